"""Tensor parallelism: ranks with parts of a GPT compute what one process with the whole model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdkit.adapters.capabilities import CAPABILITIES
from tests import hygiene
from tests.conftest import Hvdkit, rest_thorough
from tests.divided import SMALL, continues, far, reports
from tests.resuming import kill_ranks, under_way

FRAMEWORKS = tuple(name for name, own in CAPABILITIES.items() if "tensor" in own)
# TensorFlow compiles for two minutes, Keras too.
COMPILED_THOROUGH = [
    pytest.param(name, marks=pytest.mark.thorough) if name in ("tensorflow", "keras") else name for name in FRAMEWORKS
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of four ranks found."""
    return reports("tensor", tmp_path_factory)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("size", rest_thorough(2, 4))
@pytest.mark.parametrize("framework", COMPILED_THOROUGH)
def test_parts_compute_what_the_whole_model_computes(framework: str, size: int, report: Any) -> None:
    """Each gradient and weight in 20 forced steps; weights after four free ones; evaluation; state.

    On a mesh of two data ranks × two parts, and on one of four parts.
    """
    ranks = [rank[str(size)] for rank in report(framework)]
    for rank in ranks:
        assert len(rank["gradients"]) == 29 and len(rank["weights"]) > 100
        assert not far(rank["gradients"]) and not far(rank["weights"]) and not far(rank["evaluation"])
        assert not far(rank["free"], 1e-9)
        assert rank["loaded"] and rank["broadcast"]
        parts, whole = rank["bytes"]
        assert parts["parameters"] < whole["parameters"] and parts["optimizer"] == 2 * parts["parameters"]
    assert len({rank["digest"] for rank in ranks}) == 1


FAULTS = {
    # what is seen wrong first, and what is right still
    "no sum after the rows": ("transformer.ln_f.bias", ""),
    "a sum too many": ("transformer.h.1.mlp.c_proj.weight", "transformer.ln_f.bias"),
    "no sum of gradients": ("transformer.h.1.ln_1.weight", "transformer.h.1.attn.c_attn.weight"),
    "bias of each rank": ("transformer.ln_f.bias", ""),
    "vocabulary": ("transformer.wte.weight", ""),
    "norm": ("after transformer.h.1.ln_1.weight", "transformer.h.1.ln_1.weight"),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", COMPILED_THOROUGH)
def test_each_planted_fault_is_seen(framework: str, report: Any) -> None:
    for rank in report(framework):
        assert not far(rank["planted"]["no fault"])
        found = rank["planted"]
        planted = FAULTS if framework == "pytorch" else {"a sum too many"}
        assert found.keys() == {"no fault", *planted}
        for fault in planted:
            wrong, right = FAULTS[fault]
            seen = far(found[fault])
            assert wrong in seen and right not in seen, (fault, seen)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", COMPILED_THOROUGH)
def test_an_overflow_in_one_part_skips_the_update_of_all(framework: str, report: Any) -> None:
    changed = [rank["overflow"] for rank in report(framework)]
    if "fp16" in CAPABILITIES[framework]:
        assert changed == [["optimizer.loss_scale"]] * 4
    else:
        assert changed == [None] * 4


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "framework", [FRAMEWORKS[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in FRAMEWORKS[1:])]
)
def test_a_run_continues_in_other_parts(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    results = continues(hvdkit, framework, ("-np", 2, "parallel.tensor=2"), tmp_path)
    assert results[0]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=1e-10)
    assert [result["np"] for result in results] == [2, 1]
    parameters = [result["state_bytes"]["parameters"] for result in results]
    assert parameters[0] < 0.6 * parameters[1] and results[0]["parameters"] == results[1]["parameters"]


@pytest.mark.usefixtures("warm")
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    options = ("--framework", "pytorch", "-np", 2, "parallel.tensor=2", "checkpoint.every_steps=1", "threads=1", *SMALL)
    with under_way(tmp_path / "run", "gpt-tiny", *options) as process:
        kill_ranks(tmp_path / "run", rank=1)
        told = process.communicate(timeout=hygiene.patience(60))[1]
    assert process.returncode == 1
    assert "rank 1 on localhost (data 0, pipeline 0, tensor 1) was killed by SIGKILL" in told
