"""Checkpoints: whole or not there, one format for all frameworks, and a resumed run ends with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FRAMEWORKS, Hvdkit
from safetensors.numpy import load_file, save_file

from hvdkit import adapters
from hvdkit.config import Checkpointing, Recipe
from hvdkit.core import checkpoint, run, weights
from hvdkit.core.checkpoint import Checkpoint, Checkpoints, Record
from hvdkit.core.lifeline import Lifeline
from hvdkit.core.progress import Progress
from hvdkit.errors import RequestError, RunError
from hvdkit.results import EvaluationResult, TrainResult

STATE = {"fc.weight": np.arange(6.0).reshape(2, 3), "optimizer.momentum.fc.weight": np.ones((2, 3))}


def record(step: int, accuracy: float | None = None) -> Record:
    progress = Progress(step=step, epoch=step, evaluated=accuracy is not None, val_accuracy=accuracy)
    return Record(progress=progress, np=2, framework="a", framework_version="1", hvdkit_version="1", recipe={})


def written(folder: Path, *accuracies: float | None, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, Checkpointing(keep=keep))
    for step, accuracy in enumerate(accuracies, start=1):
        checkpoints.write(Checkpoint(record(step, accuracy), STATE | {"fc.bias": np.full(2, step)}))
    checkpoints.wait()
    return checkpoints


def test_what_is_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state: dict[str, np.ndarray] = STATE | {"optimizer.step": np.asarray(7), "half": np.ones(3, np.float16)}
    checkpoints = Checkpoints(tmp_path, Checkpointing())
    checkpoints.write(Checkpoint(record(3, 0.5), state))
    checkpoints.wait()
    found = checkpoint.read(tmp_path / "step-00000003")
    assert found.record == record(3, 0.5).model_copy(update={"files": found.record.files}) and found.record.np == 2
    assert found.state.keys() == state.keys()
    for name, value in state.items():
        assert found.state[name].dtype == value.dtype and found.state[name].shape == value.shape
        assert np.array_equal(found.state[name], value)
    assert set(load_file(tmp_path / "step-00000003" / "model.safetensors")) == {"fc.weight", "half"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["best", "step-00000003"]


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 0.2, 0.9, 0.3, 0.4, None)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{step}" for step in (2, 4, 5)]
    assert (tmp_path / "best").readlink() == Path("step-00000002")
    assert checkpoint.read(tmp_path / "best").record.progress.val_accuracy == 0.9


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def rotten(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Any, str]] = {
    "torn": (torn, "model.safetensors: damaged"),
    "rotten": (rotten, "optimizer.safetensors: damaged"),
    "missing": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: cannot be read"),
    "no record": (lambda folder: (folder / "checkpoint.json").unlink(), "checkpoint.json: cannot be read"),
    "cut record": (
        lambda folder: (folder / "checkpoint.json").write_text('{"format": 1'),
        "not a checkpoint of hvdkit",
    ),
    "foreign": (lambda folder: (folder / "checkpoint.json").write_text('{"a": 1}'), "not a checkpoint of hvdkit"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_told_and_the_one_before_serves(damage: str, tmp_path: Path) -> None:
    written(tmp_path, None, None)
    spoil, told = DAMAGES[damage]
    spoil(tmp_path / "step-00000002")
    with pytest.raises(RequestError, match=told):
        checkpoint.read(tmp_path / "step-00000002")
    found, complaints = checkpoint.newest(tmp_path)
    assert found and found.record.progress.step == 1
    assert len(complaints) == 1 and told in complaints[0]


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path) -> None:
    """A disk of 200 kB in a namespace of its own: the second checkpoint does not fit."""
    code = """
import sys; from pathlib import Path; import numpy as np
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Checkpoint, Checkpointing, Checkpoints, RunError, checkpoint, record
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder, Checkpointing())
checkpoints.write(Checkpoint(record(1), {"a": np.zeros(10_000)})); checkpoints.wait()
checkpoints.write(Checkpoint(record(2), {"a": np.zeros(20_000)}))
try:
    checkpoints.wait()
except RunError as error:
    print(error)
