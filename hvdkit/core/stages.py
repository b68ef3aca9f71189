"""The pieces of a model whose layers are divided over the ranks of a pipeline: each has the tensors of its stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.core.pieces import BUCKET_BYTES, Partition, Piece

if TYPE_CHECKING:
    from hvdkit.core.group import Group
    from hvdkit.core.seam import Adapter
    from hvdkit.core.tensors import Tensor


class Stages(Partition):
    """The tensors of this rank's stage; those of all stages are the model. All ranks of the `pipeline` make it.

    A tensor that several stages use, such as a table of vectors that is a model's first layer and its last, is held by
    each of them, and counts where it is first. `shared` has the names of this rank's.
    """

    def __init__(
        self,
        adapter: Adapter,
        parameters: Mapping[str, Tensor],
        pipeline: Group,
        pieces: Mapping[str, Piece] | None = None,
        label: str = "stages",
    ) -> None:
        super().__init__(adapter, parameters, pieces, label)
        self._pipeline = pipeline
        held = {name: (self.shapes[name], self.dtypes[name]) for name in parameters}
        everyone = adapter.allgather_object(held, pipeline, f"{label}.layout")
        self.shared = [name for name in parameters if sum(name in layout for layout in everyone) > 1]
        layouts = {name: told for layout in reversed(everyone) for name, told in layout.items()}
        self.shapes = {name: layouts[name][0] for name in sorted(layouts)}  # in one order on all ranks
        self.dtypes = {name: layouts[name][1] for name in self.shapes}
        self._owners: dict[str, int] = {
            name: stage for stage, layout in reversed(list(enumerate(everyone))) for name in layout
        }
        self._runs = list(self._runs_of_owners())
        self._run_of = {name: str(number) for number, run in enumerate(self._runs) for name in run}

    def _runs_of_owners(self) -> Iterator[list[str]]:
        """Tensors that follow each other, of one stage and dtype, and of a bucket's size: they are sent together."""
        run: list[str] = []
        room = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape) * np.dtype(self.dtypes[name]).itemsize
            same = run and self._owners[run[0]] == self._owners[name] and self.dtypes[run[0]] == self.dtypes[name]
            if run and not (same and size <= room):
                yield run
                run = []
            room = (room if run else BUCKET_BYTES) - size
            run.append(name)
        if run:
            yield run

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self._pipeline, *super().groups)

    def counted(self, name: str) -> tuple[object, ...]:
        return (self._counts(name), *super().counted(name))

    def _counts(self, name: str) -> bool:
        return self._owners[name] == self._pipeline.index

    def _together(self, name: str) -> str:
        return self._run_of[name]

    def _gathered(self, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names, ops, own = self._runs[int(key)], self.adapter, super()._gathered
        owner, shapes = self._owners[names[0]], [self.shapes[name] for name in names]
        if owner == self._pipeline.index:
            mine = [own(name, tensors)[name] for name in names]
            ops.in_order(mine)
            vector = ops.join(mine)
        else:
            vector = ops.from_numpy(np.zeros(sum(map(math.prod, shapes)), self.dtypes[names[0]]))
        root = self._pipeline.ranks[owner]
        vector = ops.broadcast(vector, self._pipeline, root, f"{self._label}.gather.{names[0]}")
        if owner != self._pipeline.index:
            ops.synchronize()  # queued operations: slots have the names of weights, and nobody else may wait for these
        return dict(zip(names, ops.part(vector, shapes), strict=True))

    def sum_of_squares(self, norms: list[Tensor]) -> Tensor:
        counted = [
            norm if self._counts(piece.name) else self.adapter.zeros_like(norm)
            for piece, norm in zip(self.pieces.values(), norms, strict=True)
        ]
        return self._summed(super().sum_of_squares(counted), self._pipeline)

    def _partial(self, group: Group) -> Collection[str]:
        return [] if group is self._pipeline else super()._partial(group)
