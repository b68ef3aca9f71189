"""`order: priority`: gradients in pieces, first layer first, and updates that wait for the next forward pass.

P3 (Jayarajan et al. 2019, MLSys), ByteScheduler (Peng et al. 2019, SOSP). The names of the pieces say how urgent they
are; Horovod sends them in that order (runtimes/patches/32-priority.patch). Pieces are fixed and not fused, so what is
computed does not depend on when gradients come.

A framework that executes at once reports gradients during backward, and what forward is about to use (`Hooks`). Where
operations are `queued`, all are queued after backward: each waits for what it reads, and so does the next forward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
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
from hvdkit.strategies.dense import from_wire, on_wire, ring_bytes


class Priority(Strategy):
    """Averages gradients over a group, with `half` in float16: each unit of `core.order.units` as soon as backward has
    finished it.
    """

    overlaps = True
    by_layer = True
    group: Group

    def __init__(self, adapter: Adapter, group: Group, half: bool = False, name: str = GRADIENTS) -> None:
        self._adapter, self.group, self._half, self.name = adapter, group, half, name
        self._under_way: dict[int, tuple[list[Pending], str | None]] = {}  # by unit: waits, own dtype
        self._left: set[int] = set()  # units whose update is still to come
        self._rate: Scalar = 0.0  # of that update, as its bias corrections
        self._corrections: tuple[Scalar, Scalar] = 1.0, 1.0
        self._kernels: dict[int, UpdateKernel | None] = {}  # by unit, where the framework has one
        self._joined: Joined | None = None

    def bind(self, session: Stateful) -> None:
        """Divide the parameters into units; have the gradients of each in one vector, where backward reports them."""
        super().bind(session)
        trainable = self.trainable
        elements = {name: math.prod(tensor.shape) for name, tensor in trainable.parameters.items()}
        names, itemsize = list(elements), np.dtype(session.dtype).itemsize
        sizes = [itemsize * elements[name] for name in names]
        self._units = [[names[index] for index in unit] for unit in units(sizes, PIECE_BYTES)]
        self._unit_of = {name: number for number, unit in enumerate(self._units) for name in unit}
        totals = [sum(elements[name] for name in unit) for unit in self._units]
        self._cuts = [_cuts(total, pieces(itemsize * total, PIECE_BYTES)) for total in totals]
        self._missing = [set(unit) for unit in self._units]
        self._bytes = ring_bytes(sum(sizes) * (2 / itemsize if self._half else 1), self.group.size)
        if not trainable.queued:
            assert isinstance(trainable, Hooks)  # `adapters/capabilities.py` lists the frameworks that can
            self._joined = trainable.join_gradients(list(zip(self._units, totals, strict=True)))
            trainable.on_use(self._use)

    def begin(self, name: str, gradient: Tensor) -> bool:
        """Take a gradient, and send its unit if that is whole."""
        assert self._joined is not None
        unit, part = self._unit_of[name], self._joined.parts[name]
        if name not in self._missing[unit]:
            raise RunError(f"order: priority: backward computed the gradient of {name} twice; expected once a step")
        if gradient is not part:
            self._adapter.assign(part, gradient)
        self._missing[unit].discard(name)
        if not self._missing[unit]:
            self._send(unit, self._joined.vectors[unit])
        return False

    def _send(self, unit: int, vector: Tensor) -> None:
        """Start averaging a unit's gradients: in place, or where operations are queued into new tensors.

        A queued operation waits for all writes into its tensor, so pieces of one vector would go one after the other.
        """
        tensor, dtype = on_wire(self._adapter, vector, self._half)
        waits = []
        for number, (start, stop) in enumerate(self._cuts[unit]):
            piece, name = tensor[start:stop], f"{self.name}.{unit}.{number}.priority.{unit}"
            if self._joined is None:
                waits.append(Pending(*self._adapter.allreduce([piece], self.group, "average", name)))
            else:
                waits.append(self._adapter.start("average", piece, self.group, name))
        self._under_way[unit] = waits, dtype

    def _send_rest(self, gradients: dict[str, Tensor]) -> None:
        """Send what backward has not reported: all where operations are queued, else parameters that are unused in
        this batch, but maybe not elsewhere."""
        if self._joined is None:
            own = [self._adapter.joined([gradients[name] for name in unit]) for unit in self._units]
            for unit, vector in reversed(list(enumerate(own))):
                self._send(unit, vector)
            for vector in own:
                self._adapter.to_numpy(vector[:1])  # wait: a step ends with backward
            return
        for name in reversed(self._unit_of):
            if name in self._missing[self._unit_of[name]]:
                self.begin(name, gradients[name])
        self._missing = [set(unit) for unit in self._units]

    def defer(self, gradients: dict[str, Tensor]) -> None:
        """Leave each unit's update to the next forward pass of one of its layers, or queue it."""
        self._send_rest(gradients)
        update, self._left = self.session.update, set(range(len(self._units)))
        self._rate, self._corrections = update.rate.get(), update.count_step()
        if self._joined is None:
            self._use(self._unit_of)
        self.trainable.stamp((trace_events.SENT, trace_events.RECEIVED, trace_events.REDUCED), [])

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over the group, at once."""
        self._send_rest(gradients)
        means = {name: mean for unit in range(len(self._units)) for name, mean in self._means(unit).items()}
        return {name: means[name] for name in gradients}

    @contextmanager
    def peek(self) -> Iterator[None]:
        """A context in which no update is left."""
        self.complete()
        yield

    def complete(self) -> None:
        """Make the updates that are left, or wait for those that are queued."""
        if self._left:
            self._use(self._unit_of)
        if self._joined is None:
            self._adapter.synchronize()

    def _use(self, names: Collection[str]) -> None:
        if not self._left:
            return
        for unit in sorted({self._unit_of[name] for name in names} & self._left):
            self._left.discard(unit)
            self._update(unit, self._means(unit))

    def _update(self, unit: int, means: Mapping[str, Tensor]) -> None:
        """Update a unit's weights, as `core.update.Update` does all of them."""
        update, names, ops = self.session.update, self._units[unit], self._adapter
        weights, gradients = ([of[name] for name in names] for of in (self.trainable.parameters, means))
        slots, shapes = [update.slots[name] for name in names], [shape_of(weight) for weight in weights]
        if unit not in self._kernels:
            like = [first[0] for first in slots] if update.kernel is not None else []
            self._kernels[unit] = self.trainable.update_kernel(update.settings, shapes, like) if like else None
        kernel = self._kernels[unit]
        if kernel is not None:
            kernel(weights, gradients, slots, self._rate, self._corrections)
            return
        rate, first, second = (scalar(ops, number, gradients[0]) for number in (self._rate, *self._corrections))
        updated = update.rule.updates(shapes, weights, gradients, slots, rate, (first, second), self._norms)
        for weight, old, (new, values) in zip(weights, slots, updated, strict=True):
            for tensor, value in zip((weight, *old), (new, *values), strict=True):
                ops.assign(tensor, value)

    def _norms(self, *kinds: list[Tensor]) -> list[list[Tensor]]:
        return [[self._adapter.norm(tensor) for tensor in kind] for kind in kinds]

    def _means(self, unit: int) -> Mapping[str, Tensor]:
        """A unit's averaged gradients; waits for them."""
        waits, dtype = self._under_way.pop(unit)
        means, names = [wait() for wait in waits], self._units[unit]
        if self._joined is not None and dtype is None:
            return {name: self._joined.parts[name] for name in names}
        shapes = [shape_of(self.trainable.parameters[name]) for name in names]
        vector = from_wire(self._adapter, self._adapter.joined(means), dtype)
        return dict(zip(names, self._adapter.part(vector, shapes), strict=True))


def _cuts(size: int, count: int) -> list[tuple[int, int]]:
    """Where `count` pieces of `size` elements begin and end, as equal as can be."""
    return list(pairwise(size * number // count for number in range(count + 1)))
