"""How exact is each framework's float32 batch norm? Its output against float64, on one layer's worth of random values.

    .venv/bin/python benchmarks/batch_norm.py

Why it matters: a batch norm's mean and variance shift and scale whole channels, so their rounding errors do not average
out from layer to layer as those of single values do. Writes batch_norm.json and batch_norm.md beside itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import commands
import numpy as np

HERE = Path(__file__).resolve().parent
# kernel -> the runtime that it is measured in
KERNELS = {
    "PyTorch": "pytorch",
    "TensorFlow, fused": "tensorflow",
    "TensorFlow, hvdkit's": "tensorflow",
    "MXNet": "mxnet",
}
SHAPES = ((32, 32, 32, 16), (32, 8, 8, 64))  # NHWC: ResNet-20's first and last stage at 32 images
MEANS, SEEDS, EPSILON = (0.0, 1.0), range(5), 1e-5
TIMEOUT_S = 300.0


def main() -> None:
    """The command line: the driver, and with `--kernel` the part that runs in a runtime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kernel:
        print("\n" + json.dumps(measure(args.kernel)), flush=True)
        return
    from hvdkit.files import write_atomic
    from hvdkit.results.machine import this_machine
    from hvdkit.runtimes.store import find

    rows = []
    for kernel, runtime in KERNELS.items():
        rows += commands.answer([str(find(runtime).python), __file__, "--kernel", kernel], TIMEOUT_S)
    outcome = {"command": "python benchmarks/batch_norm.py", "rows": rows, "machine": this_machine().model_dump()}
    write_atomic(HERE / "batch_norm.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(HERE / "batch_norm.md", page(rows, outcome["machine"]))


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


def page(rows: list[dict[str, object]], machine: dict[str, object]) -> str:
    """`batch_norm.md`."""
    cases = [(list(shape), mean) for shape in SHAPES for mean in MEANS]
    lines = [
        "# How exact is each framework's float32 batch norm?",
        "",
        f"‖y − exact‖ / ‖exact‖ of one batch norm's output, exact in float64: median of {len(SEEDS)} seeds (lowest to "
        "highest). Made by `python benchmarks/batch_norm.py`.",
        "",
        "| kernel | " + " | ".join(f"{'×'.join(map(str, shape))}, mean {mean:g}" for shape, mean in cases) + " |",
        "|:---" + "|---:" * len(cases) + "|",
    ]
    for kernel in KERNELS:
        cells = []
        for shape, mean in cases:
            row = next(row for row in rows if (row["kernel"], row["shape"], row["mean"]) == (kernel, shape, mean))
            errors = np.array(row["errors"])
            cells.append(f"{np.median(errors):.1e} ({errors.min():.1e} to {errors.max():.1e})")
        lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
    lines += ["", f"{machine['processor']}, {machine['cores']} cores, {machine['system']}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
