"""DistributedDataParallel, and its optimizer with shards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.baselines.pytorch.by_hand import HandWritten, ProcessGroup, TorchOptim, torch_optimizer
from hvdkit.baselines.pytorch.shares import ParameterShares, ShardedTensor
from hvdkit.core.group import Group, Mesh
from hvdkit.core.pieces import Partition
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import Strategy
from hvdkit.errors import RunError
from hvdkit.recipe.schema import Optimizer, Recipe


class _Wrapped(HandWritten):
    def bind(self, session: Stateful) -> None:
        super().bind(session)
        self._module = DistributedDataParallel(self.trainable.model, broadcast_buffers=False)
        self._rival = session.adapter.rival
        self.trainable.forward = self._forward

    def _forward(self, *inputs: Any) -> Any:
        try:
            return self._module(*inputs)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise RunError(
                f"--rival {self._rival}: a batch does not use all parameters, which DistributedDataParallel refuses in "
                "its default setting, find_unused_parameters=False; hvdkit itself trains such a model"
            ) from None

    def apart(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.no_sync()
        return context


class Ddp(ProcessGroup):
    """DistributedDataParallel with its default settings.

    The exception is `broadcast_buffers=False`: as in the recipe, each rank keeps its own running statistics, and no
    time is spent on sending them in each step.
    """

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Wrapped(mesh.data)


def _slot(parameter: torch.Tensor, owner: int, group: Group) -> ShardedTensor:
    """A slot of a parameter, which its owner has whole."""
    own = torch.zeros_like(parameter) if owner == group.index else None

    def whole() -> torch.Tensor:
        tensor = torch.empty_like(parameter) if own is None else own
        dist.broadcast(tensor, owner)
        return tensor

    def set_from(whole: torch.Tensor) -> None:
        if own is not None:
            own.copy_(whole)

    return ShardedTensor(parameter.shape, parameter.dtype, 0 if own is None else own.nbytes, whole, set_from, own)


class _Sharded(TorchOptim, _Wrapped):
    """The optimizer decides what each rank owns."""

    def partition(self, settings: Optimizer) -> Partition:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import: not for the others

        self.settings, trained = settings, self.trainable.trained
        self._optimizer = torch_optimizer(
            settings,
            list(trained.values()),
            lambda kind, groups, **options: ZeroRedundancyOptimizer(groups, kind, **options),
        )
        self._state = self._optimizer.optim.state
        names = {parameter: name for name, parameter in trained.items()}
        own = [names[parameter] for group in self._optimizer.optim.param_groups for parameter in group["params"]]
        ranks = self.session.adapter.allgather_object(own, self.group, name="zero_redundancy.owners")
        owners = {name: rank for rank, owned in enumerate(ranks) for name in owned}
        weights = self.trainable.parameters.items()
        slots = lambda: {name: _slot(weight, owners[name], self.group) for name, weight in weights}  # noqa: E731
        return ParameterShares(self.session, self.group, slots)


class ZeroRedundancy(Ddp):
    """DistributedDataParallel with `ZeroRedundancyOptimizer`: each rank updates some parameters and broadcasts them."""

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Sharded(mesh.data)
