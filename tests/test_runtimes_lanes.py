"""What a build of several runtimes does at once. Pip, compiler and proof are replaced, and the number of cores."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands import runtime_build as build
from hvdkit.errors import RunError
from hvdkit.runtimes import environment, machine, pins, store, target, wheel
from hvdkit.runtimes.store import Runtime
from hvdkit.runtimes.target import Target
from tests import hygiene

pytestmark = pytest.mark.check

PATIENCE_S = hygiene.patience(30)


class Lanes:
    """Stands for pip, the compiler and the proof; what each does is recorded, and may wait for what others do."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.compiling = self.most_compiling = 0
        self.before: dict[str, threading.Event] = {}
        self.after: dict[str, list[threading.Event]] = {}
        self.failing: set[str] = set()
        self._lock = threading.Lock()

    def waits_for(self, what: str, *others: str) -> None:
        """`what` does not end before all `others` have begun."""
        self.after[what] = [self.before.setdefault(other, threading.Event()) for other in others]

    def do(self, what: str) -> None:
        with self._lock:
            self.did.append(what)
        self.before.setdefault(what, threading.Event()).set()
        if not all(event.wait(PATIENCE_S) for event in self.after.get(what, [])):
            raise RunError(f"{what}: what runs at the same time never began")
        if what in self.failing:
            raise RunError(f"{what} does not work")


@pytest.fixture
def lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    lanes = Lanes()
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path / "runtimes"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "require", lambda names, compiling: None)

    def create(name: str, log: Any) -> Path:
        store.python_of(name).parent.mkdir(parents=True)
        lanes.do(f"create {name}")
        return store.python_of(name)

    def obtain(made_for: Target, scratch: Path, *rest: Any) -> Path:
        name = scratch.parent.name
        with lanes._lock:
            lanes.compiling += 1
            lanes.most_compiling = max(lanes.most_compiling, lanes.compiling)
        rest[-1](50)
        lanes.do(f"compile {name}")
        with lanes._lock:
            lanes.compiling -= 1
        return tmp_path / "horovod.whl"

    def examined(name: str, python: Path, **made: Any) -> Runtime:
        versions = {pins.RUNTIMES[name].module: "1", "horovod": "1"}
        return Runtime(name=name, python=python, versions=versions, controllers=["gloo"], operations=["gloo"], **made)

    monkeypatch.setattr(environment, "create", create)
    monkeypatch.setattr(environment, "install_framework", lambda name, gpu, log: lanes.do(f"install {name}"))
    monkeypatch.setattr(target, "versions", lambda python: {"numpy": "1"})
    monkeypatch.setattr(environment, "install_horovod", lambda name, made, log: lanes.do(f"add {name}"))
    monkeypatch.setattr(wheel, "obtain", obtain)
    monkeypatch.setattr(build, "examined", examined)
    monkeypatch.setattr(build, "prove", lambda runtime, name, on_tick: lanes.do(f"prove {name}"))
    return lanes


def _cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


def _build() -> None:
    build.run(build.RuntimeBuildRequest(gpu=False))


@pytest.mark.parametrize(
    "at_once",
    [
        {"install mxnet": "install pytorch", "install pytorch": "install mxnet"},
        {"install pytorch": "compile mxnet"},
        {"prove mxnet": "compile pytorch", "prove pytorch": "compile tensorflow"},
    ],
)
def test_runtimes_are_installed_compiled_and_proved_at_once(at_once: dict[str, str], lanes: Lanes) -> None:
    for what, other in at_once.items():
        lanes.waits_for(what, other)
    _build()
    assert len(lanes.did) == 5 * len(pins.RUNTIMES)


def test_on_two_cores_one_runtime_compiles_at_a_time(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    _cores(monkeypatch, 2)
    _build()
    assert lanes.most_compiling == 1
    wanted = {f"compile {name}" for name in pins.RUNTIMES}  # those of baselines only by name
    assert {what for what in lanes.did if what.startswith("compile")} == wanted


def test_with_wheels_in_a_folder_nothing_is_compiled(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(machine, "require", lambda names, compiling: asked.append(compiling))
    monkeypatch.setattr(wheel, "published", lambda name, gpu, folder: folder / f"{name}.whl")
    monkeypatch.setattr(environment, "install_horovod", lambda name, made, log: asked.append(made))
    build.run(build.RuntimeBuildRequest(names=["mxnet"], gpu=False, find_links=tmp_path))
    assert asked == [False, tmp_path / "mxnet.whl"]
    assert lanes.did == ["create mxnet", "install mxnet", "prove mxnet"]


def test_on_many_cores_all_compile_at_once(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    _cores(monkeypatch, 16)
    compiles = [f"compile {name}" for name in pins.RUNTIMES]
    for each in compiles:
        lanes.waits_for(each, *compiles)
    _build()
    assert lanes.most_compiling == 3


@pytest.mark.parametrize("stage", ["create", "install", "compile", "add", "prove"])
@pytest.mark.parametrize("name", ["mxnet", "pytorch"])
def test_a_runtime_that_fails_stops_no_other_and_is_not_whole(lanes: Lanes, stage: str, name: str) -> None:
    lanes.failing.add(f"{stage} {name}")
    with pytest.raises(RunError, match=f"^runtime '{name}': {stage} {name} does not work$"):
        _build()
    assert {each: (store.folder(each) / "runtime.json").exists() for each in pins.RUNTIMES} == {
        each: each != name for each in pins.RUNTIMES
    }
    assert not any(store.locked(name) for name in pins.RUNTIMES), "the locks are free again"


def test_all_failures_are_reported(lanes: Lanes) -> None:
    lanes.failing |= {"install mxnet", "prove tensorflow"}
    with pytest.raises(RunError) as caught:
        _build()
    assert str(caught.value).splitlines() == [
        "runtime 'mxnet': install mxnet does not work",
        "runtime 'tensorflow': prove tensorflow does not work",
    ]
