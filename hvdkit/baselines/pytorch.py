"""PyTorch's baselines: Horovod by hand, DistributedDataParallel, its optimizer with shards, and no communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.adapters import pytorch as own
from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines import base
from hvdkit.core.mesh import Mesh
from hvdkit.core.owned import Owned
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Gradients, Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.topology import Topology
from hvdkit.core.update_rules import clip, decay_of
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Loss, Optimizer, Recipe, Sgd

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_TIMEOUT = timedelta(days=1)  # the launcher detects ranks that hang


class _ByHand:
    """Shared by the baselines: PyTorch's default layout of images, as in usual scripts."""

    def bind(self, model: torch.nn.Module, loss: Loss, precision: str) -> TrainableModel:
        return TrainableModel(model, loss, precision, own.device(), torch.contiguous_format)


class _Session(Session):
    """A usual script's training step: PyTorch accumulates gradients over the batches; subclasses average them."""

    trainable: TrainableModel

    def train_step(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._begin(len(batches))
        losses = []
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self._without_communication():
                losses.append(self._backward_of(batch, len(batches))[1])
        self._synchronize()
        self._step()
        return torch.stack(losses).mean()

    def gradients(self, batch: Batch) -> Gradients:
        """Own gradients of a first backward pass without communication, averaged ones of a second pass."""
        statistics = [buffer.clone() for buffer in self.trainable.buffers.values()]
        self._begin(2)
        with self._without_communication():
            logits, loss = self._backward_of(batch, 1)
        mine = self._arrays(self.update.unscaled(self.trainable.gradients()))
        for buffer, before in zip(self.trainable.buffers.values(), statistics, strict=True):
            buffer.copy_(before)  # the second pass must not update them again
        for parameter in self.trainable.trained.values():
            parameter.grad = None
        self._backward_of(batch, 1)
        self._synchronize()
        averaged = self._arrays(self.update.unscaled(self.trainable.gradients()))
        return Gradients(own.to_numpy(logits), float(loss), mine, averaged)

    def _begin(self, parts: int) -> None:
        for parameter in self.trainable.trained.values():
            parameter.grad = None

    def _backward_of(self, batch: Batch, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.trainable.inputs(batch)
        logits, loss = self.trainable.loss_of(inputs, targets)
        (loss * (self._scale or 1.0) / parts).backward()
        return logits.detach(), loss.detach()

    def _without_communication(self) -> AbstractContextManager[Any]:
        """A context in which backward passes send no gradients."""
        return nullcontext()

    def _synchronize(self) -> None:
        """Wait until all gradients are averaged."""

    def _step(self) -> None:
        self.update(self.trainable.gradients())


class _TorchOptimSession(_Session):
    """Uses an optimizer of `torch.optim`, whose state is the session's slots."""

    settings: Optimizer

    def _step_by(self, optimizer: torch.optim.Optimizer, state: dict[torch.Tensor, Any]) -> None:
        """One step. `state` is that of the optimizer which holds the slots."""
        if self.settings.clip_norm is not None:
            gradients = list(self.trainable.gradients().values())
            for gradient, clipped in zip(
                gradients, clip(gradients, self.settings.clip_norm, self.adapter.tensors), strict=True
            ):
                gradient.copy_(clipped)
        for group in optimizer.param_groups:
            group["lr"] = self.update.rate.get()
        steps = self.update.steps.get()
        for name, slots in self.update.slots.items():
            state[self.trainable.trained[name]] = (
                {"step": torch.tensor(steps), "exp_avg": slots[0], "exp_avg_sq": slots[1]}
                if isinstance(self.settings, AdamW)
                else {"momentum_buffer": slots[0]}
            )
        optimizer.step()
        self.update.steps.set(steps + 1)


class _PlainSession(_TorchOptimSession):
    """Uses `torch.optim` if it computes the recipe's update."""

    def __init__(self, adapter: Adapter, model: Any, optimizer: Optimizer, *others: Any) -> None:
        super().__init__(adapter, model, optimizer, *others)
        self.settings, named = optimizer, self.trainable.trained
        half = getattr(self.strategy, "half", False)
        found = _torch_optimizer(optimizer, list(named.values()))
        plain = found and found[0](found[1], **found[2])
        # fp16 scales the loss and may skip a step on all ranks, which core does
        self._uses_torch_optim = plain is not None and self.update.scale is None
        self._optimizer = hvd.DistributedOptimizer(
            plain or torch.optim.SGD(named.values(), lr=0.0),
            named_parameters=named.items(),
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
            op=hvd.Average,
        )

    def _begin(self, parts: int) -> None:
        super()._begin(parts)
        self._optimizer.set_backward_passes_per_step(parts)

    def _synchronize(self) -> None:
        self._optimizer.synchronize()

    def _step(self) -> None:
        if not self._uses_torch_optim:
            super()._step()
            return
        with self._optimizer.skip_synchronize():
            self._step_by(self._optimizer, self._optimizer.state)


def _torch_optimizer(
    settings: Optimizer, parameters: list[torch.nn.Parameter]
) -> tuple[type[torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]] | None:
    """PyTorch's optimizer, if it computes core's update rule: class, groups of parameters, and options.

    Parameters without decay are in a separate group.
    """
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(decay_of(settings, tuple(parameter.shape)), []).append(parameter)
    grouped = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    if isinstance(settings, Sgd) and settings.momentum and not settings.decoupled:
        return torch.optim.SGD, grouped, {"lr": 0.0, "momentum": settings.momentum, "nesterov": settings.nesterov}
    if isinstance(settings, AdamW):
        return torch.optim.AdamW, grouped, {
            "lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon,
        }  # fmt: skip
    return None


class _Half(Strategy):
    """`half` says whether the session sends gradients in float16."""

    def __init__(self, half: bool) -> None:
        self.half = half


class Plain(_ByHand, base.Baseline):
    """hvd.DistributedOptimizer around torch.optim: each gradient is sent as soon as it is ready."""

    session_class = _PlainSession

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Half(recipe.compression.method == "fp16")


class _DdpSession(_Session):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trainable.forward = DistributedDataParallel(self.trainable.model, broadcast_buffers=False)

    def _without_communication(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.trainable.forward.no_sync()
        return context


class Ddp(_ByHand, base.WithoutHorovod):
    """DistributedDataParallel with its default settings, over Gloo, or NCCL on GPUs.

    The exception is `broadcast_buffers=False`: as in the recipe, each rank keeps its own running statistics, and no
    time is spent on sending them in each step.
    """

    session_class = _DdpSession

    def init(self, device: str, threads: int | None = None) -> Topology:
        topology = super().init(device, threads)
        store = self._store(topology)
        backend = "nccl" if topology.device == "gpu" else "gloo"
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


class _WholeTensors(Owned):
    """Each parameter is updated by one rank, its owner, as ZeroRedundancyOptimizer divides them."""

    in_place = False

    def __init__(self, adapter: Adapter, parameters: Mapping[str, torch.Tensor], owners: dict[str, int]) -> None:
        super().__init__(adapter, parameters)
        self._owners = owners
        self.shapes = {name: shape for name, shape in self.shapes.items() if owners[name] == dist.get_rank()}

    def variables(self) -> dict[str, torch.Tensor]:
        return {name: self.adapter.tensors.variable(self.parameters[name]) for name in self.shapes}

    def whole(self, pieces: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            tensor = pieces[name] if name in pieces else torch.empty_like(parameter)
            dist.broadcast(tensor, self._owners[name])
            yield name, tensor

    def cut(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: arrays[name] for name in self.shapes}


class _ShardedOptimizer(Strategy):
    """Has the session's ZeroRedundancyOptimizer, which decides what each rank owns."""

    zero: ZeroRedundancyOptimizer

    def owned(self, session: Session, settings: Optimizer) -> Owned:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import: not for the others

        assert isinstance(session.trainable, TrainableModel)
        trained = session.trainable.trained
        found = _torch_optimizer(settings, list(trained.values()))
        assert found, "registry.check_recipe refuses the other optimizers"
        optimizer_class, groups, options = found
        self.zero = ZeroRedundancyOptimizer(groups, optimizer_class, **options)
        names = {parameter: name for name, parameter in trained.items()}
        mine = [names[parameter] for group in self.zero.optim.param_groups for parameter in group["params"]]
        ranks = session.adapter.allgather_object(mine, name="zero_redundancy.owners")
        owners = {name: rank for rank, owned in enumerate(ranks) for name in owned}
        return _WholeTensors(session.adapter, session.trainable.parameters, owners)


class _ZeroRedundancySession(_DdpSession, _TorchOptimSession):
    strategy: _ShardedOptimizer

    def __init__(self, adapter: Adapter, model: Any, optimizer: Optimizer, *others: Any) -> None:
        super().__init__(adapter, model, optimizer, *others)
        self.settings = optimizer

    def _step(self) -> None:
        self._gradient_bytes = self._bytes_of(self.trainable.gradients())
        zero = self.strategy.zero
        self._step_by(zero, zero.optim.state)


class ZeroRedundancy(Ddp):
    """DistributedDataParallel with `ZeroRedundancyOptimizer`: each rank updates some parameters and broadcasts them."""

    session_class = _ZeroRedundancySession

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _ShardedOptimizer()


class Independent(_ByHand, base.Independent):
    """Gradients are not averaged."""


RIVALS = {"plain": Plain, "ddp": Ddp, "zero_redundancy": ZeroRedundancy, "independent": Independent}
