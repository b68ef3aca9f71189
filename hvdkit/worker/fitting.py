"""`batch_size: auto`: the largest batch that fits, tried before training by a process beside each rank.

The process trains two updates with each batch that its rank asks for, and tells how much memory it has had by then. It
is alone, without Horovod, so what it cannot allocate, or the kernel ends it for, ends no rank. The rank asks for larger
batches until one does not fit, or would not by what the last two took. All ranks take the smallest of their batches.

A rank then needs what it has now, what the process has come to have since it was as far, and a buffer for gradients.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdkit.core.loop import Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.step_plan import StepPlan
from hvdkit.data.dataset import BatchedSplit, StreamedSplit
from hvdkit.errors import RequestError
from hvdkit.heartbeat import Heartbeat, say
from hvdkit.recipe.data import MOST_FOUND
from hvdkit.recipe.schema import Recipe
from hvdkit.worker.memory_limits import MemoryUse, field, limits, now
from hvdkit.worker.out_of_memory import OUT_OF_MEMORY
from hvdkit.worker.setup import RankScript, Setup, start

OPTION = "--try-batches"
_MARK = b"hvdkit.batch "  # before what the process tells, as others print too
_STEPS = 2  # updates with a batch: the second has the optimizer's slots beside its gradients
_BEAT_S, _LONGEST_S = 1.0, 600.0  # between two reports of a rank that waits, and the most for one batch
_LAUNCHERS = ("HOROVOD_", "HVDKIT_", "OMPI_", "PMI", "SLURM_")  # variables by which the process would be a rank
_EXPECTED = "batch_size: expected a number"


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits on a rank, 0 for none, with the memory that it needs of `limit`, in bytes."""

    batch: int
    needed: int
    limit: int
    rank: int
    host: str
    fault: str = ""


def found(setup: Setup, heartbeat: Heartbeat, checkpoints: Path | None) -> Recipe:
    """The recipe with the largest batch that fits on all ranks; collective.

    A run that is resumed has that of the newest of its `checkpoints`. Raises RequestError, the same on all ranks, where
    none fits, or the process fails for another reason.
    """
    recipe, mesh, adapter = setup.recipe, setup.mesh, setup.adapter
    if isinstance(setup.dataset.train, BatchedSplit | StreamedSplit):
        raise RequestError(f"{_EXPECTED}, as the script's loader makes the batches, got auto")
    former: Recipe | None = None
    if checkpoints is not None and mesh.is_root:
        from hvdkit.checkpoint.resume import as_found, last_record

        if record := last_record(checkpoints):
            former = as_found(recipe, record.recipe)
    former = adapter.allgather_object(former, mesh.world, name="batch_size.former")[0]
    if former is not None:
        if mesh.is_root:
            say(f"batch_size: {former.batch_size}, that of the newest checkpoint")
        return former
    every = adapter.allgather_object(_largest(setup, heartbeat), mesh.world, name="batch_size")
    least = min(every, key=lambda of_rank: (of_rank.batch, -of_rank.needed))
    if not least.batch:
        raise RequestError(f"batch_size: rank {least.rank} on {least.host}: {least.fault}")
    times = _most(recipe) // least.batch if recipe.accumulate_rest else 1
    chosen = recipe.model_copy(update={"batch_size": least.batch, "accumulate": recipe.accumulate * times} | _KNOWN)
    if mesh.is_root:
        say(_line(setup, chosen, least))
    return chosen


_KNOWN = {"max_batch_size": None, "accumulate_rest": False}  # of a recipe whose batch is known


def _most(recipe: Recipe) -> int:
    return recipe.max_batch_size or MOST_FOUND


def sizes(most: int, samples: int, by_halves: bool) -> list[int]:
    """The batches that are tried, the smallest first: powers of two up to `most`, and that itself; or, `by_halves`,
    only `most` and what it is halved to. None has more than `samples`.
    """
    if by_halves:
        halves = [most >> n for n in range(most.bit_length()) if most % (1 << n) == 0]
        return sorted(size for size in halves if size <= samples)
    most = min(most, samples)
    return sorted({*(1 << n for n in range(most.bit_length()) if 1 << n <= most), *([most] if most else [])})


