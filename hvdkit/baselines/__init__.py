"""Other ways to train a recipe, behind the same seam, so that they have hvdkit's network, data, loop and clock.

One module a framework; its `RIVALS` maps the names of `registry.RIVALS` to subclasses of `base.Rival`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from hvdkit import adapters
from hvdkit.baselines.registry import RIVALS, check
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter


def load(framework: str, name: str) -> Adapter:
    """A baseline in the place of a framework's adapter.

    Raises RequestError where the framework has none of that name, ImportError as `adapters.load` does.
    """
    if name not in RIVALS or framework not in RIVALS[name].frameworks:
        raise RequestError("\n".join(check([name], [framework], [])))
    module = importlib.import_module(f"hvdkit.baselines.{framework}")
    return cast("Adapter", module.RIVALS[name](adapters.load(framework)))
