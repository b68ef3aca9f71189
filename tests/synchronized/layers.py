"""Models with every kind of batch norm that is synchronized, for inputs (n, 8): a local one, and one to synchronize."""

from __future__ import annotations

from typing import Any

from hvdkit.core.group import Group


def pytorch(synchronized: bool) -> Any:
    import horovod.torch as hvd
    import torch
    from torch import nn

    class Activated(nn.BatchNorm2d):
        """As in timm: it calls the function, and then something else."""

        def forward(self, input: Any, negative: float = 0.1) -> Any:
            return nn.functional.leaky_relu(super().forward(input), negative)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(8, eps=0.01)
            self.linear = nn.Linear(8, 8)
            self.cumulative = nn.BatchNorm1d(8, momentum=None, affine=False)
            self.flat = Activated(2)
            self.deep = nn.BatchNorm3d(2, track_running_stats=False)
            self.torch = nn.SyncBatchNorm(8) if synchronized else nn.BatchNorm1d(8)
            self.horovod = hvd.SyncBatchNorm(8, momentum=0.3) if synchronized else nn.BatchNorm1d(8, momentum=0.3)

        def forward(self, x: Any) -> Any:
            x = self.cumulative(self.linear(self.first(x)))
            x = self.deep(self.flat(x.reshape(-1, 2, 2, 2)).unsqueeze(2)).reshape(-1, 8)
            x = torch.tanh(self.horovod(self.torch(x)))
            return self.torch(x) + self.horovod(x * x)

    torch.manual_seed(1)
    return Model()


def tensorflow(synchronized: bool) -> Any:
    import tensorflow as tf

    from hvdkit.adapters.tensorflow.batch_norm import BatchNorm

    class Model(tf.Module):
        def __init__(self) -> None:
            self.first = BatchNorm("first", 8, "float64", epsilon=0.01)
            self.flat = BatchNorm("flat", 2, "float64", momentum=0.7)

        def __call__(self, x: Any, training: bool) -> Any:
            y = tf.tanh(self.flat(tf.reshape(self.first(x, training), (-1, 2, 2, 2)), training))
            return tf.reshape(self.flat(y * y, training), (-1, 8))

    return Model()


def keras(synchronized: bool) -> Any:
    import horovod.tensorflow as hvd
    import keras as k

    k.utils.set_random_seed(1)
    before, layers = k.config.dtype_policy(), k.layers
    k.config.set_dtype_policy("float64")
    try:
        x = k.Input((8,))
        y = layers.BatchNormalization(center=False, name="first")(x)
        y = layers.BatchNormalization(axis=1, scale=False, name="second")(layers.Reshape((2, 4))(y))
        y = layers.Masking(0.0)(layers.ReLU()(y))
        y = layers.BatchNormalization(name="masked")(y)
        y = layers.BatchNormalization(synchronized=synchronized, name="own")(layers.Reshape((8,))(y))
        last = hvd.SyncBatchNormalization if synchronized else layers.BatchNormalization
        return k.Model(x, last(momentum=0.7, name="last")(layers.Activation("tanh")(y)))
    finally:
        k.config.set_dtype_policy(before)


def mxnet(synchronized: bool) -> Any:
    from mxnet.gluon import HybridBlock, contrib, nn

    # In float64 MXNet's own kernels round a momentum to float32.
    class Model(HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm(in_channels=8, scale=False, momentum=0.5)
            self.second = nn.BatchNorm(axis=-1, in_channels=4, center=False, epsilon=0.01, momentum=0.5)
            # MXNet itself has it in float32 alone.
            self.active = (nn.BatchNormReLU if synchronized else nn.BatchNorm)(in_channels=2, momentum=0.5)
            kind = contrib.nn.SyncBatchNorm if synchronized else nn.BatchNorm
            self.last = kind(in_channels=2, momentum=0.5, **({"num_devices": 1} if synchronized else {}))

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            x = F.relu(self.active(self.second(self.first(x).reshape((-1, 2, 4))).reshape((-1, 2, 2, 2))))
            return (self.last(F.tanh(x)) + self.last(x * x)).reshape((-1, 8))

    return Model()


BUILD = {"pytorch": pytorch, "tensorflow": tensorflow, "keras": keras, "mxnet": mxnet}

PAIR = Group((0, 1), 0)


def _pytorch_ghost(adapter: Any) -> Any:
    import torch
    from torch import nn

    class Ghost(nn.BatchNorm1d):
        def forward(self, input: Any) -> Any:
            return (input - input.mean(0)) / input.std(0)

    model = nn.Sequential(nn.Linear(8, 8), Ghost(8))
    adapter.synchronize_batch_norms(model, PAIR)
    return model(torch.ones(4, 8))


def _pytorch_other(adapter: Any) -> Any:
    from torch import nn

    class InPlaceABNSync(nn.Module):
        pass

    return adapter.synchronize_batch_norms(nn.Sequential(InPlaceABNSync()), PAIR, every=False)


def _tensorflow_by_hand(adapter: Any) -> Any:
    import tensorflow as tf

    class ByHand(tf.Module):
        def __init__(self) -> None:
            self.mean = tf.Variable(tf.zeros(8), name="norm.moving_mean", trainable=False)

    return adapter.synchronize_batch_norms(ByHand(), PAIR)


def _keras_ghost(adapter: Any) -> Any:
    import keras as k

    class Ghost(k.layers.BatchNormalization):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return inputs

    return adapter.synchronize_batch_norms(k.Sequential([k.Input((8,)), Ghost(name="ghost")]), PAIR)


def _mxnet_ghost(adapter: Any) -> Any:
    from mxnet.gluon import nn

    class Ghost(nn.BatchNorm):
        def hybrid_forward(self, F: Any, x: Any, *parameters: Any) -> Any:
            return x

    model = nn.HybridSequential()
    model.add(Ghost(in_channels=8))
    return adapter.synchronize_batch_norms(model, PAIR)


# What cannot be synchronized, by the layer as messages name it.
ODD: dict[str, dict[str, Any]] = {
    "pytorch": {"1 (Ghost)": _pytorch_ghost, "0 (InPlaceABNSync)": _pytorch_other},
    "tensorflow": {"norm": _tensorflow_by_hand},
    "keras": {"ghost (Ghost)": _keras_ghost},
    "mxnet": {"0 (Ghost)": _mxnet_ghost},
}
