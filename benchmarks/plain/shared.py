"""What the scripts of this folder share: options, digits, text, the loops, a clock. Nothing of hvdkit is in it.

It computes what the recipe computes, so that both sides of the comparison have the same work.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.util
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRAIN_IMAGES, VAL_IMAGES = 1437, 360
RATE, WARMUP, DECAY, BETAS, CLIP = 4e-3, 100, 0.1, (0.9, 0.95), 1.0  # of the GPT
Arrays = tuple[np.ndarray, np.ndarray]


class Alone:
    """In place of a framework's Horovod without `--horovod`: one process that knows of no other."""

    Average = None

    def init(self) -> None:
        """Nothing to start."""

    shutdown = init

    def rank(self) -> int:
        """The only rank."""
        return 0

    def size(self) -> int:
        """One process."""
        return 1

    def same(self, value: Any, *_: Any, **__: Any) -> Any:
        """What all ranks together have."""
        return value

    broadcast_parameters = broadcast_optimizer_state = broadcast_variables = same
    DistributedOptimizer = DistributedGradientTape = grouped_allreduce = allreduce = same

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """The only rank's."""
        return [value]


def horovod(module: str) -> Any:
    """The module of Horovod, if the command line has `--horovod`, else `Alone`."""
    return importlib.import_module(module) if "--horovod" in sys.argv else Alone()


