"""What methods of compression share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdkit.core.tensors import Tensors
from hvdkit.strategies.transports import Ring

Tensor = Any
# What a method keeps from one update to the next: vectors as long as the gradients' and, by parameter, matrices. New
# tensors take the place of old ones, which are never changed: a copy of the mapping is a copy of the state.
State = dict[str, Tensor]
RESIDUAL, MOMENTUM, SENT, QUERY = "residual", "momentum", "sent", "query"
OWN = (RESIDUAL, MOMENTUM)  # each rank has its own of these; the others are equal on all


@dataclass(frozen=True)
class Call:
    """What surrounds one reduction. `shapes` are the gradients' by name, in the order in which the vector has them.

    `step` counts reductions from 0, `epoch` epochs; `seed` is the recipe's.
    """

    transport: Ring
    shapes: Mapping[str, tuple[int, ...]]
    step: int
    epoch: int
    seed: int

    @property
    def ops(self) -> Tensors:
        """The framework's operations."""
        return self.transport.adapter.tensors

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self.transport.topology.size

    def random_seed(self, part: int) -> int:
        """A seed of its own for each run, rank, reduction and part of it."""
        numbers = np.random.SeedSequence((self.seed, self.transport.topology.rank, self.step, part))
        return int(numbers.generate_state(1, np.uint64)[0]) >> 1

    def constant(self, array: np.ndarray) -> Tensor:
        """An array as a tensor."""
        return self.transport.adapter.from_numpy(array)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of zeros."""
        return self.constant(np.zeros(shape, dtype))

    def dtype(self, tensor: Tensor) -> str:
        """NumPy's name of the tensor's dtype."""
        return self.transport.adapter.dtype(tensor)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype."""
        return tensor if self.dtype(tensor) == dtype else self.transport.adapter.cast(tensor, dtype)


class Method(Protocol):
    """A way to make a mean."""

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """The mean over all ranks of `vector`, or what stands for it, and the new state; collective."""


def rows_of(call: Call, vector: Tensor, longest: int, multiple: int = 1) -> Tensor:
    """The vector as a matrix whose rows are buckets of nearly equal length, at most `longest`; zeros fill the last.

    There are a multiple of `multiple` rows.
    """
    length = int(vector.shape[0])
    rows = -(-max(1, length) // longest)
    rows = -(-rows // multiple) * multiple
    columns = -(-length // rows)
    if rows * columns > length:
        vector = call.ops.concat([vector, call.zeros((rows * columns - length,), call.dtype(vector))])
    return call.ops.reshape(vector, (rows, columns))


def corrected(vector: Tensor, state: State) -> Tensor:
    """The vector and what is left of those before it (error feedback)."""
    return vector + state[RESIDUAL] if RESIDUAL in state else vector
