"""Each command that a model of hvdkit's may meet, on one that two ranks divide, and the table of what is tried."""

from __future__ import annotations

import importlib
import json
import math
import re
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.results.pipeline import PipelineStep
from hvdkit.results.profile import load
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit
from tests.divided import SMALL

AXES = ("pipeline", "tensor")
# What a reader may ask of, the capability without which a framework refuses it, and what tries it: files, beginnings of
# tests, and cases. Tests without a framework are PyTorch's.
ROWS = [
    ("a GPT in stages, `gpipe` and `1f1b`", "pipeline", ["pipeline stages_compute"]),
    ("… `interleaved`", "interleaved", ["pipeline stages_of_two_chunks"]),
    ("a GPT in parts", "tensor", ["tensor parts_compute"]),
    ("a GPT in stages of parts", "tensor", ["pipeline stages_in_parts"]),
    ("… and copies of them, on eight ranks", "tensor", ["pipeline copies_of_stages"]),
    ("a ResNet in stages", "pipeline-resnet", ["pipeline_images stages_compute [gpipe 2]"]),
    ("… with synchronized batch norm", "pipeline-resnet", ["pipeline_images stages_compute [1f1b 2 synchronized]"]),
    ("a ResNet in parts", "tensor-resnet", ["pipeline_images parts_compute [4 parts]"]),
    ("a model of your own in stages", "pipeline-own", ["pipeline_own parity_holds"]),
    ("`sharding: optimizer`, `average_weights` (GPT)", "pipeline", ["pipeline shares_of_divided"]),
    ("`accumulate`", "pipeline", ["pipeline stages_compute"]),
    ("`recompute`", "recompute", ["pipeline stages_compute", "tensor parts_compute"]),
    ("`precision: bf16`", "bf16", ["divided_commands what_is_done"]),
    ("`precision: fp16`, an overflow on one rank", "fp16", ["pipeline an_overflow", "tensor an_overflow"]),
    ("`clip_norm` over all axes; a tied table", "pipeline", ["pipeline each_planted_fault"]),
    ("a loss that is a sum over a count, in stages", "pipeline", ["pipeline a_loss_that"]),
    ("dropout in a GPT", "pipeline", ["pipeline ranks_draw", "pipeline masks_are"]),
    ("`check_ranks`", "pipeline", ["pipeline a_rank_that_differs"]),
    ("logs, evaluation, `evaluate`, `generate`, `export`, `profile`", "pipeline", ["divided_commands what_is_done"]),
    ("`--resume` in other stages", "pipeline", ["pipeline a_run_continues_in_other"]),
    ("`--resume` in other parts", "tensor", ["tensor a_run_continues_in_other"]),
    ("a rank that dies, hangs, lacks memory or sends a wrong shape", "pipeline", ["parallel_faults it_is_named"]),
    ("`hvdkit parity`", "pipeline", ["parity_divided stages_and_those", "parity_divided other_frameworks"]),
    ("… and faults that it names", "pipeline", ["parity_divided a_planted_fault"]),
]
NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "mxnet": "MXNet"}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_done_with_a_divided_model(framework: str, axis: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Training with logs, evaluations and `check_ranks`; `evaluate`, `generate` and `export` of it; a profile."""
    divided = ("--framework", framework, "-np", 2, f"parallel.{axis}=2", *SMALL, "threads=1", "data.validation=0.01")
    own = "precision=fp64", "steps=4", "log_every=1", "check_ranks=1", "tensorboard=true"
    done = [hvdkit("train", "gpt-tiny", *divided, *own, "--out", "run")]
    assert done[0].returncode == 0, done[0].stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["loss"] for line in lines if not line["ends_epoch"]]
    assert len(logged) >= 4 and all(map(math.isfinite, logged)) and max(logged) < 7
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
    done += [hvdkit("evaluate", "run", "--framework", framework, "--out", "evaluated")]
    done += [hvdkit("generate", "run", "--framework", framework, "--prompt", "the list", "--tokens", 8)]
    done += [hvdkit("export", "run", "--out", "model.safetensors")]
    done += [hvdkit("profile", "gpt-tiny", *divided, "--steps", 8, "--out", "profile")]
    assert not any(each.returncode for each in done), [each.stderr for each in done]
    evaluated = json.loads((tmp_path / "evaluated" / "evaluate.json").read_text())
    assert evaluated["loss"] == pytest.approx(result["val_loss"], rel=1e-10)
    assert done[2].stdout.startswith("the list")
    profile = load(tmp_path / "profile" / "profile.json")
    assert profile.step.step_ms.mean > 0 and profile.np == 2
    drawn = tmp_path / "profile" / PipelineStep.FILE
    assert drawn.exists() == (axis == "pipeline")
    assert not drawn.exists() or 0 < PipelineStep.read(drawn).bubble < 1
    if "bf16" in CAPABILITIES[framework]:
        cast = hvdkit("train", "gpt-tiny", *divided, "precision=bf16", "recompute=true", "steps=2", "--out", "cast")
        assert cast.returncode == 0, cast.stderr
        assert 0 < json.loads((tmp_path / "cast" / "result.json").read_text())["val_loss"] < 7
    refused = hvdkit("train", "gpt-tiny", *divided, "elastic={max_np: 2}", "--dry-run")
    assert refused.returncode == 2 and "elastic: expected null with a model that is divided" in refused.stderr


def frameworks_of(test: str) -> set[str]:
    """The frameworks under which a test, or one case of it, is run."""
    file, begins, case = re.fullmatch(r"(\w+) (\w+)(?: \[(.+)\])?", test).groups()  # type: ignore[union-attr]
    module = vars(importlib.import_module(f"tests.test_{file}"))
    (function,) = (value for name, value in module.items() if name.startswith(f"test_{begins}"))
    marks = [mark.args[1] for mark in function.pytestmark if mark.name == "parametrize"]
    calls = [set(chain(*each)) for each in product(*([_values(one) for one in values] for values in marks))]
    calls = [values for values in calls if case is None or case in values]
    assert calls, test
    return set(FRAMEWORKS).intersection(*[set().union(*calls)]) or {"pytorch"}


def _values(one: Any) -> list[Any]:
    """What a parameter set has, each of which can be an element of a set."""
    values = getattr(one, "values", None) if not isinstance(one, dict | str) else None
    if values is None:
        values = one if isinstance(one, tuple) else (one,)
    return [value if isinstance(value, str) else repr(value) for value in values]


def table() -> str:
    """What goes with a divided model under which framework, and the test that tries it."""
    lines = [f"| | {' | '.join(NAMES.values())} | tried by |", "|---|---|---|---|---|---|"]
    for what, needed, tests in ROWS:
        tried = set().union(*map(frameworks_of, tests))
        cells = [
            "–" if needed not in CAPABILITIES[name] else "yes" if name in tried else "not tried" for name in FRAMEWORKS
        ]
        files = dict.fromkeys(f"test_{test.partition(' ')[0]}.py" for test in tests)
        lines.append(f"| {what} | {' | '.join(cells)} | {', '.join(files)} |")
    return "\n".join(lines)


@pytest.mark.check
def test_the_page_says_what_is_tried_under_which_framework() -> None:
    assert table() in (ROOT / "docs" / "parallelism.md").read_text(), f"write this:\n{table()}"
