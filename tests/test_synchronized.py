"""Synchronized batch norm: N ranks compute what one process computes with the batches of all."""

from __future__ import annotations

from typing import Any

import pytest

from hvdkit.simulator.advise import advise
from hvdkit.simulator.money import Money
from hvdkit.simulator.predict import predict
from hvdkit.simulator.settings import Settings
from hvdkit.tasks import few_samples
from tests import simulating
from tests.conftest import KERAS_THOROUGH, Hvdkit
from tests.divided import reports

pytestmark = pytest.mark.long

LARGEST_ERROR = 1e-12


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank of a job found."""
    ask = reports("synchronized", tmp_path_factory)
    return lambda framework, np: ask(framework, np=np)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("np", (2, pytest.param(3, marks=pytest.mark.thorough)))
@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_resnet20_computes_in_n_ranks_what_it_computes_in_one(framework: str, np: int, report: Any) -> None:
    """Loss, each gradient, weight and running statistic, over 5 steps, of which each starts from the same weights."""
    ranks = [rank["proof"] for rank in report(framework, np)]
    errors = ranks[0]["errors"]
    assert len(errors) > 150 and {"loss", "optimizer.momentum.conv1.weight", "bn1.running_var"} <= errors.keys()
    far = {name: error for name, error in errors.items() if not error <= LARGEST_ERROR}
    assert not far and len({rank["digest"] for rank in ranks}) == 1, far


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_every_kind_of_layer_is_synchronized_with_unequal_batches(framework: str, report: Any) -> None:
    for rank in report(framework, 2):
        far = {name: error for name, error in rank["layers"].items() if not error <= LARGEST_ERROR}
        assert len(rank["layers"]) > 6 and not far, far


CLAIMING = {"pytorch": ["torch", "horovod"], "tensorflow": [], "keras": ["own", "last"], "mxnet": ["last"]}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_what_cannot_be_synchronized_is_refused_by_name(framework: str, report: Any) -> None:
    told = dict(report(framework, 2)[0]["refusals"])
    assert told.pop("claims") == CLAIMING[framework]
    loop = told.pop("a loop without")
    assert "is a synchronized batch norm that would be a local one" in loop or framework == "tensorflow", loop
    for layer, said in told.items():
        assert said.startswith(f"model: {layer}") and "synchronized" in said and "\n" not in said, said


@pytest.mark.check
def test_few_samples_are_said_of_local_batch_norm_on_several_ranks_alone(inside: Hvdkit) -> None:
    (line,) = few_samples.warning("resnet20", "local", 15, 2)
    assert "15 samples" in line and "model.batch_norm=synchronized" in line
    quiet = ("resnet20", "synchronized", 8, 2), ("resnet20", "local", 16, 2), ("resnet20", "local", 8, 1)
    assert not any(few_samples.warning(*each) for each in (*quiet, ("gpt", None, 1, 2)))
    for batch_size, told in ((15, True), (16, False)):
        done = inside("train", "resnet20-digits", "-np", 2, f"batch_size={batch_size}", "--dry-run")
        assert done.returncode == 0 and (line in done.stdout) == told, done.stdout


@pytest.mark.check
@pytest.mark.parametrize("batch_norm, told", [("local", "of 8 samples"), ("synchronized", "as they were measured")])
def test_advice_and_predictions_say_what_they_leave_out_of_batch_norm(batch_norm: str, told: str) -> None:
    settings = {"model": {"name": "resnet20", "batch_norm": batch_norm}}
    profile = simulating.profile().model_copy(update={"batch_size": 8, "settings": settings})
    cluster = simulating.cluster()
    advice = advise(profile, cluster, 2, Settings(), Money())
    (point,) = predict(profile, cluster, [2], Settings()).points
    for warnings in (advice.today.warnings, point.warnings):
        assert len([line for line in warnings if told in line]) == 1, warnings


@pytest.mark.check
def test_what_does_not_synchronize_is_refused(inside: Hvdkit) -> None:
    words = ("resnet20-digits", "-np", 2, "model.batch_norm=synchronized", "--dry-run")
    done = inside("train", *words, "--rival", "ddp")
    assert (done.returncode, done.stderr.count("--rival ddp: does not synchronize batch norms")) == (2, 1), done.stderr
    assert inside("train", *words, "--rival", "plain").returncode == 0
