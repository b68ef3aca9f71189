"""MXNet with Horovod, in the steps of https://horovod.readthedocs.io/en/stable/mxnet.html."""

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

# Initialize Horovod, and set the context to a GPU of this process, where there is one.
hvd.init()
context = mx.gpu(hvd.local_rank()) if mx.context.num_gpus() else mx.cpu()
mx.random.seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 898 * hvd.size(), hvd.size())
dataset = gluon.data.ArrayDataset((images[mine] / 16).astype("float32"), labels[mine].astype("float32"))
loader = gluon.data.DataLoader(dataset, batch_size=32, shuffle=True, last_batch="discard")

model = gluon.nn.HybridSequential()
model.add(gluon.nn.Dense(64, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=64))
model.initialize(mx.init.Xavier(), ctx=context)
model.hybridize()

# Scale the learning rate, start all ranks from rank 0's parameters, and let Horovod's trainer average the gradients.
optimizer = mx.optimizer.create("sgd", learning_rate=0.05 * hvd.size(), momentum=0.9)
parameters = model.collect_params()
hvd.broadcast_parameters(parameters, root_rank=0)
trainer = hvd.DistributedTrainer(parameters, optimizer)
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

for _ in range(8):
    for data, target in loader:
        with autograd.record():
            loss = loss_function(model(data.as_in_context(context)), target.as_in_context(context))
        loss.backward()
        trainer.step(32)

predicted = model(mx.nd.array((images / 16).astype("float32"), ctx=context)).asnumpy().argmax(1)
checksum = sum(float(one.data().asnumpy().astype(np.float64).sum()) for one in parameters.values())
if hvd.rank() == 0:
    model.save_parameters("checkpoint.params")
print(f"trained {hvd.rank()} {float((predicted == labels).mean()):.4f} {checksum:.12f}", flush=True)