def _line(setup: Setup, chosen: Recipe, least: LargestBatch) -> str:
    """What was chosen, and why."""
    plan = StepPlan(chosen, len(setup.dataset.train), setup.mesh.data.size)
    mib = f"{least.needed / 2**20:,.0f} of {least.limit / 2**20:,.0f} MiB"
    bounds = {_most(setup.recipe): "max_batch_size", plan.samples // plan.size: "all samples of a rank"}
    why = bounds.get(chosen.batch_size, f"the largest that fits (rank {least.rank}: {mib})")
    rate, reference = plan.rate.peak, chosen.optimizer.learning_rate
    scaled = f"learning rate {rate:g}" + (f", scaled from {reference:g}" if rate != reference else "")
    lines = [f"batch_size: {chosen.batch_size}, {why}", f"accumulate {chosen.accumulate}", scaled, least.fault]
    return "; ".join(filter(None, lines))


def _largest(setup: Setup, heartbeat: Heartbeat) -> LargestBatch:
    """The largest batch that fits on this rank."""
    topology, recipe = setup.mesh.topology, setup.recipe
    samples = len(setup.dataset.train) // setup.mesh.data.size
    tried = sizes(_most(recipe), samples, recipe.accumulate_rest)
    heartbeat.beat("starting a process that tries batches")
    own, limit = now(), limits(topology.local_size, topology.local_rank, topology.device == "gpu")
    best, (needed, bound), points = 0, _tightest(MemoryUse(0, 0), limit), list[tuple[int, MemoryUse]]()
    with _Beside(recipe, topology.local_rank, heartbeat) as process:
        base = MemoryUse(*(process.answer() or {"memory": (0, 0)})["memory"])  # without an answer it has ended
        for size in tried:
            if len(points) > 1 and not _fits(_foreseen(points, size), limit):
                break
            heartbeat.beat(f"trying a batch of {size}")
            answer = process.ask(size)
            if answer is None:
                break
            spare = answer["gradients"] if setup.mesh.world.size > 1 else 0
            before = zip(own, answer["memory"], base, strict=True)
            needs = MemoryUse(*(mine + after - at_first + spare for mine, after, at_first in before))
            if not _fits(needs, limit):
                break
            best, (needed, bound) = size, _tightest(needs, limit)
            points.append((size, needs))
        fault = process.fault()
    if not best and not fault:
        smallest = tried[0] if tried else 1
        fault = f"a batch of {smallest} does not fit into {bound / 2**20:,.0f} MiB; see `hvdkit plan`"
    return LargestBatch(best, needed, bound, topology.rank, platform.node(), fault)


def _fits(needs: MemoryUse, limit: MemoryUse) -> bool:
    needed, bound = _tightest(needs, limit)
    return needed <= bound


def _tightest(needs: MemoryUse, limit: MemoryUse) -> tuple[int, int]:
    """Of the kinds of memory that have a limit, what is needed of that which is filled most, and its limit."""
    kinds = [(need, most) for need, most in zip(needs, limit, strict=True) if most]
    return max(kinds, key=lambda kind: (kind[0] / kind[1], -kind[1]))


def _foreseen(points: list[tuple[int, MemoryUse]], size: int) -> MemoryUse:
    """The memory of a batch by the line through the last two."""
    (small, fewer), (large, more) = points[-2:]
    far = (size - large) / (large - small)
    return MemoryUse(*(round(after + (after - before) * far) for before, after in zip(fewer, more, strict=True)))


class _Beside:
    """The process beside a rank, on the same device."""

    def __init__(self, recipe: Recipe, local_rank: int, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        words, given = list[str](), iter(sys.orig_argv[1:])
        for word in given:
            if word == "--out":
                next(given, None)
            elif word != "--resume" and not word.startswith("--out="):
                words.append(word)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        if recipe.device != "cpu":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            mine = visible[local_rank % len(visible)] if visible != [""] else str(local_rank)
            environment["CUDA_VISIBLE_DEVICES"] = mine
        self._ended = self._late = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        command = [sys.executable, *words, OPTION]
        ends = subprocess.PIPE, subprocess.PIPE, self._errors
        self._process = subprocess.Popen(command, 0, None, *ends, env=environment)  # unbuffered, for `select`
        with suppress(OSError):  # where memory lacks, the kernel ends this process first
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")

    def __enter__(self) -> _Beside:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def ask(self, size: int) -> dict[str, Any] | None:
        """Its highest memory after training with a batch, and the bytes of all gradients; None if it has ended."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{size}\n".encode())
        return self.answer()

    def answer(self) -> dict[str, Any] | None:
        """What it tells next. The rank reports that it waits, as that is no hang."""
        assert self._process.stdout
        until = time.monotonic() + _LONGEST_S
        while not self._ended and not self._late:
            self._heartbeat.beat(self._heartbeat.phase)
            if select.select([self._process.stdout], [], [], _BEAT_S)[0]:
                line = self._process.stdout.readline()
                if line.startswith(_MARK):
                    told: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                    return told
                self._ended = not line
            self._late = time.monotonic() > until
        return None

    def fault(self) -> str:
        """Why it has ended by itself, unless memory was what it lacked; empty else."""
        if not self._ended:
            return f"a batch took longer than {_LONGEST_S:.0f} s" if self._late else ""
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        if status == -signal.SIGKILL or any(OUT_OF_MEMORY.search(line) for line in lines):
            return ""
        return f"a process that tries batches ended with status {status}: {(lines or ['it said nothing'])[-1]}"


def try_batches(adapter: Adapter, script: RankScript, recipe: Recipe) -> None:
    """Train with the batches that standard input names, a line each, and tell what they take."""
    setup = start(adapter, script, recipe)
    _tell(now(), 0)
    session = setup.session(recipe, setup.strategy(recipe))
    gradients = session.state_bytes()["parameters"]
    for line in sys.stdin:
        _train(setup, session, int(line))
        status = Path("/proc/self/status")
        device = 0
        if setup.mesh.topology.device == "gpu":
            peak = adapter.observer(session.trainable).device()[1]
            device = round((peak or 0) * 2**20)
        _tell(MemoryUse(field(status, "VmHWM"), field(status, "VmPeak"), device), gradients)


def _train(setup: Setup, session: Session, size: int) -> None:
    times = 2 if setup.recipe.accumulate > 1 or setup.recipe.accumulate_rest else 1
    samples = len(setup.dataset.train)
    times = min(times, max(1, samples // size))
    recipe = setup.recipe.model_copy(
        update={"batch_size": size, "accumulate": times, "steps": _STEPS, "epochs": _STEPS} | _KNOWN
    )
    Loop(session, setup.task, recipe, setup.mesh, setup.dataset).train()


def _tell(memory: MemoryUse, gradients: int) -> None:
    print(_MARK.decode() + json.dumps({"memory": memory, "gradients": gradients}), flush=True)
