"""A model with its optimizer as named arrays: read, loaded, and broadcast from one rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hvdkit.core.group import Group
from hvdkit.core.pieces import StateEntry, buckets, bytes_of, set_from, shape_of, whole_tensors
from hvdkit.core.seam import Adapter
from hvdkit.core.state import (
    TURNED,
    TURNED_BACK,
    check_fits,
    from_canonical,
    has_average,
    held,
    held_layout,
    is_averaged,
    to_canonical,
    unheld,
)
from hvdkit.core.step import Step
from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Trainable
from hvdkit.core.update import Update


class Stateful:
    """The part of `Session` that reads, loads and broadcasts its state.

    `shapes` has the parameters' shapes by sorted names, in the layouts of `state`.

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
        for entry in self.update.entries():
            for name, tensor in entry.gather():
                if keep:
                    yield name, self.array(tensor)
        for name, (number, dtype) in self.update.numbers().items() if keep else ():
            yield name, np.asarray(number.get()).astype(dtype)

    def state_layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each array of `state`, by name."""
        numbers = {name: (dtype, ()) for name, (_, dtype) in self.update.numbers().items()}
        return self._layouts(self._entries()) | numbers

    def _layouts(self, entries: Iterable[StateEntry]) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            name: held_layout(dtype, self._turned_shape(shape))
            for entry in entries
            for name, (dtype, shape) in entry.layout.items()
        }

    def model_state(self, keep: bool = True) -> dict[str, np.ndarray]:
        """Parameters and buffers by torchvision's names and layouts; collective, and with `keep`, as `state`."""
        return dict(self.model_arrays(keep))

    def model_arrays(self, keep: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of `model_state` one after the other, sorted by name; collective.

        A rank that shares parameters has those of one bucket in memory. One that does not `keep` them gets none.
        """
        model = (entry.gather(sorted(entry.partition.shapes)) for entry in self._model_entries())
        for name, tensor in heapq.merge(*model, key=lambda item: item[0]):
            if keep:
                yield name, self.array(tensor)

    def _model_entries(self) -> list[StateEntry]:
        return [self.update.partition.stored, whole_tensors(self.adapter, self.trainable.buffers)]

    def _entries(self) -> list[StateEntry]:
        return [*self._model_entries(), *self.update.entries()]

    def buffers(self) -> dict[str, np.ndarray]:
        """This rank's buffers, in names and layouts as in `model_state`, with those that no checkpoint has."""
        return self._arrays({**self.trainable.buffers, **self.trainable.transient})

    def load_buffers(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the buffers that the state has. Raises RequestError for values that a buffer's dtype cannot hold."""
        self._load([whole_tensors(self.adapter, {**self.trainable.buffers, **self.trainable.transient})], state)

    def _load(self, entries: Iterable[StateEntry], state: Mapping[str, np.ndarray]) -> None:
        for entry in entries:
            dtypes = {name: dtype for name, (dtype, _) in entry.layout.items() if name in state}
            entry.load({name: self._native(unheld(name, state[name], dtype)) for name, dtype in dtypes.items()})

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load `state`. Optimizer slots may be absent. Raises RequestError naming the tensors that do not fit.

        Each rank takes its own pieces.
        """
        averaged = has_average(state)  # else it has not begun
        self._load_all([entry for entry in self._entries() if averaged or not is_averaged(entry.prefix)], state)
        for name, (number, _) in self.update.numbers().items():
            if name in state:
                number.set(float(state[name]))

    def _load_all(self, entries: Sequence[StateEntry], state: Mapping[str, np.ndarray]) -> None:
        check_fits({name: shape for name, (_, shape) in self._layouts(entries).items()}, state)
        self._load(entries, state)

    def _load_model(self, state: Mapping[str, np.ndarray]) -> None:
        tensors = (self.trainable.parameters, self.trainable.buffers)
        self._load_all([whole_tensors(self.adapter, each) for each in tensors], state)

    def broadcast_state(
        self, group: Group, root_rank: int | None = None, found: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Broadcast the root's parameters, buffers and optimizer state to every rank of a group.

        The root is `root_rank`, a rank of the world, or the group's first.

        `found` is a state that the root has in place of its own, such as a checkpoint's; the others then pass an empty
        one. Without it, ranks keep their shares of slots and parameters as they are.
        """
        buffers, whole = dict(self.trainable.transient), not self.update.partition.divided_over(group)
        root = group.root if root_rank is None else root_rank
        if found is not None:
            own = self.state()
            given = {name: value.astype(own[name].dtype) for name, value in found.items()}
            self.load_state(dict(self.broadcast_arrays(own | given, group, root)))
        else:
            buffers |= self.trainable.buffers
            entries = [self.update.partition.stored, *(self.update.entries() if whole else ())]
            undivided = [entry for entry in entries if not entry.partition.divided_over(group)]
            tensors = {entry.prefix + name: tensor for entry in undivided for name, tensor in entry.tensors.items()}
            for name, tensor in self._broadcast(tensors, group, root):
                self.adapter.tensors.assign(tensors[name], tensor)
        arrays = {name: self.adapter.to_numpy(tensor) for name, tensor in buffers.items()}
        for name, array in self.broadcast_arrays(arrays, group, root):
            set_from(self.adapter, buffers[name], array)
        if whole and found is None:
            for name, (number, _) in self.update.numbers().items():
                value = self.adapter.from_numpy(np.asarray([number.get()], np.float64))
                value = self.adapter.broadcast(value, group, root, f"state.{name}")
                number.set(float(self.adapter.to_numpy(value)[0]))

    def _broadcast(self, tensors: Mapping[str, Tensor], group: Group, root: int) -> Iterator[tuple[str, Tensor]]:
        """The root's tensors of the parameters' dtype, a bucket at a time."""
        shapes = {name: shape_of(tensor) for name, tensor in tensors.items()}
        for number, bucket in enumerate(buckets(shapes, 1, np.dtype(self.dtype).itemsize)):
            got = self.adapter.broadcast(
                self.adapter.tensors.joined([tensors[name] for name in bucket.shapes]), group, root, f"state.{number}"
            )
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

    def state_bytes(self) -> dict[str, int]:
        """The sizes of this rank's tensors: `parameters`, `gradients` when an update begins, `optimizer` (slots), and
        `average` if there is one.

        Gradients include the sums over an update's batches.
        """
        slots, average = self.update.slot_entries(), self.update.weight_average
        return {
            "parameters": self._bytes_of(self.update.partition.stored.tensors),
            "gradients": self.step.gradient_bytes + self._bytes_of(self.step.sums),
            "optimizer": sum(self._bytes_of(slot.tensors) for slot in slots),
        } | ({"average": self._bytes_of(average.pieces)} if average else {})

    def _bytes_of(self, tensors: Mapping[str, Tensor]) -> int:
        return bytes_of(self.adapter, tensors.values())

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors of the parameters, such as gradients, as one vector: by sorted names, in the layouts of `state`."""
        return self.adapter.tensors.join([self._turned(tensors[name], TURNED) for name in self.shapes])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`, in the order of the parameters."""
        parts = self.adapter.tensors.part(vector, list(self.shapes.values()))
        named = {name: self._turned(part, TURNED_BACK) for name, part in zip(self.shapes, parts, strict=True)}
        return {name: named[name] for name in self.trainable.parameters}

    def _native(self, array: np.ndarray) -> np.ndarray:
        return from_canonical(array) if self.trainable.transposed else array

    def _arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return {name: self.array(tensor) for name, tensor in tensors.items()}

    def array(self, tensor: Tensor) -> np.ndarray:
        """A tensor of the model as an array of `state`."""
        array = self.adapter.to_numpy(tensor)
        return held(to_canonical(array) if self.trainable.transposed else array)

    def _turned(self, tensor: Tensor, axes: Mapping[int, tuple[int, ...]]) -> Tensor:
        dimensions = len(tensor.shape)
        if not self.trainable.transposed or dimensions not in axes:
            return tensor
        return self.adapter.tensors.transpose(tensor, axes[dimensions])

    def _turned_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = TURNED.get(len(shape)) if self.trainable.transposed else None
        return tuple(shape[axis] for axis in axes) if axes else shape


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
