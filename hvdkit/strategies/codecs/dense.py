"""No compression, or a cast to another dtype."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.strategies.codecs.base import Call, State, Tensor


@dataclass(frozen=True)
class Dense:
    """The mean of all values, sent and summed in dtype `wire` (NumPy's name); None for the vector's own dtype."""

    wire: str | None = None

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        own = call.dtype(vector)
        return call.cast(call.transport.mean(call.cast(vector, self.wire or own)), own), state
