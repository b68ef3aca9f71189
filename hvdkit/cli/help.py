"""`--help` at once: what typer draws it by, loaded without the parts of it that hvdkit's help has no use for."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType

# What `typer.rich_utils` imports, whatever it is to draw: a Markdown parser, and a highlighter of source code for
# tracebacks. hvdkit's help is no Markdown, and its tracebacks are Python's own.
_UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


def asked() -> bool:
    """Whether the command line can only end in a page of help."""
    return len(sys.argv) == 1 or "--help" in sys.argv


def prepare() -> None:
    """Load `typer.rich_utils` with empty classes in place of the unused ones: a quarter of the time of `--help`.

    A later import of the modules gets the real ones. Where typer has no such module any more, or needs
    more of them, it loads what it needs by itself, later.
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
