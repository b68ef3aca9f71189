"""What killed runs leave on a machine: temporary files, shared memory, semaphores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit.launch.agent import process_tree, scratch
from tests import hygiene
from tests.conftest import ROOT
from tests.test_folder_of_a_run import written
from tests.test_paths import content


def test_the_next_agent_removes_the_temporary_files_of_a_killed_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in ("hvdkit-rank-0", "hvdkit-worker-localhost-4-0", "hvdkit-rank-1", "other"):
        written(tmp_path, {f"{name}-{dead.pid}/a/b": "x"})
    (tmp_path / f"hvdkit-rank-2-{dead.pid}").symlink_to(tmp_path / f"other-{dead.pid}")
    written(tmp_path, {f"hvdkit-rank-3-{os.getppid()}/a": "x"})
    in_a_container = scratch._locked(tmp_path / f"hvdkit-rank-1-{dead.pid}")  # where it has another number
    mine = scratch.Scratch("rank-0")
    mine.remove_those_of_the_dead()
    mine.remove_those_of_the_dead()
    left = {f"other-{dead.pid}", f"hvdkit-rank-1-{dead.pid}", f"hvdkit-rank-2-{dead.pid}",
            f"hvdkit-rank-3-{os.getppid()}"}  # fmt: skip
    assert mine.path is not None
    assert {path.name for path in tmp_path.iterdir()} == left | {mine.path.name}
    mine.remove()
    os.close(in_a_container)
    assert {path.name for path in tmp_path.iterdir()} == left and (tmp_path / f"other-{dead.pid}" / "a" / "b").exists()


def test_segments_of_ended_loaders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "_SHARED", str(tmp_path))
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    kept = {f"mx_{os.getpid():x}_1", f"torch_{os.getpid()}_1", "mx_zz_1", "torch", f"psm_{dead.pid}_1"}
    written(tmp_path, dict.fromkeys({*kept, f"mx_{dead.pid:x}_1", f"torch_{dead.pid}_9_0"}, ""))
    process_tree.remove_segments({os.getpid()})
    assert len(content(tmp_path)) == len(kept) + 2
    process_tree.remove_segments({os.getpid(), dead.pid})
    assert content(tmp_path).keys() == kept


SEMAPHORES = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
def wait(event):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[1]).write_text(" ".join(p.split("/")[-1] for p in open("/proc/self/maps") if "sem.mp-" in p))
    time.sleep(600)
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spawn = multiprocessing.get_context("spawn")
    event = spawn.Event()
    spawn.Process(target=wait, args=(event,)).start()
    time.sleep(600)
"""


def test_no_semaphore_of_a_killed_program_stays(tmp_path: Path) -> None:
    """As of horovodrun, whose parts wait for each other's events."""
    (tmp_path / "program.py").write_text(SEMAPHORES)
    agent = ROOT / "hvdkit" / "launch" / "agent" / "rank_agent.py"
    words = [agent, "horovodrun", tmp_path, "0.2", "0", sys.executable, tmp_path / "program.py", tmp_path / "names"]
    with subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + hygiene.patience(60)
        while not (tmp_path / "names").exists() or not (names := (tmp_path / "names").read_text().split()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(names) > 3 and all(Path("/dev/shm", name).exists() for name in names)
        process.terminate()
        process.wait(timeout=hygiene.patience(60))
    assert not [name for name in names if Path("/dev/shm", name).exists()]
