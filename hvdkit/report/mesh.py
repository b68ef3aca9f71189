"""A mesh of ranks: which has which part of the model, and who talks to whom, as lines and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdkit.core.group import coordinates
from hvdkit.report.canvas import INK, MUTED, SURFACE, Chart, brief, drawing, series
from hvdkit.report.tabular import Cell
from hvdkit.results.train import PlannedStage, TrainedStage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_RANKS = 64  # of a picture
_LISTED = 4  # groups that a line names
WHAT = {
    "pipeline": "activations and their gradients, of each microbatch",
    "ends": "gradients of what the first and the last stage have, once in a step",
    "data": "gradients, once in a step",
    "tensor": "sums of activations, in each layer of each microbatch",
}
_PAGE = {
    "pipeline": series(0), "ends": series(0), "data": series(2), "tensor": series(1),
    "ink": INK, "muted": MUTED, "ground": SURFACE,
}  # fmt: skip


class Talk(NamedTuple):
    """Ranks that exchange tensors along an axis, and by what: memory or sockets."""

    axis: str
    ranks: tuple[int, ...]
    way: str


class DrawnMesh(NamedTuple):
    """The axes' sizes, the stages, and whether ranks of one host exchange tensors through memory."""

    data: int
    pipeline: int
    tensor: int
    stages: Sequence[PlannedStage]
    shares_memory: bool

    @staticmethod
    def of(stages: Sequence[PlannedStage], tensor: int, shares_memory: bool) -> DrawnMesh:
        """The mesh of a model in these stages."""
        return DrawnMesh(len(stages[0].ranks) // tensor, len(stages), tensor, stages, shares_memory)

    @property
    def shape(self) -> str:
        """The axes in words."""
        return f"{self.data} (data) × {self.pipeline} (pipeline) × {self.tensor} (tensor)"

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return {rank: host for stage in self.stages for rank, host in zip(stage.ranks, stage.hosts, strict=True)}

    @property
    def memory(self) -> dict[int, float]:
        """The most memory that each rank's process had in a run, in MiB."""
        trained = [stage for stage in self.stages if isinstance(stage, TrainedStage)]
        return {rank: mib for own in trained for rank, mib in zip(own.ranks, own.peak_rss_mib, strict=False)}

    def place(self, rank: int) -> tuple[int, int, int]:
        """A rank's place along the data, the pipeline and the tensor axis."""
        return coordinates(rank, self.data * self.pipeline * self.tensor, self.pipeline, self.tensor)

    def talks(self) -> list[Talk]:
        """Who talks to whom: neighbors along the pipeline, its ends, and groups along the other axes."""
        found, hosts = [], self.hosts
        for number, axis in ((1, "pipeline"), (2, "tensor"), (0, "data")):
            lines: dict[tuple[int, ...], list[int]] = {}
            for rank in hosts:
                place = self.place(rank)
                lines.setdefault(place[:number] + place[number + 1 :], []).append(rank)
            for line in lines.values():
                groups = [(axis, ranks) for ranks in (pairwise(line) if axis == "pipeline" else [tuple(line)])]
                if axis == "pipeline" and len(line) > 2 and (what := self.stages[0].with_last):
                    groups.append((axis if what == "activations" else "ends", (line[0], line[-1])))
                for of, ranks in groups if len(line) > 1 else ():
                    one_host = len({hosts[rank] for rank in ranks}) == 1
                    found.append(Talk(of, ranks, "memory" if one_host and self.shares_memory else "sockets"))
        return found


def lines(mesh: DrawnMesh) -> Iterator[tuple[str, str]]:
    """A name and a text: the axes, each stage, and who talks to whom along each axis."""
    yield "mesh", mesh.shape
    several = len(set(mesh.hosts.values())) > 1
    for number, stage in enumerate(mesh.stages):
        places = zip(stage.ranks, stage.hosts, strict=True)
        ranks = [f"{rank} on {host}" if several else str(rank) for rank, host in places]
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        yield f"stage {number}", f"{blocks(stage.blocks)}, {stage.parameters:,} parameters; {who}"
    for axis, what in WHAT.items():
        mine = [talk for talk in mesh.talks() if talk.axis == axis]
        ways = dict.fromkeys(talk.way for talk in mine)
        told = []
        for way in ways:
            groups = ["–".join(map(str, talk.ranks)) for talk in mine if talk.way == way]
            more = f" and {len(groups) - _LISTED} more" if len(groups) > _LISTED else ""
            told.append(f"ranks {', '.join(groups[:_LISTED])}{more} through {way}")
        if told:
            yield "both ends" if axis == "ends" else f"along {axis}", f"{'; '.join(told)}: {what}"


def blocks(names: Sequence[str]) -> str:
    """Blocks that follow each other, such as `transformer.h.0–5`; in several runs, each of them."""
    runs: list[list[str]] = []
    for name in names:
        start, _, number = name.rpartition(".")
        follows = runs and number.isdecimal() and runs[-1][-1] == f"{start}.{int(number) - 1}"
        if follows:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1].rpartition('.')[2]}" for run in runs)


