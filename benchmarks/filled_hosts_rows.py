"""Published pairs of one device and many, by which the constants of `hvdkit/simulator/crowding.py` are fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import anchored
from benchmarks.anchored import Layer
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import step
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.jitter import slowest
from hvdkit.simulator.settings import LinkSetting, Settings, applied
from hvdkit.simulator.workload import Workload

TABLE = "filled_hosts"
_BLOCK = (4, 8)  # hidden² elements of attention and of the two layers after it


@dataclass(frozen=True)
class Pair:
    """A step of many devices: measured, and simulated from one device's, in seconds.

    Each constant (in a host and between hosts; fp32, then mixed) is multiplied with one of `shares`.
    """

    set: str
    simulated: float
    measured: float
    naive: float
    shares: tuple[float, ...]

    def error(self, constants: Sequence[float]) -> float:
        """Of the speed with these constants, in percent: above 0 is too fast."""
        return 100 * (self.measured / (self.simulated + float(np.dot(self.shares, constants))) - 1)


def groups() -> Iterator[tuple[str, str, bool, Workload, Cluster, str, dict[int, float]]]:
    """Set, label, whether in mixed precision, workload, cluster, policy, speeds by devices. Gradients are fp32."""
    found: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    keys = ("set", "model", "hardware", "framework", "precision", "batch_per_gpu")
    for row in anchored.table(TABLE):
        found[tuple(row[key] for key in keys)][int(row["gpus"])] = float(row["per_s"])
    for (name, model, hardware, framework, precision, batch), counts in found.items():
        cluster = clusters.load(Path("v100-nvlink-ib"))
        if name.startswith("DLPerf"):
            cluster = applied(cluster, Settings(link={"infiniband": LinkSetting(ports=1)}))
        if hardware == "DGX-2":  # 16 by NVSwitch
            levels = [cluster.levels[0].model_copy(update={"ranks": 16}), *cluster.levels[1:]]
            cluster = cluster.model_copy(update={"ranks_per_host": 16, "levels": levels})
        policy = "ddp" if framework.startswith("PyTorch") else "horovod"
        made = anchored.workload if model.startswith("ResNet") else of_shape
        work = made(model, int(batch), int(batch) / counts[1])
        label = f"{model}, {framework}, {hardware}, {precision}, batch {batch}"
        yield name, label, precision == "mixed", work, cluster, policy, counts


def pairs() -> list[Pair]:
    """All pairs by which the constants are fitted; without PaddlePaddle's, whose readers hold its devices up."""
    found = []
    for name, label, mixed, work, cluster, policy, counts in groups():
        for ranks, speed in counts.items():
            if ranks == 1 or "PaddlePaddle" in label:
                continue
            base = Calibration(work, Settings(policy=policy)).case(cluster, ranks, Settings())
            network, waits = base.network, float(slowest(ranks, 1, base.jitter, base.seed).mean())
            inside = anchored.compute_s(work) * (network.local - 1) / network.local
            between = inside * (network.hosts_used - 1) / network.hosts_used
            shares = (0.0, inside, 0.0, between) if mixed else (inside, 0.0, between, 0.0)
            simulated = step.period(replace(base, slow=waits))
            naive = step.period(step.Case(work, ClusterLinks(cluster, ranks), "naive"))
            found.append(Pair(name, simulated, ranks * work.batch_size / speed, naive, shares))
    return found


def fit(of: Sequence[Pair]) -> list[float]:
    """In a host in fp32 and in mixed precision, between hosts in both: least squares of relative errors.

    Sets count by the square root of their pairs, and errors beyond a tenth by their size (Huber 1964).
    """
    sizes = {name: sum(pair.set == name for pair in of) for name in {pair.set for pair in of}}
    measured = np.array([pair.measured for pair in of])
    shares = np.array([pair.shares for pair in of]) / measured[:, None]
    left = 1 - np.array([pair.simulated for pair in of]) / measured
    weights = np.array([sizes[pair.set] ** -0.5 for pair in of])
    known, found = shares.any(axis=0), np.zeros(shares.shape[1])
    for _ in range(50):
        errors = np.abs(shares @ found - left)
        scale = np.sqrt(weights * np.minimum(1.0, 0.1 / np.maximum(errors, 1e-9)))
        found[known] = np.linalg.lstsq(shares[:, known] * scale[:, None], left * scale, rcond=None)[0]
    return [max(0.0, float(value)) for value in found]


def left_out() -> list[dict[str, Any]]:
    """By set, mean signed and mean absolute errors: without the constants, by the other sets', of the plain sum."""
    every, found = pairs(), []
    for name in dict.fromkeys(pair.set for pair in every):
        mine, constants = (
            [pair for pair in every if pair.set == name],
            fit([pair for pair in every if pair.set != name]),
        )
        errors = {
            "without": [pair.error([0.0] * 4) for pair in mine],
            "others": [pair.error(constants) for pair in mine],
            "plain": [100 * (pair.measured / pair.naive - 1) for pair in mine],
        }
        both = {key: (fmean(values), fmean(map(abs, values))) for key, values in errors.items()}
        found.append({"set": name, "pairs": len(mine), "constants": constants, **both})
    return found


def of_shape(model: str, batch: int, seconds: float) -> Workload:
    """A workload of equal blocks between an embedding and an output layer."""
    layers = _layers(model)
    whole = sum(work for _, work, _ in layers)
    shared: list[Layer] = [
        (name, seconds * work / whole / 3, 2 * seconds * work / whole / 3, 4 * elements)
        for name, work, elements in layers
    ]
    return anchored.of_layers(model, batch, shared)


def _layers(model: str) -> list[tuple[str, float, int]]:
    """(name, work, elements of its gradients) in the order of forward."""
    if model == "GNMT":
        vocabulary = 32_320 * 1024
        lstm = [(f"lstm {i}", 8.0 * 2**20, 8 * 2**20) for i in range(8)]
        return [("embedding", 0.0, vocabulary), *lstm, ("output", float(vocabulary), vocabulary)]
    hidden, blocks, decoders, tokens = {
        "BERT-base": (768, 12, 0, 30_522 + 514),
        "BERT-large": (1024, 24, 0, 30_522 + 514),
        "Transformer-big": (1024, 6, 6, 33_708),
    }[model]
    found: list[tuple[str, float, int]] = [("embedding", 0.0, tokens * hidden)]
    for block in range(blocks + decoders):
        for part, times in enumerate(_BLOCK if block < blocks else (4, *_BLOCK)):
            size = times * hidden**2
            found.append((f"block {block}.{part}", float(size), size))
    return [*found, ("output", float(tokens * hidden), 0)]
