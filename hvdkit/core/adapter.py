"""The seam: what a framework must offer so that everything else need not know its name.

An adapter is a module with these functions. Validation, arithmetic and order of things are core's; an adapter does the
bare act in its framework. Tensors are the framework's own; core speaks NumPy, images NHWC, kernels OIHW.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from hvdkit.config import Loss, Optimizer
from hvdkit.core.topology import Topology

if TYPE_CHECKING:
    from hvdkit.core.data import Batch
    from hvdkit.core.loop import Loop

# Every capability that there is, and what it says. An adapter lists those that it has; the contract suite checks that
# what it lists works and that what it does not list fails.
CAPABILITIES = {
    "gpu": "can run on a GPU, given a build for it",
    "float16": "reduces float16 tensors",
    "float32": "reduces float32 tensors",
    "float64": "reduces float64 tensors",
    "bfloat16": "reduces bfloat16 tensors",
    "uint8": "reduces uint8 tensors",
    "int8": "reduces int8 tensors",
    "int32": "reduces int32 tensors",
    "int64": "reduces int64 tensors",
    "scalars": "takes tensors without dimensions",
    "empty": "takes tensors without elements",
}

Op = Literal["sum", "average", "min", "max"]
Session = Any  # an adapter's own object: model, optimizer and what it needs to take a step
Tensor = Any


class Adapter(Protocol):
    """The functions of an adapter module. `name` labels a collective and must be the same on all ranks."""

    NAME: str
    CAPABILITIES: frozenset[str]  # of the keys above

    def versions(self) -> dict[str, str]:
        """Versions by package: at least `framework`; `horovod` where there is one."""

    def init(self, device: str, threads: int | None = None) -> Topology:
        """Start Horovod and pin this rank to its device: `cpu`, `gpu`, or `auto` for a GPU where there is one.

        `threads` are CPU threads for this rank; None shares the cores among the host's ranks.
        Raises RequestError for `gpu` where the framework sees none.
        """

    def shutdown(self) -> None:
        """Leave Horovod."""

    def seed(self, value: int) -> None:
        """Seed the framework's own random numbers."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it. For clocks only."""

    def from_numpy(self, array: np.ndarray) -> Tensor:
        """A tensor on this rank's device with the array's shape, dtype and values; a copy."""

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """The tensor's values as an array; waits for the device."""

    def dtype(self, tensor: Tensor) -> str:
        """NumPy's name of the tensor's dtype."""

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype, by NumPy's name."""

    def allreduce(self, tensors: list[Tensor], op: Op = "average", name: str = "allreduce") -> list[Tensor]:
        """Reduce each tensor over all ranks; a list is reduced as one group.

        Where ranks disagree on a shape or dtype, Horovod's error, which names both, is raised on all of them.
        """

    def allgather(self, tensor: Tensor, name: str = "allgather") -> Tensor:
        """The ranks' tensors joined along the first axis, which may differ between ranks."""

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast") -> Tensor:
        """The root's tensor on every rank."""

    def allgather_object(self, value: Any, name: str = "allgather_object") -> list[Any]:
        """Every rank's value, by rank."""

    def prepare(self, model: Any, optimizer: Optimizer, loss: Loss, compression: str) -> Session:
        """Bind a network of this framework to its optimizer, whose gradients are averaged over all ranks."""

    def broadcast_state(self, session: Session, root_rank: int = 0) -> None:
        """Give every rank the root's parameters, buffers and optimizer state."""

    def train_step(self, session: Session, batch: Batch) -> Tensor:
        """One update; returns this rank's mean loss, on the device: nothing waits for it here."""

    def eval_step(self, session: Session, images: np.ndarray) -> np.ndarray:
        """Logits (n, classes) of `images` (n, height, width, channels) in evaluation mode."""

    def set_learning_rate(self, session: Session, value: float) -> None:
        """The rate of the next updates."""

    def state(self, session: Session) -> dict[str, np.ndarray]:
        """Parameters and buffers by torchvision's names and layouts, the optimizer's slots as `optimizer.SLOT.NAME`.

        The slots are there from the start, zero before the first step.
        """

    def load_state(self, session: Session, state: dict[str, np.ndarray]) -> None:
        """Set what `state` holds. Optimizer slots may be absent. Raises RequestError naming tensors that do not fit."""

    def fit(self, session: Session, loop: Loop) -> None:
        """Train: drive the loop's hooks in this framework's usual way."""
