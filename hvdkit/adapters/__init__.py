"""The seam: one module a framework, all with the functions of `hvdkit.core.adapter.Adapter`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from hvdkit.errors import RequestError
from hvdkit.rivals import RIVALS, check

if TYPE_CHECKING:
    from hvdkit.core.adapter import Adapter

NAMES = ("pytorch", "tensorflow", "keras", "mxnet", "local")


def load(name: str) -> Adapter:
    """Import one adapter and with it its framework.

    Raises KeyError for a name not in NAMES, ImportError where the framework or its Horovod is not installed.
    """
    if name not in NAMES:
        raise KeyError(name)
    return cast("Adapter", importlib.import_module(f"hvdkit.adapters.{name}"))


def rival(framework: str, name: str) -> Adapter:
    """One of `hvdkit.rivals` in the place of a framework's adapter.

    Raises RequestError where the framework has none of that name, ImportError as `load` does.
    """
    if name not in RIVALS or framework not in RIVALS[name].frameworks:
        raise RequestError("\n".join(check([name], [framework], [])))
    module = importlib.import_module(f"hvdkit.adapters.rivals.{framework}")
    return cast("Adapter", module.RIVALS[name](load(framework)))
