"""The network interface by which ranks reach each other, and how fast it says it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

_INTERFACES, _ROUTES = Path("/sys/class/net"), Path("/proc/net/route")
_TC_TIMEOUT_S = 5.0


def interface() -> str | None:
    """The one that Horovod was told to use, else that of the default route; None where that cannot be told."""
    told = os.environ.get("HOROVOD_GLOO_IFACE", "").split(",")[0]
    if told:
        return told
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def rate_mbit_per_s(name: str) -> float | None:
    """What the interface's hardware can, or what a token bucket (tc-tbf) leaves of it; None where neither is told."""
    rates = [rate for rate in (_hardware(name), _bucket(name)) if rate]
    return min(rates, default=None)


def _hardware(name: str) -> float | None:
    try:
        speed = int((_INTERFACES / name / "speed").read_text())
    except (OSError, ValueError):  # a virtual one, or down
        return None
    return float(speed) if speed > 0 else None


def _bucket(name: str) -> float | None:
    tc = shutil.which("tc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if tc is None:
        return None
    try:
        done = subprocess.run(
            [tc, "-j", "qdisc", "show", "dev", name], capture_output=True, timeout=_TC_TIMEOUT_S, check=False
        )
        rows = json.loads(done.stdout or b"[]")
        found = [row["options"]["rate"] for row in rows if row.get("kind") == "tbf"]  # bytes a second
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, AttributeError, TypeError):
        return None
    return min((8e-6 * float(rate) for rate in found), default=None)
