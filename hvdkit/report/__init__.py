"""What people read. The package is a function too: `hvdkit.report(folder)`."""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType

import hvdkit

# If the home folder cannot be written, matplotlib logs two long lines each time, and works without it.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


class _Report(ModuleType):
    def __call__(self, *arguments: object, **options: object) -> object:
        return hvdkit._function("report")(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(hvdkit._function("report"))


sys.modules[__name__].__class__ = _Report  # `hvdkit.report` is the package as soon as a part of it is imported
