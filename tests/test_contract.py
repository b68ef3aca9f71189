"""The seam's contract: all four adapters in two real Horovod processes, and the null adapter alone."""

from __future__ import annotations

import inspect
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit import adapters
from hvdkit.adapters.capabilities import CAPABILITIES, MEANINGS
from hvdkit.core.group import Topology, world_of
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.recipe.schema import Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from tests import local_adapter
from tests.conftest import FRAMEWORKS, ROOT, rest_thorough, run
from tests.contract import everything  # noqa: F401 - adds their cases
from tests.contract.cases import BETWEEN, CASES, CLASSES, FEATURES, LEAKS, PROBED, SHAPE, error  # as ranks import them
from tests.launching import framework_job
from tests.local_adapter import Linear

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of all cases under one framework, from one pair of processes."""

    @cache
    def outcome(framework: str) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
        folder = tmp_path_factory.mktemp(framework)
        asked = (ROOT / "tests" / "contract" / "rank.py", framework, folder / "report.json")
        ranks = 4 if framework.endswith(("-groups", "-leaking")) else 2
        job = framework_job(
            framework.partition("-")[0], folder / "logs", *asked, np=ranks, HOROVOD_DYNAMIC_PROCESS_SETS="1"
        )
        LAUNCHERS["direct"].run(job)
        return json.loads((folder / "report.json").read_text()), dict(np.load(folder / "report.npz"))

    return outcome


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("framework", (*FRAMEWORKS, "pytorch-overlapped"))
def test_two_ranks(framework: str, name: str, report: Any) -> None:
    told, _ = report(framework)
    assert told["cases"][name] == [], "\n".join(told["cases"][name])


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", [*rest_thorough("pytorch", "tensorflow", "keras"), "mxnet"])
def test_two_groups_of_two_ranks(framework: str, report: Any) -> None:
    """At once, with other data: what one computes does not reach the other."""
    told, _ = report(f"{framework}-groups")
    assert len(told["cases"]) >= len(BETWEEN) > 20
    assert {name: faults for name, faults in told["cases"].items() if faults} == {}


@pytest.mark.usefixtures("warm")
def test_results_of_one_group_that_reach_another_are_seen(report: Any) -> None:
    told, _ = report("mxnet-leaking")
    assert [name for name in LEAKS if not told["cases"][name]] == []


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("capability", PROBED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_declared_works_and_what_is_not_fails(framework: str, capability: str, report: Any) -> None:
    """What is listed as unsupported and works after all fails here too: then the adapter's CAPABILITIES must say so."""
    told, _ = report(framework)
    faults = told["capabilities"][capability]
    assert (faults == []) == (capability in told["declared"]), faults


@pytest.mark.check
def test_every_adapter_has_what_is_declared_for_it() -> None:
    """Read from the source, as no framework is here to import; whether it is true, the test above tries."""
    assert set(CAPABILITIES) == set(adapters.NAMES) and set().union(*CAPABILITIES.values()) <= MEANINGS.keys()
    for name in adapters.NAMES:
        source = Path(inspect.getfile(adapters)).with_name(name).joinpath("__init__.py").read_text()
        assert f'    NAME = "{name}"\n    CAPABILITIES = capabilities.CAPABILITIES[NAME]\n' in source, name


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_trains_is_declared(framework: str, report: Any) -> None:
    told, _ = report(framework)
    assert told["declared"] == sorted(CAPABILITIES[framework])


@pytest.mark.check
def test_capabilities_are_of_the_known_ones() -> None:
    """In a process of its own: NumPy has bfloat16 wherever ml_dtypes was imported, as onnx does."""
    code = "import json; from tests.contract.cases import PROBED, probe; from tests import local_adapter; "
    code += "from hvdkit.core.group import Topology; "
    code += "print(json.dumps({name: probe(name, local_adapter.adapter, Topology()) for name in PROBED}))"
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run([sys.executable, "-c", code], timeout=60, env=where)
    assert done.returncode == 0, done.stderr
    faults, has = json.loads(done.stdout), local_adapter.adapter.CAPABILITIES
    assert MEANINGS.keys() >= has and faults.keys() == set(PROBED)
    for capability, fault in faults.items():
        assert (fault == "") == (capability in has), fault


def local_session(
    compression: str = "none",
    label_smoothing: float = 0.0,
    precision: str = "fp64",
    tiny: bool = False,
    optimizer: Optimizer | None = None,
    strategy: Strategy | None = None,
    **settings: Any,
) -> Any:
    """What the ranks' `make` is, of the null adapter."""
    local: Any = local_adapter.adapter
    features = FEATURES if tiny else int(np.prod(SHAPE))
    optimizer = optimizer or Sgd(**({"learning_rate": 0.1} | settings))
    loss = Loss(label_smoothing=label_smoothing)
    strategy = strategy or Dense(local, world_of(Topology()), half=compression == "fp16")
    return Session(local, Linear(features, CLASSES), optimizer, loss, strategy)


@pytest.mark.check
@pytest.mark.parametrize("name", CASES)
def test_null_adapter(name: str) -> None:
    """The case raises where it does not hold; that it can, the test below tries."""
    CASES[name](local_adapter.adapter, Topology(), local_session)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _double(tensors: list[np.ndarray], *_: Any, **__: Any) -> list[np.ndarray]:
    return [2 * tensor for tensor in tensors]


def _itself(tensor: np.ndarray) -> np.ndarray:
    return tensor  # which is not a copy


# A function of the null adapter, what is put in its place, and a case that must find out.
SPOILT: list[tuple[str, Any, str]] = [
    ("allreduce", _double, "allreduce_reduces_by_each_op"),
    ("broadcast", lambda tensor, *_, **__: 0 * tensor, "broadcast_gives_the_roots_tensor"),
    ("to_numpy", _itself, "arrays_survive_the_way_in_and_out"),
    ("cast", lambda tensor, dtype: tensor, "cast_rounds_as_numpy_does"),
    ("load_state", _nothing, "state_has_canonical_names_and_comes_back_bit_for_bit"),
    ("load_state", _nothing, "a_state_that_does_not_fit_is_refused_by_name"),
    ("set_learning_rate", _nothing, "momentum_keeps_the_learning_rate_outside"),
    ("allgather_object", lambda value, group, name="": [], "any_object_can_be_gathered"),
]


@pytest.mark.check
@pytest.mark.parametrize(("function", "wrong", "name"), SPOILT, ids=[f"{one[0]}-{one[2]}" for one in SPOILT])
def test_a_case_finds_out_what_is_wrong(function: str, wrong: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local: Any = local_adapter.adapter
    monkeypatch.setattr(Session if hasattr(Session, function) else local, function, wrong)
    with pytest.raises(AssertionError):
        CASES[name](local, Topology(), local_session)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", ("tensorflow", "keras", "mxnet"))
def test_one_step_is_the_same_as_pytorchs(framework: str, report: Any) -> None:
    """Weights, buffers and velocities after one step on two ranks. A biased running variance (0.8 % off in the last
    block here), a wrong epsilon or asymmetric padding stands out by far."""
    _, reference = report("pytorch")
    _, made = report(framework)
    assert made.keys() == reference.keys()
    errors = {name: error(made[name], reference[name].astype(np.float64)) for name in reference}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < 1e-3, f"{worst}: {errors[worst]:.2e}"
