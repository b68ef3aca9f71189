"""What of the model a rank updates: everything, or with sharding a share (`strategies/sharded.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hvdkit.core.tensors import Tensor

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.core.seam import Adapter


class Owned:
    """All parameters. A subclass divides them into pieces, each with a name, of which a rank has some.

    `shapes` has the shape of the parameter that each piece belongs to. The optimizer's slots are pieces too.
    """

    keeps_model = True  # whether this rank has all parameters between two steps
    in_place = True  # whether `weights` are the parameters themselves
    by_kernel = True  # whether a kernel of the framework may update them

    def __init__(self, adapter: Adapter, parameters: Mapping[str, Tensor]) -> None:
        self.adapter, self.parameters = adapter, parameters
        self.shapes = {name: tuple(int(size) for size in tensor.shape) for name, tensor in parameters.items()}

    @property
    def held(self) -> Mapping[str, Tensor]:
        """The tensors in which this rank keeps the parameters between two steps."""
        return self.parameters

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and whole tensor, sorted by name; collective if ranks hold shares of them."""
        yield from sorted(self.parameters.items(), key=lambda item: item[0])

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the parameters from arrays in their shapes and dtype."""
        for name, tensor in self.parameters.items():
            self.adapter.tensors.assign(tensor, self.adapter.from_numpy(arrays[name]))

    def variables(self) -> dict[str, Tensor]:
        """A variable of zeros for each piece."""
        return {name: self.adapter.tensors.variable(tensor) for name, tensor in self.parameters.items()}

    def weights(self) -> list[Tensor]:
        """The weights of each piece."""
        return list(self.parameters.values())

    def store(self, weights: Iterable[Tensor]) -> None:
        """Set the parameters to the new weights of all ranks' pieces; collective. Weights are taken one by one."""
        for parameter, weight in zip(self.parameters.values(), weights, strict=True):
            self.adapter.tensors.assign(parameter, weight)

    def changed(self, weights: list[Tensor]) -> None:
        """As `store`, of the new weights that a framework's kernel returns; collective."""

    def summed(self, number: Tensor) -> Tensor:
        """A number of one element over all pieces, from the sum over this rank's; collective."""
        return number

    def norms(self, *kinds: list[Tensor]) -> list[list[Tensor]]:
        """For each list with a tensor for each piece, the norms over the whole parameters; collective."""
        return [[self.adapter.tensors.norm(tensor) for tensor in tensors] for tensors in kinds]

    def whole(self, pieces: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name with a tensor in its shape, from all ranks' pieces; collective.

        Tensors come a bucket at a time, so that nobody has to hold all of them.
        """
        yield from pieces.items()

    def cut(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's pieces of arrays in the parameters' shapes."""
        return dict(arrays)
