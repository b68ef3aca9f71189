"""Dense gradients reduced by Horovod: as one group after backward, or each one as soon as it is computed."""

from __future__ import annotations

import math

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.group import Group
from hvdkit.core.pieces import shape_of
from hvdkit.core.seam import Adapter, Pending
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import GRADIENTS, Strategy
from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Hooks, Joined
from hvdkit.errors import RequestError


def ring_bytes(payload: float, size: int) -> float:
    """Bytes that each of `size` ranks sends in a ring allreduce of `payload` bytes (Patarasuk and Yuan 2009)."""
    return 2 * (size - 1) / size * payload


def on_wire(adapter: Adapter, tensor: Tensor, half: bool) -> tuple[Tensor, str | None]:
    """The tensor to send, with `half` in float16, and the tensor's own dtype if that is different."""
    dtype = adapter.dtype(tensor)
    if not half or dtype not in ("float32", "float64"):
        return tensor, None
    return adapter.cast(tensor, "float16"), dtype


def from_wire(adapter: Adapter, tensor: Tensor, dtype: str | None) -> Tensor:
    """A received tensor in the dtype that `on_wire` returned."""
    return tensor if dtype is None else adapter.cast(tensor, dtype)


class Dense(Strategy):
    """Averages gradients over a group, in their own dtype or, with `half`, in float16, where values beyond 65,504 are
    infinite.
    """

    overlaps = True
    group: Group

    def __init__(
        self, adapter: Adapter, group: Group, half: bool = False, accumulate: int = 1, name: str = GRADIENTS
    ) -> None:
        if not isinstance(group, Group):
            raise RequestError(f"Dense: expected a group such as world_of(topology), got {group!r} (hvdkit.core.group)")
        self._adapter, self.group, self._half, self.name = adapter, group, half, name
        self._joins = not half and group.size > 1 and accumulate == 1  # then what backward returns is sent as it is
        self._joined: Joined | None = None
        self._under_way: dict[str, tuple[Pending, str | None]] = {}  # by gradient: wait, own dtype

    def bind(self, session: Stateful) -> None:
        """Compute the bytes per step from the number of parameters; have gradients in one vector, where possible."""
        super().bind(session)
        parameters = sum(math.prod(shape_of(tensor)) for tensor in self.trainable.parameters.values())
        itemsize = 2 if self._half else np.dtype(self.session.dtype).itemsize
        self._bytes = ring_bytes(parameters * itemsize, self.group.size)
        if self._joins and isinstance(self.trainable, Hooks) and not self.trainable.overlaps:
            self._joined = self.trainable.join_gradients([(list(self.trainable.parameters), parameters)])

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over the group by name; waits for gradients that `begin` has sent."""
        if self.trainable.overlaps:
            return self._awaited(gradients)
        if self._joined is not None and self._joined.holds(gradients):
            self.trainable.stamp((trace_events.SENT,), [])
            for vector in self._joined.vectors:
                self._adapter.start("average", vector, self.group, self.name)()
            self.trainable.stamp((trace_events.RECEIVED,), [])
            return gradients
        sent = {name: on_wire(self._adapter, gradient, self._half) for name, gradient in gradients.items()}
        packed = self.trainable.stamp((trace_events.SENT,), [tensor for tensor, _ in sent.values()])
        several = self.group.size > 1
        means = self._adapter.allreduce(packed, self.group, name=self.name, overwrite=True) if several else packed
        means = self.trainable.stamp((trace_events.RECEIVED,), means)
        return {name: from_wire(self._adapter, mean, sent[name][1]) for name, mean in zip(sent, means, strict=True)}

    def begin(self, name: str, gradient: Tensor) -> bool:
        """Start averaging one gradient, in place."""
        tensor, dtype = on_wire(self._adapter, gradient, self._half)
        self._under_way[name] = self._adapter.start("average", tensor, self.group, f"{self.name}.{name}"), dtype
        return False

    def _awaited(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, gradient in gradients.items():
            if name not in self._under_way:  # unused in this batch, but maybe used on other ranks
                self.begin(name, gradient)
        self.trainable.stamp((trace_events.SENT,), [])
        means = {name: (self._under_way[name][0](), self._under_way[name][1]) for name in gradients}
        self.trainable.stamp((trace_events.RECEIVED,), [])
        self._under_way.clear()
        return {name: from_wire(self._adapter, mean, dtype) for name, (mean, dtype) in means.items()}
