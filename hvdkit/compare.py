"""The same recipe under several frameworks and numbers of ranks, one after the other on the same machine."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from hvdkit import train
from hvdkit.config import Recipe
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.report.tables import comparison_markdown
from hvdkit.results import Comparison, this_machine
from hvdkit.train import Plan, Watch


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


def run(plans: list[Plan], folder: Path, watch: dict[str, Watch]) -> Comparison:
    """Run all plans, each into `runs/<name>` below `folder`, then write compare.json and compare.md there.

    `watch` maps a run's name to what sees its metric lines.
    """
    results = []
    for each in plans:
        place = folder / "runs" / name(each)
        place.mkdir(parents=True)
        results.append(train.run(each, place, watch.get(name(each))))
    comparison = Comparison(runs=results, machine=this_machine())
    write_atomic(folder / "compare.json", comparison.model_dump_json(indent=2) + "\n")
    write_atomic(folder / "compare.md", comparison_markdown(comparison))
    return comparison


def name(plan: Plan) -> str:
    """A run's name within its comparison."""
    return f"{plan.framework}-np{plan.np}"
