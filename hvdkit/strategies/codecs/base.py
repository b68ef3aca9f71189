"""Types and functions that the compression methods share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvdkit.core.tensors import Tensor, Tensors
from hvdkit.strategies.transports import Ring

# A method's state between updates: vectors of the gradients' length and, by parameter, matrices. Tensors are replaced,
# never changed in place, so a shallow copy of the mapping is a copy of the state.
State = dict[str, Tensor]
RESIDUAL, MOMENTUM, SENT, QUERY = "residual", "momentum", "sent", "query"
OWN = (RESIDUAL, MOMENTUM)  # slots that differ between ranks; the others are equal on all ranks


@dataclass(frozen=True)
class Call:
    """The context of one reduction. `shapes` maps the gradients' names to their shapes, in the order of the vector.

    `step` counts reductions from 0, `epoch` epochs; `seed` is the recipe's.
    """

    transport: Ring
    shapes: Mapping[str, tuple[int, ...]]
    step: int
    epoch: int
    seed: int

    @property
    def ops(self) -> Tensors:
        """The framework's tensor operations."""
        return self.transport.adapter

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.transport.data.size

    def random_seed(self, part: int) -> int:
        """A seed that differs between runs, ranks, reductions and parts of a reduction."""
        numbers = np.random.SeedSequence((self.seed, self.transport.data.index, self.step, part))
        return int(numbers.generate_state(1, np.uint64)[0]) >> 1

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of zeros."""
        return self.ops.from_numpy(np.zeros(shape, dtype))

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype."""
        return tensor if self.ops.dtype(tensor) == dtype else self.ops.cast(tensor, dtype)


class Method(Protocol):
    """A compression method."""

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """The mean over all ranks of `vector`, exact or approximate, and the new state; collective."""


def rows_of(call: Call, vector: Tensor, longest: int, multiple: int = 1) -> Tensor:
    """The vector as a matrix whose rows are buckets of equal length, at most `longest`; the end is padded with zeros.

    The number of rows is a multiple of `multiple`.
    """
    length = int(vector.shape[0])
    rows = -(-max(1, length) // longest)
    rows = -(-rows // multiple) * multiple
    columns = -(-length // rows)
    if rows * columns > length:
        vector = call.ops.concat([vector, call.zeros((rows * columns - length,), call.ops.dtype(vector))])
    return call.ops.reshape(vector, (rows, columns))


def corrected(vector: Tensor, state: State) -> Tensor:
    """The vector plus the residual of earlier updates (error feedback)."""
    return vector + state[RESIDUAL] if RESIDUAL in state else vector
