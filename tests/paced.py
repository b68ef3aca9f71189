"""A user's own input pipeline whose pace a test sets while it trains: as many images as the digits, but tiny ones.

The recipe names it (`overrides` below) with a file, the gate. While the gate exists, its text says what it holds up:
`hold N`: no batch of an epoch from number N on is handed out; `slow S`: each batch takes S seconds more, without using
the processor. So a test that kills a rank in the middle of an epoch finds it there, however fast or loaded the machine
is. An image depends on its number alone: ranks of another count see the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hvdkit.data.user_pipeline import NativeJob, NativePipeline

IMAGES, VALIDATION, SIDE = 1437, 40, 8
POLL_S = 0.01
SKIPPING_S = 0.001  # a batch that is asked for sooner than this behind the one before has not been trained on


def overrides(gate: Path) -> list[str]:
    """What makes a recipe train on this pipeline."""
    return ["model.name=resnet8", f"data={{name: native, module: {__file__}, options: {{gate: {gate}}}}}"]


def pass_gate(gate: Path, number: int) -> None:
    """Return when batch `number` may be handed out."""
    while True:
        try:
            what, value = gate.read_text().split()
        except (OSError, ValueError):  # there is none, or it is being written
            return
        if what == "slow":
            time.sleep(float(value))
            return
        if number < int(value):
            return
        time.sleep(POLL_S)


def open_pipeline(job: NativeJob) -> NativePipeline:
    rank, size, gate = job.topology.rank, job.topology.size, Path(job.options["gate"])
    random = np.random.default_rng(job.seed)
    images = random.standard_normal((IMAGES + VALIDATION, SIDE, SIDE, 3), np.float32)
    labels = random.integers(0, job.classes, len(images))

    def train(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yielded = 0.0
        for number in range(IMAGES // (job.batch_size * size)):
            if time.monotonic() - yielded > SKIPPING_S:
                pass_gate(gate, number)
            first = (number * size + rank) * job.batch_size
            yielded = time.monotonic()
            yield images[first : first + job.batch_size], labels[first : first + job.batch_size]

    def val() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        mine = np.arange(IMAGES + rank, IMAGES + VALIDATION, size)
        for first in range(0, len(mine), job.batch_size):
            yield images[mine[first : first + job.batch_size]], labels[mine[first : first + job.batch_size]]

    return NativePipeline((SIDE, SIDE, 3), train, IMAGES, val)
