"""What a shell completes after an option or in place of an argument. Each list is loaded when it is asked for."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module


def asked() -> bool:
    """Whether a shell asks for completions, instead of a user for a command."""
    return any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ) and len(sys.argv) == 1


def among(module: str, name: str) -> Callable[[str], list[str]]:
    """Completes names that a module lists."""
    return lambda incomplete: list(getattr(import_module(module), name))


def recipes(incomplete: str) -> list[str]:
    """Recipes that come with hvdkit, and YAML files."""
    from hvdkit import paths

    return _or_files(incomplete, (path.stem for path in paths.recipes().glob("*.yaml")))


def copies(incomplete: str) -> list[str]:
    """What `hvdkit recipes copy` copies."""
    return [*recipes(incomplete), *frameworks(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Clusters that hvdkit ships, and YAML files."""
    from hvdkit.simulator import cluster

    return _or_files(incomplete, cluster.shipped())


frameworks = among("hvdkit.runtimes.pins", "FRAMEWORKS")
runtimes = among("hvdkit.runtimes.pins", "RUNTIMES")
rivals = among("hvdkit.baselines.registry", "RIVALS")
launchers = among("hvdkit.launch.launchers", "LAUNCHERS")
trackers = among("hvdkit.tracking.trackers", "NAMES")
collectives = among("hvdkit.results.bench", "COLLECTIVES")


def _or_files(incomplete: str, names: Iterable[str]) -> list[str]:
    files = glob.glob(f"{glob.escape(incomplete)}*.yaml")  # noqa: PTH207 - as it was typed, ./ and all
    return [*sorted(names), *sorted(files)]
