"""Results of benchmarks, written: NAME.json, which has what made it, and NAME.md, a page of it.

The page is pages/NAME.md.j2, a template that sees what the JSON has.
"""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import __version__
from hvdkit.files import write_atomic

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# The code whose speed or result a benchmark measures, if not all of hvdkit; results name it (`measures`).
_TRAINING = ["hvdkit/core", "hvdkit/adapters", "hvdkit/strategies", "hvdkit/data", "hvdkit/runtimes/patches", "recipes"]
MEASURES = {
    "shared_memory": ["hvdkit/runtimes/patches/31-shared-memory.patch"],
    "simulator": ["hvdkit/simulator"],
    "peaks": ["hvdkit/adapters", "hvdkit/worker", "hvdkit/checkpoint"],
    "elastic": ["hvdkit/worker", "hvdkit/launch", "hvdkit/runtimes/patches"],
    "data": ["hvdkit/data"],
    "start": ["hvdkit/cli", "hvdkit/commands/train.py", "hvdkit/launch", "hvdkit/worker", "hvdkit/adapters"],
    "tools": ["hvdkit/cli", "hvdkit/report", "hvdkit/simulator", "hvdkit/runtimes"],
}
# What holds the sides of a result to the same work, where it keeps no parity check beside them.
NO_PARITY = {
    "accuracy": "each run is the recipe, and the result is its accuracy",
    "batch_norm": "the result is an error, no speed",
    "bench-network": "the methods compute something else; the accuracy beside each says what it costs",
    "data": "nothing that is trained is compared",
    "elastic": "nothing that is trained is compared",
    "gpt_loss": "benchmarks/parity/gpt-tiny",
    "gpt_network": "the methods compute something else; the bits per byte beside each say what it costs",
    "horovod-matrix": "nothing that is trained is compared",
    "largest": "no speeds are compared",
    "memory": "no speeds are compared",
    "peaks": "no speeds are compared",
    "order": "tests/test_priority.py: the same bits in each order",
    "ways": "tests/hosts/ways.py: each way gives the right averages",
    "parity": "each check says whether it passed",
    "parallel": "each row that has a rival has its own",
    "sharding": "tests/test_sharding.py: each stage trains as the whole does",
    "shared_memory": "tests/test_shared_memory_bits.py: the same sums",
    "simulator": "nothing that is trained is compared",
    "start": "nothing that is trained is compared",
    "tools": "nothing that is trained is compared",
}
_LINE = 160  # characters of a line of a result


def publish(name: str, outcome: Mapping[str, Any], folder: Path) -> None:
    """Write NAME.json and NAME.md, and print the page.

    `outcome` gets what `facts` gives, the code that it measures, and what holds its sides to the same work.
    """
    text = text_of(facts(command(), name) | dict(outcome))
    shown = page(name, json.loads(text))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.json", text + "\n")
    write_atomic(folder / f"{name}.md", shown)
    print(shown)


def text_of(value: Any, indent: str = "") -> str:
    """JSON of which each part that fits into a line is one."""
    short = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent + short) <= _LINE:
        return short
    inside = indent + "  "
    parts = [text_of(one, inside) for one in (value.values() if isinstance(value, dict) else value)]
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {part}" for key, part in zip(value, parts, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inside}" + f",\n{inside}".join(parts) + f"\n{indent}{closing}"


def compressed(path: Path, value: Any) -> None:
    """Write raw series as JSON, compressed; `anchored.measured` reads them."""
    write_atomic(path, gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0))


def command() -> str:
    """The command that runs now."""
    module = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    return " ".join(["python", "-m", ".".join(module.parts), *sys.argv[1:]])


def facts(command: str, name: str | None = None) -> dict[str, Any]:
    """The command that makes a result, today's date, this version and machine; of a result `name` what it measures."""
    from hvdkit.results.machine import this_machine

    made = {"command": command, "measured": today(), "machine": this_machine().model_dump(), **code()}
    return made | ({"measures": MEASURES.get(name, _TRAINING), "parity": NO_PARITY.get(name)} if name else {})


def code() -> dict[str, str | None]:
    """The version of hvdkit and the commit, None outside a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"hvdkit": __version__, "commit": done.stdout.strip() or None}


def today() -> str:
    """The date, such as 25 November 2026."""
    return time.strftime("%-d %B %Y", time.gmtime())


def page(name: str, outcome: Mapping[str, Any]) -> str:
    """The Markdown of pages/NAME.md.j2, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader(HERE / "pages"),
        undefined=StrictUndefined,
        autoescape=False,  # Markdown
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters |= {"median": statistics.median, "with_interval": with_interval}
    pages.globals |= {"machine_line": machine_line}
    return pages.get_template(f"{name}.md.j2").render(outcome)


# A row of a picture by its label: in each series a value, and its interval, which may be the value alone.
Rows = Mapping[str, Mapping[str, tuple[float, float, float]]]
_SERIES = (("#0072b2", "o"), ("#d55e00", "s"), ("#5c6670", "^"))  # told apart by colour-blind people too


def dots(path: Path, panels: Sequence[tuple[str, str, Rows]], one: float | None = None) -> None:
    """A picture as wide as a page: for each panel (title, unit, rows) a symbol for each series, with its interval.

    `one` is a value that the last panel's x axis marks.
    """
    from matplotlib.figure import Figure

    most = max(len(rows) for _, _, rows in panels)
    figure = Figure(figsize=(9, 1.6 + 0.34 * most), layout="constrained")
    for axes, (title, unit, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        series = list(dict.fromkeys(name for values in rows.values() for name in values))
        for name, (colour, marker) in zip(series, _SERIES, strict=False):
            shift = 0.22 * (series.index(name) - (len(series) - 1) / 2)
            mine = [(place + shift, values[name]) for place, values in enumerate(rows.values()) if name in values]
            for place, (_, low, high) in mine:
                axes.plot([low, high], [place, place], color=colour, lw=2)
            points = [value for _, (value, _, _) in mine], [place for place, _ in mine]
            axes.plot(*points, marker, color=colour, ms=7, label=name)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=11)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.4)
        axes.set_title(title, fontsize=12)
        axes.set_xlabel(unit, fontsize=11)
        axes.legend(fontsize=10)
        if one is None or axes is not figure.axes[-1]:
            axes.set_xlim(left=0)
        else:
            axes.axvline(one, color="black", lw=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def machine_line(machine: Mapping[str, Any], memory: bool = True) -> str:
    """Processor, cores, memory and system of a result's machine."""
    memory_part = f", {machine['memory_mib']} MiB" if memory else ""
    return f"{machine['processor']}, {machine['cores']} cores{memory_part}, {machine['system']}"


def with_interval(found: Mapping[str, Any], digits: int) -> str:
    """An `interval` as `1.02 (0.98–1.06)`; the median alone where both ends are the same."""
    middle, low, high = (f"{found[key]:.{digits}f}" for key in ("median", "low", "high"))
    return middle if found["low"] == found["high"] else f"{middle} ({low}–{high})"
