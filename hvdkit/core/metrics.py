"""Numbers about training: exact averages over ranks, step times, throughput, and the file that rank 0 writes."""

from __future__ import annotations

import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.group import Group, Mesh
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.step_plan import Progress, is_before
from hvdkit.core.usage import NOISY, Snapshot, load_of_others, machine, pinned, started_at
from hvdkit.data import batches as data_
from hvdkit.data.batches import Batch, Split
from hvdkit.errors import RequestError, RunError
from hvdkit.files import atomic, unwritable
from hvdkit.recipe.schema import Recipe
from hvdkit.results.train import MetricLine, read_metrics, scan_metrics
from hvdkit.tasks.task import Metrics, Sums

if TYPE_CHECKING:
    from hvdkit.core.tensorboard import EventFile

_MOST_STEPS = 2000  # the most step times that a result lists


def reduce_sums(adapter: Adapter, group: Group, **sums: float) -> dict[str, float]:
    """The sums over a group, in float64; collective. All of its ranks pass the same names.

    The average over unequal shards is (sum of sums) / (sum of counts), so ranks reduce sums and counts, never
    averages.
    """
    vector = adapter.from_numpy(np.array(list(sums.values()), np.float64))
    (total,) = adapter.allreduce([vector], group, op="sum", name="metrics." + ".".join(sums))
    return dict(zip(sums, adapter.to_numpy(total).tolist(), strict=True))


