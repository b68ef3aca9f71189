"""The adapters: one module for each framework, with the functions of `hvdkit.core.seam.Adapter`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from hvdkit.adapters.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter

NAMES = tuple(CAPABILITIES)


def load(name: str) -> Adapter:
    """Import an adapter and its framework.

    Raises KeyError for a name not in NAMES, ImportError if the framework or its Horovod is not installed.
    """
    if name not in NAMES:
        raise KeyError(name)
    return cast("Adapter", importlib.import_module(f"hvdkit.adapters.{name}"))
