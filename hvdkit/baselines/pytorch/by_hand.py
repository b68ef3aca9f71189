"""What PyTorch's baselines share: a usual script's model, process group, optimizer and training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from hvdkit.adapters.pytorch import PyTorch
from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines import base
from hvdkit.core.group import Group, Ranks, Topology
from hvdkit.core.pieces import Partition, sum_of_squares
from hvdkit.core.session import Gradients, Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.update_rules import clip, decay_of
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Optimizer, Sgd

_TIMEOUT = timedelta(days=1)  # the launcher detects ranks that hang
Outputs = tuple[torch.Tensor, torch.Tensor]  # of a batch, and its loss


class HandWritten(Strategy):
    """A usual script's own parts of a training step. By default it sends no gradients, and core updates the weights."""

    group: Group
    trainable: TrainableModel

    def __init__(self, group: Group) -> None:
        self.group = group

    def begin_update(self, batches: int) -> None:
        """Called before an update's batches."""

    def apart(self) -> AbstractContextManager[Any]:
        """A context in which backward passes send no gradients."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss to those before, and send them unless `apart`."""
        loss.backward()

    def wait(self) -> None:
        """Wait until all gradients are averaged."""

    def step(self, session: ByHandSession) -> None:
        """Update by the averaged gradients."""
        session.update(session.trainable.gradients())

    def own(self, session: ByHandSession, batch: Batch) -> dict[str, np.ndarray]:
        """This rank's gradients, as they are before they are averaged."""
        session.begin(2)
        with self.apart():
            session.forward_backward(batch)
        session.divide()
        return session.arrays(session.trainable.gradients())

    def averaged(self, session: ByHandSession, batch: Batch, weight: float = 1.0) -> tuple[Outputs, dict[str, Any]]:
        """Outputs and loss, and the averaged gradients of weight × loss."""
        session.begin(1)
        outputs = session.forward_backward(batch, weight=weight)
        self.wait()
        session.divide()
        return outputs, session.trainable.gradients()


