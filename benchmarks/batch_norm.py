"""How exact is each framework's float32 batch norm? Its output against float64, on one layer's worth of random values.

    .venv/bin/python -m benchmarks.batch_norm

Why it matters: a batch norm's mean and variance shift and scale whole channels, so their rounding errors do not average
out from layer to layer as those of single values do. Writes batch_norm.json and batch_norm.md beside itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks import harness, written

SHAPES = ((32, 32, 32, 16), (32, 8, 8, 64))  # NHWC: ResNet-20's first and last stage at 32 images
SEEDS, EPSILON = range(5), 1e-5
# What the values are, made of a normal distribution's. A background is what most pixels of a drawing are: errors of its
# sums all have one sign.
VALUES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean 0": lambda normal: normal,
    "mean 1": lambda normal: normal + 1,
    "a background": lambda normal: np.where(normal > 1, normal, 0.7),
}


def main() -> None:
    """The command line."""
    args = harness.parser(__doc__).parse_args()
    answers = [harness.elsewhere(measure, runtime, kernel=name) for name, (runtime, _) in KERNELS.items()]
    cases = [f"{'×'.join(map(str, shape))}, {values}" for shape in SHAPES for values in VALUES]
    written.publish("batch_norm", {"cases": cases, "rows": [row for rows in answers for row in rows]}, args.out)


def measure(kernel: str) -> list[dict[str, object]]:
    """Relative errors of the output by shape and kind of the values, one a seed."""
    _, normalize = KERNELS[kernel]
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        for values, of in VALUES.items():
            errors = []
            for seed in SEEDS:
                x = of(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
                exact = x.astype(np.float64)
                exact = (exact - exact.mean((0, 1, 2))) / np.sqrt(exact.var((0, 1, 2)) + EPSILON)
                errors.append(float(np.linalg.norm(normalize(x) - exact) / np.linalg.norm(exact)))
            rows.append({"kernel": kernel, "shape": list(shape), "values": values, "errors": errors})
    return rows


def _pytorch(x: np.ndarray) -> np.ndarray:
    import torch

    channels_first = torch.tensor(x).permute(0, 3, 1, 2).contiguous()
    y = torch.nn.functional.batch_norm(channels_first, None, None, training=True, eps=EPSILON)
    return np.asarray(y.permute(0, 2, 3, 1))


def _tensorflow_fused(x: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    ones, zeros = np.ones(x.shape[-1], np.float32), np.zeros(x.shape[-1], np.float32)
    y, *_ = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=zeros, variance=ones, epsilon=EPSILON)
    return np.asarray(y)


def _tensorflow(x: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    from hvdkit.adapters.tensorflow.batch_norm import batch_norm

    ones, zeros = tf.ones(x.shape[-1]), tf.zeros(x.shape[-1])
    y, *_ = batch_norm(tf.constant(x), ones, zeros, zeros, ones, momentum=0.9, epsilon=EPSILON, training=True)
    return np.asarray(y)


def _mxnet(x: np.ndarray) -> np.ndarray:
    import mxnet as mx

    ones, zeros = mx.nd.ones(x.shape[-1]), mx.nd.zeros(x.shape[-1])
    values = mx.nd.array(x.transpose(0, 3, 1, 2))
    with mx.autograd.record():
        y = mx.nd.BatchNorm(values, ones, zeros, zeros.copy(), ones.copy(), eps=EPSILON, fix_gamma=False)
    return np.asarray(y.asnumpy().transpose(0, 2, 3, 1))


# kernel -> the runtime that it is measured in, and its function of values (N, H, W, C)
KERNELS = {
    "PyTorch": ("pytorch", _pytorch),
    "TensorFlow, fused": ("tensorflow", _tensorflow_fused),
    "TensorFlow, hvdkit's": ("tensorflow", _tensorflow),
    "MXNet": ("mxnet", _mxnet),
}

if __name__ == "__main__":
    harness.exit_with(main)
