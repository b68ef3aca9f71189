"""Damaged checkpoints are never read, and what cannot be written, or takes long, is said when it happens."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.checkpoint import snapshots, writing
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core.state import slot_name
from hvdkit.errors import RequestError
from hvdkit.heartbeat import DISK, Heartbeat
from hvdkit.recipe.schema import Checkpointing
from tests.launching import wait_until
from tests.resuming import local_recipe, local_run, rewrite_record
from tests.test_checkpoint import STATE, record, whole, written

FULL = {**STATE, slot_name("average", "fc.weight"): np.ones((2, 3)), "communication.a": np.ones(3)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2, which have every file."""
    folder = tmp_path_factory.mktemp("kept")
    checkpoints = Checkpoints(folder, Checkpointing(), "accuracy")
    for step in (1, 2):
        checkpoints.write(*whole(record(step, 0.5), FULL))
    checkpoints.wait()
    return folder


def refused(folder: Path, path: Path) -> None:
    """The newest checkpoint is refused in one line that names the file, and the one before is found."""
    found, complaints = snapshots.newest(folder)
    assert found and found.record.progress.step == 1 and found.state.keys() == FULL.keys()
    assert len(complaints) == 1 and str(path) in complaints[0] and complaints[0].isprintable(), complaints
    assert not snapshots.is_whole(path.parent)


def test_any_flipped_bit_and_any_cut_are_noticed(kept: Path, tmp_path: Path) -> None:
    """Every byte of the record, and of the other files the header and some of the numbers."""
    folder, draw = shutil.copytree(kept, tmp_path / "run", symlinks=True), random.Random(7)
    for path in sorted((folder / "step-00000002").iterdir()):
        sound = path.read_bytes()
        places = range(len(sound)) if path.name == snapshots.RECORD else range(0, len(sound), 5)
        spoilt = [sound[:at] + bytes([sound[at] ^ 1 << draw.randrange(8)]) + sound[at + 1 :] for at in places]
        spoilt += [sound[:at] for at in range(0, len(sound), 31)] + [sound + b"\n", b"", sound + sound]
        for content in spoilt:
            path.write_bytes(content)
            refused(folder, path)
        path.write_bytes(sound)
    found, complaints = snapshots.newest(folder)
    assert found and found.record.progress.step == 2 and not complaints


@pytest.mark.parametrize("name", [snapshots.MODEL, snapshots.OPTIMIZER, snapshots.RECORD])
def test_a_missing_file_is_noticed(name: str, kept: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(kept, tmp_path / "run", symlinks=True)
    (folder / "step-00000002" / name).unlink()
    with pytest.raises(RequestError, match=f"{name}: cannot be read"):
        snapshots.read(folder / "step-00000002")
    refused(folder, folder / "step-00000002" / name)


def test_a_checkpoint_under_another_name_is_refused(kept: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(kept, tmp_path / "run", symlinks=True)
    (folder / "step-00000002").rename(folder / "step-00000009")
    found, complaints = snapshots.newest(folder)
    assert found and found.record.progress.step == 1 and "expected the name step-00000002" in complaints[0]


def test_a_record_of_another_kind_is_refused_by_its_key(kept: Path, tmp_path: Path) -> None:
    path = shutil.copytree(kept, tmp_path / "run", symlinks=True) / "step-00000002" / snapshots.RECORD
    sound = path.read_text()
    progress = json.loads(sound)["progress"]
    for key, changes in {
        "format": {"format": 1}, "files": {"files": {}}, "np": {"np": "1"}, "stride": {"stride": 1},
        "progress": {"progress": progress | {"step": 8.5}},
    }.items():  # fmt: skip
        rewrite_record(path, **changes)
        with pytest.raises(RequestError, match=rf"checkpoint\.json: [^\n]*{key}[^\n]*$"):
            raise AssertionError(f"{key} is read: {snapshots.read_record(path.parent)}")
        path.write_text(sound)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda each: st.lists(each) | st.dictionaries(
    st.sampled_from(["progress", "np", "files", "recipe", "data", "format", "step", "train"]), each)))  # fmt: skip
def test_any_json_is_refused_in_a_line(kept: Path, document: Any) -> None:
    folder = kept.parent / "json"
    folder.mkdir(exist_ok=True)
    (folder / snapshots.RECORD).write_text(json.dumps(document))
    with pytest.raises(RequestError) as refusal:
        snapshots.read(folder)
    assert str(refusal.value).isprintable()


# What is kept


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    """Steps 4 and 5 are damaged; a resumed run writes 3 and 4 again, and keeps two that can be read, and the best."""
    written(tmp_path, 0.9, 0.2, 0.3, None, None, keep=9)
    for step, name in ((4, "model.safetensors"), (5, "checkpoint.json")):
        path = tmp_path / f"step-0000000{step}" / name
        path.write_bytes(path.read_bytes()[:-20] + b"X" * 20)
    shutil.rmtree(tmp_path / "step-00000003")
    checkpoints = Checkpoints(tmp_path, Checkpointing(keep=2), "accuracy")
    for step, kept in ((3, {1, 2, 3}), (4, {1, 3, 4})):
        checkpoints.write(*whole(record(step, 0.1), STATE))
        checkpoints.wait()
        assert {int(path.name[-8:]) for path in tmp_path.glob("step-*")} == kept
        assert all(map(snapshots.is_whole, tmp_path.glob("step-*")))
        assert checkpoints.kept() == {"last": tmp_path / f"step-0000000{step}", "best": tmp_path / "step-00000001"}


