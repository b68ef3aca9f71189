"""ResNet-20 on the digits in MXNet's Gluon with Horovod, by hand: what hvdkit is measured against.

python benchmarks/plain/resnet_mxnet.py --epochs 2
horovodrun -np 2 python benchmarks/plain/resnet_mxnet.py --epochs 2 --horovod
"""

import mxnet as mx
import shared
from mxnet import autograd, gluon
from mxnet.gluon import nn

hvd = shared.horovod("horovod.mxnet")


def conv(inputs, outputs, kernel, stride):
    return nn.Conv2D(outputs, kernel, stride, padding=kernel // 2, use_bias=False, in_channels=inputs)


class Block(nn.HybridBlock):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.HybridSequential()
        self.body.add(conv(inputs, outputs, 3, stride), nn.BatchNorm(in_channels=outputs), nn.Activation("relu"))
        self.body.add(conv(outputs, outputs, 3, 1), nn.BatchNorm(in_channels=outputs))
        self.shortcut = nn.HybridSequential()
        if stride != 1:
            self.shortcut.add(conv(inputs, outputs, 1, stride), nn.BatchNorm(in_channels=outputs))

    def hybrid_forward(self, F, x):
        return F.Activation(self.body(x) + self.shortcut(x), act_type="relu")


class Mean(nn.HybridBlock):
    """Over the pixels. GlobalAvgPool2D is usual, but makes the step on a CPU half as slow again."""

    def hybrid_forward(self, F, x):
        return F.mean(x, axis=(2, 3))


def resnet20(classes=10):
    net = nn.HybridSequential()
    net.add(conv(3, 16, 3, 1), nn.BatchNorm(in_channels=16), nn.Activation("relu"))
    widths, strides = [16] * 3 + [32] * 3 + [64] * 3, [1, 1, 1, 2, 1, 1, 2, 1, 1]
    net.add(*map(Block, [16, *widths], widths, strides))
    net.add(Mean(), nn.Dense(classes, in_units=64))
    net.initialize(mx.init.MSRAPrelu(factor_type="out", slope=0))
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def main():
    args = shared.options()
    hvd.init()
    mx.random.seed(1)
    (images, labels), (val_images, val_labels) = shared.digits()
    images, val_images = images.transpose(0, 3, 1, 2).copy(), mx.nd.array(val_images.transpose(0, 3, 1, 2))

    net = resnet20()
    params = net.collect_params()
    settings = {"learning_rate": 0.05 * hvd.size(), "momentum": 0.9, "wd": 1e-4}
    trainer = (hvd.DistributedTrainer if args.horovod else gluon.Trainer)(params, "sgd", settings)
    hvd.broadcast_parameters(params, root_rank=0)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(indices, rate):
        trainer.set_learning_rate(rate)
        x, y = mx.nd.array(images[indices]), mx.nd.array(labels[indices])
        with autograd.record():
            loss = criterion(net(x), y)
        loss.backward()
        trainer.step(args.batch_size)
        mx.nd.waitall()  # so that the clock sees whole steps

    def correct(rows):
        return (net(val_images[rows]).asnumpy().argmax(1) == val_labels[rows]).sum()

    trainable = [parameter for parameter in params.values() if parameter.grad_req != "null"]
    shared.train(args, hvd, step, correct, sum(parameter.data().size for parameter in trainable))


if __name__ == "__main__":
    main()
