"""Prove a runtime: two real processes reduce, gather and broadcast in it (`hvdkit/worker/proof.py`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import direct
from hvdkit.runtimes import machine
from hvdkit.runtimes.store import Runtime
from hvdkit.worker.proof import RANKS


def prove(runtime: Runtime, framework: str, on_tick: Callable[[], None] | None = None) -> None:
    """Run the proof of `framework` in `runtime`. Raises RunError, with the failing rank's output, where it fails.

    `on_tick` is called ten times a second; what it raises ends the proof.
    """
    # NCCL refuses two ranks on one GPU, so that a machine with a single one proves the host's side only.
    device = "gpu" if runtime.gpu and len(machine.gpus()) >= RANKS else "cpu"
    with tempfile.TemporaryDirectory(prefix="hvdkit-proof-") as folder:
        job = Job(
            python=runtime.python,
            arguments=["-m", "hvdkit.worker.proof", framework, device],
            np=RANKS,
            hosts=parse_hosts(None, RANKS),
            environment={**runtime.environment, "OMP_NUM_THREADS": "1"},
            log_dir=Path(folder),
        )
        direct.run(job, on_tick)
