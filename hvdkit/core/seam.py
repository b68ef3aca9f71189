"""The adapter interface: the functions that each framework provides, so that no other code depends on a framework.

An adapter is a module with these functions. Core does the validation, the arithmetic and the ordering; an adapter only
calls its framework. Tensors are the framework's own; core uses NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from hvdkit.core.group import Group, Ranks, Topology
from hvdkit.core.tensors import Number, Tensor, Tensors
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Optimizer

if TYPE_CHECKING:  # the command line reads CAPABILITIES and starts without NumPy
    import numpy as np

    from hvdkit.core.synchronized import StatisticsOf
    from hvdkit.data.batches import Batch
    from hvdkit.results.recording import Kind

# Every capability and its meaning. An adapter lists those that it has; the contract tests check that what it lists
# works and that what it does not list fails.
CAPABILITIES = {
    "gpu": "can run on a GPU, given a build for it",
    "fp64": "trains with `precision: fp64`",
    "bf16": "trains with `precision: bf16` on a CPU",
    "fp16": "trains with `precision: fp16` on a CPU",
    "gpu-bf16": "trains with `precision: bf16` on a GPU",
    "gpu-fp16": "trains with `precision: fp16` on a GPU",
    "exact-sums": "its float32 batch norm adds up in more than float32, or in a tree, not one value after the other",
    "layer-times": "records when each layer's forward pass has ended, beside when each gradient is ready",
    "own-profile": "writes its framework's own profile beside hvdkit's",
    "shard-gradients": "trains with `sharding: gradients`",
    "shard-parameters": "trains with `sharding: parameters`",
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
Function = TypeVar("Function", bound=Callable[..., Any])


def rival_of(adapter: Adapter) -> str | None:
    """The name in `hvdkit.baselines.registry` of the baseline behind this adapter; None for hvdkit's own adapters."""
    return getattr(adapter, "RIVAL", None)


# The recipe's cross-entropy, or a function in the framework's operations: (outputs, targets) -> mean loss, one element,
# or (sum, count) of the batch.
AnyLoss = Loss | Callable[[Any, Any], Any]


def class_weights(loss: Loss, shape: Sequence[int]) -> list[float]:
    """The weights of a recipe's loss for outputs of `shape`. Raises RequestError unless there is one for each class."""
    weights = loss.class_weights or []
    if len(weights) != shape[-1]:
        raise RequestError(f"loss.class_weights: expected {shape[-1]}, as the model has outputs, got {len(weights)}")
    return weights


UpdateKernel = Callable[[list[Tensor], list[Tensor], list[tuple[Tensor, ...]], Any, tuple[Any, Any]], list[Tensor]]
Stamp = Callable[[tuple[str, ...], list[Tensor]], list[Tensor]]


ROOT_BLOCK = ""  # the block of parameters that belong to no other, which are used from the beginning to the end
Phase = Literal["forward", "backward", "prediction"]  # the last is a forward pass that no backward follows


class Pending(Protocol):
    """A tensor that other ranks contribute to."""

    def __call__(self) -> Tensor:
        """Wait for it."""

    def ready(self) -> bool:
        """Whether there is nothing to wait for."""


