"""The ranks of a run as a grid, which says what part of the data a rank reads and which ranks average gradients."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.core.topology import Topology
from hvdkit.data import Shard
from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one along one axis only, in order; this one is number `index` of them."""

    index: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """All ranks, `world`, along three axes.

    Ranks along the data axis hold the same parameters and read different samples; collectives over it average
    gradients, losses and statistics. Those along the pipeline axis hold different layers, those along the tensor axis
    different parts of each layer; both read the same samples. So far recipes use the data axis only. As in Megatron-LM
    (Narayanan et al. 2021, section 3), neighboring ranks are neighbors on the tensor axis, then on the data axis.
    Raises RequestError if the world's size is not a multiple of `pipeline_size` × `tensor_size`.
    """

    world: Topology
    pipeline_size: int = 1
    tensor_size: int = 1

    def __post_init__(self) -> None:
        parts = self.pipeline_size * self.tensor_size
        if self.world.size % parts:
            raise RequestError(
                f"-np: expected a multiple of {parts} ranks for {self.pipeline_size} pipeline stage(s) × "
                f"{self.tensor_size} tensor part(s), got {self.world.size}"
            )

    @property
    def data(self) -> Axis:
        """The ranks that hold the same parameters."""
        return self._axis(self.tensor_size, self.world.size // (self.pipeline_size * self.tensor_size))

    @property
    def pipeline(self) -> Axis:
        """The ranks that hold the other stages of this rank's model."""
        return self._axis(self.world.size // self.pipeline_size, self.pipeline_size)

    @property
    def tensor(self) -> Axis:
        """The ranks that hold the other parts of this rank's layers."""
        return self._axis(1, self.tensor_size)

    @property
    def shard(self) -> Shard:
        """The part of the data that this rank reads."""
        return Shard(self.data.index, self.data.size, self.world.local_rank, self.world.local_size)

    @property
    def is_root(self) -> bool:
        """Whether this is the rank that writes."""
        return self.world.is_root

    def _axis(self, stride: int, size: int) -> Axis:
        index = self.world.rank // stride % size
        first = self.world.rank - index * stride
        return Axis(index, tuple(range(first, first + size * stride, stride)))
