"""What can go wrong, told in one line: what happened, where, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

LARGEST = 2**53  # of the numbers in requests and files: a float holds every whole number up to it


class HvdkitError(Exception):
    """Base of every error that hvdkit tells its user; its text is the whole message.

    `exit_status` is what a command ends with: 1 where a run failed, 2 where the request was wrong.
    """

    exit_status = 1


class RequestError(HvdkitError):
    """The request was wrong: a bad recipe, option, host string or file. Nothing was started or written.

    Several faults found at once are told at once, one a line.
    """

    exit_status = 2


class RunError(HvdkitError):
    """Something that was rightly asked for failed while it ran."""


class Stopped(HvdkitError):
    """Training ended before its last step because it was asked to, and nothing is lost."""

    exit_status = 0


class Faults(list[str]):
    """All faults of one request, a line each, which are reported together."""

    @contextmanager
    def collected(self, kind: type[HvdkitError] = RequestError) -> Iterator[None]:
        """Add the lines of an error of this kind that is raised inside, each line once, and go on after the block."""
        try:
            yield
        except kind as error:
            self += [line for line in str(error).splitlines() if line not in self]

    def report(self) -> None:
        """Raise RequestError if there are any."""
        if self:
            raise RequestError("\n".join(self))


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong with a document, by its key and in one line; `file` where it is the whole of it."""
    fault = error.errors(include_url=False)[0]
    key = ".".join(map(str, fault["loc"])) or "file"
    told = f"{key}: {fault['msg'].removeprefix('Value error, ')}"
    return told if told.isprintable() else repr(told)


def nearest(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, to end a message with, where a known name is near the given one, or begins so; else ''."""
    known = list(known)
    near = difflib.get_close_matches(given, known, n=1) or [name for name in known if given and name.startswith(given)]
    return f"; did you mean {near[0]!r}?" if near else ""
