"""Commands that a benchmark starts: seen to their end, here or where a network's hosts are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from hvdkit.errors import RunError

Start = Callable[..., Any]  # subprocess.run, or what takes as much, such as `hosts.Network.run`
_TOLD = 2000  # characters of what a command that fails has said last


def hvdkit(start: Start, arguments: list[str], timeout_s: float, **options: Any) -> None:
    """`hvdkit` with these arguments, under this interpreter. As `run`."""
    run(start, [sys.executable, "-m", "hvdkit", *arguments], timeout_s, **options)


def run(start: Start, command: list[str], timeout_s: float, **options: Any) -> None:
    """A command; `options` are subprocess.run's.

    Raises RunError with the end of what it said where it fails or takes too long.
    """
    _ended(start, command, timeout_s, stderr=subprocess.STDOUT, **options)


def answer(command: list[str], timeout_s: float) -> Any:
    """What the last line of a command's output holds, JSON. Raises RunError as `run` does."""
    return json.loads(_ended(subprocess.run, command, timeout_s, stderr=subprocess.PIPE).stdout.splitlines()[-1])


def _ended(start: Start, command: list[str], timeout_s: float, **options: Any) -> Any:
    try:
        done = start(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, **options)
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(command)}: no end within {timeout_s:.0f} s") from None
    if done.returncode:
        said = (done.stdout + (done.stderr or ""))[-_TOLD:]
        raise RunError(f"{' '.join(command)}: exit status {done.returncode}: {said}")
    return done
