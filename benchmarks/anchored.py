"""Published figures as workloads and tables, and rows: the files of `benchmarks/anchors/` begin with their sources."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hvdkit.simulator.workload import Gradient, Workload
from hvdkit.tasks.resnet import Conv, architecture

ANCHORS = Path(__file__).parent / "anchors"
Layer = tuple[str, float, float, int]  # name, forward, backward, bytes of its gradients
BACKWARD = 2.0  # its work against forward's: as many products for the weights' gradient as for the inputs'


@dataclass
class Row:
    """One figure. Those `used_for` calibration went into a parameter; the others were predicted without being seen.

    `low` to `high` is the interval that the prediction came with. `linear`, `plain_sum` and `pollux` are what the
    baselines say in its place. All in `unit`.
    """

    set: str
    row: str
    unit: str
    predicted: float
    measured: float
    used_for: str
    low: float | None = None
    high: float | None = None
    linear: float | None = None
    plain_sum: float | None = None
    pollux: float | None = None

    @property
    def error_percent(self) -> float:
        """100 × (predicted − measured) / measured."""
        return 100 * (self.predicted - self.measured) / self.measured


def measured(path: Path) -> Any:
    """Raw series, as `written.compressed` has written them."""
    return json.loads(gzip.decompress(path.read_bytes()))


@cache
def table(name: str) -> list[dict[str, str]]:
    """The rows of one of the files; lines that begin with # say where they are from."""
    plain, packed = ANCHORS / f"{name}.csv", ANCHORS / f"{name}.csv.gz"  # of more than 200 lines
    lines = (gzip.decompress(packed.read_bytes()).decode() if packed.exists() else plain.read_text()).splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def grouped(name: str, *keys: str) -> Iterator[tuple[tuple[str, ...], dict[int, float]]]:
    """Images per second by number of GPUs, for each combination of the keys."""
    groups: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for row in table(name):
        groups[tuple(row[key] for key in keys)][int(row["gpus"])] = float(row["images_per_s"])
    yield from groups.items()


def workload(model: str, batch_size: int, seconds: float) -> Workload:
    """A model whose forward and backward take `seconds` together, shared among its layers.

    VGG-16, AlexNet and ResNet-50 are shared by measured times of some GPU, the others by the multiply-adds of layers.
    """
    short = model.lower().replace("-", "")
    if model in ("ResNet-50", "VGG16", "AlexNet"):
        rows = [row for row in table("gpu_layer_profiles") if row["model"] == short]
        layers = [_layer(f"{row['node']} {row['layer']}", row, "forward_ms", "backward_ms") for row in rows]
    elif model == "InceptionV3":
        columns = ("multiply_adds", "multiply_adds")
        layers = [_layer(row["layer"], row, *columns, backward=BACKWARD) for row in table("inception_v3")]
    else:
        layers = _resnet(short)
    whole = sum(forward + backward for _, forward, backward, _ in layers)
    shared = [(name, a * seconds / whole, b * seconds / whole, size) for name, a, b, size in layers]
    return of_layers(model, batch_size, shared)


def of_layers(name: str, batch_size: int, layers: Sequence[Layer], update_s: float = 0.0) -> Workload:
    """A workload of layers in the order of forward, each (name, forward s, backward s, gradient bytes)."""
    tensors, pending = [], 0.0
    for layer, _, backward, size in reversed(layers):
        pending += backward
        if size:
            tensors.append(Gradient(layer, layer, (size // 4,), size, pending))
            pending = 0.0
    forward = tuple((layer, seconds) for layer, seconds, _, _ in layers)
    return Workload(name, batch_size, forward, tuple(tensors), tail_s=pending, update_s=update_s)


def compute_s(work: Workload) -> float:
    """A step without communication."""
    return work.compute_s + work.update_s


def googlenet(nodes: int, forward_s: float) -> Workload:
    """GoogLeNet as it was traced on so many nodes; its forward was not measured."""
    rows = [row for row in table("googlenet_k80_traces") if row["nodes"] == str(nodes)]
    tensors = []
    for weight, bias in zip(rows[-2::-2], rows[::-2], strict=True):
        # backward yields both of a layer at once
        for row, seconds in ((bias, 1e-6 * float(weight["backward_us"])), (weight, 0.0)):
            size = int(row["params_fp32"])
            tensors.append(Gradient(f"tensor {row['tensor']}", row["tensor"], (size,), 4 * size, seconds))
    return Workload("GoogLeNet", 64, (("all layers", forward_s),), tuple(tensors))


def traced_allreduces(nodes: int) -> list[float]:
    """Seconds of each allreduce of that trace, in the order of backward."""
    rows = [row for row in table("googlenet_k80_traces") if row["nodes"] == str(nodes)]
    return [1e-6 * float(row["allreduce_us"]) for row in reversed(rows)]


def _layer(name: str, row: dict[str, str], forward: str, back: str, backward: float = 1.0) -> Layer:
    return name, float(row[forward]), backward * float(row[back]), int(row["param_bytes"])


def _resnet(name: str) -> list[Layer]:
    """Layers by multiply-adds at 224 pixels, in forward order."""
    net, size = architecture(name, 1000), 56
    layers: list[Layer] = []

    def add(block: str, conv: Conv, side: int) -> int:
        out = side // conv.stride
        weights = conv.inputs * conv.outputs * conv.kernel**2
        work = float(weights * out * out)
        layers.append((f"{block}{conv.name}", work, BACKWARD * work, 4 * (weights + 2 * conv.outputs)))
        return out

    add("", net.stem, 224)
    for block in net.blocks:
        inside = size
        for conv in block.convs:
            inside = add(f"{block.name}.", conv, inside)
        if block.projection:
            add(f"{block.name}.", block.projection, size)
        size = inside
    work = float(net.features * net.classes)
    layers.append(("fc", work, BACKWARD * work, 4 * (net.features + 1) * net.classes))
    return layers
