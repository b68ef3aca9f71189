"""The tables of the page: results, every run, tuning, baseline, machine and versions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from hvdkit.baselines.registry import label
from hvdkit.report.collect import CollectedRuns
from hvdkit.report.parity import verdict
from hvdkit.report.rounds import Estimate, RunGroup, efficiency, own_metrics, titled
from hvdkit.report.tabular import Cell, Of, Table, number, on_hosts, percent, times
from hvdkit.results.compare import BaselineRow, Comparison, Ratio
from hvdkit.results.train import TrainResult


def groups_table(groups: list[RunGroup], comparison: Comparison | None, place: str = "page") -> Table:
    """A row for each group of runs, with medians over its rounds; a column without any value is left out.

    `place` is page, which has intervals too and the versions elsewhere, or markdown, or terminal, which has no room for
    all columns. A single run, without `comparison`, has one row.
    """
    parity, first = comparison.parity if comparison else None, groups[0].first
    of, factor = first.cpu_of
    page, own = place == "page", own_metrics(run for group in groups for run in group.runs)

    def proved(group: RunGroup) -> Cell:
        checked = "none" if group.rival == "independent" else verdict(parity, group.label)
        leads = parity and checked == "0e+00" and group.framework == parity.reference and group.rival in (None, "plain")
        return Cell("reference" if leads else checked, bad=checked == "FAILED")

    def estimated(estimate: Estimate | None) -> Estimate | None:
        return estimate if page or estimate is None else Estimate(estimate.middle, None, None, estimate.n)

    def median(key: str, digits: int = 0, factor: float = 1.0) -> Of[RunGroup]:
        return lambda group: number(times(group.middle(key), factor), digits)

    names: dict[str, Of[RunGroup]] = {
        "framework": lambda group: f"{group.framework} {group.first.framework_version}",
        "rival": lambda group: group.rival or "",
    }
    columns: dict[str, Of[RunGroup]] = ({"framework": lambda group: group.label} if page else names) | {
        "ranks": lambda group: number(group.np),
        "n": lambda group: number(group.speed.n),
        f"{first.unit}/s": lambda group: _speed(estimated(group.speed)),
        "GFLOP/s": median("model_flop_per_second", 1, 1e-9),
        "efficiency": lambda group: _share(estimated(efficiency(group, groups))),
        "step p50, ms": median("step_ms_p50", 1),
        "p90, ms": median("step_ms_p90", 1),
        f"CPU ms per {of}": median("cpu_s_per_image", 2, factor),
        "start-up, s": median("startup_s", 1),
        "accuracy": lambda group: percent(group.middle("val_accuracy"), 2),
        **{titled(name): partial(_score, name) for name in own},
        "peak memory, MiB": median("peak_rss_mib"),
        "model's state, MiB": partial(_state, sharded=any(map(_is_sharded, groups))),
        "others' load": _load,
        "parity": proved,
    }
    wide = {f"CPU ms per {of}", "start-up, s"}
    left_out = {
        "page": wide | {"model's state, MiB", "others' load"},
        "markdown": {"n"},
        "terminal": wide | {"n", "GFLOP/s", *map(titled, own[:-1])},
    }[place] | (set() if comparison else {"n", "efficiency", "parity"})
    shown = {name: cell for name, cell in columns.items() if name not in left_out}
    return Table.of("results", groups, shown).without_empty()


def _speed(estimate: Estimate | None) -> Cell:
    assert estimate
    return Cell(estimate.text(), estimate.middle)


def _score(name: str, group: RunGroup) -> Cell:
    return number(group.middle(name, of_validation=True), 4)


def _is_sharded(group: RunGroup) -> bool:
    """Whether its ranks share the model's state; of rivals, only those that do count it."""
    return group.first.sharding != "none" or bool(group.rival and group.first.state_bytes)


def _state(group: RunGroup, sharded: bool) -> Cell:
    """The size of parameters, gradients and the optimizer's state on the largest rank, where any of the runs shards."""
    held = group.first.state_bytes
    return number(sum(held.values()) / 2**20 if held and sharded else None, 2)


def _load(group: RunGroup) -> Cell:
    load, noisy = group.middle("load"), sum(run.result.noisy for run in group.runs)
    shown = percent(load, 0)
    return Cell(f"{shown.text}, {noisy} of {len(group.runs)} noisy", load) if load is not None and noisy else shown


def ratios_table(ratios: Sequence[Ratio]) -> Table:
    """hvdkit's speed over that of each rival, and over one rank's or one host's."""

    def sure(ratio: Ratio, key: str) -> float | None:
        return getattr(ratio, key) if ratio.rounds > 1 else None

    columns: dict[str, Of[Ratio]] = {
        "framework": lambda ratio: ratio.framework,
        "ranks": lambda ratio: number(ratio.np),
        "against": lambda ratio: _alternative(ratio),
        "median": lambda ratio: number(ratio.median, 3),
        "low": lambda ratio: number(sure(ratio, "low"), 3),
        "high": lambda ratio: number(sure(ratio, "high"), 3),
        "rounds": lambda ratio: number(ratio.rounds),
        "confidence": lambda ratio: percent(sure(ratio, "confidence"), 0),
        "verdict": lambda ratio: ratio.shown,
    }
    return Table.of("ratios", ratios, columns)


def _alternative(ratio: Ratio) -> str:
    if not ratio.of_scaling:
        return ratio.against
    return "one rank" if ratio.against == "np=1" else f"one host, {ratio.against.removeprefix('np=')} ranks"


