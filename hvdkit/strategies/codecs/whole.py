"""No compression, or float16 on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.core.tensors import Tensor
from hvdkit.strategies.codecs.base import Call, State
from hvdkit.strategies.dense import from_wire, on_wire


@dataclass(frozen=True)
class DenseCodec:
    """The mean of all values, sent and summed in their own dtype or, with `half`, in float16."""

    half: bool = False

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        adapter = call.transport.adapter
        sent, dtype = on_wire(adapter, vector, self.half)
        return from_wire(adapter, call.transport.mean(sent), dtype), state
