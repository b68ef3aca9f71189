"""A command's life at its terminal: the streams that it is given, and how it ends.

However a command ends, it prints one line that says what happened and returns an exit status.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hvdkit.errors import HvdkitError

TRACEBACK = "HVDKIT_TRACEBACK"  # set it to see where a fault of hvdkit's own has come from
_HANDLER = "hvdkit"
# What hvdkit prints beyond ASCII, where the terminal or the file has no such letters.
_PLAIN = str.maketrans({"÷": "/", "×": "x", "–": "-", "—": "-", "…": "...", "‖": "||", "µ": "u", "±": "+/-", "→": "->",
                        "≤": "<=", "≥": ">=", "•": "*"})  # fmt: skip


def prepare() -> None:
    """Make the three streams usable: each is open, and standard output and error take any letter.

    A closed one leads nowhere: else the next file that is opened would get its number, and what is printed, or read by
    a child process, would be that file's.
    """
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        if os.open(os.devnull, os.O_RDWR) != number:  # the lowest free number is taken
            raise AssertionError(f"descriptor {number} is not the lowest free one")
        os.set_inheritable(number, True)
    if "error" in os.environ.get("PYTHONWARNINGS", ""):  # under which libraries of others, the frameworks', do not load
        os.environ["PYTHONWARNINGS"] = "default"
    codecs.register_error(_HANDLER, _substitute)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            stream = io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), "utf-8", write_through=True)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for letters that an encoding has not: a plain one, the byte of a path, or an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if "\udc80" <= letter <= "\udcff":  # Python's name for a byte of a path that is no UTF-8
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    plain = letter.translate(_PLAIN)
    escaped = letter.encode("ascii", "backslashreplace").decode("ascii")
    return plain if plain.isascii() else escaped, error.start + 1


def end_on_signals(own_process: bool) -> None:
    """From here on SIGTERM ends the command in good order, and so does Ctrl-C that was left to the kernel so far."""
    signal.signal(signal.SIGTERM, _terminated)
    if own_process and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_signals() -> None:
    """The work is done and nothing is left to be tidied up: a signal that comes now ends the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def ended(end: BaseException) -> int:
    """Say on standard error how a command ended, where that is no good end, and return its exit status."""
    lines, status = _message(end)
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, or nobody who reads
        same = isinstance(end, OSError) and end.filename is None and end.errno == error.errno
        lines, status = [*([] if same else lines), f"standard output: {error.strerror}"], status or 1
        _lead_nowhere(1)
    try:
        for line in lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        _lead_nowhere(2)
    return status


def _message(end: BaseException) -> tuple[list[str], int]:
    if isinstance(end, SystemExit):
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        # typer makes a SystemExit of a KeyboardInterrupt, without a word
        said = {128 + signal.SIGINT: ["interrupted"], 128 + signal.SIGTERM: ["ended by SIGTERM"]}
        return said.get(status, []), status
    if isinstance(end, HvdkitError):
        return str(end).splitlines(), end.exit_status
    if isinstance(end, KeyboardInterrupt):
        return ["interrupted"], 128 + signal.SIGINT
    if os.environ.get(TRACEBACK):
        return "".join(traceback.format_exception(end)).splitlines(), 1
    if isinstance(end, OSError):  # the machine's refusal where no room foresaw one: a folder that is gone, a full disk
        place = f"{end.filename}: " if end.filename else ""
        return [f"{place}{end.strerror or end}"], 1
    if isinstance(end, MemoryError):
        return ["out of memory; free some, or raise the limit (ulimit -v)"], 1
    if str(end) == "can't start new thread":
        return ["no thread can be started; raise the limit of processes (ulimit -u)"], 1
    frame = traceback.extract_tb(end.__traceback__)[-1:]
    where = f" ({Path(frame[0].filename).name}, line {frame[0].lineno})" if frame else ""
    what = f"{type(end).__name__}: {' '.join(str(end).split())[:300]}".removesuffix(": ")
    return [f"a fault of hvdkit's own: {what}{where}; please report it, with what {TRACEBACK}=1 adds"], 1


def _lead_nowhere(number: int) -> None:
    """What is still to be written there is lost; without this Python would complain of it at its very end."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
