"""FSDP2: `torch.distributed.fsdp.fully_shard` (Zhao et al. 2023), with an optimizer of `torch.optim`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines.pytorch.by_hand import ByHandSession, ProcessGroup, TorchOptim
from hvdkit.baselines.pytorch.shares import Gather, ParameterShares, ShardedTensor, SharesScript, local, share_of_rows
from hvdkit.core.group import Group, Mesh
from hvdkit.core.pieces import ROOT_BLOCK, Partition
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import Strategy
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Optimizer, Recipe


class ShardedModel(TrainableModel):
    """A module that `fully_shard` has divided: each rank of a group has some rows of every parameter."""

    def take_shares(self, group: Group, gather: Gather) -> None:
        """Make the parameters those of the divided module. `gather` concatenates the shares of the group."""
        self._shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self._over = group, gather
        self.trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.parameters = {name: self.share(name, parameter.detach()) for name, parameter in self.trained.items()}

    def share(self, name: str, tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that is divided as the parameter of this name is."""
        return share_of_rows(tensor, self._shapes[name], *self._over)

    def slots(self) -> dict[str, ShardedTensor]:
        """A slot of zeros of all parameters."""
        return {name: self.share(name, torch.zeros_like(own).detach()) for name, own in self.trained.items()}

    def gradients(self) -> dict[str, Any]:
        return {
            name: self.share(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for name, parameter in self.trained.items()
        }

    def evaluated(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().evaluated(inputs)
        for module in self.model.modules():  # gathered weights would stay until backward, even if others are loaded
            if isinstance(module, FSDPModule):
                module.reshard()
        return outputs


class _Model(ShardedModel):
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
        self.take_shares(group, gather)


class ShardedScript(SharesScript, TorchOptim):
    """A script whose model is a `ShardedModel`."""

    trainable: ShardedModel

    def partition(self, settings: Optimizer) -> Partition:
        super().partition(settings)
        return ParameterShares(self.session, self.group, self.trainable.slots)

    def _held_gradients(self, session: ByHandSession) -> list[torch.Tensor]:
        return [local(gradient.held) for gradient in session.trainable.gradients().values()]


class _FullyShard(ShardedScript):
    """Divides the session's model. With `frees` gathered parameters are freed after forward (ZeRO-3)."""

    trainable: _Model

    def __init__(self, group: Group, frees: bool) -> None:
        super().__init__(group)
        self._frees = frees

    def bind(self, session: Stateful) -> None:
        super().bind(session)
        self.trainable.shard(self._frees, self.group, partial(session.adapter.allgather, group=self.group))

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
