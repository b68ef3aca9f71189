"""What the GPT loops of this folder share: options, text, the rate, the clock. Nothing of hvdkit is in it.

The sizes come from the command line, so that a loop has the work of the recipe that it is measured beside.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RATE, WARMUP, DECAY, BETAS, CLIP = 4e-3, 100, 0.1, (0.9, 0.95), 1.0


def options() -> argparse.Namespace:
    """The command line of a loop; without `--horovod` it is one process that knows of no other."""
    parser = argparse.ArgumentParser(description="A small GPT on the bytes of Python's English text, without hvdkit.")
    for name, default in (("layers", 4), ("heads", 4), ("width", 128), ("context", 64), ("batch-size", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--horovod", action="store_true", help="average the gradients over Horovod's ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup-steps", type=int, default=20, help="first steps that throughput leaves out")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a rank")
    parser.add_argument("--out", type=Path, help="file for the result, JSON")
    made = parser.parse_args()
    made.vocabulary = 256
    return made


class Text:
    """Random windows of the text, as nanoGPT draws them."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        from pydoc_data.topics import topics

        self._bytes = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
        self._random, self._args = np.random.default_rng([1, rank]), args

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and those that follow each, int64 (batch, context)."""
        context = self._args.context
        starts = self._random.integers(0, len(self._bytes) - context - 1, (self._args.batch_size, 1))
        found = self._bytes[starts + np.arange(context + 1)].astype(np.int64)
        return found[:, :-1], found[:, 1:]


def rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to 0."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


class Clock:
    """Seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def tick(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def train(args: argparse.Namespace, hvd: Any, step: Callable[[np.ndarray, np.ndarray, float], float]) -> None:
    """Train and report; `step(bytes, following, rate)` is one update, and returns the rank's loss."""
    text, clock, loss = Text(args, hvd.rank() if hvd else 0), Clock(), math.nan
    for number in range(args.steps):
        loss = step(*text.batch(), rate(number, args.steps))
        clock.tick()
    report(args, hvd, clock.seconds, loss)


def report(args: argparse.Namespace, hvd: Any, seconds: list[float], loss: float) -> None:
    """Rank 0 prints the result and writes it to `--out`; then all ranks end.

    A step takes as long as on the rank that was slowest at it, as in hvdkit.
    """
    mine = seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, float(loss)
    ranks = hvd.allgather_object(mine, name="report") if hvd else [mine]
    measured = np.max([each for each, _, _ in ranks], axis=0)[args.warmup_steps :]
    if hvd is None or hvd.rank() == 0:
        tokens = args.batch_size * args.context * len(ranks)
        result = {
            "tokens_per_second": tokens * len(measured) / float(measured.sum()),
            "step_ms": 1e3 * float(np.median(measured)),
            "peak_rss_mib": max(memory for _, memory, _ in ranks),
            "loss": float(np.mean([loss for _, _, loss in ranks])),
        }
        text = json.dumps(result, indent=2)
        print(text, flush=True)
        if args.out:
            args.out.write_text(text + "\n", encoding="utf-8")
    if hvd:
        hvd.shutdown()
