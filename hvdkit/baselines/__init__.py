"""Baselines: other ways to train a recipe, with hvdkit's model, data, training loop and timing.

There is one module for each framework. Its `RIVALS` maps names of `registry.RIVALS` to subclasses of `base.Baseline`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from hvdkit import adapters
from hvdkit.baselines.registry import RIVALS, check
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.baselines.base import Baseline


def load(framework: str, name: str) -> Baseline:
    """A baseline, which is used in place of the framework's adapter.

    Raises RequestError if the framework has no baseline of that name, ImportError like `adapters.load`.
    """
    if name not in RIVALS or framework not in RIVALS[name].frameworks:
        raise RequestError("\n".join(check([name], [framework], [])))
    adapters.load(framework)
    make = importlib.import_module(f"hvdkit.baselines.{framework}").RIVALS[name]
    return cast("Baseline", make().named(name))
