"""The tables of `hvdkit compare`, for terminals and for `compare.md`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from rich.table import Table as RichTable

from hvdkit.baselines.registry import label
from hvdkit.report.collect import Run
from hvdkit.report.documents import render
from hvdkit.report.findings import above_one
from hvdkit.report.parity import deviations, reference, verdict
from hvdkit.report.rounds import RunGroup, by_kind, efficiency, own_metrics, titled
from hvdkit.report.tabular import Table, terminal
from hvdkit.results.compare import BaselineRow, Comparison, Ratio
from hvdkit.results.train import TrainResult

_RATIOS = "hvdkit ÷ the alternatives, and scaling efficiency, by rounds"


def comparison_tables(comparison: Comparison) -> list[RichTable]:
    """For the terminal."""
    first = comparison.runs[0]
    title = f"{first.recipe}: {first.model}, {first.batch} per rank"
    tables = [terminal(_main(comparison, leave_out=_paper_only(comparison)), title)]
    if comparison.ratios and (comparison.rounds > 1 or any(ratio.against != "np=1" for ratio in comparison.ratios)):
        tables.append(terminal(_ratios(comparison.ratios), _RATIOS))
    if comparison.baseline is not None:
        tables.append(terminal(_baseline(comparison.baseline), _against(first)))
    return tables


def comparison_markdown(comparison: Comparison) -> str:
    """`compare.md`: the tables, and what one must know to judge them."""
    parity = comparison.parity
    return render(
        "compare.md",
        comparison=comparison,
        main=_main(comparison),
        titles={"ratios": _RATIOS, "baseline": _against(comparison.runs[0])},
        ratios=_ratios(comparison.ratios),
        sure=min((ratio.confidence for ratio in comparison.ratios), default=1.0),
        baseline=_baseline(comparison.baseline or []),
        deviations=deviations(parity) if parity else [],
        reference=reference(parity) if parity else "",
        notes=above_one(list(by_kind(map(Run, comparison.runs)).values())),
    )


def _main(comparison: Comparison, leave_out: Collection[str] = ()) -> Table:
    """A row for each group of runs, with medians over its rounds. A column without any value is left out too."""
    groups = list(by_kind(map(Run, comparison.runs)).values())
    first = groups[0].first
    columns: dict[str, Callable[[RunGroup], str]] = {
        "framework": lambda group: f"{group.framework} {group.first.framework_version}",
        "rival": lambda group: group.rival or "",
        "ranks": lambda group: str(group.np),
        f"{first.unit}/s": lambda group: _number(group.middle("images_per_second")),
        "GFLOP/s": lambda group: _number(group.middle("model_flop_per_second"), factor=1e-9),
        "efficiency": lambda group: _percent(share.middle if (share := efficiency(group, groups)) else None),
        "step p50": lambda group: _number(group.middle("step_ms_p50"), " ms"),
        "step p90": lambda group: _number(group.middle("step_ms_p90"), " ms"),
        _cpu(first): lambda group: _number(group.middle("cpu_s_per_image"), " ms", 2, first.cpu_of[1]),
        "start-up": lambda group: _number(group.middle("startup_s"), " s"),
        "accuracy": lambda group: _percent(group.middle("val_accuracy"), 2),
        **{titled(name): partial(_score, name) for name in own_metrics(run for group in groups for run in group.runs)},
        "peak memory": lambda group: _number(group.middle("peak_rss_mib"), " MiB", 0),
        "model's state": partial(_state, sharded=any(map(_is_sharded, groups))),
        "others' load": _load,
        "parity": lambda group: "none" if group.rival == "independent" else verdict(comparison.parity, group.label),
    }
    shown = {name: cell for name, cell in columns.items() if name not in leave_out}
    return Table.of("", groups, shown).without_empty(shown)


def _paper_only(comparison: Comparison) -> set[str]:
    """Columns that a terminal has no room for: of a task's own metrics it has the last one."""
    own = own_metrics(map(Run, comparison.runs))
    return {"start-up", "GFLOP/s", _cpu(comparison.runs[0]), *map(titled, own[:-1])}


def _cpu(result: TrainResult) -> str:
    return f"CPU per {result.cpu_of[0]}"


def _against(result: TrainResult) -> str:
    return f"{result.unit} per second, now ÷ the baseline"


def _score(name: str, group: RunGroup) -> str:
    return _number(group.score(name), digits=4)


def _ratios(ratios: list[Ratio]) -> Table:
    columns: dict[str, Callable[[Ratio], str]] = {
        "framework": lambda ratio: ratio.framework,
        "ranks": lambda ratio: str(ratio.np),
        "against": lambda ratio: "one rank" if ratio.against == "np=1" else ratio.against,
        "median": lambda ratio: f"{ratio.median:.3f}",
        "interval": lambda ratio: f"{ratio.low:.3f}–{ratio.high:.3f}" if ratio.rounds > 1 else "–",
        "rounds": lambda ratio: str(ratio.rounds),
        "verdict": lambda ratio: ratio.shown if ratio.verdict else "",
    }
    return Table.of("", ratios, columns)


def _baseline(rows: list[BaselineRow]) -> Table:
    columns: dict[str, Callable[[BaselineRow], str]] = {
        "framework": lambda row: label(row.framework, row.rival),
        "ranks": lambda row: str(row.np),
        "median": lambda row: f"{row.median:.3f}",
        "interval": lambda row: f"{row.low:.3f}–{row.high:.3f}",
        "rounds": lambda row: f"{row.rounds} ÷ {row.old_rounds}",
        "verdict": lambda row: row.verdict,
    }
    return Table.of("", rows, columns)


def _is_sharded(group: RunGroup) -> bool:
    """Whether its ranks share the model's state; of baselines, only those that do count it."""
    return group.first.sharding != "none" or bool(group.rival and group.first.state_bytes)


def _state(group: RunGroup, sharded: bool) -> str:
    """The size of parameters, gradients and the optimizer's state on the largest rank, where any of the runs shards."""
    held = group.first.state_bytes
    return _number(sum(held.values()) / 2**20 if held and sharded else None, " MiB", 2)


def _load(group: RunGroup) -> str:
    load, noisy = group.middle("load"), sum(run.result.noisy for run in group.runs)
    if load is None:
        return "-"
    return _percent(load) + (f", {noisy} of {len(group.runs)} noisy" if noisy else "")


def _number(value: float | None, unit: str = "", digits: int = 1, factor: float = 1) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}{unit}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"
