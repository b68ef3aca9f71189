"""The tables of the page: results, every run, tuning, baseline, machine and versions."""

from __future__ import annotations

from datetime import UTC, datetime

from hvdkit.baselines.registry import label
from hvdkit.report.collect import Found
from hvdkit.report.parity import verdict
from hvdkit.report.rounds import Estimate, Group, efficiency
from hvdkit.report.tabular import Cell, Table, number, percent
from hvdkit.results.compare import BaselineRow
from hvdkit.results.parity import Parity
from hvdkit.results.train import TrainResult


def results_table(groups: list[Group], parity: Parity | None) -> Table:
    """A row for each group of runs, with medians over its rounds."""
    columns = ["framework", "ranks", "n", "images/s", "efficiency", "step p50, ms", "p90, ms", "accuracy"]
    columns += ["peak memory, MiB", "parity"]
    table = Table("results", columns, [])
    for group in groups:
        checked = verdict(parity, group.label)
        if parity and (group.label, checked) == (parity.reference, "0e+00"):
            checked = "reference"
        table.rows.append(
            [
                Cell(group.label),
                number(group.np),
                number(group.speed.n),
                Cell(group.speed.text(), group.speed.middle),
                _share(efficiency(group, groups)),
                number(group.middle("step_ms_p50"), 1),
                number(group.middle("step_ms_p90"), 1),
                percent(group.middle("val_accuracy"), 2),
                number(group.middle("peak_rss_mib")),
                Cell(checked, bad=checked == "FAILED"),
            ]
        )
    return table


def runs_table(found: Found) -> Table:
    """A row for each run, from its result.json."""
    results = [run.result for run in found.runs]
    columns = ["framework", "ranks", "round", "images/s", "p50, ms", "p90, ms", "steps measured", "loss", "accuracy"]
    columns += ["MiB", "seconds"]
    optional = {
        "p99, ms": [number(result.step_ms_p99, 1) for result in results],
        "start, s": [number(result.startup_s, 1) for result in results],
        "CPU ms an image": [
            number(None if result.cpu_s_per_image is None else 1e3 * result.cpu_s_per_image, 1) for result in results
        ],
        "others' load": [percent(result.load) for result in results],
    }
    shown = {title: cells for title, cells in optional.items() if any(cell.value is not None for cell in cells)}
    table = Table("runs", [*columns, *shown], [])
    for place, result in enumerate(results):
        name = label(result.framework, result.rival)
        table.rows.append(
            [
                Cell(f"{name} (noisy)" if result.noisy else name, bad=result.noisy),
                number(result.np),
                number(result.round or 1),
                number(result.images_per_second, 1),
                number(result.step_ms_p50, 1),
                number(result.step_ms_p90, 1),
                number(result.measured_steps),
                number(result.train_loss, 4),
                percent(result.val_accuracy, 2),
                number(result.peak_rss_mib),
                number(result.train_s, 1),
                *(cells[place] for cells in shown.values()),
            ]
        )
    return table


def tuning_table(found: Found) -> Table | None:
    """The settings that were chosen automatically, and why; None if there are none."""
    table = Table("tuning", ["framework", "ranks", "what", "chosen", "why"], [])
    for run in found.runs:
        for key, choice in (run.result.tuning or {}).items():
            value = "its own" if choice.get("value") is None else str(choice["value"])
            row = [Cell(run.result.framework), number(run.result.np), Cell(key), Cell(value), Cell(str(choice["why"]))]
            if row not in table.rows:  # the rounds share their tuning
                table.rows.append(row)
    return table if table.rows else None


def baseline_table(rows: list[BaselineRow]) -> Table:
    """Images per second over those of an earlier comparison."""
    columns = ["framework", "ranks", "now ÷ baseline", "low", "high", "rounds", "rounds then", "verdict"]
    table = Table("baseline", columns, [])
    for row in rows:
        figures = [number(value, 3) for value in (row.median, row.low, row.high)]
        counts = [number(row.rounds), number(row.old_rounds)]
        judged = Cell(row.verdict, bad=row.verdict == "worse")
        table.rows.append([Cell(label(row.framework, row.rival)), number(row.np), *figures, *counts, judged])
    return table


def machine_table(found: Found) -> Table:
    """The machine, the versions and the settings of all runs."""
    rows: dict[str, str] = {}
    if found.comparison:
        machine = found.comparison.machine
        rows |= {
            "processor": f"{machine.processor}, {machine.cores} cores usable",
            "memory": f"{machine.memory_mib:,} MiB",
            "system": f"{machine.system}, Python {machine.python}",
        }
    else:
        rows["machine"] = "not recorded in a single run's folder"
    results = [run.result for run in found.runs]
    rows["measured"] = _when([result.ended_at for result in results if result.ended_at])
    for result in results:
        rows[result.framework] = f"{result.framework_version}, Horovod {result.horovod_version or 'none'}"
    for name, values in {
        "hvdkit": [result.hvdkit_version for result in results],
        "device": [result.device for result in results],
        "threads a rank": [str(result.threads) for result in results],
        "launcher": [result.launcher for result in results],
        "gradients on the wire": [_wire(result) for result in results],
        "initial weights": [result.initial_state_sha256[:16] for result in results if not result.rival],
    }.items():
        rows[name] = ", ".join(dict.fromkeys(values))
    return Table("machine", ["what", "which"], [[Cell(key), Cell(value)] for key, value in rows.items()])


def _when(ends: list[datetime]) -> str:
    """The time from the end of the first run to the end of the last, in UTC."""
    if not ends:
        return "not recorded"
    known = [end if end.tzinfo else end.replace(tzinfo=UTC) for end in ends]
    first, last = (f"{end:%-d %B %Y, %H:%M}" for end in (min(known), max(known)))
    return f"{first} UTC" if first == last else f"{first} to {last} UTC"


def _share(found: Estimate | None) -> Cell:
    if found is None or found.low is None or found.high is None:
        return percent(found.middle if found else None)
    text = f"{100 * found.middle:.1f} % ({100 * found.low:.1f}–{100 * found.high:.1f})"
    return Cell(text, found.middle)


def _wire(result: TrainResult) -> str:
    text = f"compression {result.compression}"
    if result.sync:
        text += f", weights every {result.sync['every']} updates"
    return text if result.allreduce == "ring" else f"{text}, allreduce {result.allreduce}"
