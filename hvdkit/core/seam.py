"""The seam between core and the frameworks: what an adapter provides. No other code imports a framework.

An adapter is a subclass of `Adapter`, whose models in training are subclasses of `Trainable` (`core/trainable.py`).
What a framework does not say is a default: one process, eager execution, NumPy's operations (`core/tensors.py`), no
kernels of its own. Core does the validation, the arithmetic and the ordering; an adapter only calls its framework.
"""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from hvdkit.core.group import Group, ProcessSet, Ranks, Topology
from hvdkit.core.tensors import Tensor, Tensors
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.core.passes import Chain, Stage
    from hvdkit.core.trainable import Trainable
    from hvdkit.results.bus import Carried
    from hvdkit.results.recording import Kind

Op = Literal["sum", "average", "min", "max"]
Starting = Literal["average", "reducescatter", "allgather"]
Model = Any  # of a framework
# A function in the framework's operations: (outputs, targets) -> the batch's mean loss, one element, or (sum, count).
LossFunction = Callable[[Tensor, Tensor], Tensor]
AnyLoss = Loss | LossFunction  # the recipe's cross-entropy, or such a function
# (outputs, targets) -> sum and count
CountedLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Pending:
    """A tensor that other ranks contribute to. This one has come already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        """Wait for it."""
        return self._tensor

    def ready(self) -> bool:
        """Whether there is nothing to wait for."""
        return True


class Observer:
    """The adapter's part of `hvdkit profile`, beside the events of `core.trace_events` (each adapter's `timing.py`).

    The functions are called between two steps, on all ranks. `hvd` is the framework's Horovod, or None. This class is
    for a framework that records trace events without preparation.
    """

    def __init__(self, hvd: Any = None) -> None:
        self._hvd, self._writes = hvd, False

    def watch(self, kind: Kind) -> None:
        """Set what the next steps record: nothing, the step's trace events, or also one per gradient and layer."""

    @final
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


