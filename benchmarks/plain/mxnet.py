"""ResNet-20 on the digits in MXNet's Gluon with Horovod, by hand: what hvdkit is measured against.

horovodrun -np 2 python benchmarks/plain/mxnet.py --epochs 2
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its mxnet.py is not MXNet

# ruff: noqa: E402 - the imports follow the path that they are found by
import horovod.mxnet as hvd
import mxnet as mx
import shared
from mxnet import autograd, gluon
from mxnet.gluon import nn


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


def evaluate(net, images, labels, batch_size):
    correct = 0
    for start in range(hvd.rank() * batch_size, len(labels), hvd.size() * batch_size):
        logits = net(images[start : start + batch_size]).asnumpy()
        correct += (logits.argmax(1) == labels[start : start + batch_size]).sum()
    return hvd.allreduce(mx.nd.array([correct]), average=False, name="correct").asscalar() / len(labels)


def main():
    args = shared.options()
    hvd.init()
    mx.random.seed(1)
    (images, labels), (val_images, val_labels) = shared.digits()
    images, val_images = images.transpose(0, 3, 1, 2).copy(), mx.nd.array(val_images.transpose(0, 3, 1, 2))

    net = resnet20()
    params = net.collect_params()
    settings = {"learning_rate": 0.05 * hvd.size(), "momentum": 0.9, "wd": 1e-4}
    trainer = hvd.DistributedTrainer(params, "sgd", settings)
    hvd.broadcast_parameters(params, root_rank=0)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()

    clock, step, accuracy = shared.Clock(), 0, 0.0
    for epoch in range(args.epochs):
        clock.resume()
        batches = shared.epoch_indices(len(labels), args.batch_size, epoch, hvd.rank(), hvd.size())
        for indices in batches:
            trainer.set_learning_rate(shared.learning_rate(step, len(batches), args.epochs, hvd.size()))
            x, y = mx.nd.array(images[indices]), mx.nd.array(labels[indices])
            with autograd.record():
                loss = criterion(net(x), y)
            loss.backward()
            trainer.step(args.batch_size)
            mx.nd.waitall()  # so that the clock sees whole steps
            clock.tick()
            step += 1
            if step == args.steps:
                break
        accuracy = evaluate(net, val_images, val_labels, args.batch_size)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.mean().asscalar():.4f}, accuracy {accuracy:.4f}", flush=True)
        if step == args.steps:
            break
    trainable = [parameter for parameter in params.values() if parameter.grad_req != "null"]
    parameters = sum(parameter.data().size for parameter in trainable)
    shared.report(args, clock, hvd.allgather_object, hvd.rank(), accuracy, parameters)
    hvd.shutdown()


if __name__ == "__main__":
    main()
