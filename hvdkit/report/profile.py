"""The result of `hvdkit profile` as tables and sentences for the terminal, and as `profile.png`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.profiling import batch_curves, breakdown
from hvdkit.profiling.assemble import Findings
from hvdkit.report import plotting
from hvdkit.report.canvas import ranks
from hvdkit.report.tabular import Of, Table, number, percent, size, terminal
from hvdkit.results.batch_times import BatchTime
from hvdkit.results.profile import Cost, Layer, Profile, Spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_SLOW, _OFTEN = 0.05, 0.75  # a slow rank is behind by this share of a step, and the last in this share of steps
_LAYERS = 5
_BLOCK = re.compile(r".*?\.\d+(?=\.)")  # up to the first number in a layer's name
# The parts in the order of a step, with their colours: compute is blue and green, waiting of any kind is warm.
_COLOURS = {
    breakdown.INPUT: "#8c8c8c",
    breakdown.FORWARD: "#7fb3d9",
    breakdown.BACKWARD: "#2f6ea5",
    breakdown.COMPRESSION: "#8e6bbf",
    breakdown.WAITING: "#f2c14e",
    breakdown.NEGOTIATION: "#e8893b",
    breakdown.COMMUNICATION: "#c8403a",
    breakdown.UPDATE: "#2a9d9d",
    breakdown.GAPS: "#dddddd",
}
_SHOWN = {breakdown.GAPS: "other"}  # what a part is called, if not by its key in profile.json


def tables(profile: Profile) -> list[RichTable]:
    """For the terminal: the parts of a step, the layers that take longest, and the blocks of a model of sequences."""
    blocks = [_blocks(profile)] if profile.units_per_sample > 1 else []
    return [terminal(table, "") for table in (parts_table(profile), _layers(profile), *blocks)]


def parts_table(profile: Profile) -> Table:
    """The parts of a step, those of compute after it, the step, and communication that compute hides."""
    step, rows = profile.step, dict[str, Spread]()
    for name, spread in step.parts().items():
        rows[_SHOWN.get(name, name)] = spread
        if name == "compute":
            inner = (step.forward_ms, step.backward_ms, step.compression_ms, step.update_ms)
            names = ("forward", "backward", "compression", "update")
            rows |= {f"of compute, {part}": ms for part, ms in zip(names, inner, strict=True) if ms is not None}
    rows |= {"the step": step.step_ms, "communication under compute": step.overlapped_communication_ms}
    columns: dict[str, Of[tuple[str, Spread]]] = {
        "part of a step": lambda row: row[0],
        "mean, ms": lambda row: number(row[1].mean, 2),
        "share": lambda row: percent(row[1].mean / step.step_ms.mean if step.step_ms.mean else None),
        "10 %, ms": lambda row: number(row[1].low, 2),
        "90 %, ms": lambda row: number(row[1].high, 2),
    }
    return Table.of("results", rows.items(), columns)


def _layers(profile: Profile) -> Table:
    ready = {tensor.layer: tensor.ready_ms for tensor in profile.tensors}  # the layer's last tensor counts
    slow = sorted(profile.layers, key=lambda layer: -((layer.forward_ms or 0.0) + (layer.backward_ms or 0.0)))
    columns: dict[str, Of[Layer]] = {
        "layer": lambda layer: layer.name,
        "forward, ms": lambda layer: number(layer.forward_ms, 2),
        "backward, ms": lambda layer: number(layer.backward_ms, 2),
        "gradient": lambda layer: _gradients(profile, [layer.name]),
        "ready after, ms": lambda layer: number(ready[layer.name], 2),
    }
    return Table.of("layers", slow[:_LAYERS], columns)


def _blocks(profile: Profile) -> Table:
    """Blocks, such as `transformer.h.3`, in the order of forward, each the sum of its layers; other layers alone."""
    blocks: dict[str, list[Layer]] = {}
    for layer in profile.layers:
        numbered = _BLOCK.match(layer.name)
        blocks.setdefault(numbered[0] if numbered else layer.name, []).append(layer)

    def forward(layers: list[Layer]) -> float | None:
        known = [layer.forward_ms for layer in layers if layer.forward_ms is not None]
        return sum(known) if known else None

    columns: dict[str, Of[tuple[str, list[Layer]]]] = {
        "block": lambda row: row[0],
        "layers": lambda row: number(len(row[1])),
        "forward, ms": lambda row: number(forward(row[1]), 2),
        "backward, ms": lambda row: number(sum(layer.backward_ms or 0.0 for layer in row[1]), 2),
        "gradients": lambda row: _gradients(profile, [layer.name for layer in row[1]]),
    }
    return Table.of("blocks", blocks.items(), columns)


def _gradients(profile: Profile, layers: Sequence[str]) -> str:
    return size(sum(tensor.bytes for tensor in profile.tensors if tensor.layer in layers))


def sentences(profile: Profile) -> list[str]:
    """What bounds the step, the slowest rank, the achieved bandwidth, and the cost of profiling."""
    step, name = profile.step, profile.bound
    step_ms, part_ms = step.step_ms.mean, step.parts()[name].mean
    shown = {"gaps": "time outside the traced phases", "waiting": "waiting for the slowest rank"}.get(name, name)
    share = _share(part_ms, step_ms)
    text = f"{shown[0].upper()}{shown[1:]} bounds the step: it takes {part_ms:.1f} ms of {step_ms:.1f} ms, {share}"
    exposed = step.exposed_communication_ms.mean
    if name == "communication":
        text += f"; without it a step would be {step_ms / max(step_ms - part_ms, 1e-9):.2f} times as fast"
    elif profile.np > 1:
        text += f"; communication that does not overlap with compute takes {_share(exposed, step_ms)}"
    lines = [f"{text}."]
    slow = profile.slowest
    if slow and slow.behind_ms > _SLOW * step_ms and slow.last_share > _OFTEN:
        lines.append(
            f"Rank {slow.rank} on {slow.host} is the slowest: {slow.behind_ms:.1f} ms behind the first on average, "
            f"the last in {100 * slow.last_share:.0f} % of the steps{_why(profile, slow.rank)}."
        )
    if profile.communications:
        count = len(profile.communications)
        put_in = size(sum(op.bytes for op in profile.communications))
        sync = profile.settings.get("sync") or {}
        often = "per step" if sync.get("every", 1) == 1 else f"every {sync['every']} steps"
        text = f"{count} collective{'' if count == 1 else 's'} {often}, with {put_in} from each rank"
        lines.append(f"{text}{_bandwidth(profile)}.")
    lines += [_by_batch(profile.batches)] if profile.batches else []
    return [*lines, _overhead(profile.cost)] if profile.cost else lines


def _by_batch(batches: Sequence[BatchTime]) -> str:
    """Forward and backward by batch size: the affine fit, and how far from it the measured times are."""
    sizes = [batch.batch_size for batch in batches]
    fitted = batch_curves.fit(sizes, [batch.compute_ms for batch in batches])
    return (
        f"Forward and backward by batch size, {', '.join(map(str, sizes))}: {fitted.fixed_ms:.1f} ms and "
        f"{fitted.per_sample_ms:.3g} ms for each sample, within {fitted.residual_percent:.1f} %."
    )


def _overhead(cost: Cost) -> str:
    """What tracing costs: the median of the pairs' differences and their range, or that they do not agree."""
    pairs = f"{cost.turns} pair{'' if cost.turns == 1 else 's'} of traced and plain steps"
    low, high = (cost.percent if end is None else end for end in (cost.low_percent, cost.high_percent))
    if low <= 0:
        return f"Tracing overhead: none that these steps can show ({low:+.1f} to {high:+.1f} % in {pairs})."
    between = f", {low:.1f} to {high:.1f} %," if cost.turns > 1 else ""
    return f"Tracing overhead: a step is {cost.percent:.1f} % longer{between} in {pairs}."


