"""What a call would start: `dry_run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdkit.api.calls import Described, starts_nothing
from hvdkit.api.comparing import compare, parity
from hvdkit.api.measuring import profile
from hvdkit.api.training import train
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.results.dry_run import DryRun


def dry_run(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> DryRun:
    """What `train`, `compare`, `parity` or `profile` would start with these arguments; starts and writes nothing."""
    if getattr(function, "func", function) not in (train, compare, parity, profile):
        raise RequestError(f"dry_run: expected hvdkit's train, compare, parity or profile, got {function!r}")
    token = starts_nothing.set(True)
    try:
        function(*arguments, **options)
    except Described as end:
        return end.run
    finally:
        starts_nothing.reset(token)
    raise AssertionError("a dry run went on")
