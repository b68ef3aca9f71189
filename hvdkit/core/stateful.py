"""A model with its optimizer as named arrays: read, loaded, and broadcast from one rank."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from hvdkit.core.group import Group
from hvdkit.core.pieces import Owned, buckets
from hvdkit.core.seam import Adapter, Tensor, Trainable
from hvdkit.core.state import (
    check_fits,
    from_canonical,
    has_average,
    held,
    held_layout,
    is_averaged,
    is_statistic,
    to_canonical,
    unheld,
)
from hvdkit.core.step import Step, bytes_of
from hvdkit.core.update import Update

_TURNED = {4: (3, 2, 0, 1), 2: (1, 0)}  # HWIO kernels to OIHW, (in, out) matrices to (out, in)
_TURNED_BACK = {4: (2, 3, 1, 0), 2: (1, 0)}


class Stateful:
    """What a `Session` is made of. `shapes` has the parameters' shapes by sorted names, in the layouts of `state`.

    `step` keeps sums of gradients (`core.step.Step`).
    """

    adapter: Adapter
    trainable: Trainable
    update: Update
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    step: Step

    def state(self, keep: bool = True) -> dict[str, np.ndarray]:
        """`model_state`, and the optimizer's slots as `optimizer.SLOT.NAME`; collective if ranks own shares of them.

        A rank that does not `keep` it joins the collectives with a bucket in memory at a time, and gets nothing.

        Slots are always present, zero before the first step. There are also arrays without dimensions: `optimizer.step`
        (int64, number of updates) if the optimizer counts them, and, if the loss is scaled, `optimizer.loss_scale`
        (float64) and `optimizer.good_steps` (int64, steps since the scale last changed).
        """
        return dict(self.state_arrays(keep))

    def state_arrays(self, keep: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of `state` one after the other; collective. A rank that shares them has one bucket in memory."""
        yield from self.model_arrays(keep)
        for name, tensor in self.update.whole_slots():
            if keep:
                yield name, self.array(tensor)
        for name, (number, dtype) in self.update.numbers().items() if keep else ():
            yield name, np.asarray(number.get()).astype(dtype)

    def state_layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each array of `state`, by name."""
        whole = self.trainable.parameters | self.trainable.buffers | self.update.slot_templates()
        found = {name: self._layout(tensor) for name, tensor in whole.items()}
        return found | {name: (dtype, ()) for name, (_, dtype) in self.update.numbers().items()}

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
                yield name, self.array(tensor)

    def buffers(self) -> dict[str, np.ndarray]:
        """This rank's buffers, in names and layouts as in `model_state`, with those that no checkpoint has."""
        return self._arrays({**self.trainable.buffers, **self.trainable.transient})

    def load_buffers(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the buffers that the state has. Raises RequestError for values that a buffer's dtype cannot hold."""
        for name, tensor in {**self.trainable.buffers, **self.trainable.transient}.items():
            if name in state:
                self._assign(tensor, self._native(unheld(name, state[name], self.adapter.dtype(tensor))))

    def _assign(self, tensor: Tensor, array: np.ndarray) -> None:
        """Set a tensor from an array of its dtype, or of one that holds its values."""
        adapter = self.adapter
        value, dtype = adapter.from_numpy(array), adapter.dtype(tensor)
        adapter.tensors.assign(tensor, value if adapter.dtype(value) == dtype else adapter.cast(value, dtype))

    def merge_buffers(self, group: Group) -> list[str]:
        """Make the buffers of a group one: running statistics are averaged, others as in `merging.py`; collective.

        Each rank's statistics come from its own batches. The ranks then evaluate and save the same model. Returns a
        line for each kind of other buffers that has differed, the same on all ranks.
        """
        adapter, buffers = self.adapter, {**self.trainable.buffers, **self.trainable.transient}
        running = {name: self.array(buffers.pop(name)) for name in list(buffers) if is_statistic(name)}
        if running:
            means = adapter.allreduce(
                [adapter.from_numpy(array) for array in running.values()], group, name="running_statistics"
            )
            self.load_buffers({name: adapter.to_numpy(mean) for name, mean in zip(running, means, strict=True)})
        if not buffers:
            return []
        from hvdkit.core.merging import merge_buffers  # most models have no others

        return merge_buffers(adapter, group, self, buffers)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load `state`. Optimizer slots may be absent. Raises RequestError naming the tensors that do not fit.

        Each rank takes its own share of the slots.
        """
        tensors = self.trainable.parameters
        slots = self.update.slot_templates()
        if not has_average(state):  # as it has not begun
            slots = {name: tensor for name, tensor in slots.items() if not is_averaged(name)}
        wanted = {**tensors, **self.trainable.buffers, **slots}
        check_fits({name: self._layout(tensor)[1] for name, tensor in wanted.items()}, state)
        arrays = {
            name: self._native(unheld(name, state[name], self.adapter.dtype(tensor)))
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
        shapes = {name: self._layout(each)[1] for name, each in (parameters | self.trainable.buffers).items()}
        check_fits(shapes, state)
        Owned(self.adapter, parameters).load(
            {name: self._native(unheld(name, state[name], self.dtype)) for name in parameters}
        )
        self.load_buffers(state)

    def broadcast_state(
        self, group: Group, root_rank: int | None = None, found: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Broadcast the root's parameters, buffers and optimizer state to every rank of a group.

        The root is `root_rank`, a rank of the world, or the group's first.

        `found` is a state that the root has in place of its own, such as a checkpoint's; the others then pass an empty
        one. Without it, ranks keep their shares of slots and parameters as they are.
        """
        owned, buffers = self.update.owned, dict(self.trainable.transient)
        root = group.root if root_rank is None else root_rank
        if found is not None:
            own = self.state()
            given = {name: value.astype(own[name].dtype) for name, value in found.items()}
            self.load_state(dict(self.broadcast_arrays(own | given, group, root)))
        else:
            buffers |= self.trainable.buffers
            tensors = dict(self.trainable.parameters if owned.keeps_model else {})
            tensors |= self.update.whole_slots() if owned.in_place else ()
            for name, tensor in self._broadcast(tensors, group, root):
                self.adapter.tensors.assign(tensors[name], tensor)
        arrays = {name: self.adapter.to_numpy(tensor) for name, tensor in buffers.items()}
        for name, array in self.broadcast_arrays(arrays, group, root):
            self._assign(buffers[name], array)
        if owned.in_place and found is None:
            for name, (number, _) in self.update.numbers().items():
                value = self.adapter.from_numpy(np.asarray([number.get()], np.float64))
                value = self.adapter.broadcast(value, group, root, f"state.{name}")
                number.set(float(self.adapter.to_numpy(value)[0]))

    def _broadcast(self, tensors: Mapping[str, Tensor], group: Group, root: int) -> Iterator[tuple[str, Tensor]]:
        """The root's tensors of the parameters' dtype, a bucket at a time."""
        shapes = {name: tuple(int(size) for size in tensor.shape) for name, tensor in tensors.items()}
        for number, bucket in enumerate(buckets(shapes, 1, np.dtype(self.dtype).itemsize)):
            got = self.adapter.broadcast(self._joined(tensors, bucket.shapes), group, root, f"state.{number}")
            yield from zip(bucket.shapes, self.adapter.tensors.part(got, list(bucket.shapes.values())), strict=True)
            del got

    def broadcast_arrays(
        self, arrays: Mapping[str, np.ndarray], group: Group, root: int
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The root's arrays, a bucket at a time.

        They are sent as bytes, since each framework's Horovod refuses other dtypes, and some tensors without elements.
        """
        yield from ((name, array) for name, array in arrays.items() if not array.nbytes)
        sizes = {name: (array.nbytes,) for name, array in arrays.items() if array.nbytes}
        for number, bucket in enumerate(buckets(sizes, 1, 1)):
            sent = np.concatenate([_bytes(arrays[name]) for name in bucket.shapes])
            got = self.adapter.broadcast(self.adapter.from_numpy(sent), group, root, f"state.bytes.{number}")
            ends = np.cumsum([size for (size,) in bucket.shapes.values()])
            for name, part in zip(bucket.shapes, np.split(self.adapter.to_numpy(got), ends[:-1]), strict=True):
                yield name, np.frombuffer(part.tobytes(), arrays[name].dtype).reshape(arrays[name].shape)

    def _joined(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> Tensor:
        """The tensors of these names as one vector: a single one without a copy."""
        found, ops = [tensors[name] for name in names], self.adapter.tensors
        return ops.join(found) if len(found) > 1 else ops.reshape(found[0], (-1,))

    def state_bytes(self) -> dict[str, int]:
        """The sizes of this rank's tensors: `parameters`, `gradients` when an update begins, `optimizer` (slots), and
        `average` if there is one.

        Gradients include the sums over an update's batches.
        """
        slots = {f"{name}.{place}": each for name, held in self.update.slots.items() for place, each in enumerate(held)}
        return {
            "parameters": self._bytes_of(self.update.owned.held),
            "gradients": self.step.gradient_bytes + self._bytes_of(self.step.sums),
            "optimizer": self._bytes_of(slots),
        } | ({"average": self._bytes_of(average.pieces)} if (average := self.update.average) else {})

    def _bytes_of(self, tensors: Mapping[str, Tensor]) -> int:
        return bytes_of(self.adapter, tensors)

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
        return {name: self.array(tensor) for name, tensor in tensors.items()}

    def array(self, tensor: Tensor) -> np.ndarray:
        """A tensor of the model as an array of `state`."""
        array = self.adapter.to_numpy(tensor)
        return held(to_canonical(array) if self.trainable.transposed else array)

    def _layout(self, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        return held_layout(self.adapter.dtype(tensor), self._turned_shape(tensor))

    def _turned(self, tensor: Tensor, axes: Mapping[int, tuple[int, ...]]) -> Tensor:
        dimensions = len(tensor.shape)
        if not self.trainable.transposed or dimensions not in axes:
            return tensor
        return self.adapter.tensors.transpose(tensor, axes[dimensions])

    def _turned_shape(self, tensor: Tensor) -> tuple[int, ...]:
        shape = tuple(int(size) for size in tensor.shape)
        axes = _TURNED.get(len(shape)) if self.trainable.transposed else None
        return tuple(shape[axis] for axis in axes) if axes else shape


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
