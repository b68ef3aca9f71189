"""The adapters: one package for each framework, with a subclass of `hvdkit.core.seam.Adapter`.

`from hvdkit.adapters import pytorch` gives the adapter itself, not the package that it is in.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, cast

from hvdkit.adapters.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter

    pytorch: Adapter
    tensorflow: Adapter
    keras: Adapter
    mxnet: Adapter

NAMES = tuple(CAPABILITIES)


def load(name: str) -> Adapter:
    """Import an adapter and its framework.

    Raises KeyError for a name not in NAMES, ImportError if the framework or its Horovod is not installed.
    """
    if name not in NAMES:
        raise KeyError(name)
    return cast("Adapter", importlib.import_module(f"hvdkit.adapters.{name}").adapter)


class _Package(ModuleType):
    """This package. Importing `hvdkit.adapters.NAME` sets its attribute NAME, which is passed over."""

    def __getattribute__(self, name: str) -> object:
        return load(name) if name in CAPABILITIES else super().__getattribute__(name)


sys.modules[__name__].__class__ = _Package
