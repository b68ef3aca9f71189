"""ResNets in stages and parts: batch norm sees microbatches; checkpoints have the running statistics of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdkit.adapters.capabilities import CAPABILITIES
from tests.conftest import Hvdkit, rest_thorough
from tests.divided import SETTINGS, continues, far, reports

FRAMEWORKS = tuple(name for name, own in CAPABILITIES.items() if "pipeline-resnet" in own)
IN_PARTS = tuple(name for name, own in CAPABILITIES.items() if "tensor-resnet" in own)
QUICK = ("1f1b 4", "4 parts")
THOROUGH = ("gpipe 2", "1f1b 2 synchronized", "interleaved 4", "2 parts synchronized", "1f1b 2 in parts")
RATE = "schedule={scale: none, decay: constant}"  # whatever number of updates an epoch has
RUN = ("train", "resnet20-digits", *SETTINGS, "model.name=resnet8", "batch_size=8", RATE)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of four ranks found in a case."""
    ask = reports("pipeline_images", tmp_path_factory)
    return lambda framework, case: [
        rank[case] for rank in ask(framework, *able(framework, QUICK if case in QUICK else THOROUGH))
    ]


def able(framework: str, names: tuple[str, ...]) -> list[str]:
    """The cases that a framework can train."""
    words = {"interleaved": "interleaved", "parts": "tensor-resnet"}
    lacks = [word for word, needed in words.items() if needed not in CAPABILITIES[framework]]
    return [name for name in names if not any(word in name for word in lacks)]


def cases(*names: str) -> list[Any]:
    """Frameworks and cases, of which most are thorough."""
    return [
        pytest.param(framework, name, marks=() if framework == "pytorch" and name in QUICK else pytest.mark.thorough)
        for framework in FRAMEWORKS
        for name in able(framework, names)
    ]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), cases("1f1b 4", "gpipe 2", "1f1b 2 synchronized", "interleaved 4"))
def test_stages_compute_what_the_whole_model_computes(framework: str, case: str, report: Any) -> None:
    """Each gradient, weight and running statistic in 20 forced steps; a free one; evaluation; state.

    One process has the same microbatches. Beside two data ranks, statistics are compared where they are synchronized.
    """
    statistics = 0 if case == "gpipe 2" else 2 * 21
    for rank in report(framework, case):
        assert not far(rank["gradients"]) and not far(rank["weights"])
        assert len(rank["weights"]) == 2 * (3 * 21 + 2) + statistics
        assert not far(rank["free"], 1e-9) and not far(rank["evaluation"])
        assert rank["loaded"] and rank["digest"][0] == rank["digest"][1]
    names = [name for rank in report(framework, case)[:: 2 if " 2" in case else 1] for name in rank["own"]]
    assert len(names) == len(set(names)) == 5 * 21 + 2, "each tensor is on one stage"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), cases("4 parts", "2 parts synchronized", "1f1b 2 in parts"))
def test_parts_compute_what_the_whole_model_computes(framework: str, case: str, report: Any) -> None:
    """Also bottlenecks, of which each stage has parts."""
    for rank in report(framework, case):
        assert not far(rank["gradients"]) and not far(rank["weights"])
        assert not far(rank["free"], 1e-9) and not far(rank["evaluation"])
        assert rank["loaded"] and rank["digest"][0] == rank["digest"][1]
        assert any("running_var" in name for name in rank["weights"])


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_a_run_continues_in_other_stages(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Alone with the same microbatches, which batch norm sees."""
    stages, alone = ("-np", 2, "parallel.pipeline=2", "parallel.microbatches=2"), ("batch_size=4", "accumulate=2")
    results = continues(hvdkit, framework, stages, tmp_path, RUN, alone)
    for key in ("val_loss", "val_accuracy", "train_loss"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-10)


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", IN_PARTS)
def test_a_run_continues_in_other_parts(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    results = continues(hvdkit, framework, ("-np", 2, "parallel.tensor=2"), tmp_path, RUN)
    assert results[0]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=1e-10)
    parameters = [result["state_bytes"]["parameters"] for result in results]
    assert parameters[0] < 0.6 * parameters[1]
