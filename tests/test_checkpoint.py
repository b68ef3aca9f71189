"""Checkpoints: whole or not there, one format for all frameworks, and a resumed run ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit.checkpoint import snapshots, writing
from hvdkit.checkpoint.resume import _other_rate, pick
from hvdkit.checkpoint.snapshots import CheckpointRecord
from hvdkit.checkpoint.streamed import Layout
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core.session import Session
from hvdkit.core.step_plan import Progress
from hvdkit.errors import RequestError, RunError
from hvdkit.recipe.schema import Checkpointing
from hvdkit.results.train import kept_lines
from tests.local_adapter import adapter as local
from tests.resuming import lines, local_recipe, local_run

STATE = {"fc.weight": np.arange(6.0).reshape(2, 3), "optimizer.momentum.fc.weight": np.ones((2, 3))}


def record(step: int, accuracy: float | None = None) -> CheckpointRecord:
    progress = Progress(
        step=step, epoch=step, evaluated=accuracy is not None,
        validation={} if accuracy is None else {"accuracy": accuracy},
    )  # fmt: skip
    return CheckpointRecord(
        progress=progress, np=2, framework="a", framework_version="1", hvdkit_version="1", recipe={}
    )


def whole(about: CheckpointRecord, state: Mapping[str, np.ndarray]) -> tuple[CheckpointRecord, Layout, Any]:
    """What `Checkpoints.write` takes, of a state that is in memory."""
    return about, {name: (str(array.dtype), array.shape) for name, array in state.items()}, state.items()


def written(folder: Path, *accuracies: float | None, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, Checkpointing(keep=keep), "accuracy")
    for step, accuracy in enumerate(accuracies, start=1):
        checkpoints.write(*whole(record(step, accuracy), STATE | {"fc.bias": np.full(2, step)}))
    checkpoints.wait()
    return checkpoints


def test_what_is_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state: dict[str, np.ndarray] = STATE | {"optimizer.step": np.asarray(7), "half": np.ones(3, np.float16)}
    checkpoints = Checkpoints(tmp_path, Checkpointing(), "accuracy")
    checkpoints.write(*whole(record(3, 0.5), state))
    checkpoints.wait()
    found = snapshots.read(tmp_path / "step-00000003")
    assert found.record == record(3, 0.5).model_copy(update={"files": found.record.files}) and found.record.np == 2
    assert found.state.keys() == state.keys()
    for name, value in state.items():
        assert found.state[name].dtype == value.dtype and found.state[name].shape == value.shape
        assert np.array_equal(found.state[name], value)
    assert set(load_file(tmp_path / "step-00000003" / "model.safetensors")) == {"fc.weight", "half"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["best", "last", "step-00000003"]


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 0.2, 0.9, 0.3, 0.4, None)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{step}" for step in (2, 4, 5)]
    assert (tmp_path / "best").readlink() == Path("step-00000002")
    assert (tmp_path / "last").readlink() == Path("step-00000005")
    assert snapshots.read(tmp_path / "best").record.progress.validation == {"accuracy": 0.9}


def test_a_runs_folder_means_its_best_checkpoint_else_its_last(tmp_path: Path) -> None:
    written(tmp_path / "run" / "checkpoints", 0.5, 0.25)
    best, last = (tmp_path / "run" / "checkpoints" / name for name in ("best", "last"))
    assert snapshots.locate(tmp_path / "run") == best and snapshots.read(best).record.progress.step == 1
    written(tmp_path / "unscored" / "checkpoints", None, None)
    assert snapshots.locate(tmp_path / "unscored") == tmp_path / "unscored" / "checkpoints" / "last"
    assert snapshots.locate(last) == last and snapshots.locate(last.resolve()) == last.resolve()


def test_best_points_to_what_is_there_even_where_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = written(tmp_path, 0.2, keep=1)

    def refuse(place: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(writing.shutil, "rmtree", refuse)
    checkpoints.write(*whole(record(2, 0.9), STATE))
    checkpoints.wait()
    assert checkpoints.missing is None
    assert "step-00000001: this old checkpoint cannot be removed (Operation not permitted)" in capsys.readouterr().out
    assert (tmp_path / "best").readlink() == Path("step-00000002")


def test_what_goes_wrong_while_training_goes_on_is_raised_in_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, Checkpointing(), "accuracy")
    with pytest.raises(KeyError, match="U"):
        checkpoints.write(*whole(record(1), {"fc.weight": np.array(["no number"])}))
    monkeypatch.setattr(writing, "_sync", mock.Mock(side_effect=ValueError("by the thread")))
    checkpoints.write(*whole(record(1), STATE))
    with pytest.raises(ValueError, match="by the thread"):
        checkpoints.wait()
    assert not list(tmp_path.iterdir())


# The null adapter: whole runs in moments


def test_killed_at_any_step_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """15 updates an epoch, the last of two batches; checkpoints each 4 updates and behind each epoch."""
    whole = local_run(tmp_path / "whole", local_recipe())
    assert whole and whole.steps == 45
    for kill_at in (0, 3, 4, 14, 15, 16, 29, 30, 44):  # before the first checkpoint it starts anew
        folder = tmp_path / f"killed-{kill_at}"
        assert local_run(folder, local_recipe(), kill_at=kill_at) is None
        resumed = local_run(folder, local_recipe(), resume=True)
        assert resumed and resumed.final_weights_sha256 == whole.final_weights_sha256, kill_at
        assert (resumed.val_accuracy, resumed.train_loss) == (whole.val_accuracy, whole.train_loss)
        assert lines(folder) == lines(tmp_path / "whole"), kill_at
        assert resumed.first_step == max(step for step in (0, *range(4, 45, 4), 15, 30) if step <= kill_at)


@pytest.mark.parametrize(
    "sent",
    [
        {"compression": {"method": "topk", "ratio": 0.05}},
        {"compression": "int8", "sync": {"every": 3, "start": 0.5, "outer": "nesterov"}},
    ],
    ids=str,
)
def test_what_compression_and_local_sgd_keep_is_gone_on_from(sent: dict[str, Any], tmp_path: Path) -> None:
    recipe = local_recipe(epochs=2, **sent)
    whole = local_run(tmp_path / "whole", recipe)
    for kill_at in (3, 6, 14, 25):
        folder = tmp_path / f"killed-{kill_at}"
        assert local_run(folder, recipe, kill_at=kill_at) is None
        resumed = local_run(folder, recipe, resume=True)
        assert resumed and whole and resumed.final_weights_sha256 == whole.final_weights_sha256, kill_at
    place = snapshots.newest(tmp_path / "whole" / "checkpoints")[0]
    assert place and set(place.record.files) >= {"communication.safetensors"}
    assert any(name.startswith("communication.") for name in place.state)
    without = local_run(tmp_path / "killed-3", local_recipe(epochs=4, **sent | {"compression": "none"}), resume=True)
    assert without and without.steps == 60


def test_a_checkpoint_of_another_recipe_is_refused_by_key(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(), kill_at=10)
    other = local_recipe(seed=2, optimizer={"name": "sgd", "learning_rate": 0.01})
    with pytest.raises(
        RequestError, match=r"optimizer.name: the checkpoint has adamw, the recipe sgd; seed: .* 1, the recipe 2$"
    ):
        local_run(tmp_path / "run", other, resume=True)
    longer = local_run(tmp_path / "run", local_recipe(epochs=4, device="cpu"), resume=True)
    assert longer and longer.steps == 60


def test_a_change_that_moves_the_learning_rate_is_said(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(), kill_at=10)
    place, same = tmp_path / "run" / "checkpoints", local_recipe()
    assert pick(place, same)[1] == []
    found, lines = pick(place, local_recipe(epochs=4, batch_size=same.batch_size * 2))
    longer, larger = lines
    assert found and longer.startswith(
        f"epochs: {same.epochs} in the checkpoint, 4 now: the learning rate continues on"
    )
    assert larger.startswith("batch_size, accumulate: ") and "the learning rate is 2 times as high" in larger
    constant = local_recipe(epochs=4, schedule={"decay": "constant", "scale": "none"})
    assert _other_rate({"epochs": 2, "batch_size": 8, "accumulate": 1}, constant) == []


def test_another_number_of_images_an_update_goes_on_where_the_epoch_was_left(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(), kill_at=13)  # 12 updates of 96 images are kept
    resumed = local_run(tmp_path / "run", local_recipe(batch_size=64, accumulate=1), resume=True)
    # (1437 - 1152) // 64 = 4 updates are left of 22, which begin at the 18th; then two whole epochs
    assert resumed and resumed.first_step == 18 and resumed.steps == 22 + 2 * 22


def test_updates_counted_anew_may_be_more_than_steps_allows(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(), kill_at=28)  # 28 updates of 96 images, in the second epoch of 15
    small = local_recipe(batch_size=32, accumulate=1, steps=40)  # 44 an epoch: the 40th would be in the first
    resumed = local_run(tmp_path / "run", small, resume=True)
    assert resumed and (resumed.steps, resumed.first_step, resumed.epochs) == (40, 40, 2)
    assert lines(tmp_path / "run")[-1]["ends_epoch"] and lines(tmp_path / "run")[-1]["epoch"] == 1


def test_a_run_that_steps_has_ended_goes_on_in_the_middle_of_its_epoch(tmp_path: Path) -> None:
    whole = local_run(tmp_path / "whole", local_recipe())
    short = local_run(tmp_path / "run", local_recipe(steps=7))
    assert whole and short and short.steps == 7
    resumed = local_run(tmp_path / "run", local_recipe(), resume=True)
    assert resumed and resumed.first_step == 7 and resumed.steps == 45
    assert resumed.final_weights_sha256 == whole.final_weights_sha256
    ends = [[line for line in lines(tmp_path / name) if line["ends_epoch"]] for name in ("run", "whole")]
    for mine, theirs in zip(*ends, strict=True):
        assert mine | {"loss": 0} == theirs | {"loss": 0}
        assert mine["loss"] == pytest.approx(theirs["loss"])  # summed in other portions
    with pytest.raises(RequestError, match="the recipe ends at step 20, the checkpoint is at 45"):
        local_run(tmp_path / "run", local_recipe(steps=20), resume=True)


def test_where_no_checkpoint_can_be_used_nothing_is_started_over(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(), kill_at=10)
    for place in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (place / snapshots.MODEL).unlink()
    with pytest.raises(RequestError, match=r"none in .* can be used; remove it, or start again with --overwrite"):
        local_run(tmp_path / "run", local_recipe(), resume=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the null adapter
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    wild = {"name": "sgd", "learning_rate": 1e6, "weight_decay": 1e6}
    with pytest.raises(RunError, match=r"the loss is no longer a number from step (\d+) on, .*; lower opti") as early:
        local_run(tmp_path / "each", local_recipe(optimizer=wild, log_every=1))
    with pytest.raises(RunError) as late:
        local_run(tmp_path / "run", local_recipe(optimizer=wild, log_every=14, checkpoint=None))
    assert str(early.value) == str(late.value), "the first such step, however seldom they are looked at"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_has_never_been_a_number_is_not_the_learning_rates(tmp_path: Path) -> None:
    def broken(session: Any, batches: Any) -> np.ndarray:
        return np.asarray(np.nan)

    with (
        mock.patch.object(Session, "train_step", broken),
        pytest.raises(RunError, match=r"no longer a number from step 1 on, .*; look for NaN .* in the samples"),
    ):
        local_run(None, local_recipe())


def test_a_new_run_beside_an_earlier_ones_checkpoints_is_refused(tmp_path: Path) -> None:
    """By a recipe's own script; the earlier run's would count as the last and the best of the new one."""
    local_run(tmp_path / "run", local_recipe(), kill_at=10)
    before = lines(tmp_path / "run")
    with pytest.raises(RequestError, match="checkpoints of an earlier run; add --resume to continue from them"):
        local_run(tmp_path / "run", local_recipe(seed=2))
    assert lines(tmp_path / "run") == before
    kept_none = local_run(tmp_path / "run", local_recipe(checkpoint=None))
    assert kept_none and kept_none.checkpoints == {} and kept_lines(kept_none, tmp_path) == []


def test_ranks_that_speak_json_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rivals without Horovod do."""
    local_run(tmp_path / "run", local_recipe(), kill_at=10)
    monkeypatch.setattr(local, "allgather_object", lambda value, group, name="": [json.loads(json.dumps(value))])
    resumed = local_run(tmp_path / "run", local_recipe(), resume=True)
    assert resumed and (resumed.first_step, resumed.steps) == (8, 45)
