"""How exact is each framework's float32 batch norm? Its output against float64, on one layer's worth of random values.

    .venv/bin/python benchmarks/batch_norm.py

Why it matters: a batch norm's mean and variance shift and scale whole channels, so their rounding errors do not average
out from layer to layer as those of single values do. Writes batch_norm.json and batch_norm.md beside itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import harness
import numpy as np

# kernel -> the runtime that it is measured in
KERNELS = {
    "PyTorch": "pytorch",
    "TensorFlow, fused": "tensorflow",
    "TensorFlow, hvdkit's": "tensorflow",
    "MXNet": "mxnet",
}
SHAPES = ((32, 32, 32, 16), (32, 8, 8, 64))  # NHWC: ResNet-20's first and last stage at 32 images
MEANS, SEEDS, EPSILON = (0.0, 1.0), range(5), 1e-5


def main() -> None:
    """The command line: the driver, and with `--kernel` the part that runs in a runtime."""
    parser = harness.parser(__doc__)
    parser.add_argument("--kernel", choices=KERNELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kernel:
        print("\n" + json.dumps(measure(args.kernel)), flush=True)
        return
    rows = [
        row for kernel, runtime in KERNELS.items() for row in harness.in_runtime(runtime, __file__, "--kernel", kernel)
    ]
    cases = [f"{'×'.join(map(str, shape))}, mean {mean:g}" for shape in SHAPES for mean in MEANS]
    harness.publish("batch_norm", {"rows": rows}, cases=cases)


def measure(kernel: str) -> list[dict[str, object]]:
    """Relative errors of the output by shape and mean of the values, one a seed."""
    normalize = {
        "PyTorch": _pytorch,
        "TensorFlow, fused": _tensorflow_fused,
        "TensorFlow, hvdkit's": _tensorflow,
        "MXNet": _mxnet,
    }[kernel]()
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        for mean in MEANS:
            errors = []
            for seed in SEEDS:
                x = (np.random.default_rng(seed).standard_normal(shape) + mean).astype(np.float32)
                exact = x.astype(np.float64)
                exact = (exact - exact.mean((0, 1, 2))) / np.sqrt(exact.var((0, 1, 2)) + EPSILON)
                errors.append(float(np.linalg.norm(normalize(x) - exact) / np.linalg.norm(exact)))
            rows.append({"kernel": kernel, "shape": list(shape), "mean": mean, "errors": errors})
    return rows


def _pytorch() -> Callable[[np.ndarray], np.ndarray]:
    import torch

    def normalize(x: np.ndarray) -> np.ndarray:
        channels_first = torch.tensor(x).permute(0, 3, 1, 2).contiguous()
        y = torch.nn.functional.batch_norm(channels_first, None, None, training=True, eps=EPSILON)
        return np.asarray(y.permute(0, 2, 3, 1))

    return normalize


def _tensorflow_fused() -> Callable[[np.ndarray], np.ndarray]:
    import tensorflow as tf

    def normalize(x: np.ndarray) -> np.ndarray:
        ones, zeros = np.ones(x.shape[-1], np.float32), np.zeros(x.shape[-1], np.float32)
        y, *_ = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=zeros, variance=ones, epsilon=EPSILON)
        return np.asarray(y)

    return normalize


def _tensorflow() -> Callable[[np.ndarray], np.ndarray]:
    import tensorflow as tf

    from hvdkit.adapters.tensorflow.batch_norm import batch_norm

    def normalize(x: np.ndarray) -> np.ndarray:
        ones, zeros = tf.ones(x.shape[-1]), tf.zeros(x.shape[-1])
        x = tf.constant(x)
        return np.asarray(batch_norm(x, ones, zeros, zeros, ones, momentum=0.9, epsilon=EPSILON, training=True)[0])

    return normalize


def _mxnet() -> Callable[[np.ndarray], np.ndarray]:
    import mxnet as mx

    def normalize(x: np.ndarray) -> np.ndarray:
        ones, zeros = mx.nd.ones(x.shape[-1]), mx.nd.zeros(x.shape[-1])
        with mx.autograd.record():
            y = mx.nd.BatchNorm(
                mx.nd.array(x.transpose(0, 3, 1, 2)),
                ones,
                zeros,
                zeros.copy(),
                ones.copy(),
                eps=EPSILON,
                fix_gamma=False,
            )
        return np.asarray(y.asnumpy().transpose(0, 2, 3, 1))

    return normalize


if __name__ == "__main__":
    harness.exit_with(main)