class Adapter(Tensors):
    """A framework. By default it has one process, on the CPU.

    Each collective takes the `Group` whose ranks call it. `name` labels it and must be the same on all of them.
    """

    NAME: str
    CAPABILITIES: frozenset[str] = frozenset()  # keys of adapters.capabilities.MEANINGS
    CHOSEN: Mapping[str, Mapping[str, tuple[str, str]]] = {}  # by device: name of a setting -> (value, reason)
    rival: str | None = None  # the name in `baselines.registry` of a baseline; None for hvdkit's own adapters
    counts = True  # whether it supports losses that return (sum, count)

    def versions(self) -> dict[str, str]:
        """Versions by package: `framework`, and `horovod` if it is used."""
        return {"framework": np.__version__, "numpy": np.__version__}

    # The process and its device

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        """Initialize Horovod and bind this rank to its device: `cpu`, `gpu`, or `auto` for a GPU if there is one.

        Horovod starts with a process set for each of `sets`, the same on all ranks.
        `threads` is the number of CPU threads of this rank; None divides the cores among the host's ranks.
        Raises RequestError for `gpu` if the framework finds none.
        """
        return self.bind_device(Topology(), device, threads)

    def bind_device(self, topology: Topology, device: str, threads: int | None) -> Topology:
        """The part of `init` after Horovod has started: bind the rank to its device and threads."""
        if device == "gpu":
            raise RequestError(f"device: expected cpu or auto, as the {self.NAME} adapter knows no GPU; got gpu")
        return topology

    def shutdown(self) -> None:
        """Shut Horovod down; `init` may start it again."""

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def cpu_seconds(self) -> float:
        """CPU time of this process, and of others that work for it, in seconds."""
        return time.process_time()

    def seed(self, value: int) -> None:
        """Seed the framework's random number generator."""

    def random_states(self) -> dict[str, np.ndarray]:
        """The states of the framework's random number generators, as far as it tells them."""
        return {}

    def load_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        """Continue from what `random_states` has returned."""

    # Collectives: of one rank by default

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
        return [self._alone(tensor) for tensor in tensors]

    def allgather(self, tensor: Tensor, group: Group, name: str = "allgather") -> Tensor:
        """The ranks' tensors concatenated along the first axis, whose length may differ between ranks."""
        return self._alone(tensor)

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        """The root's tensor on every rank; all pass one of its shape and dtype. `root_rank` counts over the world."""
        return self._alone(tensor)

    def alltoall(self, tensor: Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        """Send the group's r-th rank the r-th part along the first axis; returns the received parts, in rank order.

        Parts have equal lengths, or those in `splits`, of which each is at least 1.
        """
        return self._alone(tensor)

    def reducescatter(self, tensor: Tensor, group: Group, op: Op = "average", name: str = "reducescatter") -> Tensor:
        """This rank's part of the reduced tensor, split evenly along the first axis; `op` is sum or average."""
        return self._alone(tensor)

    def start(self, what: Starting, tensor: Tensor, group: Group, name: str, out: Tensor = None) -> Pending:
        """Start a collective. Where the framework cannot start one, it is done at once.

        `average` averages a tensor in place. `reducescatter` averages a vector, for this rank's part of the mean; the
        parts have equal length. `allgather` gathers vectors of equal length into the vector `out`.
        """
        if what == "average":
            (mean,) = self.allreduce([tensor], group, "average", name)
            self.assign(tensor, mean)
            return Pending(tensor)
        if what == "reducescatter":
            return Pending(self.reducescatter(tensor, group, "average", name))
        self.assign(out, self.allgather(tensor, group, name))
        return Pending(out)

    def start_broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str) -> Pending:
        """Start a broadcast of a contiguous tensor, which may overwrite the others'. Where none can be started, it is
        done at once."""
        return Pending(self.broadcast(tensor, group, root_rank, name))

    def stage(self, trainable: Trainable) -> Stage:
        """The passes of a model that is a stage of a pipeline. Raises RequestError where the framework has none."""
        raise RequestError(f"parallel.pipeline: {self.NAME} does not train stages of a model yet; expected 1")

    def chain(self, model: Model, blocks: Sequence[Any] | None) -> Chain:
        """A model of the user's own as a chain of its `blocks`, or of what the framework says they are.

        Raises RequestError where the framework has none, and unless each of the model's tensors is in one block.
        """
        raise RequestError(f"parallel.pipeline: {self.NAME} does not train stages of such a model yet; expected 1")

    def enter_parts(self, tensor: Tensor, group: Group, name: str) -> Tensor:
        """The tensor, the same on all ranks of a group, as what this rank's part of a layer takes.

        Its gradient is the sum of the ranks' gradients: f of Shoeybi et al. 2019, section 3. For models.
        """
        return tensor

    def leave_parts(self, tensor: Tensor, group: Group, name: str) -> Tensor:
        """The sum of what all ranks' parts of a layer return, on all ranks. Its gradient is this rank's: g there."""
        return tensor

    def allgather_object(self, value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
        """The values of the group's ranks, in rank order. They are sent by `pickle`."""
        mine = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
        sizes, everyone = (
            self.to_numpy(self.allgather(self.from_numpy(array), group, f"{name}.{what}"))
            for what, array in (("sz", np.array([mine.size], np.int64)), ("t", mine))
        )
        return [pickle.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(sizes)[:-1])]

    def _alone(self, tensor: Tensor) -> Tensor:
        """A copy: what a collective of this rank alone returns."""
        copy = self.variable(tensor)
        self.assign(copy, tensor)
        return copy

    def process_set(self, ranks: Ranks) -> ProcessSet:
        """The `Group.handle` of these ranks: a process set with which Horovod has started, or a new one.

        A new one needs HOROVOD_DYNAMIC_PROCESS_SETS=1, and all ranks ask for the same sets in the same order.
        """
        return ranks

    def communication_counters(self) -> list[Carried] | None:
        """What this rank's collectives have carried since its process started, by kind; None where Horovod does not
        count. Those of few bytes are left out, and those on a GPU."""
        return None

    # Models

    @abstractmethod
    def bind(self, model: Model, loss: AnyLoss, precision: str) -> Trainable:
        """Prepare a model of this framework for training, in a precision that `CAPABILITIES` lists.

        A batch with a tuple of inputs calls the model with as many arguments.
        If the framework cannot change a model's dtypes later, the model must already have them. Raises RequestError
        for a model that cannot be trained, for example because variables share a name.
        """

    def cross_entropy(self, loss: Loss) -> CountedLoss:
        """A function of outputs (…, classes) and labels (…): the sum of their cross-entropies, and its count.

        As `torch.nn.CrossEntropyLoss` has it: with w the `class_weights`, 1 without, and s the `label_smoothing`, a
        label y adds (1 - s) w_y (-log p_y) + s / classes Σ_c w_c (-log p_c) to the sum, and w_y to the count. The
        `ignored_label` adds nothing to either. Raises RequestError unless there is a weight for each class.
        """
        raise RequestError(
            f"loss: expected no ignored_label or class_weights, as the {self.NAME} adapter differentiates no functions"
        )

    def synchronize_batch_norms(self, model: Model, group: Group, every: bool = True) -> list[str]:
        """Have a model's batch norms use the batches of a whole group in training; returns the names of these layers,
        whose tensors keep theirs; none where the framework has no batch norms.

        Without `every`, and on one rank, only those whose class says so, such as `torch.nn.SyncBatchNorm`; on one rank
        they then compute what local ones do, to the bit. Call it before `Session`. Raises RequestError naming a layer
        that cannot be synchronized.
        """
        return []

    def observer(self, trainable: Trainable) -> Observer:
        """The observer of this model's steps."""
        return Observer()


def class_weights(loss: Loss, shape: Sequence[int]) -> list[float]:
    """The weights of a recipe's loss for outputs of `shape`. Raises RequestError unless there is one for each class."""
    weights = loss.class_weights or []
    if len(weights) != shape[-1]:
        raise RequestError(f"loss.class_weights: expected {shape[-1]}, as the model has outputs, got {len(weights)}")
    return weights
