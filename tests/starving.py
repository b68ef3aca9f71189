"""Slow networks for tests: benchmarks/hosts.py, and the plain word where this machine can have none; Slurm on them."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT

HOSTS = ROOT / "benchmarks" / "hosts.py"


@cache
def module(name: str = "hosts") -> ModuleType:
    """What tests share with the benchmarks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@cache
def _why_not() -> str | None:
    return module().why_not()


def network(hosts: int, mbit_per_s: float) -> Any:
    """A `Network`, to be entered. Skips, saying why, on a machine that allows no network namespaces."""
    reason = _why_not()
    if reason:
        pytest.skip(f"needs network namespaces: {reason}")
    return module().Network(hosts, mbit_per_s)


Slurm = module("slurm_daemons").Slurm
