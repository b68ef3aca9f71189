"""A command's standard streams, its signals, and how it ends: with one line that says what happened and a status."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hvdkit.errors import HvdkitError
from hvdkit.files import open_standard_streams

TRACEBACK = "HVDKIT_TRACEBACK"  # an environment variable: set it to see the traceback of an internal error
_HANDLER = "hvdkit"
# Replacements for what hvdkit prints beyond ASCII, if the encoding of the terminal or file does not have it.
_PLAIN = str.maketrans({"÷": "/", "×": "x", "–": "-", "—": "-", "…": "...", "‖": "||", "µ": "u", "±": "+/-", "→": "->",
                        "≤": "<=", "≥": ">=", "•": "*", "█": "#", "·": "."})  # fmt: skip

# What a file or an argument may hold and a terminal obeys: control characters, and those that turn text around.
_UNSEEN = re.compile(r"[\0-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# The same without what progress and tables need: ends of lines, colours, the cursor's line.
_OBEYED = re.compile(
    r"\x1b(?!\[[0-9;]*[mKA]|\[\?25[hl])|[\0-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class _Guarded(io.TextIOWrapper):
    """A standard stream on which no text of a rank, a file or a server moves the terminal's window or clears it."""

    def write(self, text: str) -> int:
        return super().write(_OBEYED.sub(_escaped, text))


def _escaped(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def prepare() -> None:
    """Make the three streams usable: each is open, and standard output and error accept any character.

    A closed one is opened on /dev/null. Otherwise the next file that is opened would get its descriptor, and the
    command or a child process would print into that file or read from it.
    """
    open_standard_streams()
    if "error" in os.environ.get("PYTHONWARNINGS", ""):  # frameworks do not load with it
        os.environ["PYTHONWARNINGS"] = "default"
    codecs.register_error(_HANDLER, _substitute)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            stream = io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), "utf-8", write_through=True)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
        if type(stream) is io.TextIOWrapper:  # none that a test or an embedding program has put there
            facts = stream.encoding, _HANDLER, None, stream.line_buffering, stream.write_through
            setattr(sys, name, _Guarded(stream.detach(), *facts))
            setattr(sys, f"__{name}__", getattr(sys, name))


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    """The replacement of a character that the encoding does not have: a plain one, the byte of a path, or an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if "\udc80" <= letter <= "\udcff":  # Python's surrogate for a byte of a path that is not UTF-8
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    plain = letter.translate(_PLAIN)
    escaped = letter.encode("ascii", "backslashreplace").decode("ascii")
    return plain if plain.isascii() else escaped, error.start + 1


def end_on_signals(own_process: bool) -> None:
    """From now on SIGTERM, Ctrl-C and, unless it is ignored, SIGHUP end the command with cleanup."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _terminated)
    if own_process and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_signals() -> None:
    """Nothing is left to clean up: from now on a signal ends the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def ended(end: BaseException, words: Sequence[str] = ()) -> int:
    """Report on standard error how the command of these words ended, unless it succeeded; returns its exit status."""
    lines, status = _message(end, words)
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk or a closed pipe
        same = isinstance(end, OSError) and end.filename is None and end.errno == error.errno
        lines, status = [*([] if same else lines), f"standard output: {error.strerror}"], status or 1
        _discard(1)
    try:
        for line in lines:
            print(_UNSEEN.sub(_escaped, line), file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        _discard(2)
    return status


def _message(end: BaseException, words: Sequence[str]) -> tuple[list[str], int]:
    if isinstance(end, SystemExit):
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        # typer turns a KeyboardInterrupt into a SystemExit
        said = {128 + number: [f"ended by {number.name}"] for number in (signal.SIGTERM, signal.SIGHUP)}
        return (said | {128 + signal.SIGINT: ["interrupted"]}).get(status, []), status
    if hasattr(end, "format_message"):  # typer's errors have it
        from hvdkit.cli import wrong_words

        return wrong_words.lines(end, words), 2
    if isinstance(end, HvdkitError):
        return [*str(end).splitlines(), *getattr(end, "__notes__", [])], end.exit_status
    if isinstance(end, KeyboardInterrupt):
        return ["interrupted"], 128 + signal.SIGINT
    if os.environ.get(TRACEBACK):
        return "".join(traceback.format_exception(end)).splitlines(), 1
    if isinstance(end, OSError):  # one that no module handles, such as a deleted folder or a full disk
        file = f"{end.filename}: " if end.filename else ""
        return [f"{file}{end.strerror or end}"], 1
    if isinstance(end, MemoryError):
        return ["out of memory; free some, or raise the limit (ulimit -v)"], 1
    if str(end) == "can't start new thread":
        return ["no thread can be started; raise the limit of processes (ulimit -u)"], 1
    frame = traceback.extract_tb(end.__traceback__)[-1:]
    where = f" ({Path(frame[0].filename).name}, line {frame[0].lineno})" if frame else ""
    what = f"{type(end).__name__}: {' '.join(str(end).split())[:300]}".removesuffix(": ")
    return [f"a fault of hvdkit's own: {what}{where}; please report it, with what {TRACEBACK}=1 adds"], 1


def _discard(number: int) -> None:
    """Discard what is still to be written; otherwise Python reports it when it exits."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
