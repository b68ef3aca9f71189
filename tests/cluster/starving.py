"""Slow networks for tests: hosts.py, and the plain word where this machine can have none."""

from __future__ import annotations

from functools import cache

import pytest

from tests.cluster import hosts


@cache
def _why_not() -> str | None:
    return hosts.why_not()


def network(count: int, mbit_per_s: float, control: bool = True) -> hosts.Network:
    """A `Network`, to be entered. Skips, saying why, on a machine that allows no network namespaces."""
    reason = _why_not()
    if reason:
        pytest.skip(f"needs network namespaces: {reason}")
    return hosts.Network(count, mbit_per_s, control)
