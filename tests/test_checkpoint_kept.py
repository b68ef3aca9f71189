"""Which weights a run keeps by default, where they are, and that figures do not count their writing."""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdkit import tasks
from hvdkit.checkpoint import snapshots, writing
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core import loop
from hvdkit.core.group import Mesh, Topology
from hvdkit.core.loop import Loop
from hvdkit.core.session import Session
from hvdkit.core.state import digest, parameters_of
from hvdkit.core.step_plan import Progress
from hvdkit.data.batches import open_dataset
from hvdkit.handlers.standard import attach
from hvdkit.recipe.schema import Checkpointing, Recipe
from hvdkit.results.train import kept_lines, read_result
from tests.crowd import together
from tests.local_adapter import Linear
from tests.local_adapter import adapter as local
from tests.resuming import lines, local_recipe, local_run, rewrite_record
from tests.test_checkpoint import record, whole

# What is kept without being asked for, and where it is


def test_a_run_keeps_its_last_and_its_best_weights_by_default(tmp_path: Path) -> None:
    recipe = local_recipe()
    recipe = Recipe.model_validate(recipe.model_dump(exclude={"checkpoint"}))
    folder = tmp_path / "a run"
    result = local_run(folder, recipe)
    assert result and result == read_result(folder / "result.json")
    ends = [line for line in lines(folder) if line["ends_epoch"]]
    best = max(ends, key=lambda line: (line["val_accuracy"], line["step"]))
    steps = {"last": result.steps, "best": best["step"]}
    assert result.checkpoints == {name: f"checkpoints/step-{step:08}" for name, step in steps.items()}
    for name, step in steps.items():
        found = snapshots.read(folder / "checkpoints" / name)
        assert found.record.progress.step == step and found.record.progress.evaluated
        again = snapshots.read(folder / result.checkpoints[name])
        assert again.record == found.record
    assert digest(parameters_of(snapshots.read(folder / "checkpoints" / "last").state)) == result.final_weights_sha256
    *places, command = kept_lines(result, folder)
    assert places == [f"weights: {folder}/checkpoints/{name} (step-{step:08})" for name, step in steps.items()]
    words = shlex.split(command.removeprefix("evaluate them: "))
    assert words == ["hvdkit", "evaluate", f"{folder}/checkpoints/best", "--framework", "local"]


def test_without_images_to_evaluate_on_the_last_is_kept_alone(tmp_path: Path) -> None:
    data = {"name": "synthetic", "height": 32, "width": 32, "train_images": 96, "val_images": 0}
    result = local_run(tmp_path / "run", local_recipe(data=data, epochs=1, checkpoint={}))
    assert result and result.checkpoints == {"last": "checkpoints/step-00000001"}
    assert kept_lines(result, tmp_path) == [f"weights: {tmp_path}/checkpoints/last (step-00000001)"]


def test_the_keys_of_the_progress_stay(tmp_path: Path) -> None:
    """Other versions read them: samples are `images` in the file, and metrics have the prefix `val_`."""
    local_run(tmp_path, local_recipe(epochs=1))
    path = tmp_path / "checkpoints" / "last" / "checkpoint.json"
    written = json.loads(path.read_text())["progress"]
    found = snapshots.read(path.parent).record.progress
    assert (written["images"], written["val_accuracy"]) == (found.samples, found.validation["accuracy"])
    assert set(written) == {
        "step", "epoch", "images", "evaluated", "line_loss", "line_steps", "epoch_loss", "epoch_steps", "train_loss",
        "val_accuracy", "val_loss",
    }  # fmt: skip
    unevaluated = written | {"evaluated": False, "val_accuracy": None, "val_loss": None}
    rewrite_record(path, progress=unevaluated)
    assert snapshots.read(path.parent).record.progress.validation == {}


