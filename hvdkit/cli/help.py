"""A faster `--help`: loads typer's help renderer without the modules that hvdkit's help does not use."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType

# `typer.rich_utils` always imports these: a Markdown parser, and a syntax highlighter for tracebacks. hvdkit's help
# texts are not Markdown, and it prints Python's own tracebacks.
_UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


def asked() -> bool:
    """Whether the command line asks for help."""
    return len(sys.argv) == 1 or "--help" in sys.argv


def prepare() -> None:
    """Import `typer.rich_utils` with empty classes in place of the unused ones, which saves a third of the time.

    A later import of those modules gets the real ones. If another version of typer has no `rich_utils`, or needs more
    of the classes, it imports what it needs later.
    """
    placed = [name for name in _UNUSED if name not in sys.modules]
    for name in placed:
        module = ModuleType(name)
        setattr(module, _UNUSED[name], type(_UNUSED[name], (), {}))
        sys.modules[name] = module
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("typer.rich_utils")
    finally:
        for name in placed:
            del sys.modules[name]
