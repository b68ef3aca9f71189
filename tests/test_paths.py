"""Folders that a command claims: one run at a time, and nobody else's files."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from hvdkit import paths
from hvdkit.errors import RequestError


def test_a_claimed_folder_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with (
        paths.claimed(tmp_path / "run", overwrite=False) as folder,
        pytest.raises(RequestError, match="another run is writing there"),
        paths.claimed(tmp_path / "run", overwrite=True),
    ):
        pytest.fail("the folder was given twice")
    assert folder == tmp_path / "run" and not list(folder.iterdir())
    with paths.claimed(tmp_path / "run", overwrite=False):
        pass


def test_a_lock_whose_file_has_gone_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends, and takes its file away, between the opening of that file and its lock."""
    sound = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        (tmp_path / ".lock").unlink()
        sound(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RequestError, match="another run is writing there"), paths.claimed(tmp_path, overwrite=False):
        pytest.fail("two runs could have the folder now")
