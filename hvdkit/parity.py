"""The same recipe under several frameworks: is it the same computation? Float64, step by step, against PyTorch.

Ranks measure (`hvdkit/core/parity.py`); here they are started one framework after the other, and their findings judged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit import config, train
from hvdkit.config import Recipe
from hvdkit.core import resnet
from hvdkit.core.optimizer import slot_names
from hvdkit.core.parity import SINGLE_BATCHES
from hvdkit.errors import RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.report.parity import parity_markdown
from hvdkit.results import FrameworkParity, Parity, this_machine
from hvdkit.train import Plan

REFERENCE = "pytorch"
# Largest errors that pass, in float64; batches and initial weights must be equal bit by bit.
MARKS = {
    "logits_f64": 1e-11,
    "gradients_f64": 1e-9,
    "applied_f64": 1e-12,
    "buffers_f64": 1e-9,
    "weights_f64": 1e-9,
    "losses_f64": 1e-8,
    "step_f64": 1e-9,
    "evaluation_f64": 1e-9,
}
# Float32 may be so many times as far from float64 as the reference's own. Where a framework's batch norm adds up one
# value after the other, its statistics alone are so far off (docs/parity.md has the proof).
F32_FACTOR, F32_FACTOR_PLAIN_SUMS = 3.0, 50.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ParityPlan:
    """A parity run that has passed every check that can be made before it starts; `plans[0]` is the reference's."""

    recipe: Recipe
    plans: list[Plan]
    steps: int
    frameworks: list[str]


def plan(
    recipe: Recipe,
    frameworks: list[str],
    steps: int,
    np: int = 2,
    launcher: str = "direct",
    stall_timeout_s: float = 60.0,
) -> ParityPlan:
    """Check all runs. Raises RequestError with the faults of all of them."""
    faults = [] if steps >= 1 else [f"--steps {steps}: expected 1 or more"]
    if recipe.data.name == "native":
        faults.append(
            "data native: parity needs the same bytes under every framework, which only hvdkit's own data sets give; "
            "choose one of them, or compare with --no-parity"
        )
    plans: list[Plan] = []
    for framework in dict.fromkeys([REFERENCE, *frameworks]):
        try:
            plans.append(train.plan(recipe, framework, np, None, launcher, stall_timeout_s))
        except RequestError as error:
            faults += [line for line in str(error).splitlines() if line not in faults]
    if faults:
        raise RequestError("\n".join(faults))
    return ParityPlan(recipe, plans, steps, list(dict.fromkeys(frameworks)))


def short(recipe: Recipe) -> Recipe:
    """The recipe with batches of at most 16 images: enough for the proof, and affordable in float64."""
    return recipe.model_copy(update={"batch_size": min(recipe.batch_size, 16)})


def run(plan: ParityPlan, folder: Path, tell: Tell = lambda framework: None) -> Parity:
    """Run the reference, then the frameworks, and write parity.json, parity.md and parity.png into `folder`.

    `tell` hears each framework's name before it starts. The trace that the reference leaves for the others takes the
    bytes of one state a step and is removed in the end. Raises what the launcher raises, RunError where the disk is too
    small for the trace.
    """
    write_atomic(folder / "config.yaml", config.dump(plan.recipe))
    trace = folder / "trace"
    _check_room(plan, folder)
    trace.mkdir()
    try:
        for each in plan.plans:
            tell(each.framework)
            leads = ["--leads"] if each.framework == REFERENCE else []
            arguments = ["--parity", str(trace), "--steps", str(plan.steps), *leads]
            train.launch(each, folder / "config.yaml", arguments, folder / "logs" / each.framework)
        findings = {name: json.loads((trace / f"{name}.json").read_text()) for name in plan.frameworks}
    finally:
        shutil.rmtree(trace, ignore_errors=True)
    parity = judge(plan, findings)
    write_atomic(folder / "parity.json", parity.model_dump_json(indent=2) + "\n")
    write_atomic(folder / "parity.md", parity_markdown(parity))
    from hvdkit.report.plots import parity_plot

    parity_plot(parity, folder / "parity.png")
    return parity


def judge(plan: ParityPlan, findings: Mapping[str, Mapping[str, Any]]) -> Parity:
    """Hold each framework's findings against the marks."""
    frameworks = {name: _framework(found) for name, found in findings.items()}
    return Parity(
        passed=all(each.passed for each in frameworks.values()),
        reference=REFERENCE,
        recipe=plan.recipe.name,
        model=plan.recipe.model.name,
        optimizer=plan.recipe.optimizer.name,
        batch_size=plan.recipe.batch_size,
        np=plan.plans[0].np,
        steps=min(found["steps"] for found in findings.values()),
        seed=plan.recipe.seed,
        marks=MARKS,
        frameworks=frameworks,
        machine=this_machine(),
    )


def _framework(found: Mapping[str, Any]) -> FrameworkParity:
    worst = {key: _worst(found[key]) for key in ("gradients_f64", "applied_f64", "buffers_f64", "weights_f64")}
    figures = {
        "logits_f64": found["logits_f64"],
        **{key: value for key, (_, value) in worst.items()},
        "losses_f64": max(found["losses_f64"]),
        "step_f64": max(found["step_f64"]),
        "evaluation_f64": found["evaluation_f64"],
    }
    single = {
        "logits_f32": found["logits_f32"],
        "gradients_f32": _worst(found["gradients_f32"])[1],
        "reference_logits_f32": found["reference_logits_f32"],
        "reference_gradients_f32": _worst(found["reference_gradients_f32"])[1],
    }
    factor = F32_FACTOR if found["exact_sums"] else F32_FACTOR_PLAIN_SUMS
    missed = [key for key in ("batches_equal", "initial_weights_equal") if not found[key]]
    missed += [key for key, value in figures.items() if not value <= MARKS[key]]
    missed += [key for key in ("logits_f32", "gradients_f32") if not single[key] <= factor * single[f"reference_{key}"]]
    return FrameworkParity(
        passed=not missed,
        missed=missed,
        f32_factor=factor,
        version=found["versions"]["framework"],
        batches_equal=found["batches_equal"],
        initial_weights_equal=found["initial_weights_equal"],
        worst_gradient=worst["gradients_f64"][0],
        worst_buffer=worst["buffers_f64"][0],
        worst_weight=worst["weights_f64"][0],
        worst_step=1 + found["step_f64"].index(max(found["step_f64"])),
        gradient_errors_f64=found["gradients_f64"],
        gradient_errors_f32=found["gradients_f32"],
        reference_gradient_errors_f32=found["reference_gradients_f32"],
        step_errors_f64=found["step_f64"],
        evaluation_correct=found["correct"],
        evaluation_total=found["total"],
        first_deviation=found["first_deviation"],
        likely_cause=found["likely_cause"],
        **figures,
        **single,
    )


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """The tensor that is furthest off, and how far."""
    name = max(errors, key=lambda each: errors[each], default="")
    return name, errors.get(name, 0.0)


def _check_room(plan: ParityPlan, folder: Path) -> None:
    network = resnet.architecture(plan.recipe.model.name, plan.recipe.model.classes)
    slots = len(slot_names(plan.recipe.optimizer))
    states, probes = (1 + slots) * (plan.steps + 1), 2 * min(plan.steps, SINGLE_BATCHES)
    needed = 8 * resnet.parameter_count(network) * (states + probes)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"{folder}: {needed / 2**30:.1f} GiB are needed for the states of {plan.steps} steps, "
            f"{free / 2**30:.1f} are free; free space, choose another --out or fewer --steps"
        )
