"""Published iteration times of divided GPTs on A100s, beside predictions from one row of each model and machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from benchmarks import anchored
from benchmarks.anchored import Row
from hvdkit.recipe.communication import Parallel
from hvdkit.simulator import chains, meshes
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.meshes import Divided, MeshLinks, ModelWork, Processor
from hvdkit.tasks.gpt import GPT

VTRAIN, MEGATRON = "vTrain, A100", "Megatron-LM, A100"
VOCABULARY = 51_200
# bf16 values and gradients; Adam reads or writes a parameter, its gradient, fp32 master and two slots.
VALUE_BYTES, UPDATE_BYTES = 2, 32
# What launching a kernel takes Megatron-DeepSpeed, which computes again in backward: chosen, like what chains.py says
# of moved values, on vTrain's two models CHOSEN. Rows of the other small models were read while the form of the formula
# was sought, but no number was chosen on them. The first predictions, with 5 us a launch and nothing chosen, were 32 to
# 50 % too fast for the four small models, 14 % wrong for 3.6 billion parameters, and 2 % for 175 billion.
LAUNCH_S = 29e-6
CHOSEN = {("1024", "24"), ("2048", "20")}


def rows() -> Iterator[Row]:
    """All rows; of each model the device's rate is from one of them, in which least is divided."""
    yield from _of(VTRAIN, anchored.table("vtrain_2024"), "iteration_ms", 1.0)
    yield from _of(MEGATRON, anchored.table("korthikanti_2022"), "full_s", 1e3)


def _of(name: str, table: list[dict[str, str]], measured: str, ms: float) -> Iterator[Row]:
    models: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in table:  # Megatron-LM's rows are of one machine, and as many models
        key = (row["hidden"], row["layers"]) if name == VTRAIN else ()
        models.setdefault(key, []).append(row)
    for key, found in models.items():
        calibration = max(found, key=_whole)
        seconds = 1e-3 * ms * float(calibration[measured])
        device = meshes.fitted(
            lambda device, row=calibration: divided(row, device).step().seconds,
            seconds,
            _links().cluster.device.memory_bytes_per_s,
            LAUNCH_S,
        )
        titles = set[str]()
        for row in found:
            title = _title(row)
            title += ", measured again" * (title in titles)
            titles.add(title)
            used = "calibration" if row is calibration or key in CHOSEN else "validation"
            step = divided(row, device).step()
            yield Row(name, title, "ms", 1e3 * step.seconds, ms * float(row[measured]), used)


def divided(row: Mapping[str, str], device: Processor) -> Divided:
    """A row's model on its mesh, whose stages have equally many layers."""
    get = {key: int(value) for key, value in row.items() if value.isdigit()}
    runs = get["pipeline"] * get.get("interleave", 1)
    axes = Parallel.model_construct(
        data=get.get("data", 1),
        tensor=get["tensor"],
        pipeline=get["pipeline"],
        chunks=get.get("interleave", 1),
        schedule="1f1b" if runs == get["pipeline"] else "interleaved",
        split=[get["layers"] // runs] * runs,
    )
    share = get["global_batch"] // get.get("data", 1)
    chain = _chain(get["layers"], get["heads"], get["hidden"], get.get("sequence", 2048))
    return Divided(chain, axes, share // get["microbatch"], get["microbatch"], device, _links(), recompute=True)


@cache
def _links() -> MeshLinks:
    return MeshLinks(clusters.load(Path("a100-nvlink-ib")))


@cache
def _chain(layers: int, heads: int, hidden: int, tokens: int) -> ModelWork:
    table = GPT("gpt", layers, heads, hidden, tokens, VOCABULARY)
    return chains.of_table(table, (tokens,), VALUE_BYTES, VALUE_BYTES, UPDATE_BYTES)


def _whole(row: Mapping[str, str]) -> tuple[int, ...]:
    """The least divided, with the most work: its time is the device's more than another's."""
    return tuple(
        sign * int(row.get(key, 1))
        for key, sign in (("tensor", -1), ("pipeline", -1), ("data", -1), ("microbatch", 1), ("global_batch", 1))
    )


def _title(row: Mapping[str, str]) -> str:
    axes = f"{row.get('data', 1)} × {row['pipeline']} × {row['tensor']}"
    return f"width {row['hidden']}, {row['layers']} layers, {axes}, batch {row['global_batch']} by {row['microbatch']}"