def chart(mesh: DrawnMesh) -> Iterator[Chart]:
    """The picture: a row for each stage, a box for each rank, a line for each two that talk. None of a large mesh."""
    if len(mesh.hosts) > _MOST_RANKS:
        return
    talks, columns = mesh.talks(), ["axis", "ranks", "through", "what"]
    with drawing(46 + 92 * mesh.pipeline, "mesh", "The mesh: who has what, and talks to whom", columns) as canvas:
        axes = canvas.figure.subplots()
        draw(axes, mesh)
        canvas.legend(axes)
        for talk in talks:
            cells = [talk.axis, "–".join(map(str, talk.ranks)), talk.way, WHAT[talk.axis]]
            canvas.table.rows.append([Cell(text) for text in cells])
        ways = dict.fromkeys(talk.way for talk in talks)
        summary = f"A mesh of {mesh.shape}; ranks exchange tensors through {' and '.join(ways)}."
        more = " MiB: the most memory that a rank's process had." if mesh.memory else ""
        yield canvas.chart(summary, f"A full line is memory of one host, a dashed one is sockets.{more}")


def draw(axes: Axes, mesh: DrawnMesh, colours: Mapping[str, str] = _PAGE) -> None:
    """Draw a mesh in these colours, by default the page's."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path

    width, several = mesh.data * mesh.tensor, len(set(mesh.hosts.values())) > 1
    memory, high, half = mesh.memory, 0.17, min(0.4, 0.09 * max(4, 10 / width))

    def at(rank: int) -> tuple[float, float]:
        data, stage, tensor = mesh.place(rank)
        return data * mesh.tensor + tensor + 0.25 * data * (mesh.tensor > 1), float(stage)

    labelled: set[str] = set()
    for talk in mesh.talks():
        dashes = "-" if talk.way == "memory" else (0, (3, 2))
        style: dict[str, Any] = {"color": colours[talk.axis], "lw": 1.6, "ls": dashes, "arrowstyle": "<|-|>"}
        style |= {"mutation_scale": 7, "shrinkA": 1, "shrinkB": 1}
        for first, second in pairwise(talk.ranks):
            (left, above), (right, below) = at(first), at(second)
            bend = "arc3"
            if below - above > 1:  # the ends of a pipeline: beside the boxes between them
                points = [(left - half, above + high / 2), *[(left - half - 0.13, y) for y in (above, below)]]
                path = Path([*points, (right - half, below - high / 2)], [Path.MOVETO, *[Path.CURVE4] * 3])
                axes.add_patch(FancyArrowPatch(path=path, **style))
                continue
            if talk.axis == "pipeline":
                above, below = above + high, below - high
            elif talk.axis == "tensor":
                left, right = left + half, right - half
            else:
                bend = f"arc3,rad={0.22 / (right - left):.3f}"
                left, right, above, below = left + 0.4 * half, right - 0.4 * half, above + high, below + high
            axes.add_patch(FancyArrowPatch((left, above), (right, below), connectionstyle=bend, **style))
        if talk.axis not in labelled | {"ends"}:
            axes.plot([], [], color=colours[talk.axis], lw=1.6, label=talk.axis)
            labelled.add(talk.axis)
    for rank, host in mesh.hosts.items():
        x, y = at(rank)
        box = "round,pad=0,rounding_size=0.04"
        axes.add_patch(
            FancyBboxPatch(
                (x - half, y - high), 2 * half, 2 * high, boxstyle=box, fc=colours["ground"], ec=colours["muted"]
            )
        )
        name = f"{rank} on {brief(host, 10)}" if several else f"rank {rank}"
        name += f"\n{memory[rank]:,.0f} MiB" if rank in memory else ""
        axes.text(x, y, name, color=colours["ink"], size=9, ha="center", va="center")
    for number, stage in enumerate(mesh.stages):
        told = blocks(stage.blocks).replace("transformer.h.", "blocks ")
        text = f"stage {number}: {brief(told, 30)}\n{stage.parameters:,} parameters"
        ground = {"fc": colours["ground"], "ec": "none", "pad": 0.5}
        place = 0.07, number - high - 0.05  # beside the line from the stage above
        axes.text(*place, text, color=colours["muted"], size=9, ha="left", va="bottom", bbox=ground)
    axes.set(xlim=(-0.55, at(mesh.stages[-1].ranks[-1])[0] + 0.5), ylim=(mesh.pipeline - 0.6, -0.5))
    axes.set_axis_off()
