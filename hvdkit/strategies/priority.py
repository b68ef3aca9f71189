"""`order: priority`: gradients in pieces, first layer first, and updates that wait for the next forward pass.

P3 (Jayarajan et al. 2019, MLSys), ByteScheduler (Peng et al. 2019, SOSP). The names of the pieces say how urgent they
are; Horovod sends them in that order (runtimes/patches/32-priority.patch). Pieces are fixed and not fused, so what is
computed does not depend on when gradients come.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.group import Group
from hvdkit.core.order import pieces, units
from hvdkit.core.pieces import PIECE_BYTES, shape_of
from hvdkit.core.seam import Adapter, Pending
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import GRADIENTS, Strategy
from hvdkit.core.tensors import Scalar, Tensor, scalar
from hvdkit.core.trainable import Hooks, Joined, UpdateKernel
from hvdkit.errors import RunError
from hvdkit.strategies.dense import ring_bytes


class Priority(Strategy):
    """Averages gradients over a group: each unit of `core.order.units` as soon as backward has finished it."""

    overlaps = True
    by_layer = True
    group: Group

    def __init__(self, adapter: Adapter, group: Group, name: str = GRADIENTS) -> None:
        self._adapter, self.group, self.name = adapter, group, name
        self._under_way: dict[int, list[Pending]] = {}  # by unit
        self._left: set[int] = set()  # units whose update is still to come
        self._rate: Scalar = 0.0  # of that update, as its bias corrections
        self._corrections: tuple[Scalar, Scalar] = 1.0, 1.0
        self._kernels: dict[int, UpdateKernel | None] = {}  # by unit, where the framework has one

    def bind(self, session: Stateful) -> None:
        """Have the gradients of each unit in one vector, in forward order."""
        super().bind(session)
        trainable = self.trainable
        assert isinstance(trainable, Hooks)  # `adapters/capabilities.py` lists the frameworks that can
        elements = {name: math.prod(tensor.shape) for name, tensor in trainable.parameters.items()}
        names, itemsize = list(elements), np.dtype(session.dtype).itemsize
        sizes = [itemsize * elements[name] for name in names]
        self._units = [[names[index] for index in unit] for unit in units(sizes, PIECE_BYTES)]
        self._unit_of = {name: number for number, unit in enumerate(self._units) for name in unit}
        totals = [sum(elements[name] for name in unit) for unit in self._units]
        self._joined: Joined = trainable.join_gradients(list(zip(self._units, totals, strict=True)))
        self._pieces = [
            _cut(vector, total, pieces(itemsize * total, PIECE_BYTES))
            for vector, total in zip(self._joined.vectors, totals, strict=True)
        ]
        self._missing = [set(unit) for unit in self._units]
        self._bytes = ring_bytes(sum(sizes), self.group.size)
        trainable.on_use(self._use)

    @property
    def bytes_per_step(self) -> float:
        """Bytes per update in a ring (`ring_bytes`)."""
        return self._bytes

    def begin(self, name: str, gradient: Tensor) -> bool:
        """Take a gradient, and send its unit if that is whole."""
        unit, part = self._unit_of[name], self._joined.parts[name]
        if name not in self._missing[unit]:
            raise RunError(f"order: priority: backward computed the gradient of {name} twice; expected once a step")
        if gradient is not part:
            self._adapter.assign(part, gradient)
        self._missing[unit].discard(name)
        if not self._missing[unit]:
            self._under_way[unit] = [
                self._adapter.start("average", piece, self.group, f"{self.name}.{unit}.{number}.priority.{unit}")
                for number, piece in enumerate(self._pieces[unit])
            ]
        return False

    def _send_rest(self, gradients: dict[str, Tensor]) -> None:
        """Send what backward has not reported: parameters that are unused in this batch, but maybe not elsewhere."""
        for name in reversed(self._unit_of):
            if name in self._missing[self._unit_of[name]]:
                self.begin(name, gradients[name])
        self._missing = [set(unit) for unit in self._units]

    def defer(self, gradients: dict[str, Tensor]) -> None:
        """Leave each unit's update to the next forward pass of one of its layers."""
        self._send_rest(gradients)
        update, self._left = self.session.update, set(range(len(self._units)))
        self._rate, self._corrections = update.rate.get(), update.count_step()
        self.trainable.stamp((trace_events.SENT, trace_events.RECEIVED, trace_events.REDUCED), [])

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over the group, at once."""
        self._send_rest(gradients)
        for unit in range(len(self._units)):
            self._wait(unit)
        return {name: self._joined.parts[name] for name in gradients}

    @contextmanager
    def peek(self) -> Iterator[None]:
        """A context in which no update is left."""
        self.complete()
        yield

    def complete(self) -> None:
        """Make the updates that are left."""
        if self._left:
            self._use(self._unit_of)

    def _use(self, names: Collection[str]) -> None:
        if not self._left:
            return
        for unit in sorted({self._unit_of[name] for name in names} & self._left):
            self._left.discard(unit)
            self._wait(unit)
            self._update(unit)

    def _update(self, unit: int) -> None:
        """Update a unit's weights, as `core.update.Update` does all of them."""
        update, names, ops = self.session.update, self._units[unit], self._adapter
        weights, gradients = ([of[name] for name in names] for of in (self.trainable.parameters, self._joined.parts))
        slots, shapes = [update.slots[name] for name in names], [shape_of(weight) for weight in weights]
        if unit not in self._kernels:
            like = [one[0] for one in slots] if update.kernel is not None else []
            self._kernels[unit] = self.trainable.update_kernel(update.settings, shapes, like) if like else None
        kernel = self._kernels[unit]
        if kernel is not None:
            kernel(weights, gradients, slots, self._rate, self._corrections)
            return
        rate, first, second = (scalar(ops, each, gradients[0]) for each in (self._rate, *self._corrections))
        updated = update.rule.updates(shapes, weights, gradients, slots, rate, (first, second), self._norms)
        for weight, old, (new, values) in zip(weights, slots, updated, strict=True):
            for tensor, value in zip((weight, *old), (new, *values), strict=True):
                ops.assign(tensor, value)

    def _norms(self, *kinds: list[Tensor]) -> list[list[Tensor]]:
        return [[self._adapter.norm(tensor) for tensor in kind] for kind in kinds]

    def _wait(self, unit: int) -> None:
        for pending in self._under_way.pop(unit):
            pending()


def _cut(vector: Tensor, size: int, count: int) -> list[Tensor]:
    """The first `size` elements of a vector as `count` views, as equal as can be."""
    bounds = [size * number // count for number in range(count + 1)]
    return [vector[start:stop] for start, stop in pairwise(bounds)]