def add_rows(adapter: Adapter, group: Group, names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """The sum of each column over the rows of a group, by name; collective. Ranks may have unequal numbers of rows.

    They are added exactly and rounded once (Shewchuk 1997, by `math.fsum`), so that the sums have the same bits
    however the rows are divided among ranks.
    """
    mine = np.array([[0.0] * len(names), *rows], np.float64)  # a row at least: not all frameworks gather nothing
    everyone = adapter.to_numpy(adapter.allgather(adapter.from_numpy(mine), group, "metrics." + ".".join(names)))
    columns = everyone.T.tolist()
    return {name: _sum(column) for name, column in zip(names, columns, strict=True)}


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # of infinities, or beyond float64
        return sum(values)


def evaluate(
    adapter: Adapter,
    session: Session,
    metrics_of: Metrics,
    split: Split,
    batch_size: int,
    group: Group,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The means of the metrics over a group of ranks that divide the samples, each counted once; empty if the split is.

    Collective, with the same result on all ranks.
    """
    return metrics_of.means(*summed(adapter, session, metrics_of, split, batch_size, group, on_batch))


def summed(
    adapter: Adapter,
    session: Session,
    metrics_of: Metrics,
    split: Split,
    batch_size: int,
    group: Group,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[Sums, int]:
    """By metric the sum over the split's samples, with its count, and the number of samples; collective.

    They have the same bits on any number of ranks (`batches.evaluation_batches`, `add_rows`). A session with a
    loss of the user's own adds that as `loss`, unless a metric has the name.
    """
    adds_loss = session.own_loss is not None and "loss" not in metrics_of.names
    names = [*metrics_of.names, *(["loss"] if adds_loss else [])]
    rows: list[list[float]] = []  # of each batch: sums and counts in the order of the names, and samples
    batches = data_.evaluation_batches(split, batch_size, group.index, group.size)
    for batch, valid in session.strategy.evaluated(batches):
        on_batch()
        if metrics_of.sums is None:
            pairs = [_losses(session, batch, valid, metrics_of.ignored)]
        elif valid:
            outputs, targets = session.predict(batch.inputs)[:valid], batch.targets[:valid]
            pairs = checked_sums(metrics_of, outputs, targets)
            if adds_loss:
                value, count = session.loss_of(outputs, targets)
                pairs.append((value * valid, valid) if count is None else (value, count))
        else:
            session.predict(batch.inputs)
            continue
        rows.append([*(value for pair in pairs for value in pair), valid])
    columns = [part for name in names for part in (name, f"{name}.count")]
    found = add_rows(adapter, group, [*columns, "samples"], rows)
    return {name: (found[name], found[f"{name}.count"]) for name in names}, round(found["samples"])


def _losses(session: Session, batch: Batch, valid: int, ignored: int | None) -> tuple[float, float]:
    """The sum of a batch's cross-entropies and its count: of samples, or with an `ignored` label of targets."""
    if ignored is None:
        each = session.trainable.losses(batch)[:valid]
        if not valid:  # a rank whose samples have run out computes beside the others
            return 0.0, 0.0
        return float(each.reshape(valid, -1).mean(axis=1).sum(dtype=np.float64)), valid
    counts = batch.targets != ignored
    each = session.trainable.losses(Batch(batch.inputs, np.where(counts, batch.targets, 0)))[:valid]
    return float(each[counts[:valid]].sum(dtype=np.float64)), float(counts[:valid].sum())


def checked_sums(metrics_of: Metrics, outputs: np.ndarray, targets: np.ndarray) -> list[tuple[float, float]]:
    """The sum of each metric over a batch, and its count. Raises RequestError unless both are finite numbers."""
    assert metrics_of.sums
    count = len(targets)
    if metrics_of.ignored is not None:
        outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        counts = targets != metrics_of.ignored
        outputs, targets, count = outputs[counts], targets[counts], int(counts.sum())
    got, names = metrics_of.sums(outputs, targets), metrics_of.names
    listed = got if isinstance(got, tuple | list) else np.asarray(got).reshape(-1).tolist()
    parts = [np.asarray(each, float).reshape(-1) for each in ([listed] if len(names) == 1 else listed)]
    whole = len(parts) == len(names) and all(part.size in (1, 2) for part in parts)
    if not whole or (np.isfinite(outputs).all() and not all(np.isfinite(part).all() for part in parts)):
        expected = f"a finite sum over the batch, or (sum, count), for each of {', '.join(names)}"
        raise RequestError(f"metrics: expected {expected}, got {np.asarray(got, object).tolist()}")
    return [(float(part[0]), float(part[1]) if part.size == 2 else float(count)) for part in parts]


def peak_rss_mib() -> float:
    """The peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rss_mib() -> float | None:
    """The resident memory of this process now, in MiB; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize() / 2**20


class StepClock:
    """Seconds from the end of one step to the end of the next, including input, without the pauses between epochs.

    `cpu_seconds` is the CPU time of all threads of this process in the same steps. `last_ns` is the time
    (`time.perf_counter_ns`) of the last start or end of a step, and `first_at` the wall-clock time (`time.time`) at the
    end of the first step. `since_warmup` returns the CPU use of the machine since step `warmup`.
    """

    def __init__(self, warmup: int = 0, cpu: Callable[[], float] = time.process_time) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.first_at: float | None = None
        self._warmup, self._cpu = warmup, cpu
        self._begun = Snapshot.take(cpu())
        self.resume()

    def resume(self) -> None:
        """Start or restart the clock; the time before this call counts to no step."""
        self.last_ns, self._last_cpu = time.perf_counter_ns(), self._cpu()
        trace_events.note(trace_events.OPEN, self.last_ns)

    def tick(self) -> None:
        """Record the end of a step."""
        now, cpu = time.perf_counter_ns(), self._cpu()
        self.seconds.append((now - self.last_ns) / 1e9)
        self.cpu_seconds.append(cpu - self._last_cpu)
        self.last_ns, self._last_cpu = now, cpu
        trace_events.note(trace_events.END, now)
        if self.first_at is None:
            self.first_at = time.time()
        if len(self.seconds) == self._warmup:
            self._begun = Snapshot.take(cpu)

    def since_warmup(self) -> dict[str, float]:
        """CPU time used since the warm-up, including evaluations, as `Snapshot.since` returns it."""
        return Snapshot.take(self._cpu()).since(self._begun)


@dataclass(frozen=True)
class Measurement:
    """`processes` counts the ranks measured, `samples_per_second` counts all of them together.

    `cpu_s_per_sample` is the CPU time of all ranks; None if no step was measured. `figures` holds the other fields of a
    TrainResult about time and memory.
    """

    processes: int
    samples_per_second: float
    cpu_s_per_sample: float | None
    figures: dict[str, Any]


def gather(adapter: Adapter, recipe: Recipe, mesh: Mesh, clock: StepClock, samples: list[int]) -> Measurement:
    """Gather the measurement of a run; collective, with the same result on every rank.

    `samples` are those of all ranks in each step. When ranks train together, a step takes as long as on the slowest
    rank of that step. Independent processes do not wait for each other, so the slowest process counts, and its
    throughput is multiplied by their number. Under Local SGD ranks wait for each other only when they synchronize, so
    the rank with the longest total time counts.
    """
    steps = len(clock.seconds)
    warmup = max(0, min(recipe.warmup_steps, steps - 1))  # at least one step is measured, however short the run
    mine = {
        "seconds": clock.seconds[warmup:],
        "cpu_s": sum(clock.cpu_seconds[warmup:]),
        "rss_mib": peak_rss_mib(),
        "startup_s": None if clock.first_at is None else clock.first_at - started_at(),
        "used": clock.since_warmup(),
        "machine": machine(),
        "cores": pinned(),
    }
    rows = adapter.allgather_object(mine, mesh.world, name="measured")
    alone = len(rows) // mesh.world.size  # the number of independent training processes
    if alone > 1 or recipe.sync is not None:
        measured = np.array(max((row["seconds"] for row in rows), key=sum))
    else:
        measured = np.max([row["seconds"] for row in rows], axis=0)
    counted = alone * sum(samples[warmup:])
    here = [row["used"] for row in rows if row["machine"] == rows[0]["machine"]]
    load = load_of_others(here)
    figures: dict[str, Any] = {
        "warmup_steps": warmup,
        "measured_steps": len(measured),
        **{f"step_ms_p{q}": 1e3 * float(np.percentile(measured, q)) if len(measured) else 0.0 for q in (50, 90, 99)},
        "step_ms": [round(1e3 * float(second), 2) for second in _thinned(measured)],
        "startup_s": max((row["startup_s"] for row in rows if row["startup_s"] is not None), default=None),
        "peak_rss_mib": max(row["rss_mib"] for row in rows),
        "load": load,
        "noisy": load > NOISY,
        "idle_cores": round((os.cpu_count() or 1) * (1 - load) / len(here), 2),
        "pinned": [row["cores"] for row in rows] if pinned() is not None else None,
    }
    return Measurement(
        processes=len(rows),
        samples_per_second=counted / float(measured.sum()) if len(measured) else 0.0,
        cpu_s_per_sample=sum(row["cpu_s"] for row in rows) / counted if counted else None,
        figures=figures,
    )


def _thinned(steps: np.ndarray) -> np.ndarray:
    if len(steps) <= _MOST_STEPS:
        return steps
    kept: np.ndarray = steps[np.linspace(0, len(steps) - 1, _MOST_STEPS).round().astype(int)]
    return kept


class MetricsFile:
    """`metrics.jsonl`, one JSON object per line. With `path` None (ranks other than 0) nothing is written.

    A file that is removed or replaced while it is written comes back with all its lines. `events` receives the same
    lines for TensorBoard. `notes` are lines for the user. Raises RunError if the file cannot be opened.
    """

    def __init__(self, path: Path | None, events: EventFile | None = None) -> None:
        self._path, self._events = path, events
        self._begun = path is not None and path.exists()
        self._file = _appended(path) if path else None
        self.notes: list[str] = []

    def forget_after(self, progress: Progress, recounted: bool, beat: Callable[[], None] = lambda: None) -> None:
        """Remove the lines that a killed run wrote after the checkpoint, and lines that cannot be read.

        If updates are `recounted`, only lines of complete epochs are kept. `beat` is called from time to time. Raises
        RunError if the file cannot be read or written.
        """
        if self._path is None or self._file is None:
            return
        self._file.close()
        damaged = 0
        try:
            with atomic(self._path) as kept:
                for number, (text, line) in enumerate(scan_metrics(self._path)):
                    if line is None:
                        damaged += text.endswith(b"\n")  # else the run was killed while it wrote the last line
                    elif is_before(line, progress, recounted):
                        kept.write(text.rstrip(b"\n") + b"\n")
                    if number % 10_000 == 0:
                        beat()
        except OSError as error:
            raise RunError(
                f"{self._path}: cannot be read ({error.strerror}); remove it to train on without it"
            ) from error
        self._file = _appended(self._path)
        if damaged:
            self.notes.append(f"{self._path}: {damaged} damaged line(s) are left out")
        if progress.step and not self._begun:
            self.notes.append(f"{self._path}: it was missing; there are no lines of the steps up to {progress.step}")
        if self._events:
            self._events.begin(read_metrics(self._path))

    def write(self, line: MetricLine) -> None:
        """Append one line and flush it. Raises RunError if the disk is full."""
        if self._file is None:
            return
        self.keep()
        try:
            self._file.write(line.model_dump_json(exclude_none=True).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error, "and start again") from error
        if self._events:
            self._events.write(line)

    def keep(self) -> None:
        """Make the file again where it, or its folder, was removed or replaced. Raises RunError if that fails."""
        if self._path is None or self._file is None or _is_open(self._file, self._path):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(self._path) as again:
                self._file.seek(0)
                shutil.copyfileobj(self._file, again)
        except OSError as error:
            raise unwritable(self._path, error, "and start again") from error
        self._file.close()
        self._file = _appended(self._path)
        print(
            f"warning: {self._path}: removed or replaced while the run writes it; made again, with all lines",
            flush=True,
        )


def _is_open(file: BinaryIO, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without blocking: the file in the folder of a resumed run may be a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK, 0o644)


def _appended(path: Path) -> BinaryIO:
    try:
        return open(path, "a+b", opener=_open_nonblocking)
    except OSError as error:
        raise unwritable(path, error, "and start again") from error