def test_without_a_folder_nothing_is_kept_and_sigterm_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    result = local_run(None, local_recipe(epochs=1))
    assert result and result.steps == 15 and result.checkpoints == {}
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []
    kept = local_run(tmp_path / "run", local_recipe(epochs=1))
    assert kept and kept.final_weights_sha256 == result.final_weights_sha256


# Throughput does not count it: by a clock on which a step takes a second, and all that has to do with a checkpoint 1000


def test_figures_are_those_of_a_run_that_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slow(seconds: float, sound: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any, **options: Any) -> Any:
            clock[0] += seconds
            return sound(*arguments, **options)

        return work

    monkeypatch.setattr(
        loop,
        "time",
        SimpleNamespace(perf_counter_ns=lambda: round(1e9 * clock[0]), time=time.time, process_time=time.process_time),
    )
    monkeypatch.setattr(Session, "train_step", slow(1.0, Session.train_step))
    monkeypatch.setattr(local, "cpu_seconds", lambda: clock[0], raising=False)
    results, speeds = [], []
    for kept in (None, {}, {"every_steps": 4}):
        with monkeypatch.context() as patch:
            if kept is not None:
                patch.setattr(Session, "state_layout", slow(1000.0, Session.state_layout))
                patch.setattr(writing, "_put", slow(1000.0, writing._put))
                patch.setattr(Checkpoints, "wait", slow(1000.0, Checkpoints.wait))  # for the disk
            folder = tmp_path / str(len(results))
            results.append(local_run(folder, local_recipe(checkpoint=kept, warmup_steps=2, epochs=2)))
        logged = (folder / "metrics.jsonl").read_text().splitlines()
        speeds.append([json.loads(line)["images_per_second"] for line in logged])
    assert (tmp_path / "2" / "checkpoints" / "last").exists() and not (tmp_path / "0" / "checkpoints").exists()
    for key in ("images_per_second", "step_ms", "step_ms_p50", "step_ms_p99", "cpu_s_per_image", "measured_steps"):
        assert len({str(getattr(result, key)) for result in results}) == 1, key
    assert results[0] and set(results[0].step_ms) == {1000.0}
    assert speeds[0] == speeds[1] == speeds[2] and max(speeds[0]) == 96.0
    assert clock[0] > 3 * 30 + 3 * 1000, "the clock has seen the writing"


def test_no_rank_counts_the_writing_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it within their next step."""
    written_s, own = [0.0], threading.local()
    now = SimpleNamespace(
        perf_counter_ns=lambda: 10**9 * round(written_s[0] + own.steps), time=time.time, process_time=time.process_time
    )
    monkeypatch.setattr(loop, "time", now)
    sound, put = Session.train_step, writing._put

    def train_step(session: Any, batches: Any) -> Any:
        own.steps += 1
        return sound(session, batches)

    def slow_put(*given: Any) -> None:
        time.sleep(0.05)  # whoever does not wait is well in its next step
        written_s[0] += 1000
        put(*given)

    monkeypatch.setattr(Session, "train_step", train_step)
    monkeypatch.setattr(writing, "_put", slow_put)
    recipe = local_recipe(steps=12, checkpoint={"every_steps": 3})
    dataset = open_dataset(recipe.data, 10, recipe.seed)

    def work(adapter: Any, topology: Topology) -> list[float]:
        own.steps = 0
        session = Session(adapter, Linear(3072, 10), recipe.optimizer, recipe.loss)
        checkpoints = Checkpoints(tmp_path, Checkpointing(), "accuracy") if topology.is_root else None

        def keep(progress: Progress, own: object) -> None:
            if checkpoints:
                checkpoints.write(*whole(record(progress.step), session.state()))

        task, mesh = tasks.choose(recipe), Mesh(topology)
        run = attach(Loop(session, task, recipe, mesh, dataset), None, keep)
        run.train()
        if checkpoints:
            checkpoints.wait()
        return run.clock.seconds

    assert together(2, work) == [[1.0] * 12] * 2
    assert written_s[0] >= 4000 and (tmp_path / "last").readlink() == Path("step-00000012")
