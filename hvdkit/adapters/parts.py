"""Layers that are divided over ranks, for the models of all frameworks: what goes into a part, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter
from hvdkit.core.tensors import Tensor


@dataclass(frozen=True)
class LayerParts:
    """A layer of which each rank of a `group` has a part, or without a group, one that is whole.

    Each has two collectives, whose names begin with the layer's `name`.
    """

    adapter: Adapter
    group: Group | None
    name: str

    @property
    def size(self) -> int:
        """The number of parts."""
        return 1 if self.group is None else self.group.size

    def enter(self, x: Tensor) -> Tensor:
        """The inputs, the same on all ranks, for this rank's part."""
        return x if self.group is None else self.adapter.enter_parts(x, self.group, f"tensor.{self.name}.backward")

    def leave(self, y: Tensor) -> Tensor:
        """The sum of what the ranks' parts have computed, on all ranks."""
        return y if self.group is None else self.adapter.leave_parts(y, self.group, f"tensor.{self.name}.forward")
