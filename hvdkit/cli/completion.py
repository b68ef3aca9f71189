"""What a shell completes after an option or in place of an argument. Each list is loaded when it is asked for."""

from __future__ import annotations

import os
import sys


def asked() -> bool:
    """Whether a shell asks for completions, instead of a user for a command."""
    return any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ) and len(sys.argv) == 1


def recipes(incomplete: str) -> list[str]:
    """Recipes that come with hvdkit. Where none begins so, shells complete files."""
    from hvdkit import paths

    return sorted(path.stem for path in paths.recipes().glob("*.yaml"))


def copies(incomplete: str) -> list[str]:
    """What `hvdkit recipes copy` copies."""
    from hvdkit.runtimes.pins import FRAMEWORKS

    return [*recipes(incomplete), *FRAMEWORKS]


def runtimes(incomplete: str) -> list[str]:
    """What `hvdkit runtime build` builds."""
    from hvdkit.runtimes.pins import ALL

    return list(ALL)


def clusters(incomplete: str) -> list[str]:
    """Clusters that hvdkit ships."""
    from hvdkit.simulator import cluster

    return sorted(cluster.shipped())


def overrides(incomplete: str) -> list[str]:
    """Keys of a recipe as `key=`, and after the sign their values, as far as there is a list of them.

    A single key comes with its default too: bash puts a space after a single word.
    """
    from hvdkit.recipe.hints import values
    from hvdkit.recipe.schema import Recipe

    known = values(Recipe)
    key, sign, _ = incomplete.partition("=")
    if sign:
        return [f"{key}={value}" for value in known.get(key, [])]
    keys = [key for key in known if key.startswith(incomplete)]
    return [f"{key}=" for key in keys] + [f"{keys[0]}={value}" for value in known[keys[0]] if len(keys) == 1]