class Joined(Protocol):
    """Gradients that are parts of vectors, of which each can be sent as it is."""

    vectors: list[Tensor]

    def holds(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether these are the parts themselves, so that what changes the vectors changes them."""


class Block(Protocol):
    """Parameters as parts of one vector whose memory can be freed. A new one has none."""

    vector: Tensor

    def allocate(self) -> None:
        """Get memory for the vector, whose values are then undefined."""

    def free(self) -> None:
        """Free the memory. Tensors that the framework has kept for backward have it again after `allocate`."""


class Uses(Protocol):
    """Is called before and after each use of a block's parameters."""

    def begin(self, block: str, phase: Phase) -> None:
        """Before the block's forward pass, or its backward pass, which may be repeated."""

    def end(self, block: str, phase: Phase) -> None:
        """Behind it; behind a backward pass only if each parameter has a gradient."""


class Trainable(Protocol):
    """A model of this framework in training: the operations that only the framework can do, used by `core.session`.

    `parameters` and `buffers` map torchvision's names to tensors, which `Tensors.assign` changes. If `transposed`,
    kernels are HWIO and matrices (in, out), unless a model's attribute `transposed` is False. If `traced`, functions
    are compiled once and run many times. `stamp(names, tensors)` returns the tensors; while trace events are recorded
    it also records, under these names of `core.trace_events`, when the tensors are ready. `reports` says whether
    backward can report each gradient, and `overlaps` whether gradients are best sent then.
    """

    parameters: dict[str, Tensor]
    transposed: bool
    traced: bool
    reports: bool
    overlaps: bool
    stamp: Stamp
    session: Session  # the session that uses it; set by the session
    warnings: Sequence[str]  # lines about what training does otherwise than the model says, such as casts

    @property
    def buffers(self) -> dict[str, Tensor]: ...  # the other tensors of checkpoints, such as frozen parameters

    @property
    def transient(self) -> Mapping[str, Tensor]: ...  # those that no checkpoint has: the model makes them anew

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch's inputs and targets on the device."""

    def backward(self, inputs: Tensor, targets: Tensor, scale: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Outputs, mean loss, and the gradients of loss × `scale` by parameter (None: of the loss).

        Each parameter has a gradient, zero for an unused one. The next call may overwrite the gradients.
        Stamps FORWARD.
        """

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """The outputs for a batch's inputs, in evaluation mode."""

    def losses(self, batch: Batch) -> np.ndarray:
        """Each target's cross-entropy (n, …) without label smoothing, in evaluation mode.

        Outputs are (n, …, classes) and stay on the device, targets are (n, …), whole numbers.
        """

    def observe(self, inputs: Tensor, targets: Tensor) -> None:
        """A forward pass in training mode, of which only the changes of buffers matter."""

    def constrain(self) -> None:
        """Project the parameters on what the model allows them to be, after an update. Traced into a graph."""

    def compile(self, function: Function) -> Function:
        """The function compiled in the framework's fastest way; it takes and returns tensors."""

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Call a Python function on a vector from a compiled function; the result has the vector's shape and dtype."""

    def update_kernel(
        self, settings: Optimizer, shapes: Sequence[tuple[int, ...]], like: Sequence[Tensor]
    ) -> UpdateKernel | None:
        """The framework's own kernel for the rule of `core.update_rules`, or None to use that rule.

        `like` has a tensor like each weight: a parameter, or a vector of a part of it; with `traced`, a variable.
        `shapes` are those of the parameters, which decide on weight decay.

        The kernel takes weights, gradients, slots by weight, the learning rate, and both bias corrections. It updates
        in place, and returns the new weights; with `traced`, weights that are no variables may be left as they are.
        """

    def on_ready(self, ready: Callable[[str, Tensor], bool]) -> None:
        """Call `ready(name, gradient)` as soon as backward has computed a gradient. Only used if `reports`. Where it
        returns true, backward keeps no reference to the gradient and leaves it out of its result."""

    def join_gradients(self, groups: Sequence[tuple[Sequence[str], int]]) -> Joined | None:
        """Have `backward` leave gradients in vectors: for each group those of its parameters, in its order, in a vector
        of its size, which ends with zeros. Returns None where the framework cannot.
        """

    def start_average(self, tensor: Tensor, group: Group, name: str) -> Pending:
        """Start averaging a tensor over a group, in place. Only used if `overlaps`, or for joined gradients."""

    def start_reducescatter(self, tensor: Tensor, group: Group, name: str) -> Pending:
        """Start averaging a vector over a group, for this rank's part of the mean.

        The parts have equal length. Where the framework cannot start it, it is done at once.
        """

    def start_allgather(self, tensor: Tensor, group: Group, out: Tensor, name: str) -> Pending:
        """Start gathering a group's vectors of equal length into the vector `out`. Needs `shard-parameters`."""

    def blocks(self) -> dict[str, list[str]]:
        """The names of the parameters by block, in forward order: a block's are used together. ROOT_BLOCK is the first,
        unless it has none. Needs `shard-parameters`."""

    def divide(self, blocks: Mapping[str, tuple[Sequence[str], int]], uses: Uses | None = None) -> dict[str, Block]:
        """Put the parameters into blocks, each with the names and the size of its vector, and report their `uses`.
        Their values are lost, and `parameters` are new tensors. Needs `shard-parameters`."""

    def unchanged(self) -> AbstractContextManager[None]:
        """A context after which buffers, and random numbers where the framework tells, are what they were before."""


class Observer:
    """The adapter's part of `hvdkit profile`, beside the events of `core.trace_events` (each adapter's `timing.py`).

    The functions are called between two steps, on all ranks. `hvd` is the framework's Horovod, or None. This class is
    for a framework that records trace events without preparation.
    """

    def __init__(self, hvd: Any = None) -> None:
        self._hvd, self._writes = hvd, False

    def watch(self, kind: Kind) -> None:
        """Set what the next steps record: nothing, the step's trace events, or also one per gradient and layer."""

    def timeline(self, path: Path | None) -> None:
        """Start Horovod's timeline at `path` (rank 0 writes it); None stops it and completes the file."""
        if self._hvd is not None and self._writes:
            self._hvd.stop_timeline()
        self._writes = path is not None
        if self._hvd is not None and path is not None:
            self._hvd.start_timeline(str(path))

    def own_profile(self, path: Path | None) -> None:
        """Start the framework's own profiler, if it has one that is used; None stops it and writes the file."""

    def device(self) -> tuple[str, float | None]:
        """The name of this rank's device, and its peak memory in MiB; None if that is the machine's main memory."""
        from hvdkit.results.machine import this_machine  # training does not need it

        return this_machine().processor, None


class Session(Protocol):
    """What strategies, adapters and helpers of core may use of `core.session.Session`, where each is described."""

    adapter: Adapter
    dtype: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def trainable(self) -> Trainable: ...
    @property
    def loss_scale(self) -> Number | None: ...
    @property
    def averages(self) -> bool: ...

    def buffers(self) -> dict[str, np.ndarray]: ...
    def load_buffers(self, state: Mapping[str, np.ndarray]) -> None: ...
    def state(self, keep: bool = True) -> dict[str, np.ndarray]: ...
    def load_state(self, state: Mapping[str, np.ndarray]) -> None: ...
    def weights(self) -> Tensor: ...
    def set_weights(self, weights: Tensor) -> None: ...
    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor: ...
    def unpack(self, vector: Tensor) -> dict[str, Tensor]: ...
    def array(self, tensor: Tensor) -> np.ndarray: ...
    def compiled(self, function: Function) -> Function: ...


class Adapter(Protocol):
    """The functions of an adapter module.

    Each collective takes the `Group` whose ranks call it. `name` labels it and must be the same on all of them.
    """

    NAME: str
    CAPABILITIES: frozenset[str]  # keys of the dictionary above
    CHOSEN: dict[str, dict[str, tuple[str, str]]]  # by device: name of a setting -> (value, reason)
    tensors: Tensors

    def versions(self) -> dict[str, str]:
        """Versions by package: `framework`, and `horovod` if it is used."""

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        """Initialize Horovod and bind this rank to its device: `cpu`, `gpu`, or `auto` for a GPU if there is one.

        Horovod starts with a process set for each of `sets`, the same on all ranks.
        `threads` is the number of CPU threads of this rank; None divides the cores among the host's ranks.
        Raises RequestError for `gpu` if the framework finds none.
        """

    def shutdown(self) -> None:
        """Shut Horovod down; `init` may start it again."""

    def seed(self, value: int) -> None:
        """Seed the framework's random number generator."""

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work. Used for timing only."""

    def from_numpy(self, array: np.ndarray) -> Tensor:
        """A tensor on this rank's device with the array's shape, dtype and values; a copy."""

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """The tensor's values as an array, those of bfloat16 in float32 where NumPy lacks it; waits for the device."""

    def dtype(self, tensor: Tensor) -> str:
        """The tensor's dtype by NumPy's name."""

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype, by NumPy's name."""

    def allreduce(
        self,
        tensors: list[Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[Tensor]:
        """Reduce each tensor over the group, all in one operation.

        With `overwrite` the results may overwrite the tensors.
        If ranks disagree on a shape or dtype, all of them raise Horovod's error, which names both.
        """

    def allgather(self, tensor: Tensor, group: Group, name: str = "allgather") -> Tensor:
        """The ranks' tensors concatenated along the first axis, whose length may differ between ranks."""

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        """The root's tensor on every rank; all pass one of its shape and dtype. `root_rank` counts over the world."""

    def alltoall(self, tensor: Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        """Send the group's r-th rank the r-th part along the first axis; returns the received parts, in rank order.

        Parts have equal lengths, or those in `splits`, of which each is at least 1.
        """

    def process_set(self, ranks: Ranks) -> Any:
        """The `Group.handle` of these ranks: a process set with which Horovod has started, or a new one.

        A new one needs HOROVOD_DYNAMIC_PROCESS_SETS=1, and all ranks ask for the same sets in the same order.
        """

    def reducescatter(self, tensor: Tensor, group: Group, op: Op = "average", name: str = "reducescatter") -> Tensor:
        """This rank's part of the reduced tensor, split evenly along the first axis; `op` is sum or average."""

    def allgather_object(self, value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
        """The values of the group's ranks, in rank order."""

    def synchronize_batch_norms(self, model: Any, statistics: StatisticsOf, every: bool) -> list[str]:
        """Have batch norms compute their statistics in training by `statistics(name)`, unless that is None.

        Without `every`, only those that their class calls synchronized. Returns the names of the layers, whose tensors
        keep theirs. Raises RequestError naming a layer that cannot be synchronized (`core.synchronized`).
        """

    def bind(self, model: Any, loss: AnyLoss, precision: str) -> Trainable:
        """Prepare a model of this framework for training, in a precision that `CAPABILITIES` lists.

        A batch with a tuple of inputs calls the model with as many arguments.
        If the framework cannot change a model's dtypes later, the model must already have them. Raises RequestError
        for a model that cannot be trained, for example because variables share a name.
        """

    def cross_entropy(self, loss: Loss) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """A function of outputs (…, classes) and labels (…): the sum of their cross-entropies, and its count.

        As `torch.nn.CrossEntropyLoss` has it: with w the `class_weights`, 1 without, and s the `label_smoothing`, a
        label y adds (1 - s) w_y (-log p_y) + s / classes Σ_c w_c (-log p_c) to the sum, and w_y to the count. The
        `ignored_label` adds nothing to either. Raises RequestError unless there is a weight for each class.
        """

    def observer(self, session: Session) -> Observer:
        """The observer of this session's steps."""
