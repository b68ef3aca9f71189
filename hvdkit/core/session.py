"""A model with its optimizer and strategy, and the training step, the same for every framework and strategy.

    accumulate → average → unscale → clip → update → count

Frameworks that trace (TensorFlow, Keras) compile the methods of this class; the others call them directly.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.owned import Owned
from hvdkit.core.seam import Adapter, AnyLoss, Hooks, Tensor, one_value
from hvdkit.core.shares import buckets
from hvdkit.core.state import check_fits, from_canonical, to_canonical
from hvdkit.core.strategy import Strategy
from hvdkit.core.update import Update, scalar
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Optimizer

_TURNED = {4: (3, 2, 0, 1), 2: (1, 0)}  # HWIO kernels to OIHW, (in, out) matrices to (out, in)
_TURNED_BACK = {4: (2, 3, 1, 0), 2: (1, 0)}


@dataclass(frozen=True)
class Gradients:
    """The results of one batch in training mode: the `outputs`, the rank's mean `loss`, and gradients by
    parameter: the rank's `own`, and those `averaged` over all ranks that the optimizer takes, before clipping.

    Arrays have the parameters' dtype, and names and layouts as in `Session.state`. They are divided by the loss
    scale.
    """

    outputs: np.ndarray
    loss: float
    own: dict[str, np.ndarray]
    averaged: dict[str, np.ndarray]


class Session:
    """`trainable` is the framework's part (`seam.Trainable`), `update` the optimizer with its slots.

    `initial` makes a `model_state` to start from, which is never in memory beside the slots; an empty one changes
    nothing.
    Raises RequestError for a model that cannot be trained, for example because two variables share a name.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: Any,
        optimizer: Optimizer,
        loss: AnyLoss,
        strategy: Strategy | None = None,
        precision: str = "fp32",
        initial: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        self.adapter, self.strategy = adapter, strategy or Strategy()
        self.own_loss = None if isinstance(loss, Loss) else one_value(loss)
        self.trainable = adapter.bind(model, self.own_loss or loss, precision)
        self.trainable.session = self
        if not self.trainable.parameters:
            raise RequestError("model: expected parameters to train, got a model without any")
        parameters = self.trainable.parameters
        self.shapes = {name: self._turned_shape(parameters[name]) for name in sorted(parameters)}
        self.dtype = adapter.dtype(parameters[next(iter(self.shapes))])
        del parameters  # sharding replaces them, and frees their memory
        if initial is not None and (state := initial()):
            self._load_model(state)
            del state
        self.strategy.bind(self, sum(int(np.prod(shape)) for shape in self.shapes.values()))
        settings = self.strategy.optimizer(optimizer)
        self.update = Update(adapter, self.trainable, settings, precision, self.strategy.owned(self, settings))
        self._sums: dict[str, Tensor] = {}  # sums of the gradients of an update's earlier batches
        self._parts = 1  # batches in the current update
        self._gradient_bytes = 0  # of the gradients with which an update begins, on this rank
        self._sends = False  # whether gradients from `_ready` belong to the update's last batch
        during = self.trainable.overlaps or (self.trainable.reports and self.strategy.keeps_shares)
        if during and self.strategy.overlaps:
            self.trainable.on_ready(self._ready)
        self._compiled: dict[Any, dict[str, Any]] = defaultdict(dict)

    # The step

    def train_step(self, batches: Sequence[Batch]) -> Tensor:
        """One update by the mean of the batches' gradients, which is communicated once.

        Returns this rank's mean loss over the batches, a tensor of one element; the device may still be computing it.
        With `precision: fp16` an update that overflows on any rank is skipped on all ranks.
        """
        if len(batches) == 1:
            self._sends = True
            loss = self.compiled(self._whole)(*self._inputs(batches[0]))
        else:
            losses = [self._part(batch, number, len(batches)) for number, batch in enumerate(batches)]
            self.finish(len(batches))
            loss = sum(losses[1:], losses[0]) / len(losses)
        self._sends = False
        self._mark_updated()
        return loss

    def _whole(self, inputs: Tensor, targets: Tensor) -> Tensor:
        _, loss, gradients = self.trainable.backward(inputs, targets, self._scale)
        self.take(gradients)
        return loss

    def _part(self, batch: Batch, number: int, count: int) -> Tensor:
        self.sums()  # create them before a compiled function uses them
        self._parts, self._sends = count, self.strategy.keeps_shares or number == count - 1
        return self.compiled(self._accumulate)(*self._inputs(batch))

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        _, loss, gradients = self.trainable.backward(inputs, targets, self._scale)
        self.add(gradients)
        return loss

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add one batch's gradients, or this rank's share of their means, to the sums for `finish`."""
        gradients = self._stamped((trace_events.BACKWARD,), gradients)
        if self.strategy.keeps_shares:
            gradients = self._averaged(gradients)
        for name, total in self.sums().items():
            self.adapter.tensors.assign(total, total + gradients[name])

    def sums(self) -> dict[str, Tensor]:
        """The sums of gradients since the last update, created on first use."""
        if not self._sums:
            owned = self.update.owned if self.strategy.keeps_shares else Owned(self.adapter, self.trainable.parameters)
            self._sums = owned.variables()
        return self._sums

    def finish(self, count: int) -> None:
        """Update by the mean of the gradients of `count` batches, which `add` has summed."""
        self._parts = count
        self.compiled(self._finish)(float(count))
        self._parts = 1

    def _finish(self, count: Any) -> None:
        ops = self.adapter.tensors
        means = {name: total / scalar(self.adapter, count, total) for name, total in self._sums.items()}
        self.update(means if self.strategy.keeps_shares else self._averaged(means))
        for total in self._sums.values():
            ops.assign(total, total * 0)

    def take(self, gradients: Mapping[str, Tensor]) -> None:
        """Update by the gradients of one batch's scaled loss: average, unscale, clip, apply, count."""
        self.update(self._averaged(self._stamped((trace_events.BACKWARD,), gradients)))

    def _averaged(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        means = self.strategy.average(self, dict(gradients))
        if not self._gradient_bytes:  # the same in each update, and slow to count
            self._gradient_bytes = self._bytes_of(means if self.strategy.keeps_shares else gradients)
        return self._stamped((trace_events.REDUCED,), means)

    def _ready(self, name: str, gradient: Tensor) -> bool:
        """Send a gradient that backward has computed, if it is to be sent after this batch; whether it is taken."""
        if not self._sends:
            return False
        first = self._parts == 1 or self.strategy.keeps_shares
        return self.strategy.begin(self, name, gradient if first else (self.sums()[name] + gradient) / self._parts)

    def gradients(self, batch: Batch) -> Gradients:
        """What a training step computes and sends, without the update; collective.

        Buffers change as in a training step.
        """
        with self.strategy.peek():
            outputs, loss, own, averaged = self.compiled(self._probe)(*self._inputs(batch))
        to_numpy = self.adapter.to_numpy
        return Gradients(to_numpy(outputs), float(to_numpy(loss).mean()), self._arrays(own), self._arrays(averaged))

    def _probe(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        outputs, loss, gradients = self.trainable.backward(inputs, targets, self._scale)
        own = {name: gradient * 1 for name, gradient in gradients.items()}  # copies: averaging may overwrite the others
        means = dict(self.update.owned.whole(self.strategy.average(self, gradients)))
        averaged = {name: means[name] for name in own}
        return outputs, loss, self.update.unscaled(own), self.update.unscaled(averaged)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """The model's outputs in the parameters' dtype for inputs (n, …), in evaluation mode."""
        return self.trainable.predict(inputs)

    def mean_loss(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        """The `own_loss` of outputs that `predict` has returned, and of their targets. Nothing is learned from it."""
        assert self.own_loss
        if np.issubdtype(targets.dtype, np.floating):
            targets = targets.astype(outputs.dtype)  # as in training
        adapter = self.adapter
        found = self.own_loss(adapter.from_numpy(outputs), adapter.from_numpy(np.ascontiguousarray(targets)))
        return float(adapter.to_numpy(found).mean())

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next updates."""
        self.update.rate.set(value)

    def fit(self, hooks: Hooks) -> None:
        """Train: call the loop's hooks in this framework's usual way."""
        self.trainable.fit(hooks)

    @property
    def _scale(self) -> Any:
        return self.update.scale.get() if self.update.scale is not None else None

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self._mark(trace_events.BEGIN)
        inputs = self.trainable.inputs(batch)
        self._mark(trace_events.INPUTS)
        return inputs

    # Trace events for the profiler

    def compiled(self, function: Any) -> Any:
        """A method of the step, compiled by the framework once for each `trainable.stamp`."""
        made, name = self._compiled[self.trainable.stamp], function.__name__
        if name not in made:
            made[name] = self.trainable.compile(function)
        return made[name]

    def _stamped(self, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(tensors, self.trainable.stamp(names, list(tensors.values())), strict=True))

    def _mark(self, name: str) -> None:
        """Record a trace event between two compiled functions."""
        if self.trainable.traced:
            trace_events.mark(name)
        else:
            self.trainable.stamp((name,), [])

    def _mark_updated(self) -> None:
        if self.trainable.traced:
            trace_events.mark(trace_events.UPDATED)
        else:
            self.trainable.stamp((trace_events.UPDATED,), list(self.trainable.parameters.values()))

    # The state

    def state(self, keep: bool = True) -> dict[str, np.ndarray]:
        """`model_state`, and the optimizer's slots as `optimizer.SLOT.NAME`; collective if ranks own shares of them.

        A rank that does not `keep` it joins the collectives with a bucket in memory at a time, and gets nothing.

        Slots are always present, zero before the first step. There are also arrays without dimensions: `optimizer.step`
        (int64, number of updates) if the optimizer counts them, and, if the loss is scaled, `optimizer.loss_scale`
        (float64) and `optimizer.good_steps` (int64, steps since the scale last changed).
        """
        slots = {name: self._array(tensor) for name, tensor in self.update.tensors() if keep}
        model = self.model_state(keep)
        if not keep:
            return {}
        numbers = {
            name: np.asarray(number.get()).astype(dtype) for name, (number, dtype) in self.update.numbers().items()
        }
        return model | slots | numbers

    def model_state(self, keep: bool = True) -> dict[str, np.ndarray]:
        """Parameters and buffers by torchvision's names and layouts; collective, and with `keep`, as `state`."""
        return dict(self.model_arrays(keep))

    def model_arrays(self, keep: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of `model_state` one after the other, sorted by name; collective.

        A rank that shares parameters has those of one bucket in memory. One that does not `keep` them gets none.
        """
        buffers = sorted(self.trainable.buffers.items())
        for name, tensor in heapq.merge(self.update.owned.model(), buffers, key=lambda item: item[0]):
            if keep:
                yield name, self._array(tensor)

    def buffers(self) -> dict[str, np.ndarray]:
        """This rank's buffers, in names and layouts as in `model_state`."""
        return self._arrays(self.trainable.buffers)

    def load_buffers(self, state: Mapping[str, np.ndarray]) -> None:
        """Set all buffers."""
        for name, tensor in self.trainable.buffers.items():
            array = self._native(state[name]).astype(self.adapter.dtype(tensor), copy=False)
            self.adapter.tensors.assign(tensor, self.adapter.from_numpy(array))

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load `state`. Optimizer slots may be absent. Raises RequestError naming the tensors that do not fit.

        Each rank takes its own share of the slots.
        """
        tensors = self.trainable.parameters
        slots = self.update.slot_tensors()
        wanted = {**tensors, **self.trainable.buffers, **slots}
        check_fits({name: self._turned_shape(tensor) for name, tensor in wanted.items()}, state)
        arrays = {
            name: self._native(state[name]).astype(self.adapter.dtype(tensor), copy=False)
            for name, tensor in (tensors | slots).items()
            if name in state
        }
        self.update.owned.load(arrays)
        self.load_buffers(state)
        if slots.keys() <= arrays.keys():
            self.update.load(arrays)
        for name, (number, _) in self.update.numbers().items():
            if name in state:
                number.set(float(state[name]))

    def _load_model(self, state: Mapping[str, np.ndarray]) -> None:
        parameters = self.trainable.parameters
        shapes = {name: self._turned_shape(each) for name, each in (parameters | self.trainable.buffers).items()}
        check_fits(shapes, state)
        Owned(self.adapter, parameters).load(
            {name: self._native(state[name]).astype(self.dtype, copy=False) for name in parameters}
        )
        self.load_buffers(state)

    def broadcast_state(self, root_rank: int = 0, found: Mapping[str, np.ndarray] | None = None) -> None:
        """Broadcast the root's parameters, buffers and optimizer state to every rank.

        `found` is a state that the root has in place of its own, such as a checkpoint's; the others then pass an empty
        one. Without it, ranks keep their shares of slots and parameters as they are.
        """
        if found is not None:
            own = self.state()
            given = {name: value.astype(own[name].dtype) for name, value in found.items()}
            state = {name: self.adapter.from_numpy(value.reshape(-1)) for name, value in (own | given).items()}
            roots = ((name, self.adapter.to_numpy(tensor)) for name, tensor in self._broadcast(state, root_rank))
            self.load_state({name: array.reshape(own[name].shape) for name, array in roots})
            return
        owned = self.update.owned
        tensors = self.trainable.buffers | (self.trainable.parameters if owned.keeps_model else {})
        tensors |= dict(self.update.tensors() if owned.in_place else ())
        for name, tensor in self._broadcast(tensors, root_rank):
            self.adapter.tensors.assign(tensors[name], tensor)
        if owned.in_place:
            for name, (number, _) in self.update.numbers().items():
                value = self.adapter.from_numpy(np.asarray([number.get()], np.float64))
                number.set(float(self.adapter.to_numpy(self.adapter.broadcast(value, root_rank, f"state.{name}"))[0]))

    def _broadcast(self, tensors: Mapping[str, Tensor], root_rank: int) -> Iterator[tuple[str, Tensor]]:
        """The root's tensors, a bucket at a time."""
        adapter, by_dtype = self.adapter, defaultdict[str, dict[str, tuple[int, ...]]](dict)
        for name, tensor in tensors.items():
            by_dtype[adapter.dtype(tensor)][name] = tuple(int(size) for size in tensor.shape)
        for dtype, shapes in by_dtype.items():
            for number, bucket in enumerate(buckets(shapes, 1, np.dtype(dtype).itemsize)):
                got = adapter.broadcast(self._joined(tensors, bucket.shapes), root_rank, f"state.{dtype}.{number}")
                yield from zip(bucket.shapes, adapter.tensors.part(got, list(bucket.shapes.values())), strict=True)
                del got

    def _joined(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> Tensor:
        """The tensors of these names as one vector: a single one without a copy."""
        found, ops = [tensors[name] for name in names], self.adapter.tensors
        return ops.join(found) if len(found) > 1 else ops.reshape(found[0], (-1,))

    def state_bytes(self) -> dict[str, int]:
        """The sizes of this rank's tensors: `parameters`, `gradients` when an update begins, `optimizer` (slots).

        Gradients include the sums over an update's batches.
        """
        slots = {f"{name}.{place}": each for name, held in self.update.slots.items() for place, each in enumerate(held)}
        return {
            "parameters": self._bytes_of(self.update.owned.held),
            "gradients": self._gradient_bytes + self._bytes_of(self._sums),
            "optimizer": self._bytes_of(slots),
        }

    def _bytes_of(self, tensors: Mapping[str, Tensor]) -> int:
        sizes = (int(np.prod(each.shape)) * np.dtype(self.adapter.dtype(each)).itemsize for each in tensors.values())
        return sum(sizes)

    def weights(self) -> Tensor:
        """A copy of the parameters as one vector on the device, sorted by the names and in the layouts of `state`."""
        return self.compiled(self._packed_weights)()

    def _packed_weights(self) -> Tensor:
        return self.pack(self.trainable.parameters)

    def set_weights(self, weights: Tensor) -> None:
        """Set the parameters from a vector such as `weights` returns."""
        self.compiled(self._set_weights)(weights)

    def _set_weights(self, weights: Tensor) -> None:
        for name, value in self.unpack(weights).items():
            self.adapter.tensors.assign(self.trainable.parameters[name], value)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors of the parameters, such as gradients, as one vector: by sorted names, in the layouts of `state`."""
        return self.adapter.tensors.join([self._turned(tensors[name], _TURNED) for name in self.shapes])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`, in the order of the parameters."""
        parts = self.adapter.tensors.part(vector, list(self.shapes.values()))
        named = {name: self._turned(part, _TURNED_BACK) for name, part in zip(self.shapes, parts, strict=True)}
        return {name: named[name] for name in self.trainable.parameters}

    def _native(self, array: np.ndarray) -> np.ndarray:
        return from_canonical(array) if self.trainable.transposed else array

    def _arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return {name: self._array(tensor) for name, tensor in tensors.items()}

    def _array(self, tensor: Tensor) -> np.ndarray:
        array = self.adapter.to_numpy(tensor)
        return to_canonical(array) if self.trainable.transposed else array

    def _turned(self, tensor: Tensor, axes: Mapping[int, tuple[int, ...]]) -> Tensor:
        dimensions = len(tensor.shape)
        if not self.trainable.transposed or dimensions not in axes:
            return tensor
        return self.adapter.tensors.transpose(tensor, axes[dimensions])

    def _turned_shape(self, tensor: Tensor) -> tuple[int, ...]:
        shape = tuple(int(size) for size in tensor.shape)
        axes = _TURNED.get(len(shape)) if self.trainable.transposed else None
        return tuple(shape[axis] for axis in axes) if axes else shape
