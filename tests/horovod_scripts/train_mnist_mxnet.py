"""MXNet with Horovod, in the form of Horovod's example mxnet_mnist.py, on the digits of scikit-learn."""

import argparse
import logging

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


def evaluate(model, data_iter, context):
    data_iter.reset()
    metric = mx.metric.Accuracy()
    for batch in data_iter:
        output = model(batch.data[0].as_in_context(context))
        metric.update([batch.label[0].as_in_context(context)], [output])
    return metric.get()


def main(args):
    hvd.init()
    mx.random.seed(hvd.rank())
    context = mx.cpu(hvd.local_rank())
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).reshape(-1, 1, 8, 8).astype("float32"), labels.astype("float32")
    mine = np.flatnonzero(np.arange(len(x)) % 5)[hvd.rank() :: hvd.size()]
    train_data = mx.io.NDArrayIter(x[mine], y[mine], args.batch_size, shuffle=True, last_batch_handle="discard")
    val_data = mx.io.NDArrayIter(x[::5], y[::5], args.batch_size)

    model = gluon.nn.HybridSequential()
    with model.name_scope():
        model.add(gluon.nn.Conv2D(channels=16, kernel_size=3, activation="relu"))
        model.add(gluon.nn.MaxPool2D(pool_size=2, strides=2))
        model.add(gluon.nn.Flatten())
        model.add(gluon.nn.Dense(10))
    model.cast("float32")
    model.hybridize()
    opt = mx.optimizer.create("sgd", momentum=0.9, learning_rate=0.05 * hvd.size())
    model.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2), ctx=context)
    params = model.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)  # their shapes are known only after the first forward
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    trainer = hvd.DistributedTrainer(
        params, opt, compression=compression, gradient_predivide_factor=args.gradient_predivide_factor
    )
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    metric = mx.metric.Accuracy()
    for epoch in range(args.epochs):
        train_data.reset()
        metric.reset()
        for batch in train_data:
            data, label = batch.data[0].as_in_context(context), batch.label[0].as_in_context(context)
            with autograd.record():
                output = model(data)
                loss = loss_fn(output, label)
            loss.backward()
            trainer.step(args.batch_size)
            metric.update([label], [output])
        name, accuracy = evaluate(model, val_data, context)
        logging.info("Epoch[%d]\tTrain: %s=%f\tValidation: %s=%f", epoch, name, metric.get()[1], name, accuracy)

    checksum = sum(float(one.data().asnumpy().astype(np.float64).sum()) for one in params.values())
    print(f"trained {hvd.rank()} {accuracy:.4f} {checksum:.12f}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(parser.parse_args())