def runs_table(given: CollectedRuns) -> Table:
    """A row for each run, from its result.json."""
    of, factor = given.runs[0].result.cpu_of
    own = own_metrics(given.runs) if all(run.result.val_accuracy is None for run in given.runs) else []
    columns: dict[str, Of[TrainResult]] = {
        "framework": lambda run: Cell(f"{_name(run)}{' (noisy)' if run.noisy else ''}", bad=run.noisy),
        "ranks": lambda run: number(run.np),
        "round": lambda run: number(run.round or 1),
        f"{given.runs[0].result.unit}/s": lambda run: number(run.images_per_second, 1),
        "p50, ms": lambda run: number(run.step_ms_p50, 1),
        "p90, ms": lambda run: number(run.step_ms_p90, 1),
        "steps measured": lambda run: number(run.measured_steps),
        "loss": lambda run: number(run.train_loss, 4),
        **({"accuracy": lambda run: percent(run.val_accuracy, 2)} if not own else {}),
        **{titled(name): partial(_of_run, name) for name in own},
        "MiB": lambda run: number(run.peak_rss_mib),
        "seconds": lambda run: number(run.train_s, 1),
    }
    optional: dict[str, Of[TrainResult]] = {
        "p99, ms": lambda run: number(run.step_ms_p99, 1),
        "start, s": lambda run: number(run.startup_s, 1),
        f"CPU ms per {of}": lambda run: number(times(run.cpu_s_per_image, factor), 1),
        "others' load": lambda run: percent(run.load),
    }
    return Table.of("runs", [run.result for run in given.runs], columns | optional).without_empty(optional)


def _of_run(name: str, run: TrainResult) -> Cell:
    return number((run.validation or {}).get(name), 4)


def tuning_table(given: CollectedRuns) -> Table:
    """The settings that were chosen automatically, and why."""
    sizes: dict[tuple[str, str, str, str], set[int]] = {}  # rounds, and often numbers of ranks, share their tuning
    for run in given.runs:
        for key, choice in (run.result.tuning or {}).items():
            value = "default" if choice.get("value") is None else str(choice["value"])
            sizes.setdefault((run.result.framework, key, value, str(choice["why"])), set()).add(run.result.np)
    rows = [
        [Cell(framework), Cell(", ".join(map(str, sorted(nps))), min(nps)), Cell(key), Cell(value), Cell(why)]
        for (framework, key, value, why), nps in sizes.items()
    ]
    return Table("tuning", ["framework", "ranks", "setting", "value", "reason"], rows)


def baseline_table(rows: list[BaselineRow]) -> Table:
    """Images per second over those of an earlier comparison."""
    columns: dict[str, Of[BaselineRow]] = {
        "framework": _name,
        "ranks": lambda row: number(row.np),
        "now ÷ earlier": lambda row: number(row.median, 3),
        "low": lambda row: number(row.low, 3),
        "high": lambda row: number(row.high, 3),
        "rounds": lambda row: number(row.rounds),
        "rounds then": lambda row: number(row.old_rounds),
        "verdict": lambda row: Cell(row.verdict, bad=row.verdict == "worse"),
    }
    return Table.of("baseline", rows, columns)


def machine_table(given: CollectedRuns) -> Table:
    """The machine, the versions and the settings of all runs."""
    rows: dict[str, str] = {}
    if given.comparison:
        machine = given.comparison.machine
        rows |= {
            "processor": f"{machine.processor}, {machine.cores} cores usable",
            "memory": f"{machine.memory_mib:,} MiB",
            "system": f"{machine.system}, Python {machine.python}",
        }
    results = [run.result for run in given.runs]
    rows["measured"] = _when([result.ended_at for result in results if result.ended_at])
    for result in sorted(results, key=lambda result: result.horovod_version is not None):  # some rivals do without
        rows[result.framework] = f"{result.framework_version}, Horovod {result.horovod_version or 'none'}"
    for name, values in {
        "hvdkit": [result.hvdkit_version for result in results],
        "device": [result.device for result in results],
        "threads per rank": [str(result.threads) for result in results],
        "launcher": [result.launcher for result in results],
        "ranks by host": [on_hosts(max(results, key=lambda result: result.np).hosts)],
        "communication": [_wire(result) for result in results],
        "initial weights": [result.initial_state_sha256[:16] for result in results if not result.rival],
    }.items():
        if any(values):
            rows[name] = ", ".join(dict.fromkeys(values))
    return Table("machine", ["item", "value"], [[Cell(key), Cell(value)] for key, value in rows.items()])


def _name(row: TrainResult | BaselineRow) -> str:
    return label(row.framework, row.rival)


def _when(ends: list[datetime]) -> str:
    """The time from the end of the first run to the end of the last, in UTC."""
    if not ends:
        return "not recorded"
    known = [end if end.tzinfo else end.replace(tzinfo=UTC) for end in ends]
    first, last = (f"{end:%-d %B %Y, %H:%M}" for end in (min(known), max(known)))
    if first == last:
        return f"{first} UTC"
    same_day = min(known).date() == max(known).date()
    return f"{first} to {last.rpartition(' ')[2] if same_day else last} UTC"


def _share(share: Estimate | None) -> Cell:
    if share is None or share.low is None or share.high is None:
        return percent(share.middle if share else None)
    text = f"{100 * share.middle:.1f} % ({100 * share.low:.1f}–{100 * share.high:.1f})"
    return Cell(text, share.middle)


def _wire(result: TrainResult) -> str:
    text = f"compression {result.compression}"
    if result.sync:
        text += f", weights every {result.sync['every']} updates"
    return text if result.allreduce == "ring" else f"{text}, allreduce {result.allreduce}"