def _why(profile: Profile, rank: int) -> str:
    """The part of a step on which the rank spends most more than the fastest other rank."""
    mine = profile.ranks[rank].split
    extras = {}
    for name in ("input", "compute", "gaps"):
        others = [other.split.parts()[name].mean for other in profile.ranks if other.rank != rank]
        extras[name] = mine.parts()[name].mean - min(others)
    most = max(extras, key=lambda name: extras[name])
    return f", most of it {_SHOWN.get(most, most)} (+{extras[most]:.1f} ms)" if extras[most] > 0 else ""


def _bandwidth(profile: Profile) -> str:
    link = profile.link
    if link.achieved_mbit_per_s is None:
        return ""
    beside = [f", at {_rate(link.achieved_mbit_per_s)} (bus bandwidth)"]
    if link.measured_mbit_per_s:
        beside.append(f"{_rate(link.measured_mbit_per_s)} in a collective alone")
    if link.rated_mbit_per_s:
        beside.append(f"{_rate(link.rated_mbit_per_s)} rated for {link.interface}")
    return "; ".join(beside[:2]) + "".join(f", {line}" for line in beside[2:])


def _share(part_ms: float, step_ms: float) -> str:
    return f"{100 * part_ms / step_ms:.1f} %"


def _rate(value: float) -> str:
    return f"{value / 1000:.1f} Gbit/s" if value >= 1000 else f"{value:.0f} Mbit/s"


