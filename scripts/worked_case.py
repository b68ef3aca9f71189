"""Write docs/worked-case.md: from one published figure to a decision, with what the commands really print.

    .venv/bin/python -m scripts.worked_case

Run it after a change of the simulator; tests/test_worked_case.py compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from hvdkit.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "worked-case.md"
_MOST_LINES = 32  # of a command that are shown


def page() -> str:
    """worked_case.md, each line that begins with $ replaced by the command and what it prints."""
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return re.sub(r"^\$ ((?:.*\\\n)*.*)$", lambda found: _fenced(found[1]), text, flags=re.MULTILINE)


def _fenced(command: str) -> str:
    text = _run(command).replace(f"{Path.cwd()}{os.sep}", "")
    printed = [line.rstrip() for line in text.splitlines() if line.strip()]
    shown = printed if len(printed) <= _MOST_LINES else [*printed[: _MOST_LINES - 1], "…"]
    return "\n".join(["```", f"$ {command}", *shown, "```"])


def _run(command: str) -> str:
    """What a command of hvdkit prints. Raises SystemExit if it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = app(shlex.split(command.replace("\\\n", " "))[1:], standalone_mode=False)
    if status:
        raise SystemExit(f"{command}: status {status}")
    return printed.getvalue()


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
