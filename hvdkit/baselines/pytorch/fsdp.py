"""FSDP2: `torch.distributed.fsdp.fully_shard` (Zhao et al. 2023), with an optimizer of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines.pytorch.process_group import ProcessGroup
from hvdkit.baselines.pytorch.sessions import TorchOptimSession, torch_optimizer
from hvdkit.baselines.pytorch.shares import Share, SharesSession, Slots
from hvdkit.core import seam
from hvdkit.core.group import Mesh
from hvdkit.core.pieces import ROOT_BLOCK, Partition
from hvdkit.core.seam import Adapter, AnyLoss
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Optimizer, Recipe


class _Sharded(Share):
    """A tensor that FSDP has divided along its first axis."""

    def __init__(self, tensor: DTensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.nbytes = tensor.to_local().nbytes

    def detach(self) -> torch.Tensor:
        return self.tensor.detach().full_tensor()

    def copy_(self, whole: torch.Tensor) -> None:
        divided = distribute_tensor(whole, self.tensor.device_mesh, self.tensor.placements, src_data_rank=None)
        self.tensor.to_local().copy_(divided.to_local())


class _Model(TrainableModel):
    """A module that `shard` divides among the ranks."""

    def shard(self, frees: bool, device: str) -> None:
        """Divide the parameters of the blocks, which are those of hvdkit's own sharding, then the others.

        With `frees` gathered ones are freed after forward. Raises RequestError for what FSDP cannot divide.
        """
        scalars = [name for name, parameter in self.model.named_parameters() if not parameter.dim()]
        if scalars:
            raise RequestError(f"--rival fsdp: expected parameters of one axis or more, got the scalar {scalars[0]}")
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        frozen = {parameter for parameter in self.model.parameters() if not parameter.requires_grad}
        blocks = [self.model.get_submodule(name) for name in self.blocks() if name != ROOT_BLOCK]
        for module in (*blocks, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=frees, ignored_params=frozen)
        self.trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.parameters = {name: _Sharded(parameter.detach()) for name, parameter in self.trained.items()}

    def gradients(self) -> dict[str, Any]:
        return {
            name: _Sharded(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for name, parameter in self.trained.items()
        }

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        outputs = super().predict(inputs)
        self._free()
        return outputs

    def losses(self, batch: Batch) -> np.ndarray:
        losses = super().losses(batch)
        self._free()
        return losses

    def _free(self) -> None:
        """Free gathered weights, which would stay until the next backward, even if others are loaded before."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Slots(Slots):
    """Slots divided as the parameters are."""

    parameters: Mapping[str, _Sharded]

    def variables(self) -> dict[str, Any]:
        return {name: _Sharded(torch.zeros_like(parameter.tensor)) for name, parameter in self.parameters.items()}


class _FullyShard(Strategy):
    """Divides the session's model. With `frees` gathered parameters are freed after forward (ZeRO-3)."""

    def __init__(self, frees: bool) -> None:
        self._frees = frees

    def bind(self, session: seam.SessionView, parameters: int) -> None:
        assert isinstance(session.trainable, _Model)
        session.trainable.shard(self._frees, session.trainable.device.type)

    def partition(self, session: seam.SessionView, settings: Optimizer) -> Partition:
        return _Slots(session.adapter, session.trainable.parameters)


class _FsdpSession(SharesSession, TorchOptimSession):
    trainable: _Model

    def __init__(self, adapter: Adapter, model: Any, optimizer: Optimizer, *others: Any) -> None:
        super().__init__(adapter, model, optimizer, *others)
        self.settings = optimizer
        chosen = torch_optimizer(optimizer, list(self.trainable.trained.values()))
        assert chosen, "registry.check_recipe refuses the other optimizers"
        optimizer_class, groups, options = chosen
        self._optimizer = optimizer_class(groups, **options)

    def _reduced(self, batch: Batch, weight: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        self._begin(1)
        logits, loss = self.trainable.loss_of(*self.trainable.inputs(batch))
        (loss * weight).backward()
        return logits.detach(), loss.detach(), self.trainable.gradients()

    def _step(self) -> None:
        self.step.gradient_bytes = self._bytes_of(self.trainable.gradients())
        self._step_by(self._optimizer, self._optimizer.state)

    def _total(self, norms: list[torch.Tensor]) -> torch.Tensor:
        total = super()._total(norms)
        dist.all_reduce(total)
        return total

    def _held_gradients(self) -> list[torch.Tensor]:
        return [gradient.tensor.to_local() for gradient in self.trainable.gradients().values()]

    def _torch_slot(self, slot: _Sharded) -> torch.Tensor:
        return slot.tensor


class Fsdp(ProcessGroup):
    """FSDP2 as its documentation shows it: `fully_shard` of each block, then of the whole model.

    `sharding: gradients` keeps gathered parameters until backward; otherwise they are freed after forward and gathered
    again.
    """

    session_class = _FsdpSession

    def bind(self, model: torch.nn.Module, loss: AnyLoss, precision: str) -> TrainableModel:
        return _Model(model, loss, precision, self.device, torch.contiguous_format)

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _FullyShard(frees=recipe.sharding != "gradients")