def picture(profile: Profile, findings: Findings, path: Path) -> None:
    """Draw the step of median length on all ranks, and when backward finishes the gradients; written as PNG.

    Raises RunError if it cannot be written.
    """
    row = sorted(findings.marked, key=lambda step_row: max(step.ns for step in step_row))[len(findings.marked) // 2]
    height = 1.6 + 0.45 * len(row)
    with plotting.picture(path, 11, height + 2.6, layout="constrained") as figure:
        from matplotlib.patches import Patch

        above, below = figure.subplots(2, 1, height_ratios=(height - 0.6, 2.6))
        zero, used = min(step.open for step in row), set()
        for rank, step in enumerate(row):
            for phase in breakdown.phases(step, findings.beside(row, rank), findings.negotiation):
                bar = (phase.start - zero) / 1e6, (phase.end - phase.start) / 1e6
                above.broken_barh([bar], (rank - 0.38, 0.76), color=_COLOURS[phase.kind], lw=0)
                used.add(phase.kind)
        hosts = [f" on {rank.host}" if profile.hosts > 1 else "" for rank in profile.ranks]
        above.set_yticks(range(len(row)), [f"rank {rank}{host}" for rank, host in enumerate(hosts)])
        above.set(ylim=(len(row) - 0.5, -0.5), xlabel="ms", xlim=(0, max(step.end - zero for step in row) / 1e6))
        what = f"{profile.framework}, {profile.model}, {ranks(profile.np)}, batch size {profile.batch_size}"
        above.set_title(f"A step of median length: {what}", loc="left", fontsize=11)
        patches = [
            Patch(color=colour, label=_SHOWN.get(kind, kind)) for kind, colour in _COLOURS.items() if kind in used
        ]
        above.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)
        times = [0.0, *(tensor.ready_ms for tensor in profile.tensors)]  # after backward's start
        sums = list(accumulate((tensor.bytes / 2**20 for tensor in profile.tensors), initial=0.0))
        below.step(times, sums, where="post", color=_COLOURS[breakdown.BACKWARD], lw=1.6)
        below.fill_between(times, sums, step="post", color=_COLOURS[breakdown.FORWARD], alpha=0.35)
        below.set(xlim=(0, times[-1] or 1), ylim=(0, None), xlabel="ms after backward's start", ylabel="MiB")
        below.set_title("Gradients that backward has finished", loc="left", fontsize=11)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
