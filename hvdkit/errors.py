"""Errors whose message is one line: what happened, where, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

LARGEST = 2**53  # bound for numbers in requests and files: a float is exact for all whole numbers up to it


class HvdkitError(Exception):
    """Base of every error that hvdkit reports to its user; its text is the whole message.

    `exit_status` is the command's exit status: 1 if a run failed, 2 if the request was wrong.
    """

    exit_status = 1


class RequestError(HvdkitError):
    """The request is wrong: a bad recipe, option, host string or file. Nothing was started or written.

    Several faults are reported together, one per line.
    """

    exit_status = 2


class RunError(HvdkitError):
    """A valid request failed while it ran."""


class Stopped(HvdkitError):
    """Training stopped before its last step on request; nothing is lost."""

    exit_status = 0


class Faults(list[str]):
    """All faults of one request, one line each, reported together."""

    @contextmanager
    def collected(self, kind: type[HvdkitError] = RequestError) -> Iterator[None]:
        """Catch an error of this kind raised in the block and add its lines, each line once."""
        try:
            yield
        except kind as error:
            self += [line for line in str(error).splitlines() if line not in self]

    def report(self) -> None:
        """Raise RequestError if there are any faults."""
        if self:
            raise RequestError("\n".join(self))


def first_fault(error: ValidationError) -> str:
    """The first validation error of a document, as one line `key: message`; `file` stands for the whole document."""
    fault = error.errors(include_url=False)[0]
    key = ".".join(map(str, fault["loc"])) or "file"
    text = f"{key}: {fault['msg'].removeprefix('Value error, ')}"
    return text if text.isprintable() else repr(text)


def nearest(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a known name resembles or starts with the given one, else ''; ends an error message."""
    known = list(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.65) or [
        name for name in known if given and name.startswith(given)
    ]
    return f"; did you mean {near[0]!r}?" if near else ""
