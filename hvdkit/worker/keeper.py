"""What a run keeps of its state: checkpoints on the disk, and commits of an elastic run in memory."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

import hvdkit
from hvdkit.checkpoint.snapshots import Checkpoint, CheckpointRecord
from hvdkit.core import metrics
from hvdkit.core.session import Session
from hvdkit.core.state import is_averaged
from hvdkit.core.step_plan import Progress
from hvdkit.errors import RunError
from hvdkit.heartbeat import DISK, Heartbeat
from hvdkit.strategies.dense import Dense
from hvdkit.worker import startup
from hvdkit.worker.setup import Setup, seed_rank

if TYPE_CHECKING:
    from hvdkit.checkpoint.elastic import Commits
    from hvdkit.checkpoint.writing import Checkpoints

_PAUSES_S = (1.0, 4.0)  # before the last checkpoint is tried again
T = TypeVar("T")


@dataclass(frozen=True)
class Keeper:
    """Saves a run's state: on disk, on the rank that has `checkpoints`, and in memory if there are `commits`."""

    setup: Setup
    session: Session
    checkpoints: Checkpoints | None
    commits: Commits | None
    last_own: dict[str, np.ndarray] = field(default_factory=dict)  # of the last checkpoint

    def keep(self, progress: Progress, own: Mapping[str, np.ndarray]) -> None:
        """Start writing a checkpoint, with further tensors that all ranks have; collective."""
        writes, shared = self.checkpoints is not None, bool(self.session.update.partition.groups)
        if writes or shared or not isinstance(self.session.strategy, Dense):  # other strategies' states are collective
            rest = {**self.session.strategy.state(), **own}
            arrays = chain(self._begun(self.session.state_arrays(keep=writes)), rest.items())
            if self.checkpoints:
                layout = dict(self._begun(self.session.state_layout().items()))
                layout |= {name: (str(array.dtype), array.shape) for name, array in rest.items()}
                # Where ranks share it, none has more than its own shares and a bucket in memory.
                write = self.checkpoints.write_each if shared else self.checkpoints.write
                if not shared:  # what steps have freed is in pieces in which the files' bytes find no place
                    startup.return_freed_memory()
                write(_record(self.setup, progress), layout, arrays)
            else:
                deque(arrays, maxlen=0)  # its part in the collectives
        self.last_own.clear()
        self.last_own.update(own)
        # A run resumed from here then draws the same random numbers as one that was never stopped.
        seed_rank(self.setup.adapter, self.setup.recipe, self.setup.mesh.stream, progress.step)

    def _begun(self, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """What a checkpoint has of a state: no average before the first weights are in it."""
        average = self.session.update.weight_average
        return (item for item in named if average is None or average.started or not is_averaged(item[0]))

    def end(self, progress: Progress, heartbeat: Heartbeat) -> None:
        """Wait until the last checkpoint is on the disk; one that cannot be written is tried again. Collective.

        Raises RunError on the rank that writes if it still cannot be.
        """
        for pause_s in (*_PAUSES_S, None):
            heartbeat.beat("checkpoint" if self.setup.mesh.is_root else DISK, progress.step)
            if self.checkpoints:
                self.checkpoints.wait()
            missing, world = self.checkpoints.missing if self.checkpoints else None, self.setup.mesh.world
            if not metrics.reduce_sums(self.setup.adapter, world, missing=float(missing is not None))["missing"]:
                return
            if pause_s is not None:
                time.sleep(pause_s)
                if self.checkpoints:
                    self.checkpoints.make_room()
                self.keep(progress, dict(self.last_own))
        if missing is not None:
            raise RunError(missing)

    def commit(self, progress: Progress) -> None:
        """Keep the state in memory; collective. Raises HostsChanged if hosts have been added or removed."""
        if self.commits:
            rest, record = self.session.strategy.state(), _record(self.setup, progress)
            self.commits.take(Checkpoint(record, self.session.state() | rest), self.setup.mesh.world)


def _record(setup: Setup, progress: Progress) -> CheckpointRecord:
    adapter, script = setup.adapter, None
    if setup.task.own:
        from hvdkit.tasks.own import script_sha256

        script = script_sha256(setup.recipe)
    return CheckpointRecord(
        progress=copy.copy(progress),
        np=setup.mesh.world.size,
        framework=adapter.NAME,
        framework_version=adapter.versions()["framework"],
        hvdkit_version=hvdkit.__version__,
        recipe=setup.recipe.model_dump(mode="json"),
        preprocessing=setup.dataset.preprocessing,
        text_sha256=setup.dataset.text_sha256,
        data=setup.dataset.fingerprints,
        script_sha256=script,
    )
