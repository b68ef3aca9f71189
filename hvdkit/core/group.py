"""A rank's place among all ranks, and the groups of ranks that take part in a collective.

Each collective names its group; there is no default.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hvdkit.data import Shard
from hvdkit.errors import RequestError

Ranks = tuple[int, ...]
ProcessSet = Any  # of a framework's Horovod; without one, the ranks themselves
HOST = os.environ.get("HOROVOD_HOSTNAME") or platform.node()  # as the launcher calls it
MOST = "HVDKIT_MOST_A_HOST"  # ranks that a host has in the largest run of a comparison


@dataclass(frozen=True)
class Topology(Shard):
    """Ranks number all processes, local ranks those of one host, cross ranks the hosts with the same local rank.

    `device` is `cpu` or `gpu`. `shared_memory_ranks` are those of this host that exchange tensors on CPUs through
    memory, 0 where it is sockets. Without a `Mesh`, each rank reads a shard of its own.
    """

    cross_rank: int = 0
    cross_size: int = 1
    device: str = "cpu"
    shared_memory_ranks: int = 0

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the only one that writes."""
        return self.rank == 0


@dataclass(frozen=True)
class Group:
    """Ranks of the world, in order; this one is number `index` of them.

    `handle` is the process set of an adapter's Horovod; None: all ranks.
    """

    ranks: Ranks
    index: int
    handle: ProcessSet | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether this is one rank of several: it has no process set."""
        return self.size == 1 and self.handle is not None

    @property
    def root(self) -> int:
        """The rank, counted over the world, that is the first of the group."""
        return self.ranks[0]


def world_of(topology: Topology) -> Group:
    """The group of all ranks."""
    return Group(tuple(range(topology.size)), topology.rank)


class Mesh:
    """All ranks, as a grid along three axes; its groups are made once, when ranks have started.

    `world` has all ranks. Ranks of `data` hold the same parameters and read different samples: collectives over it
    average gradients, losses and statistics. Those of `pipeline` hold different layers, those of `tensor` different
    parts of each layer; both read the same samples. Those of `model` hold one copy of the model together. As in
    Megatron-LM (Narayanan et al. 2021, section 3), neighboring ranks are neighbors on the tensor axis, then on the data
    axis. Of a pipeline, `before` and `after` are this rank and the one before or after it, None where there is none,
    and `ends` are the first and the last rank, None on the others.

    `process_set` gives the handles of the groups that `sets` lists. A group of one rank has its
    ranks in place of a process set, as None means all ranks. Raises RequestError if the world's size is not a multiple
    of `pipeline_size` × `tensor_size`.
    """

    def __init__(
        self,
        topology: Topology,
        pipeline_size: int = 1,
        tensor_size: int = 1,
        process_set: Callable[[Ranks], ProcessSet] = lambda ranks: ranks,
    ) -> None:
        self.topology, self.world = topology, world_of(topology)
        self._process_set = process_set
        axes = _axes(topology.size, pipeline_size, tensor_size)
        self.tensor, self.data, self.pipeline, self.model = (
            self._group(next(ranks for ranks in groups if topology.rank in ranks)) for groups in axes
        )
        stages, index = self.pipeline.ranks, self.pipeline.index
        self.before = self._group(stages[index - 1 : index + 1]) if index > 0 else None
        self.after = self._group(stages[index : index + 2]) if index + 1 < len(stages) else None
        at_an_end = len(stages) > 1 and (self.before is None or self.after is None)
        self.ends = self._group((stages[0], stages[-1])) if at_an_end else None

    def _group(self, ranks: Ranks) -> Group:
        rank, size = self.topology.rank, self.topology.size
        handle = None if len(ranks) == size else self._process_set(ranks) if len(ranks) > 1 else ranks
        return Group(ranks, ranks.index(rank), handle)

    @property
    def shard(self) -> Shard:
        """The part of the data that this rank reads."""
        return Shard(self.data.index, self.data.size, self.topology.local_rank, self.topology.local_size)

    @property
    def stream(self) -> int:
        """The number of this rank's random numbers: those that differ only along the tensor axis draw the same."""
        return self.pipeline.index * self.data.size + self.data.index

    @property
    def is_root(self) -> bool:
        """Whether this is the rank that writes."""
        return self.topology.is_root


def coordinates(rank: int, size: int, pipeline_size: int, tensor_size: int) -> tuple[int, int, int]:
    """The place of a rank of `size` along the data, the pipeline and the tensor axis."""
    stage, within = divmod(rank, size // pipeline_size)
    return within // tensor_size, stage, within % tensor_size


def sets(size: int, pipeline_size: int = 1, tensor_size: int = 1) -> list[Ranks]:
    """The process sets of a mesh of `size` ranks, for all ranks in one order; none if it has a data axis only."""
    axes = _axes(size, pipeline_size, tensor_size)
    groups = [ranks for axis in axes for ranks in axis]
    for stages in axes[2]:
        groups += [*pairwise(stages), (stages[0], stages[-1])] if len(stages) > 1 else []
    return [ranks for ranks in dict.fromkeys(groups) if 1 < len(ranks) < size]


def _axes(size: int, pipeline_size: int, tensor_size: int) -> list[list[Ranks]]:
    """All groups along the tensor, data and pipeline axes, and all copies of the model."""
    parts = pipeline_size * tensor_size
    if size % parts:
        raise RequestError(
            f"-np: expected a multiple of {parts} ranks for {pipeline_size} pipeline stage(s) × "
            f"{tensor_size} tensor part(s), got {size}"
        )
    stage = size // pipeline_size  # ranks of one stage
    tensor = [tuple(range(first, first + tensor_size)) for first in range(0, size, tensor_size)]
    data = [
        tuple(range(begin + part, begin + stage, tensor_size))
        for begin in range(0, size, stage)
        for part in range(tensor_size)
    ]
    pipeline = [tuple(range(first, size, stage)) for first in range(stage)]
    model = [
        tuple(begin + copy * tensor_size + part for begin in range(0, size, stage) for part in range(tensor_size))
        for copy in range(stage // tensor_size)
    ]
    return [tensor, data, pipeline, model]


def threads_per_rank(requested: int | None, local_size: int) -> int:
    """CPU threads: `requested`, else OMP_NUM_THREADS, else the host's cores by its ranks, or by the variable MOST."""
    given, most = (int(text) if text.isdecimal() else 0 for text in map(os.getenv, ("OMP_NUM_THREADS", MOST), ("", "")))
    return requested or given or max(1, len(os.sched_getaffinity(0)) // max(local_size, most))


def wants_gpu(device: str, gpus: int, local_size: int, framework: str) -> bool:
    """Whether this host's ranks compute on GPUs, one per rank, if the framework finds so many `gpus`.

    Raises RequestError if there are too few for `gpu`, or some but too few for `auto`.
    """
    if device == "cpu" or (device == "auto" and not gpus):
        return False
    if gpus < local_size:
        raise RequestError(
            f"device: expected a GPU for each of this host's {local_size} rank(s), {framework} sees {gpus}; "
            "choose device=cpu or fewer ranks a host"
        )
    return True
