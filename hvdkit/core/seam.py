"""The seam: what a framework must offer so that everything else need not know its name.

An adapter is a module with these functions. Validation, arithmetic and order of things are core's; an adapter does the
bare act in its framework. Tensors are the framework's own; core speaks NumPy, images NHWC, kernels OIHW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from hvdkit.core.tensors import Tensors
from hvdkit.core.topology import Topology
from hvdkit.recipe.schema import Loss, Optimizer

if TYPE_CHECKING:  # the command line asks for capabilities, and starts without NumPy
    import numpy as np

    from hvdkit.core.counters import Progress
    from hvdkit.data.batches import Batch
    from hvdkit.results.recording import Kind

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
Session = Any  # core.session.Session, which is built over this module
Tensor = Any
Function = TypeVar("Function", bound=Callable[..., Any])


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


UpdateKernel = Callable[[list[Tensor], list[Tensor], list[tuple[Tensor, ...]], Any, tuple[Any, Any]], None]
Stamp = Callable[[tuple[str, ...], list[Tensor]], list[Tensor]]


class Trainable(Protocol):
    """A model of this framework in training: what only the framework can do with it. `core.session` does the rest.

    `parameters` and `buffers` are tensors by torchvision's names, which `Tensors.assign` changes; where `transposed`,
    kernels are HWIO and matrices (in, out). Where `traced`, functions are compiled once and run many times.
    `stamp(names, tensors)` returns the tensors, and notes the time when they are there under these names of
    `core.trace_events`, while somebody records. `overlaps` says whether gradients may be sent during backward here.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    transposed: bool
    traced: bool
    overlaps: bool
    stamp: Stamp
    session: Session  # which uses it, set by the session

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch's images and labels on the device."""

    def backward(self, images: Tensor, labels: Tensor, scale: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits (n, classes), mean loss and, by parameter, the gradients of loss × `scale` (None: of the loss).

        Gradients are whole, zero where a parameter is unused, and may be overwritten by the next call. Stamps FORWARD.
        """

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Logits (n, classes) of images (n, height, width, channels), in evaluation mode."""

    def compile(self, function: Function) -> Function:
        """The function as this framework runs it fastest; it takes and returns tensors."""

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Call Python from within a compiled function, on a vector; the result has its shape and dtype."""

    def update_kernel(self, settings: Optimizer) -> UpdateKernel | None:
        """What updates weights in place, by the framework's own kernels, as `core.update_rules` says; None for those.

        Its arguments: weights, gradients, slots by weight, the learning rate, and both bias corrections.
        """

    def on_ready(self, ready: Callable[[str, Tensor], None]) -> None:
        """Call `ready(name, gradient)` from now on as soon as backward has finished a gradient. Where it `overlaps`."""

    def start_average(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to average a tensor over all ranks; what is returned waits for the mean. Where it `overlaps`."""

    def fit(self, hooks: Hooks) -> None:
        """Train: call the loop's hooks in this framework's usual way."""


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
        self,
        tensors: list[Tensor],
        op: Op = "average",
        name: str = "allreduce",
        within: Any = None,
        overwrite: bool = False,
    ) -> list[Tensor]:
        """Reduce each tensor over all ranks, or those `within` a process set; a list is reduced as one group.

        With `overwrite` the results may take the tensors' place.

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

    def bind(self, model: Any, loss: Loss, precision: str) -> Trainable:
        """Make a model of this framework ready to train, in a precision that `CAPABILITIES` has.

        Where a framework cannot change a model's dtypes afterwards, it has been built in them already. Raises
        RequestError for a model that cannot be trained so, for example where variables share a name.
        """

    def observer(self, session: Session) -> Observer:
        """What watches this session's steps."""
