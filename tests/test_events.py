"""TensorBoard's events say what metrics.jsonl says, through kills and resumptions too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdkit.errors import RequestError
from hvdkit.handlers import tensorboard
from tests import hygiene, paced
from tests.conftest import Hvdkit, rest_thorough
from tests.resuming import by_tag, kill_ranks, local_recipe, local_run, under_way

pytestmark = pytest.mark.long

TAGS = {
    "train/loss", "train/learning_rate", "train/images_per_second",
    "epoch/train_loss", "validation/accuracy", "validation/loss",
}  # fmt: skip
Shown = dict[str, list[tuple[int, float]]]


def shown(folder: Path) -> Shown:
    """(step, value) by tag, as TensorBoard itself reads them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def told(folder: Path) -> Shown:
    """The same by metrics.jsonl, rounded to what an event holds."""
    return {tag: [(step, float(np.float32(value))) for step, value in of] for tag, of in by_tag(folder).items()}


def test_events_are_the_lines_of_metrics(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(tensorboard=True))
    assert shown(tmp_path / "run" / "tensorboard") == told(tmp_path / "run")
    assert shown(tmp_path / "run" / "tensorboard").keys() == TAGS
    assert [step for step, _ in shown(tmp_path / "run" / "tensorboard")["epoch/train_loss"]] == [15, 30, 45]


@pytest.mark.parametrize(("kill_at", "before"), [(3, True), (10, True), (30, True), (44, True), (20, False)])
def test_resumed_they_have_no_gaps_and_no_doubles(kill_at: int, before: bool, tmp_path: Path) -> None:
    """Where they are first wanted when a run is resumed, they tell its beginning too."""
    local_run(tmp_path / "run", local_recipe(tensorboard=before), kill_at=kill_at)
    local_run(tmp_path / "run", local_recipe(tensorboard=True), resume=True)
    assert shown(tmp_path / "run" / "tensorboard") == told(tmp_path / "run")
    assert len(shown(tmp_path / "run" / "tensorboard")["train/loss"]) == 45 // 4
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def test_without_the_library_one_line_tells_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RequestError, match=r"^tensorboard: tensorboardX.*pip install tensorboardX.*$"):
            local_run(tmp_path / "run", local_recipe(tensorboard=True))
    local_run(tmp_path / "run", local_recipe(steps=2))


SETTINGS = ("epochs=1", "log_every=3", "batch_size=64", "checkpoint={every_steps: 2}", "tensorboard=true", "threads=1")


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "framework", rest_thorough("mxnet", "pytorch")
)  # the events are core's, which knows no framework
def test_over_real_ranks_and_kill_9(framework: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("hold 5")  # of 11 updates: killed behind a checkpoint, and before the end
    options, settings = ("--framework", framework, "-np", 2), (*SETTINGS, *paced.overrides(gate))
    with under_way(tmp_path / "run", recipe, *options, *settings) as process:
        kill_ranks(tmp_path / "run")
        _, said = process.communicate(timeout=hygiene.patience(60))
    assert process.returncode == 1, said
    gate.unlink()
    done = hvdkit("train", recipe, *options, "--out", "run", "--resume", *settings)
    assert done.returncode == 0, done.stderr
    assert shown(tmp_path / "run" / "tensorboard") == told(tmp_path / "run")
    assert shown(tmp_path / "run" / "tensorboard").keys() == TAGS | {"train/communication_mbit_per_s"}
    assert [step for step, _ in shown(tmp_path / "run" / "tensorboard")["train/loss"]] == [3, 6, 9]
    if framework == "mxnet":  # the folder is the driver's to clear, which knows no framework
        done = hvdkit("train", recipe, "--framework", framework, "--out", "run", "--overwrite", "steps=1")
        assert done.returncode == 0 and not (tmp_path / "run" / "tensorboard").exists(), done.stderr