class ByHandSession(Session):
    """A usual script's step: PyTorch accumulates gradients over the batches, and a `HandWritten` averages them."""

    trainable: TrainableModel
    strategy: HandWritten

    def train_step(self, batches: Sequence[Batch]) -> torch.Tensor:
        self.begin(len(batches))
        losses = []
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self.strategy.apart():
                losses.append(self.forward_backward(batch, parts=len(batches))[1])
            if self.counting is not None:
                self.counting.add()
        self.strategy.wait()
        if self.divide(len(batches)):
            self.strategy.step(self)
        loss = torch.stack(losses).mean()
        return loss if self.counting is None else self.counting.mean(loss)

    def gradients(self, batch: Batch) -> Gradients:
        """Own gradients by one or more passes that change no buffers, averaged ones by another pass."""
        with self.buffers_kept():
            own = self.strategy.own(self, batch)
        (outputs, loss), averaged = self.strategy.averaged(self, batch)
        loss = loss if self.counting is None else self.counting.mean(loss)
        return Gradients(self.adapter.to_numpy(outputs), float(loss), own, self.arrays(averaged))

    def begin(self, batches: int) -> None:
        """Begin an update by so many batches."""
        for parameter in self.trainable.trained.values():
            parameter.grad = None
        self.strategy.begin_update(batches)

    def forward_backward(self, batch: Batch, parts: int = 1, weight: float = 1.0) -> Outputs:
        """Outputs and loss of a batch, and a backward pass of weight × loss / parts."""
        outputs, loss = self.trainable.loss_of(*self.trainable.inputs(batch))
        self.strategy.backward(loss * (self.step.scale or 1.0) * weight / parts)
        return outputs.detach(), loss.detach()

    def divide(self, batches: float | None = None) -> bool:
        """Divide the gradients of sums by the mean count over the data axis; whether there is an update."""
        if self.counting is None or not self.counting.counts:
            return True
        mean = self.counting.taken(self.strategy, batches)
        self.counting.over_count(self.trainable.gradients(), mean)  # in place
        return bool(mean > 0)

    def arrays(self, gradients: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Gradients of the scaled loss as arrays of a state; collective where ranks hold shares of them."""
        return self._arrays(self.update.unscaled(gradients))

    @override
    def _bytes_of(self, tensors: Mapping[str, Any]) -> int:
        return sum(tensor.nbytes for tensor in tensors.values())

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """A context after which buffers are what they were before."""
        buffers = self.trainable.buffers.values()
        before = [buffer.clone() for buffer in buffers]
        yield
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


class TorchOptim(HandWritten):
    """With an optimizer of `torch.optim`, whose state is the session's slots."""

    settings: Optimizer
    _optimizer: Any
    _state: dict[torch.Tensor, Any]

    def partition(self, settings: Optimizer) -> Partition:
        """Make the optimizer."""
        self.settings, self._optimizer = settings, torch_optimizer(settings, list(self.trainable.trained.values()))
        self._state = self._optimizer.state
        return super().partition(settings)

    def step(self, session: ByHandSession) -> None:
        if not session.step.gradient_bytes:  # the same in each update
            session.step.gradient_bytes = sum(gradient.nbytes for gradient in session.trainable.gradients().values())
        update = session.update
        if self.settings.clip_norm is not None:
            total = partial(self._total, session)
            clip(self._held_gradients(session), self.settings.clip_norm, session.adapter, total)
        for group in self._optimizer.param_groups:
            group["lr"] = update.rate.get()
        steps = update.steps.get()
        for name, slots in update.slots.items():
            tensors = [getattr(slot, "held", slot) for slot in slots]  # a `ShardedTensor` has it
            if tensors[0] is None:  # another rank's
                continue
            self._state[session.trainable.trained[name]] = (
                {"step": torch.tensor(steps), "exp_avg": tensors[0], "exp_avg_sq": tensors[1]}
                if isinstance(self.settings, AdamW)
                else {"momentum_buffer": tensors[0]}
            )
        self._optimizer.step()
        update.steps.set(steps + 1)

    def _held_gradients(self, session: ByHandSession) -> list[torch.Tensor]:
        """The gradients that this rank holds."""
        return list(session.trainable.gradients().values())

    def _total(self, session: ByHandSession, norms: list[torch.Tensor]) -> torch.Tensor:
        """The sum of squares over the whole gradients, from the norms of `_held_gradients`."""
        return sum_of_squares(session.adapter, norms)


class ByHand(PyTorch):
    """Shared by the baselines: PyTorch's default layout of images, as in usual scripts."""

    layout = torch.contiguous_format


class ProcessGroup(base.WithoutHorovod, ByHand):
    """Starts PyTorch's default process group of all ranks: Gloo, or NCCL on GPUs. A `HandWritten` averages over it."""

    session_class = ByHandSession

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        topology = super().init(device, threads, sets)
        backend, store = "nccl" if topology.device == "gpu" else "gloo", self._store(topology)
        dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.size, timeout=_TIMEOUT)
        return topology

    def _store(self, topology: Topology) -> dist.TCPStore:
        """PyTorch's key-value store, on a port that the kernel chooses."""
        host, size = "127.0.0.1", topology.size
        if topology.is_root:
            store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            self.rendezvous.exchange(str(store.port).encode())
            return store
        return dist.TCPStore(host, int(self.rendezvous.exchange(b"")[0]), size, is_master=False)

    def shutdown(self) -> None:
        super().shutdown()
        dist.destroy_process_group()


def torch_optimizer(
    settings: Optimizer,
    parameters: list[torch.nn.Parameter],
    make: Callable[..., torch.optim.Optimizer] = lambda kind, groups, **options: kind(groups, **options),
) -> Any:
    """PyTorch's optimizer, or None if it does not compute core's update rule.

    Parameters without decay are in a separate group.
    """
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(decay_of(settings, tuple(parameter.shape)), []).append(parameter)
    grouped = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    if isinstance(settings, Sgd) and settings.momentum and not settings.decoupled:
        return make(torch.optim.SGD, grouped, lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov)
    if isinstance(settings, AdamW):
        betas = settings.beta1, settings.beta2
        return make(torch.optim.AdamW, grouped, lr=0.0, betas=betas, eps=settings.epsilon)
    return None
