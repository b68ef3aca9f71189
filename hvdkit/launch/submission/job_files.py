"""A job's files: written, and handed to the scheduler where that is asked for."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.files import write_atomic

NUMBERS = "\1"  # in the name of Slurm's log: the numbers of the job, and of the task in an array


@dataclass(frozen=True)
class Submission:
    """A job that has passed every check that can be made before the scheduler sees it.

    `main` is the one of the `files` that the scheduler gets, by `submit`, which returns the job's name or number there.
    `by_hand` is the command that does the same, `described` what users want to know of the job, with NUMBERS for its
    name. `notes` say what the job needs that is not in the files.
    """

    files: Mapping[Path, str]
    main: Path
    submit: Callable[[], str]
    by_hand: list[str]
    described: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Submitted:
    """A job that was written: the `file` for the scheduler and, once that has it, its name or number there, `job`.

    `lines` are for the user.
    """

    file: Path
    job: str | None
    lines: list[str]


def write(submission: Submission, apply: bool) -> Submitted:
    """Write the files, and with `apply` hand the job to the scheduler.

    Raises RequestError where a file cannot be written or the scheduler refuses the job; the files are then as they
    were.
    """
    before = {path: path.read_bytes() if path.exists() else None for path in submission.files}
    new = [folder for folder in submission.main.parents if not folder.exists()]
    try:
        for path, text in submission.files.items():
            _write_file(path, text)
        job = submission.submit() if apply else None
    except RequestError:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, content)
        for folder in new:
            with contextlib.suppress(OSError):  # not made, or not empty
                folder.rmdir()
        raise
    beside = [path.name for path in submission.files if path != submission.main]
    with_recipe = f", with the recipe {beside[0]}{' and others' if beside[1:] else ''} beside it" if beside else ""
    then = [f"start it with: {shlex.join(submission.by_hand)}"]
    if job is not None:
        then = [line.replace(NUMBERS, job) for line in submission.described]
    return Submitted(submission.main, job, [f"written to {submission.main}{with_recipe}", *submission.notes, *then])


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise RequestError(f"--script {path}: cannot be written ({error.strerror})") from None
    except RunError as error:
        raise RequestError(f"--script: {error}") from None
