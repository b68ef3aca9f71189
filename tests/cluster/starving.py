"""Slow networks for tests, and the plain word where this machine can have none."""

from __future__ import annotations

from functools import cache

import pytest

from hvdkit.launch import namespaces


@cache
def _why_not() -> str | None:
    return namespaces.why_not()


def network(count: int, mbit_per_s: float, control: bool = True) -> namespaces.Network:
    """A `Network`, to be entered. Skips, saying why, on a machine that allows no network namespaces."""
    reason = _why_not()
    if reason:
        pytest.skip(f"needs network namespaces: {reason}")
    return namespaces.Network(count, mbit_per_s, control)
