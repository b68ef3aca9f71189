"""What `--dry-run` prints."""

from __future__ import annotations

import shlex
from collections import Counter

from hvdkit.recipe import yaml_files
from hvdkit.report import mesh
from hvdkit.report.tabular import Table, markdown, number, percent, size
from hvdkit.results.dry_run import DryRun, PlannedRun
from hvdkit.results.memory import Parts

_MOST_RANKS = 8  # named one by one


def lines(plan: DryRun) -> list[str]:
    """The resolved recipe, then what would be started, a line for each thing."""
    if len(plan.runs) == 1:
        about = _one(plan.runs[0], plan.recipe["parallel"]["tensor"])
    else:
        about = [(run.title, _brief(run)) for run in plan.runs]
        known = [run.seconds * run.times for run in plan.runs if run.seconds is not None]
        if len(known) == len(plan.runs):
            about.append(("time", f"about {_duration(sum(known))} for all runs"))
        about.append(("launcher", plan.runs[0].launcher))
    about.append(("writes to", plan.out))
    width = max(len(name) for name, _ in about)
    return [
        yaml_files.dump(plan.recipe),
        f"hvdkit {plan.command} would start this; with --dry-run nothing is started or written:",
        *(f"  {name:<{width}}  {text}" for name, text in about),
        *(f"  {line}" for line in _stages(plan.runs[0])),
        *plan.notes,
    ]


def _stages(run: PlannedRun) -> list[str]:
    """A table of a pipeline's stages; no lines without several."""
    stages = list(enumerate(run.stages or []))
    table = Table.of(
        "stages",
        stages,
        {
            "stage": lambda row: number(row[0]),
            "blocks": lambda row: mesh.blocks(row[1].blocks),
            "parameters": lambda row: number(row[1].parameters),
            "of the work": lambda row: percent(row[1].work),
        },
    )
    return markdown(table).splitlines() if len(stages) > 1 else []


def _one(run: PlannedRun, tensor: int) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    about = [
        ("run", run.title),
        ("ranks", _ranks(run)),
        ("launcher", run.launcher),
        ("program", shlex.join([run.interpreter, run.script])),
        ("versions", versions or "not known"),
    ]
    if run.within_hosts:
        about.insert(2, ("in a host", run.within_hosts))
    if run.stages:
        shares_memory = (run.within_hosts or "").startswith("shared memory")
        about += mesh.lines(mesh.Mesh.of(run.stages, tensor, shares_memory))
    if run.threads:
        about.append(("threads", f"{run.threads} per rank"))
    for name, choice in run.tuning.items():
        value = "" if choice["value"] is None else f"{choice['value']}: "  # without a value `why` begins with it
        about.append((name, f"{value}{choice['why']}"))
    if run.train is not None and run.shape is not None:
        shape = "×".join(map(str, run.shape))
        about.append(("data", f"{run.train:,} training and {run.val:,} validation samples of {shape}"))
    else:
        about.append(("data", "only the ranks know how many samples there are"))
    took = "not known" if run.seconds is None else f"about {_duration(run.seconds)}"
    about += [("steps", _steps(run)), ("memory", _memory(run.memory)), ("time", f"{took}: {run.seconds_from}")]
    return about


def _brief(run: PlannedRun) -> str:
    times = "once" if run.times == 1 else f"{run.times} times"
    known = "" if run.seconds is None else f", about {_duration(run.seconds)} each"
    return f"{times}, {_count(run.steps)} steps{known}"


def _ranks(run: PlannedRun) -> str:
    if len(run.ranks) <= _MOST_RANKS:
        return ", ".join(f"{rank.rank} on {rank.host} (slot {rank.slot})" for rank in run.ranks)
    hosts = Counter(rank.host for rank in run.ranks)
    return f"{len(run.ranks)}: " + ", ".join(f"{number} on {host}" for host, number in hosts.items())


def _steps(run: PlannedRun) -> str:
    done = f"; {run.first_step} of them are done" if run.first_step else ""
    if run.steps_per_epoch is None:
        steps = "only the ranks know how many" if run.steps is None else f"at most {run.steps:,}"
        return f"{steps}; {run.global_batch} samples per batch{done}"
    if run.epochs is None:
        return f"{_count(run.steps)} in all, an epoch has {run.steps_per_epoch:,}; {run.global_batch} samples per batch"
    epochs = f"{run.epochs} epoch{'' if run.epochs == 1 else 's'}"
    return f"{run.steps:,} in {epochs} of {run.steps_per_epoch:,}; {run.global_batch} samples per batch{done}"


def _memory(memory: Parts | None) -> str:
    if memory is None:
        return "not known: only the script knows the model, or its stages have several chunks"
    sizes = [f"{name} {size(value)}" for name, value in memory if value]
    return f"a rank needs at least {', '.join(sizes)}, and more for data and scratch space"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _count(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"
