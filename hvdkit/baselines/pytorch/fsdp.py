"""FSDP2: `torch.distributed.fsdp.fully_shard` (Zhao et al. 2023), with an optimizer of `torch.optim`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines.pytorch.by_hand import ByHandSession, ProcessGroup, TorchOptim, torch_optimizer
from hvdkit.baselines.pytorch.shares import Gather, ParameterShares, ShardedTensor, SharesScript, local, share_of_rows
from hvdkit.core.group import Group, Mesh
from hvdkit.core.pieces import ROOT_BLOCK, Partition
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Optimizer, Recipe


class _Model(TrainableModel):
    """A module that `shard` divides among the ranks."""

    def shard(self, frees: bool, group: Group, gather: Gather) -> None:
        """Divide the parameters of the blocks, which are those of hvdkit's own sharding, then the others.

        With `frees` gathered ones are freed after forward. Raises RequestError for what FSDP cannot divide.
        """
        scalars = [name for name, parameter in self.model.named_parameters() if not parameter.dim()]
        if scalars:
            raise RequestError(f"--rival fsdp: expected parameters of one axis or more, got the scalar {scalars[0]}")
        mesh = init_device_mesh(self.device.type, (group.size,))
        frozen = {parameter for parameter in self.model.parameters() if not parameter.requires_grad}
        blocks = [self.model.get_submodule(name) for name in self.blocks() if name != ROOT_BLOCK]
        for module in (*blocks, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=frees, ignored_params=frozen)
        self.trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self._share = partial(share_of_rows, group=group, gather=gather)
        self.parameters = {name: self.share(parameter.detach()) for name, parameter in self.trained.items()}

    def share(self, tensor: torch.Tensor) -> ShardedTensor:
        return self._share(tensor, tensor.shape)

    def gradients(self) -> dict[str, Any]:
        return {
            name: self.share(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
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


class _FullyShard(SharesScript, TorchOptim):
    """Divides the session's model. With `frees` gathered parameters are freed after forward (ZeRO-3)."""

    def __init__(self, group: Group, frees: bool) -> None:
        super().__init__(group)
        self._frees = frees

    def bind(self, session: Stateful) -> None:
        super().bind(session)
        assert isinstance(session.trainable, _Model)
        session.trainable.shard(self._frees, self.group, partial(session.adapter.allgather, group=self.group))

    def partition(self, settings: Optimizer) -> Partition:
        assert isinstance(self.trainable, _Model)
        self.settings, shares, share = settings, self.trainable.parameters.items(), self.trainable.share
        self._optimizer = torch_optimizer(settings, list(self.trainable.trained.values()))
        self._state = self._optimizer.state
        return ParameterShares(
            self.session, self.group, lambda: {name: share(torch.zeros_like(weight.held)) for name, weight in shares}
        )

    def _held_gradients(self, session: ByHandSession) -> list[torch.Tensor]:
        return [local(gradient.held) for gradient in session.trainable.gradients().values()]

    def _total(self, session: ByHandSession, norms: list[torch.Tensor]) -> torch.Tensor:
        total = super()._total(session, norms)
        dist.all_reduce(total)
        return total


class Fsdp(ProcessGroup):
    """FSDP2 as its documentation shows it: `fully_shard` of each block, then of the whole model.

    `sharding: gradients` keeps gathered parameters until backward; otherwise they are freed after forward and gathered
    again.
    """

    trainable_class = _Model

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _FullyShard(mesh.data, frees=recipe.sharding != "gradients")
