"""Errors in code of the user's own (`model.script`, and modules beside it), in a line."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import hvdkit
from hvdkit.runtimes.pins import FRAMEWORKS

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST = 300  # characters of a message


def is_own(error: BaseException, script: str) -> bool:
    """Whether the error comes from code of the user's own, or from a library; a note says that of one on the way."""
    if getattr(error, "__notes__", []):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(hvdkit.__file__).parent
    return bool(_own_frames(frames, script)) or not Path(frames[-1].filename).is_relative_to(package)


def described(error: BaseException, script: str, phase: str = "") -> str:
    """The innermost line of the user's own code that the error has passed, and the error.

    Without such a line there is the `phase` of the run.
    """
    kind = f"{type(error).__name__}: "
    what = kind + _message(error).removeprefix(kind)
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {what}"
    if notes := getattr(error, "__notes__", []):
        what += f" ({notes[0]})"
    frames = _own_frames(traceback.extract_tb(error.__traceback__), script)
    if not frames:
        return f"{script}: {what}" + (f" ({phase})" if phase and not notes else "")
    last = frames[-1]
    function = "" if last.name == "<module>" else f", in {last.name}"
    return f"{last.filename}, line {last.lineno}{function}: {what}; the line is `{last.line}`"


def hidden_module(error: BaseException, folder: Path) -> str:
    """The remedy where a file in the script's folder has taken the place of a module that is imported by its name.

    Python looks there first. Empty if no such file has a part in the error.
    """
    known = {*sys.stdlib_module_names, *FRAMEWORKS, "torch", "horovod", "numpy"}
    text = "".join(traceback.format_exception(error))
    for path in sorted(folder.glob("*.py")):
        if path.stem in known and str(path) in text:
            return f"; {path} hides the module {path.stem}: rename the file"
    return ""


def _own_frames(frames: traceback.StackSummary, script: str) -> list[traceback.FrameSummary]:
    """The frames in files of the script's folder; packages that are installed below it are not the user's own."""
    folder = Path(script).absolute().parent
    found = []
    for frame in frames:
        path = Path(frame.filename).absolute()
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        if path.is_relative_to(folder) and not installed and not path.is_relative_to(Path(hvdkit.__file__).parent):
            found.append(frame)
    return found


def _message(error: BaseException) -> str:
    """The first two lines of an error's message; the last one of a message that begins with a traceback."""
    if isinstance(error, SystemExit):
        return f"{error}; it left before its work was done".removeprefix("None")
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line for each in _COLOURS.sub("", text).splitlines() if (line := each.strip())] or ["no message"]
    lines = lines[-1:] if lines[0].startswith("Traceback") else lines[:2]
    joined = " ".join(lines)
    return joined if len(joined) <= _MOST else joined[: _MOST - 1] + "…"
