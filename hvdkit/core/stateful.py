"""A model with its optimizer as named arrays: read, loaded, and broadcast from one rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np

from hvdkit.core.group import Group
from hvdkit.core.pieces import BUCKET_BYTES, Partition, Piece, StateEntry, set_from, whole_tensors
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
    unheld,
)
from hvdkit.core.tensors import Shape, Tensor
from hvdkit.core.trainable import Trainable
from hvdkit.core.update import Update


class Stateful:
    """The part of `Session` that reads, loads and broadcasts its state; what a strategy knows of a session.

    `dtype` is the parameters'; `shapes` has their whole shapes by sorted names, in the layouts of `state`. `pieces` are
    those of the parameters that this rank has only a part of, by name. `stages` are the ranks of its pipeline, of which
    the model is one stage, and `shapes` are of all.
    """

    adapter: Adapter
    trainable: Trainable
    update: Update
    dtype: str
    shapes: dict[str, Shape]
    pieces: Mapping[str, Piece] = MappingProxyType({})
    stages: Group | None = None
    buffer_pieces: Partition | None = None  # of a model that is divided over ranks

    def held(self) -> Partition:
        """The parameters as pieces: whole tensors, or what this rank has of its model; collective over a pipeline."""
        return self.as_pieces(self.trainable.parameters, self.stages)

    def as_pieces(self, tensors: Mapping[str, Tensor], stages: Group | None, label: str = "pieces") -> Partition:
        """Parameters or buffers of this rank as pieces of those of a pipeline, or of its stage alone."""
        pieces = {name: piece for name, piece in self.pieces.items() if name in tensors}
        if stages is None:
            return Partition(self.adapter, tensors, pieces, label)
        from hvdkit.core.stages import Stages  # most models are in one piece

        return Stages(self.adapter, tensors, stages, pieces, label)

    def complete(self) -> None:
        """Make the updates that a strategy has left to the next forward pass; collective, as `state` is with them."""

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
        yield from self.model_arrays(keep)  # which completes updates
        for name, tensor in chain.from_iterable(entry.gather() for entry in self.update.entries()):
            if keep:
                yield name, self.array(tensor)
        for name, (number, dtype) in self.update.numbers().items() if keep else ():
            yield name, np.asarray(number.get()).astype(dtype)

    def state_layout(self) -> dict[str, tuple[str, Shape]]:
        """The dtype and shape of each array of `state`, by name."""
        numbers: dict[str, tuple[str, Shape]] = {name: (kind, ()) for name, (_, kind) in self.update.numbers().items()}
        return self._layouts(self._entries()) | numbers

    def _layouts(self, entries: Iterable[StateEntry]) -> dict[str, tuple[str, Shape]]:
        items = chain.from_iterable(entry.layout.items() for entry in entries)
        return {name: held_layout(dtype, self._turned_shape(shape)) for name, (dtype, shape) in items}

    def model_state(self) -> dict[str, np.ndarray]:
        """Parameters and buffers by torchvision's names and layouts; collective, as `state`."""
        return dict(self.model_arrays())

    def model_arrays(self, keep: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of `model_state` one after the other, sorted by name; collective.

        A rank that shares parameters has those of one bucket in memory. One that does not `keep` them gets none.
        """
        self.complete()
        for name, tensor in self._sorted(self._model_entries()):
            if keep:
                yield name, self.array(tensor)

    def _sorted(self, entries: Iterable[StateEntry]) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of entries, one after the other by name; collective."""
        gathered = (entry.gather(sorted(entry.partition.shapes)) for entry in entries)
        return heapq.merge(*gathered, key=lambda item: item[0])

    def _model_entries(self) -> list[StateEntry]:
        return [self.update.partition.stored, self.stored_buffers()]

    def stored_buffers(self) -> StateEntry:
        """The buffers, as pieces of those of a model that is divided over ranks."""
        if self.buffer_pieces is None:
            return whole_tensors(self.adapter, self.trainable.buffers)
        return StateEntry(self.buffer_pieces, self.trainable.buffers)

    def _entries(self) -> list[StateEntry]:
        return [*self._model_entries(), *self.update.entries()]

    def all_buffers(self) -> dict[str, Tensor]:
        """This rank's buffers, with those that no checkpoint has."""
        return {**self.trainable.buffers, **self.trainable.transient}

    def buffers(self) -> dict[str, np.ndarray]:
        """`all_buffers` in names and layouts as in `model_state`."""
        return {name: self.array(tensor) for name, tensor in self.all_buffers().items()}

    def load_buffers(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the buffers that the state has. Raises RequestError for values that a buffer's dtype cannot hold."""
        self._load([whole_tensors(self.adapter, self.all_buffers())], state)

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
        self.complete()
        check_fits({name: shape for name, (_, shape) in self._layouts(entries).items()}, state)
        self._load(entries, state)

    def _load(self, entries: Iterable[StateEntry], state: Mapping[str, np.ndarray]) -> None:
        for entry in entries:
            arrays = {n: unheld(n, state[n], dtype) for n, (dtype, _) in entry.layout.items() if n in state}
            turns = self.trainable.transposed
            entry.load({name: from_canonical(array) if turns else array for name, array in arrays.items()})

    def broadcast_state(
        self, group: Group, root_rank: int | None = None, replacement: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Broadcast the root's parameters, buffers and optimizer state to every rank of a group, but for the tensors
        that the group's ranks have different pieces of.

        The root is `root_rank`, a rank of the world, or the group's first.

        `replacement` is a state that the root has in place of its own, such as a checkpoint's; the others then pass an
        empty one. Without it, ranks keep their shares of slots and parameters as they are.
        """
        self.complete()
        root = group.root if root_rank is None else root_rank
        same = self.stages is None or replacement is None  # a group of one stage, or all have the same model
        unsaved = self.trainable.transient if same else {}
        entries, numbers = [whole_tensors(self.adapter, unsaved)], self.update.numbers()
        if replacement is None:
            entries += self._entries()
        else:
            own, numbers = self.state(), {}
            given = {name: value.astype(own[name].dtype) for name, value in replacement.items()}
            self.load_state(dict(self.broadcast_arrays((own | given).items(), group, root)))
        tensors = {name: tensor for entry in entries for name, tensor in entry.alike(group).items()}
        arrays = ((name, self.adapter.to_numpy(tensor)) for name, tensor in tensors.items())
        counts = ((name, np.asarray(number.get(), np.float64)) for name, (number, _) in numbers.items())
        for name, array in self.broadcast_arrays(chain(arrays, counts), group, root):
            if name in tensors:
                set_from(self.adapter, tensors[name], array)
            else:
                numbers[name][0].set(float(array))

    def broadcast_arrays(
        self, arrays: Iterable[tuple[str, np.ndarray]], group: Group, root: int
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The root's arrays, a bucket at a time.

        They are sent as bytes, since each framework's Horovod refuses other dtypes, and some tensors without elements.
        """
        for number, run in enumerate(_buckets(arrays)):
            sent = np.concatenate([*(_bytes(array) for _, array in run), np.zeros(1, np.uint8)])
            got = self.adapter.broadcast(self.adapter.from_numpy(sent), group, root, f"state.{number}")
            parts = np.split(self.adapter.to_numpy(got), np.cumsum([array.nbytes for _, array in run]))
            for (name, array), part in zip(run, parts, strict=False):
                yield name, np.frombuffer(part.tobytes(), array.dtype).reshape(array.shape)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors of the parameters, such as gradients, as one vector: by sorted names, in the layouts of `state`."""
        return self.adapter.join([self._turned(tensors[name], TURNED) for name in self.shapes])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`, in the order of the parameters."""
        parts = self.adapter.part(vector, list(self.shapes.values()))
        named = {name: self._turned(part, TURNED_BACK) for name, part in zip(self.shapes, parts, strict=True)}
        return {name: named[name] for name in self.trainable.parameters}

    def weights(self) -> Tensor:
        """A copy of the parameters as one vector on the device, as `pack` has them."""
        self.complete()
        return self.pack(self.trainable.parameters)

    def set_weights(self, weights: Tensor) -> None:
        """Set the parameters from a vector such as `weights` returns."""
        self.complete()
        for name, value in self.unpack(weights).items():
            self.adapter.assign(self.trainable.parameters[name], value)

    def array(self, tensor: Tensor) -> np.ndarray:
        """A tensor of the model as an array of `state`."""
        return held(np.asarray(self.adapter.to_numpy(self._turned(tensor, TURNED)), order="C"))

    def _turned(self, tensor: Tensor, axes: Mapping[int, Sequence[int]]) -> Tensor:
        order = axes.get(len(tensor.shape)) if self.trainable.transposed else None
        return tensor if order is None else self.adapter.transpose(tensor, order)

    def _turned_shape(self, shape: Shape) -> Shape:
        order = TURNED.get(len(shape)) if self.trainable.transposed else None
        return shape if order is None else tuple(shape[axis] for axis in order)


def _buckets(arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Runs of arrays with at most BUCKET_BYTES, or one larger array."""
    run: list[tuple[str, np.ndarray]] = []
    for name, array in arrays:
        if run and sum(earlier.nbytes for _, earlier in run) + array.nbytes > BUCKET_BYTES:
            yield run
            run = []
        run.append((name, array))
    if run:
        yield run


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