assert [path.name for path in folder.iterdir()] == ["step-00000001"], list(folder.iterdir())
assert checkpoint.newest(folder)[0].record.progress.step == 1
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    script = f'mount -t tmpfs -o size=200k tmpfs "{disk}" && exec "$@"'
    command = ["unshare", flags, "sh", "-c", script, "sh", sys.executable, "-c", code, str(disk)]
    done = subprocess.run([*command, str(Path(__file__).parent)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no checkpoint can be written (No space left on device)" in done.stdout


# The null adapter: whole runs in moments


def local_recipe(**changes: Any) -> Recipe:
    document = {
        "name": "local",
        "model": {"name": "resnet20"},
        "data": {"name": "digits", "augment": "crop"},
        "epochs": 3,
        "accumulate": 3,
        "log_every": 4,
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "schedule": {"warmup_epochs": 0.5},
        "checkpoint": {"every_steps": 4},
    }
    return Recipe.model_validate(document | changes)


class Killed(BaseException):
    """What a test puts in the place of SIGKILL."""


def local_run(folder: Path, recipe: Recipe, resume: bool = False, kill_at: int | None = None) -> TrainResult | None:
    """Train on the null adapter, killed before update `kill_at`."""
    adapter: Any = adapters.load("local")
    folder.mkdir(exist_ok=True)
    sound, steps = adapter.train_step, 0

    def train_step(session: Any, batches: Any) -> Any:
        nonlocal steps
        if steps == kill_at:
            raise Killed
        steps += 1
        return sound(session, batches)

    class Network(adapter.Linear):  # type: ignore[name-defined, misc]
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "train_step", train_step)
        patch.setattr(run.resnet, "initial_state", lambda network, seed: Network(3072, 10).parameters)
        try:
            return run.train(adapter, lambda table: Network(3072, 10), recipe, folder, Lifeline(), resume)
        except Killed:
            for writer in (each for each in threading.enumerate() if each.name == "checkpoint"):
                writer.join()  # no process has ended here, so neither has it
            return None


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = ("images_per_second", "bytes_per_step")  # of each process
    return [{key: value for key, value in line.items() if key not in own} for line in found]


def test_killed_at_any_step_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """15 updates an epoch, the last of two batches; checkpoints each 4 updates and behind each epoch."""
    whole = local_run(tmp_path / "whole", local_recipe())
    assert whole and whole.steps == 45
    for kill_at in (0, 3, 4, 14, 15, 16, 29, 30, 44):
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
    recipe = local_recipe(**sent)
    whole = local_run(tmp_path / "whole", recipe)
    for kill_at in (3, 6, 14, 30):
        folder = tmp_path / f"killed-{kill_at}"
        assert local_run(folder, recipe, kill_at=kill_at) is None
        resumed = local_run(folder, recipe, resume=True)
        assert resumed and whole and resumed.final_weights_sha256 == whole.final_weights_sha256, kill_at
    place = checkpoint.newest(tmp_path / "whole" / "checkpoints")[0]
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
        torn(place)
    with pytest.raises(RequestError, match=r"none in .* can be used; remove it, or start again with --overwrite"):
        local_run(tmp_path / "run", local_recipe(), resume=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the null adapter
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the loss is no longer a number .*; lower optimizer"):
        local_run(tmp_path / "run", local_recipe(optimizer={"name": "sgd", "learning_rate": 1e6, "weight_decay": 1e6}))


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    result = local_run(tmp_path / "run", local_recipe(), resume=True)
    assert result and result.first_step == 0 and result.steps == 45


# Real frameworks


SETTINGS = ("epochs=1", "log_every=3", "batch_size=64", "checkpoint={every_steps: 2}", "accumulate=2")
# What each rank keeps for itself is in a checkpoint too: residuals and momentum, rounds of Local SGD, PowerSGD's Q.
SENT = {
    "pytorch": ("compression={method: topk, ratio: 0.02, momentum_correction: true}",),
    "tensorflow": ("sync={every: 4, outer: nesterov}", "compression={method: int8, error_feedback: true}"),
    "keras": (),
    "mxnet": ("compression=powersgd",),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_kill_9_and_resume(framework: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """11 batches an epoch and rank in 6 updates."""
    options, settings = ("--framework", framework, "-np", 2), (*SETTINGS, *SENT[framework])
    whole = hvdkit("train", recipe, *options, "--out", "whole", *settings)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), *map(str, options), "--out", "killed", *settings]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    kill_ranks(tmp_path / "killed", framework)
    assert process.wait(timeout=30) == 1, process.communicate()[1]
    resumed = hvdkit("train", recipe, *options, "--out", "killed", "--resume", *settings)
    assert resumed.returncode == 0, resumed.stderr
    results = [
        TrainResult.model_validate_json((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")
    ]
    assert results[1].first_step > 0 == results[0].first_step
    assert results[0].final_weights_sha256 == results[1].final_weights_sha256
    assert (results[0].val_accuracy, results[0].val_loss) == (results[1].val_accuracy, results[1].val_loss)
    assert lines(tmp_path / "whole") == lines(tmp_path / "killed")


def test_all_frameworks_count_the_same_images_right(trained: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    counted = set()
    for framework in FRAMEWORKS:
        done = hvdkit("evaluate", trained, "--framework", framework, "--out", framework)
        assert done.returncode == 0, done.stderr
        found = EvaluationResult.model_validate_json((tmp_path / framework / "evaluate.json").read_text())
        assert (found.framework, found.trained_by, found.total) == (framework, "mxnet", 360)
        assert f"correct {found.correct} of 360" in done.stdout
        counted.add(found.correct)
    assert len(counted) == 1 and counted.pop() > 100


def kill_ranks(folder: Path, framework: str) -> None:
    """SIGKILL to the ranks themselves, as from the kernel."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if (
                "python" in Path(words[0]).name
                and f"recipes/{framework}/resnet.py" in words[1]
                and str(folder) in words
            ):
                os.kill(int(entry.name), signal.SIGKILL)


def test_sigterm_ends_behind_a_checkpoint_with_status_0(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    settings = ("epochs=5000", "log_every=100000", "checkpoint={every_epochs: 0, every_steps: 30}")
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "-np", "2", "--out", "run"]
    process = subprocess.Popen([*command, *settings], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):  # nothing is logged yet
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    asked = time.monotonic()
    process.terminate()
    assert process.wait(timeout=40) == 0, process.communicate()[1]
    assert time.monotonic() - asked < 30
    found, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    step = found.record.progress.step
    assert f"stopped by SIGTERM behind {tmp_path}/run/checkpoints/step-{step:08}" in process.communicate()[1]
    assert step > 0 and not (tmp_path / "run" / "result.json").exists()
    limit = f"steps={step + 2}"
    done = hvdkit("train", recipe, *command[5:], "--resume", *settings, limit)
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert (result.first_step, result.steps) == (step, step + 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Path:
    """A folder with a checkpoint of a real, short run."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "--out", "run", "steps=40"]
    subprocess.run([*command, "checkpoint={}"], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "run" / "checkpoints" / "step-00000040"


def test_more_classes_and_other_networks_are_refused_by_tensor(trained: Path, hvdkit: Hvdkit) -> None:
    for override, part in (("model.classes=11", "fc.weight: expected shape (11, 64), got (10, 64)"),
                           ("model.name=resnet18", "is missing")):  # fmt: skip
        done = hvdkit("evaluate", trained, "--framework", "mxnet", "--out", override, override)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_wrong_folders_and_options_are_one_line(trained: Path, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    save_file({"fc.weight": np.zeros(1)}, broken / "model.safetensors")
    for arguments, part in (
        (("evaluate", "nowhere"), "nowhere/checkpoint.json: cannot be read"),
        (("evaluate", broken), "model.safetensors: damaged"),
        (("evaluate", trained, "epochs=x"), "epochs: expected"),
        (("train", recipe, "--resume"), "--resume: expected --out"),
        (("train", recipe, "--resume", "--out", "r"), "a `checkpoint` section"),
        (("train", recipe, "--resume", "--overwrite", "--out", "r", "checkpoint={}"), "expected one of them, got both"),
        (("train", recipe, "--out", "r", "checkpoint={every_epochs: 0}"), "expected every_epochs or every_steps"),
    ):
        done = hvdkit(*arguments)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "r").exists()


def test_fine_tuning_starts_from_a_file_in_torchvisions_layout(hvdkit: Hvdkit, trained: Path, recipe: Path) -> None:
    """A checkpoint's own file is one. With as many classes it starts where that left; with more, the head is new."""
    source = f"model.weights={trained / 'model.safetensors'}"
    arguments = ("train", recipe, "--framework", "pytorch", source, "steps=1", "optimizer.learning_rate=1e-9")
    done = hvdkit(*arguments, "--out", "same")
    assert done.returncode == 0 and "validation accuracy" in done.stdout, done.stderr
    accuracy = float(done.stdout.split("validation accuracy ")[1].split(" %")[0])
    assert accuracy > 25  # chance is 10
    done = hvdkit(*arguments, "--out", "more", "model.classes=12")
    assert done.returncode == 2 and "fc.weight: expected shape (12, 64), got (10, 64)" in done.stderr
    assert "model.new_head=true" in done.stderr and "Traceback" not in done.stderr
    done = hvdkit(*arguments, "--out", "head", "model.classes=12", "model.new_head=true")
    assert done.returncode == 0, done.stderr


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    initial = {"fc.weight": np.zeros((2, 3), np.float32)}
    (tmp_path / "text").write_text("no")
    for name, part in (("nowhere", "cannot be read"), ("text", "no safetensors file")):
        with pytest.raises(RequestError, match=part):
            weights.start_from(tmp_path / name, initial, new_head=False)
