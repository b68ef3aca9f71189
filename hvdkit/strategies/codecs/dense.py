"""All values, in their own dtype or in another."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.strategies.codecs.base import Call, State, Tensor


@dataclass(frozen=True)
class Dense:
    """The mean of all values, summed up on the way in `wire` (by NumPy's name), None for their own dtype."""

    wire: str | None = None

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        own = call.dtype(vector)
        return call.cast(call.transport.mean(call.cast(vector, self.wire or own)), own), state
