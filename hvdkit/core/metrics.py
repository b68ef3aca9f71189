"""Numbers about training: exact averages over ranks, step times, and the file that rank 0 writes them to."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from pydantic import ValidationError

from hvdkit.core.counters import Progress
from hvdkit.core.seam import Adapter
from hvdkit.core.usage import Snapshot
from hvdkit.errors import RunError
from hvdkit.files import read_bounded, write_atomic
from hvdkit.results.train import MetricLine

if TYPE_CHECKING:
    from hvdkit.core.tensorboard import EventFile


def reduce_sums(adapter: Adapter, **sums: float) -> dict[str, float]:
    """The sums over all ranks, in float64; collective, and all ranks give the same names.

    An average over unequal shards is right only as (sum of sums) / (sum of counts), so ranks exchange these and
    never averages.
    """
    vector = adapter.from_numpy(np.array(list(sums.values()), np.float64))
    (total,) = adapter.allreduce([vector], op="sum", name="metrics." + ".".join(sums))
    return dict(zip(sums, adapter.to_numpy(total).tolist(), strict=True))


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Softmax cross-entropy of each row in float64: (n, classes), (n,) -> (n,)."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels])


def peak_rss_mib() -> float:
    """The largest resident memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class StepClock:
    """Seconds from the end of one step to the end of the next, input included; pauses between epochs left out.

    `cpu_seconds` are those of CPU time, of all this process's threads, in the same steps; `first_at` is what the wall
    clock said at the end of the first. Of the machine, `since_warmup` tells what has been used since step `warmup`.
    """

    def __init__(self, warmup: int = 0, cpu: Callable[[], float] = time.process_time) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.first_at: float | None = None
        self._warmup, self._cpu = warmup, cpu
        self._begun = Snapshot.take(cpu())
        self.resume()

    def resume(self) -> None:
        """Start (again) now: what went before belongs to no step."""
        self._last, self._last_cpu = time.perf_counter(), self._cpu()

    def tick(self) -> None:
        """A step has ended."""
        now, cpu = time.perf_counter(), self._cpu()
        self.seconds.append(now - self._last)
        self.cpu_seconds.append(cpu - self._last_cpu)
        self._last, self._last_cpu = now, cpu
        if self.first_at is None:
            self.first_at = time.time()
        if len(self.seconds) == self._warmup:
            self._begun = Snapshot.take(cpu)

    def since_warmup(self) -> dict[str, float]:
        """CPU time used until now, evaluations included, as `Snapshot.since` tells it."""
        return Snapshot.take(self._cpu()).since(self._begun)


class MetricsFile:
    """`metrics.jsonl`, one object a line; nothing at all where `path` is None (on ranks other than 0).

    `events` gets the same lines for TensorBoard. Raises RunError where the file cannot be opened.
    """

    def __init__(self, path: Path | None, events: EventFile | None = None) -> None:
        self._path, self._events = path, events
        self._file = _appended(path) if path else None

    def forget_after(self, progress: Progress, recounted: bool) -> None:
        """Leave out what a killed run has written behind the checkpoint, and lines that cannot be read.

        Where updates are `recounted`, only whole epochs stay. Raises RunError where the file cannot be written.
        """
        if self._path is None or self._file is None:
            return
        kept: dict[str, MetricLine] = {}  # by its text
        for text in read_bounded(self._path).decode("utf-8", "replace").splitlines():
            try:
                line = MetricLine.model_validate_json(text)
            except ValidationError:
                continue  # the last line of a killed run
            before = line.step < progress.step or (line.step == progress.step and not line.ends_epoch)
            if line.epoch < progress.epoch or (before and not recounted):
                kept[text] = line
        self._file.close()
        write_atomic(self._path, "".join(f"{text}\n" for text in kept))
        self._file = _appended(self._path)
        if self._events:
            self._events.begin(kept.values())

    def write(self, line: MetricLine) -> None:
        """Append one line, whole. Raises RunError where the disk is full."""
        if self._file is None:
            return
        try:
            self._file.write(line.model_dump_json(exclude_none=True) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written ({error.strerror}); free space and start again") from error
        if self._events:
            self._events.write(line)


def _at_once(path: str, flags: int) -> int:
    """Open without waiting: what lies in the folder of a resumed run may be a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK, 0o644)


def _appended(path: Path) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8", opener=_at_once)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error
