"""How a comparison was made, in words that a paper's section on methods can take."""

from __future__ import annotations

from datetime import datetime

from hvdkit.report.collect import CollectedRuns
from hvdkit.report.findings import parity_finding
from hvdkit.report.rounds import RunGroup
from hvdkit.results import intervals
from hvdkit.results.compare import Comparison
from hvdkit.results.machine import Machine
from hvdkit.results.train import TrainResult


def methods(given: CollectedRuns, groups: list[RunGroup], length: str) -> list[str]:
    """The paragraphs: what was trained where, what was measured how, and whether all did the same work; of a single run
    none, since it compares nothing. `length` is how long the runs trained.
    """
    if given.comparison is None:
        return []
    results = [run.result for run in given.runs]
    return [
        _trained(results, groups, length, given.comparison.machine),
        _measured(results, given.comparison),
        _same_work(given.comparison),
    ]


def _trained(results: list[TrainResult], groups: list[RunGroup], length: str, machine: Machine) -> str:
    first, kinds = results[0], {group.label: group.first for group in groups}
    compared = [f"{name} ({_versions(result)})" for name, result in kinds.items()]
    nps = sorted({result.np for result in results})
    hosts = len(set(max(results, key=lambda result: result.np).hosts)) or 1
    threads = " and ".join(map(str, sorted({result.threads for result in results})))
    ended = [result.ended_at for result in results if result.ended_at]
    when = f" on {max(ended, key=datetime.timestamp):%-d %B %Y}" if ended else ""
    return (
        f"We trained {first.model} ({first.parameters:,} parameters) by the recipe {first.recipe} of hvdkit "
        f"{first.hvdkit_version}: {length}, {first.optimizer}, {first.precision}, seed {first.seed}, {first.batch} per "
        f"rank and step. We compared {'; '.join(compared)}, on {_listed(nps)} rank{'s' if nps[-1] > 1 else ''}, with "
        f"{threads} thread{'' if threads == '1' else 's'} each, on {first.device.upper()}s{when}: {machine.processor}, "
        f"{machine.cores} cores usable, {machine.memory_mib / 1024:.1f} GiB, {machine.system}; {hosts} "
        f"host{'' if hosts == 1 else 's'}, launcher {first.launcher}."
    )


def _versions(result: TrainResult) -> str:
    horovod = f", Horovod {result.horovod_version}" if result.horovod_version else ""
    return f"{result.framework_version}{horovod}"


def _measured(results: list[TrainResult], comparison: Comparison) -> str:
    first, rounds, warmups = results[0], comparison.rounds, sorted({result.warmup_steps for result in results})
    noisy = sum(result.noisy for result in results)
    text = (
        f"Speed is the {first.unit} per second of all ranks over the steps after the first {_listed(warmups)}, without "
        "evaluation; a step takes as long as on its slowest rank. "
    )
    if rounds == 1:
        text += "Each kind of run ran once, so speeds have no interval."
    else:
        text += (
            f"Each kind of run ran once in each of {rounds} rounds, in a new random order. We give medians over "
            f"the rounds with intervals by the percentile bootstrap ({intervals.RESAMPLES:,} resamples), whose "
            f"confidence is at most {100 * intervals.confidence(rounds):.0f} %; both runs of a ratio are of the same "
            "round."
        )
    return f"{text} In {noisy} of {len(results)} runs other processes took more than a tenth of the CPU time."


def _same_work(comparison: Comparison) -> str:
    parity, found = comparison.parity, parity_finding(comparison)
    if parity is None:
        return "Whether all did the same work was not checked."
    return (
        f"Before, all trained {parity.steps} steps from the same weights on the same batches, on {parity.np} "
        f"rank{'' if parity.np == 1 else 's'}, and each tensor was compared. {found.text}"
    )


def _listed(values: list[int]) -> str:
    return " and ".join(map(str, values)) if len(values) < 3 else f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
