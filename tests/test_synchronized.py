"""Synchronized batch norm: N ranks compute what one process computes with the batches of all."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from conftest import FRAMEWORKS, ROOT
from launching import framework_job

from hvdkit.launch.launchers import LAUNCHERS

LARGEST_ERROR = 1e-12


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank of a job found."""

    @cache
    def found(framework: str, np: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(framework)
        asked = (ROOT / "tests" / "synchronized" / "rank.py", framework, folder / "report.json")
        LAUNCHERS["direct"].run(framework_job(framework, folder / "logs", *asked, np=np))
        return json.loads((folder / "report.json").read_text())

    return found


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("np", (2, 3))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resnet20_computes_in_n_ranks_what_it_computes_in_one(framework: str, np: int, report: Any) -> None:
    """Loss, each gradient, weight and running statistic, over 20 steps, of which each starts from the same weights."""
    ranks = [rank["proof"] for rank in report(framework, np)]
    errors = ranks[0]["errors"]
    assert len(errors) > 150 and {"loss", "optimizer.momentum.conv1.weight", "bn1.running_var"} <= errors.keys()
    far = {name: error for name, error in errors.items() if not error <= LARGEST_ERROR}
    assert not far and len({rank["digest"] for rank in ranks}) == 1, far


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_kind_of_layer_is_synchronized_with_unequal_batches(framework: str, report: Any) -> None:
    for rank in report(framework, 2):
        far = {name: error for name, error in rank["layers"].items() if not error <= LARGEST_ERROR}
        assert len(rank["layers"]) > 6 and not far, far