def options() -> argparse.Namespace:
    """The command line of a script that trains ResNet-20; without `--horovod` it is one process."""
    parser = argparse.ArgumentParser(description="ResNet-20 on the digits, without hvdkit.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    return _common(parser, batch_size=32, warmup_steps=10)


def text_options() -> argparse.Namespace:
    """The command line of a script that trains a GPT; without `--horovod` it is one process that knows of no other."""
    parser = argparse.ArgumentParser(description="A small GPT on the bytes of Python's English text, without hvdkit.")
    for name, default in (("layers", 4), ("heads", 4), ("width", 128), ("context", 64), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.set_defaults(vocabulary=256)
    return _common(parser, batch_size=4, warmup_steps=20)


def _common(parser: argparse.ArgumentParser, batch_size: int, warmup_steps: int) -> argparse.Namespace:
    parser.add_argument("--batch-size", type=int, default=batch_size, help="samples per rank and step")
    parser.add_argument("--warmup-steps", type=int, default=warmup_steps, help="first steps that speeds leave out")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a rank")
    parser.add_argument("--horovod", action="store_true", help="average the gradients over Horovod's ranks")
    parser.add_argument("--out", type=Path, help="file for the result, JSON")
    return parser.parse_args()


def digits() -> tuple[Arrays, Arrays]:
    """(images, labels) to train on and held out: float32 (n, 32, 32, 3), bilinear from 8×8, normalised; int64 (n,).

    Read from the file in scikit-learn's package. Importing scikit-learn itself would make a plain script look heavier
    than hvdkit by 60 MiB, which is no merit of hvdkit's.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise SystemExit("error: scikit-learn, which ships the digits, is not installed beside the framework")
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    centres = (np.arange(32) + 0.5) / 4 - 0.5
    weights = np.stack([np.interp(centres, np.arange(8), one) for one in np.eye(8)], axis=1).astype(np.float32)
    images = (weights @ table[:, :64].reshape(-1, 8, 8) @ weights.T / 16 - 0.305) / 0.324
    images = np.repeat(images[..., None], 3, axis=-1).astype(np.float32)
    labels = table[:, 64].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, val = order[VAL_IMAGES:], order[:VAL_IMAGES]
    return (images[train], labels[train]), (images[val], labels[val])


def epoch_indices(samples: int, batch_size: int, epoch: int, rank: int, size: int) -> np.ndarray:
    """This rank's samples of one epoch, (steps, batch_size); the incomplete last global batch is left out."""
    order = np.random.default_rng(epoch).permutation(samples)[rank::size]
    steps = samples // (batch_size * size)
    return order[: steps * batch_size].reshape(steps, batch_size)


def learning_rate(step: int, steps_per_epoch: int, epochs: int, size: int, base: float = 0.05) -> float:
    """Scaled by the number of ranks, reached over one epoch, then a cosine down to 0."""
    if step < steps_per_epoch:
        return base + (base * size - base) * step / steps_per_epoch
    progress = (step - steps_per_epoch) / max(1, (epochs - 1) * steps_per_epoch)
    return base * size * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Text:
    """Random windows of the text, as nanoGPT draws them."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        from pydoc_data.topics import topics

        self._bytes = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
        self._random, self._args = np.random.default_rng([1, rank]), args

    def batch(self) -> Arrays:
        """Bytes and those that follow each, int64 (batch, context)."""
        context = self._args.context
        starts = self._random.integers(0, len(self._bytes) - context - 1, (self._args.batch_size, 1))
        windows = self._bytes[starts + np.arange(context + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def text_rate(step: int, steps: int) -> float:
    """The GPT's learning rate: a warm-up, then a cosine down to 0."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


class Clock:
    """Seconds from the end of one step to the end of the next; evaluations are left out by `resume`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.resume()

    def resume(self) -> None:
        """The next step begins now."""
        self._last = time.perf_counter()

    def tick(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def train(args: argparse.Namespace, hvd: Any, step: Callable, correct: Callable, parameters: int) -> None:
    """Train, evaluate after each epoch, and report.

    `step(indices, rate)` is one update, `correct(rows)` counts the right answers in a slice of the held-out images.
    """
    clock, done, accuracy = Clock(), 0, 0.0
    for epoch in range(args.epochs):
        clock.resume()
        batches = epoch_indices(TRAIN_IMAGES, args.batch_size, epoch, hvd.rank(), hvd.size())
        for indices in batches:
            step(indices, learning_rate(done, len(batches), args.epochs, hvd.size()))
            clock.tick()
            done += 1
            if done == args.steps:
                break
        starts = range(hvd.rank() * args.batch_size, VAL_IMAGES, hvd.size() * args.batch_size)
        mine = sum(float(correct(slice(start, start + args.batch_size))) for start in starts)
        accuracy = sum(hvd.allgather_object(mine, name="correct")) / VAL_IMAGES
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}", flush=True)
        if done == args.steps:
            break
    report_images(args, hvd, clock, accuracy, parameters)


def train_text(args: argparse.Namespace, hvd: Any, step: Callable[[np.ndarray, np.ndarray, float], float]) -> None:
    """Train a GPT and report; `step(bytes, following, rate)` is one update, and returns the rank's loss."""
    text, clock, loss = Text(args, hvd.rank()), Clock(), math.nan
    for number in range(args.steps):
        loss = step(*text.batch(), text_rate(number, args.steps))
        clock.tick()
    report_text(args, hvd, clock, loss)


def report_images(args: argparse.Namespace, hvd: Any, clock: Clock, accuracy: float, parameters: int) -> None:
    """`report` for ResNet-20."""
    report(args, hvd, clock, "images", args.batch_size, val_accuracy=accuracy, parameters=parameters)


def report_text(args: argparse.Namespace, hvd: Any, clock: Clock, loss: float) -> None:
    """`report` for a GPT."""
    report(args, hvd, clock, "tokens", args.batch_size * args.context, loss=float(loss))


def report(args: argparse.Namespace, hvd: Any, clock: Clock, unit: str, per_step: int, **figures: float) -> None:
    """Rank 0 prints the result and writes it to `--out`; then all ranks end.

    A rank computes `per_step` units a step. A step takes as long as on the rank that was slowest at it, as in hvdkit.
    """
    mine = clock.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ranks = hvd.allgather_object(mine, name="report")
    slowest = np.max([seconds for seconds, _ in ranks], axis=0)
    measured = slowest[min(args.warmup_steps, len(slowest) - 1) :]
    if hvd.rank() == 0:
        result = {
            f"{unit}_per_second": per_step * len(ranks) * len(measured) / float(measured.sum()),
            "step_ms": 1e3 * float(np.median(measured)),
            "peak_rss_mib": max(memory for _, memory in ranks),
            "steps": len(slowest),
        } | figures
        text = json.dumps(result, indent=2)
        print(text, flush=True)
        if args.out:
            args.out.write_text(text + "\n", encoding="utf-8")
    hvd.shutdown()
