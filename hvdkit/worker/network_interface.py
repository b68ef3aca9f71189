"""The network interface that connects the ranks, and its nominal rate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

_INTERFACES, _ROUTES = Path("/sys/class/net"), Path("/proc/net/route")
_TC_TIMEOUT_S = 5.0


def interface() -> str | None:
    """The interface in HOROVOD_GLOO_IFACE, else that of the default route; None if it cannot be determined."""
    chosen = os.environ.get("HOROVOD_GLOO_IFACE", "").split(",")[0]
    if chosen:
        return chosen
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def rate_mbit_per_s(name: str) -> float | None:
    """The lower of the hardware's rate and a token bucket's (tc-tbf) limit, in Mbit/s; None if both are unknown."""
    rates = [rate for rate in (_hardware(name), _bucket(name)) if rate]
    return min(rates, default=None)


def _hardware(name: str) -> float | None:
    try:
        speed = int((_INTERFACES / name / "speed").read_text())
    except (OSError, ValueError):  # a virtual interface, or one that is down
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
        rates = [row["options"]["rate"] for row in rows if row.get("kind") == "tbf"]  # bytes per second
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, AttributeError, TypeError):
        return None
    return min((8e-6 * float(rate) for rate in rates), default=None)
