"""The seam: what a framework must offer so that everything else need not know its name.

An adapter is a module with these functions. Validation, arithmetic and order of things are core's; an adapter does the
bare act in its framework. Tensors are the framework's own; core speaks NumPy, images NHWC, kernels OIHW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hvdkit.core.tensors import Tensors
from hvdkit.core.topology import Topology
from hvdkit.recipe.schema import Loss, Optimizer
from hvdkit.results.recording import Kind

if TYPE_CHECKING:  # the command line asks for capabilities, and starts without NumPy
    import numpy as np

    from hvdkit.core.counters import Progress
    from hvdkit.data.batches import Batch

# Every capability that there is, and what it says. An adapter lists those that it has; the contract suite checks that
# what it lists works and that what it does not list fails.
CAPABILITIES = {
    "gpu": "can run on a GPU, given a build for it",
    "fp64": "trains with `precision: fp64`",
    "bf16": "trains with `precision: bf16` on a CPU",
    "fp16": "trains with `precision: fp16` on a CPU",
    "gpu-bf16": "trains with `precision: bf16` on a GPU",
    "gpu-fp16": "trains with `precision: fp16` on a GPU",
    "exact-sums": "its float32 batch norm adds up in more than float32, or in a tree, not one value after the other",
    "layer-times": "tells when each layer's forward pass has ended, beside when each gradient is ready",
    "own-profile": "writes its framework's own profile beside hvdkit's",
    "recompute": "computes activations again in backward where the recipe says `recompute: true`",
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


@dataclass(frozen=True)
class Gradients:
    """What one batch makes of a network in training mode: `logits` (n, classes), the rank's mean `loss`, and gradients
    by parameter: the rank's `own`, and `averaged` over all ranks as the optimizer takes them, before any clipping.

    Arrays are in the parameters' dtype, names and layouts as in `Adapter.state`."""

    logits: np.ndarray
    loss: float
    own: dict[str, np.ndarray]
    averaged: dict[str, np.ndarray]


class Averaging(Protocol):
    """What makes gradients their means where Horovod's own reduction is not asked for (`strategies/averaging.py`)."""

    def __call__(self, gradients: Mapping[str, Tensor], /, scale: float | None = None) -> Mapping[str, Tensor]:
        """The means over all ranks by name; collective. Tensors are in the layouts of `Adapter.state`.

        `scale` is the factor of a scaled loss. Where a gradient of any rank is infinite or NaN then, all means are NaN.
        """

    def packed(self, vector: Tensor, shapes: Mapping[str, tuple[int, ...]], /, scale: float | None = None) -> Tensor:
        """As `__call__`, of all gradients as one vector: one behind the other in the order of `shapes`, by name."""

    def peek(self) -> AbstractContextManager[None]:
        """What is asked inside leaves no trace."""


def peeking(averaging: Averaging | None) -> AbstractContextManager[None]:
    """`Averaging.peek`, of nothing where there is none."""
    return nullcontext() if averaging is None else averaging.peek()


def rival_of(adapter: Adapter) -> str | None:
    """Which of `hvdkit.baselines.registry` stands behind the seam; None where it is hvdkit's own adapter."""
    return getattr(adapter, "RIVAL", None)


class Hooks(Protocol):
    """What a framework's way to train calls: `core.trainer.Loop`.

    `begin_epoch`; then for each group of batches `begin_step`, the update, `end_step`; then `end_epoch`.
    """

    epochs: int
    progress: Progress
    group_sizes: list[int]  # batches of each update that the epoch has left

    @property
    def finished(self) -> bool:
        """Whether the last step has been taken."""

    def groups(self, epoch: int) -> Iterator[list[Batch]]:
        """This rank's batches of what is left of an epoch, one list an update."""

    def enter_epoch(self, epoch: int) -> None:
        """Set `group_sizes`."""

    def begin_epoch(self, epoch: int) -> None:
        """Before an epoch's first step. Epochs count from 0."""

    def begin_step(self) -> None:
        """Before an update."""

    def end_step(self, loss: Tensor) -> None:
        """After an update; `loss` is this rank's mean loss of the step."""

    def end_epoch(self) -> None:
        """After an epoch's last step."""


