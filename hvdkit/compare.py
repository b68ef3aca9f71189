"""The same recipe under several frameworks and numbers of ranks, one after the other on the same machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdkit import parity, train
from hvdkit.config import Recipe
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.parity import ParityPlan
from hvdkit.report.tables import comparison_markdown
from hvdkit.results import Comparison, Parity, read_parity, this_machine
from hvdkit.train import Plan, Watch

PARITY_STEPS = 5  # of the short proof before a comparison


def plan(
    recipe: Recipe, frameworks: list[str], nps: list[int], launcher: str, stall_timeout_s: float = 60.0
) -> list[Plan]:
    """All runs of a comparison, checked. Raises RequestError with the faults of all of them.

    Every rank of every run gets the same number of threads: the cores shared among as many ranks as the largest run
    has. Otherwise one rank alone would have all cores, and efficiency would say nothing about communication.
    """
    plans: list[Plan] = []
    faults: list[str] = []
    for option, values in (("--framework", frameworks), ("-np", [str(np) for np in nps])):
        for value, times in Counter(values).items():
            if times > 1:
                faults.append(f"{option} {value}: given {times} times; once is enough")
    recipe = recipe.model_copy(update={"checkpoint": None, "elastic": None})  # a comparison's runs are whole
    if recipe.threads == "auto" and nps:
        recipe = recipe.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // max(1, *nps))})
    for framework in frameworks:
        for np in nps:
            try:
                plans.append(train.plan(recipe, framework, np, None, launcher, stall_timeout_s))
            except RequestError as error:
                faults += [line for line in str(error).splitlines() if line not in faults]
    if faults:
        raise RequestError("\n".join(faults))
    return plans


@dataclass(frozen=True)
class Proof:
    """Where the proof comes from that all frameworks do the same work: a short parity run, a file, or nowhere."""

    plan: ParityPlan | None
    found: Parity | None

    @property
    def stages(self) -> int:
        """How many runs it takes."""
        return len(self.plan.plans) if self.plan else 0

    def give(self, folder: Path, tell: Callable[[str], None]) -> Parity | None:
        """The proof. A run goes into `parity` below `folder`; `tell` hears each framework's name before it starts.

        Raises as `parity.run` does.
        """
        if self.plan is None:
            return self.found
        (folder / "parity").mkdir()
        return parity.run(self.plan, folder / "parity", tell)


def proof(
    recipe: Recipe, frameworks: list[str], file: Path | None, none: bool, launcher: str, stall_timeout_s: float = 60.0
) -> Proof:
    """Plan the proof: `file` is an earlier one of the same recipe, `none` leaves it out.

    Raises RequestError where both are given, where the file is missing, damaged or no proof for this recipe and these
    frameworks, and as `parity.plan` does.
    """
    if none and file:
        raise RequestError("--parity, --no-parity: expected one of them, got both")
    if none:
        return Proof(None, None)
    if file is None:
        return Proof(parity.plan(parity.short(recipe), frameworks, PARITY_STEPS, 2, launcher, stall_timeout_s), None)
    found = read_parity(file)
    parity.check(found, file, recipe, frameworks)
    return Proof(None, found)


def run(plans: list[Plan], shown: Parity | None, folder: Path, watch: dict[str, Watch]) -> Comparison:
    """Run all plans, each into `runs/<name>` below `folder`, then write compare.json and compare.md there.

    `shown` is the proof that all do the same work, None where nobody asked for it. `watch` maps a run's name to what
    sees its metric lines. Raises as `train.run` does; what ran before stays in its folder.
    """
    results = []
    for each in plans:
        place = folder / "runs" / name(each)
        place.mkdir(parents=True)
        results.append(train.run(each, place, watch.get(name(each))))
    comparison = Comparison(runs=results, parity=shown, machine=this_machine())
    write_atomic(folder / "compare.json", comparison.model_dump_json(indent=2) + "\n")
    write_atomic(folder / "compare.md", comparison_markdown(comparison))
    return comparison


def name(plan: Plan) -> str:
    """A run's name within its comparison."""
    return f"{plan.framework}-np{plan.np}"