def test_the_best_is_one_that_can_be_read(tmp_path: Path) -> None:
    written(tmp_path, 0.9, 0.5, 0.1, keep=3)
    path = tmp_path / "step-00000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    checkpoints = Checkpoints(tmp_path, Checkpointing(keep=1), "accuracy")
    checkpoints.write(*whole(record(4), STATE))
    checkpoints.wait()
    assert checkpoints.kept() == {"last": tmp_path / "step-00000004", "best": tmp_path / "step-00000002"}
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-00000002", "step-00000004"}


def test_last_leaves_a_damaged_one_when_a_run_is_resumed(tmp_path: Path) -> None:
    local_run(tmp_path / "run", local_recipe(), kill_at=10)
    place = tmp_path / "run" / "checkpoints"
    (place / "step-00000008" / "optimizer.safetensors").write_bytes(b"")
    assert local_run(tmp_path / "run", local_recipe(), resume=True, kill_at=1) is None
    assert (place / "last").readlink() == Path("step-00000004")


# What cannot be written

FAULTS = {
    "full": (errno.ENOSPC, "free space"), "quota": (errno.EDQUOT, "quota"), "broken": (errno.EIO, "look at the disk"),
    "read-only": (errno.EROFS, "mount the file system"), "descriptors": (errno.EMFILE, "ulimit -n"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", ["_sync", "write_atomic", "link"])
def test_a_fault_is_said_at_once_and_the_next_one_is_written(
    fault: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, (number, remedy) = written(tmp_path, 0.5), FAULTS[fault]

    def fail(*arguments: Any) -> None:
        raise OSError(number, "the fault")

    with monkeypatch.context() as patch:
        patch.setattr(writing, where, fail)
        checkpoints.write(*whole(record(2), STATE))
        writer = checkpoints._writing
        assert writer
        writer.join(60)
        said = capsys.readouterr().out  # before anyone has waited
        assert said.startswith("hvdkit: ") and "the checkpoint of step 2 cannot be written (the fault)" in said, said
        assert remedy in said and said.count("\n") == 1
    checkpoints.wait()
    assert checkpoints.missing and "use --resume" in checkpoints.missing
    checkpoints.write(*whole(record(3), STATE))
    checkpoints.wait()
    assert checkpoints.missing is None and "the checkpoint of step 3 is written" in capsys.readouterr().out
    found, complaints = snapshots.newest(tmp_path)
    assert found and found.record.progress.step == 3 and not complaints and not list(tmp_path.glob(".step*"))


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def replaced(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


@pytest.mark.parametrize(("change", "said"), [(removed, "the folder has been removed"), (replaced, "remove the file")])
def test_a_folder_that_goes_is_said(
    change: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = written(tmp_path / "checkpoints", 0.5)
    change(tmp_path / "checkpoints")
    checkpoints.write(*whole(record(2), STATE))
    checkpoints.wait()
    assert said in capsys.readouterr().out and bool(checkpoints.missing) == (change is replaced)


def test_training_ends_with_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint is tried again; where it fails again there is no result, and the run can be resumed."""
    tries = 0

    def fail(path: Path) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EIO, "Input/output error")

    recipe = local_recipe(checkpoint={}, epochs=1)
    monkeypatch.setattr("hvdkit.worker.keeper._PAUSES_S", (0.0, 0.0))
    with monkeypatch.context() as patch, pytest.raises(Exception, match=r"step 15 cannot be written \(Input/output"):
        patch.setattr(writing, "_sync", fail)
        local_run(tmp_path / "run", recipe)
    assert tries == 3 and not (tmp_path / "run" / "result.json").exists()
    sound = writing._sync
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_sync", lambda path: sound(path) if tries >= 4 else fail(path))
        resumed = local_run(tmp_path / "run", recipe, resume=True)
    assert tries == 4 and resumed and resumed.checkpoints and (tmp_path / "run" / "result.json").exists()


def test_a_slow_disk_is_named_and_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDKIT_RANK_DIR", str(tmp_path))
    monkeypatch.delenv("HVDKIT_TRACE", raising=False)
    monkeypatch.setattr("hvdkit.heartbeat._BEAT_S", 0.01)
    monkeypatch.setattr("hvdkit.heartbeat._PATIENCE_S", 0.05)
    beats, beat = [], tmp_path / "rank-0.beat"
    sound = writing._sync

    def beaten() -> bool:
        beats.append(beat.read_text().split(" ", 2))
        return len({number for number, _, _ in beats}) > 5 and DISK in {phase.strip() for _, _, phase in beats}

    def slow(path: Path) -> None:
        assert wait_until(beaten, 20)
        sound(path)

    monkeypatch.setattr(writing, "_sync", slow)
    heartbeat = Heartbeat()
    heartbeat.beat("checkpoint", 7)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Checkpointing(), "accuracy", heartbeat)
    checkpoints.write(*whole(record(7), STATE))
    checkpoints.wait()
    assert {step for _, step, _ in beats} == {"7"} and heartbeat.phase == "checkpoint"
    said = capsys.readouterr().out
    assert "hvdkit: rank 0 waits for the disk: the checkpoint of step 7 takes " in said