class Strategy(Protocol):
    """How ranks come to one model, as the training loop sees it (`hvdkit/strategies/`)."""

    def begin_epoch(self, epoch: int) -> None:
        """Epochs count from 0."""

    def begin_step(self, step: int, steps_per_epoch: int) -> None:
        """Before the update that `step` others precede."""

    def end_step(self) -> None:
        """After an update."""

    @property
    def diverged(self) -> bool:
        """Whether ranks have weights of their own."""

    def synchronize(self) -> None:
        """Make one model of the ranks' models; collective."""

    def settle(self) -> None:
        """As `synchronize`, for the optimizers' slots too."""

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a rank has sent for an update, on average."""


class HostWatch(Protocol):
    """News of hosts that come and go (`hvdkit/adapters/host_updates.py`)."""

    def look(self) -> None:
        """Raise `hvdkit.checkpoint.elastic.HostsChanged`, on all ranks alike, where there is news; collective."""

    def forget(self) -> None:
        """Horovod is being entered anew."""


class Observer(Protocol):
    """What `hvdkit profile` asks of an adapter beside the marks of `core.trace_events` (each adapter's `timing.py`).

    Between two steps, on all ranks alike.
    """

    def watch(self, kind: Kind) -> None:
        """The next steps are plain, marked, or detailed: with a mark for each gradient, and for each layer."""

    def timeline(self, path: Path | None) -> None:
        """Let Horovod write its timeline there from now on (rank 0 does), or end it: then the file is whole."""

    def start_own_profile(self, folder: Path, rank: int) -> None:
        """Let the framework profile by its own means."""

    def stop_own_profile(self) -> None:
        """End that, and write `rank-<rank>.json` into the folder."""

    def device_name(self) -> str:
        """What this rank computes on."""

    def device_peak_mib(self) -> float | None:
        """The most memory that the device has had in use; None where it is the machine's own."""


class Adapter(Protocol):
    """The functions of an adapter module. `name` labels a collective and must be the same on all ranks."""

    NAME: str
    CAPABILITIES: frozenset[str]  # of the keys above
    CHOSEN: dict[str, dict[str, tuple[str, str]]]  # by device: what was chosen to be fast, how, and why
    tensors: Tensors

    def versions(self) -> dict[str, str]:
        """Versions by package: at least `framework`; `horovod` where there is one."""

    def init(self, device: str, threads: int | None = None) -> Topology:
        """Start Horovod and pin this rank to its device: `cpu`, `gpu`, or `auto` for a GPU where there is one.

        `threads` are CPU threads for this rank; None shares the cores among the host's ranks.
        Raises RequestError for `gpu` where the framework sees none.
        """

    def shutdown(self) -> None:
        """Leave Horovod; `init` may enter it again."""

    def watch_hosts(self) -> HostWatch:
        """Listen to the elastic launcher that has started this rank; before `init`."""

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

    def allreduce(
        self, tensors: list[Tensor], op: Op = "average", name: str = "allreduce", within: Any = None
    ) -> list[Tensor]:
        """Reduce each tensor over all ranks, or those `within` a process set; a list is reduced as one group.

        Where ranks disagree on a shape or dtype, Horovod's error, which names both, is raised on all of them.
        """

    def allgather(self, tensor: Tensor, name: str = "allgather") -> Tensor:
        """The ranks' tensors joined along the first axis, which may differ between ranks."""

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast", within: Any = None) -> Tensor:
        """The root's tensor on every rank, or each one `within` a process set; all bring one of its shape and dtype."""

    def alltoall(self, tensor: Tensor, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        """Give rank r the r-th part along the first axis; returns the parts got, joined in the order of ranks.

        Parts are equal, or as long as `splits` says, which is never nothing for any rank.
        """

    def process_set(self, ranks: list[int]) -> Any:
        """A group of ranks, for `within`; all ranks ask for the same ones in the same order.

        Horovod must have been started with HOROVOD_DYNAMIC_PROCESS_SETS=1.
        """

    def reducescatter(self, tensor: Tensor, op: Op = "average", name: str = "reducescatter") -> Tensor:
        """This rank's share of the reduced tensor, which is cut evenly along its first axis; op is sum or average."""

    def allgather_object(self, value: Any, name: str = "allgather_object") -> list[Any]:
        """Every rank's value, by rank."""

    def prepare(
        self,
        model: Any,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
        averaging: Averaging | None = None,
    ) -> Session:
        """Bind a network of this framework to its optimizer, whose gradients are averaged over all ranks.

        By Horovod's grouped allreduce, in float16 where `compression` is fp16, not none; or else by `averaging`.
        `precision` is a key of `hvdkit.core.precision.PRECISIONS` that `CAPABILITIES` has. Where a framework cannot
        change a network's dtypes afterwards, the network has been built in them already. Raises RequestError for a
        network that cannot be trained so, for example where variables share a name.
        """

    def broadcast_state(self, session: Session, root_rank: int = 0) -> None:
        """Give every rank the root's parameters, buffers and optimizer state."""

    def train_step(self, session: Session, batches: Sequence[Batch]) -> Tensor:
        """One update by the mean of the batches' gradients, which goes over the wire once.

        Returns this rank's mean loss over the batches, one element, on the device: nothing waits for it here. With
        `precision: fp16` an update that overflows on any rank is left out on all.
        """

    def gradients(self, session: Session, batch: Batch) -> Gradients:
        """What a training step would compute and send, without the update; all ranks call it.

        Buffers take part as in a training step. Gradients are unscaled.
        """

    def eval_step(self, session: Session, images: np.ndarray) -> np.ndarray:
        """Logits (n, classes) in the parameters' dtype, of `images` (n, height, width, channels); evaluation mode."""

    def set_learning_rate(self, session: Session, value: float) -> None:
        """The rate of the next updates."""

    def weights(self, session: Session) -> Tensor:
        """A copy of the parameters as one vector on the device, sorted by the names and in the layouts of `state`."""

    def set_weights(self, session: Session, weights: Tensor) -> None:
        """The inverse of `weights`, which may be of other values."""

    def state(self, session: Session) -> dict[str, np.ndarray]:
        """Parameters and buffers by torchvision's names and layouts, the optimizer's slots as `optimizer.SLOT.NAME`.

        The slots are there from the start, zero before the first step. Beside them, as arrays without dimensions:
        `optimizer.step` (int64, updates made, where the optimizer counts them), `optimizer.loss_scale` (float64) and
        `optimizer.good_steps` (int64, steps since the scale has changed) where the loss is scaled.
        """

    def load_state(self, session: Session, state: dict[str, np.ndarray]) -> None:
        """Set what `state` holds. Optimizer slots may be absent. Raises RequestError naming tensors that do not fit."""

    def fit(self, session: Session, loop: Hooks) -> None:
        """Train: drive the loop's hooks in this framework's usual way."""

    def observer(self, session: Session) -> Observer:
        """What watches this session's steps."""
