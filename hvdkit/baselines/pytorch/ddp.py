"""DistributedDataParallel, and its optimizer with shards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines.pytorch.process_group import ProcessGroup
from hvdkit.baselines.pytorch.sessions import ByHandSession, OverAll, TorchOptimSession, torch_optimizer
from hvdkit.core import seam
from hvdkit.core.group import Group, Mesh
from hvdkit.core.pieces import Partition, StateEntry, whole_tensors
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.errors import RunError
from hvdkit.recipe.schema import Optimizer, Recipe

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


class _DdpSession(ByHandSession):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trainable.forward = DistributedDataParallel(self.trainable.model, broadcast_buffers=False)

    def _backward_of(self, batch: Batch, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return super()._backward_of(batch, parts)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise RunError(
                f"--rival {self.adapter.rival}: a batch does not use all parameters, which DistributedDataParallel "
                "refuses in its default setting, find_unused_parameters=False; hvdkit itself trains such a model"
            ) from None

    def _without_communication(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.trainable.forward.no_sync()
        return context


class Ddp(ProcessGroup):
    """DistributedDataParallel with its default settings.

    The exception is `broadcast_buffers=False`: as in the recipe, each rank keeps its own running statistics, and no
    time is spent on sending them in each step.
    """

    session_class: type[Session] = _DdpSession

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return OverAll(mesh.data)


class _WholeTensors(Partition):
    """Each parameter is updated by one rank, its owner, as ZeroRedundancyOptimizer divides them."""

    by_kernel = False

    def __init__(
        self, adapter: Adapter, parameters: Mapping[str, torch.Tensor], owners: dict[str, int], group: Group
    ) -> None:
        super().__init__(adapter, parameters)
        self._owners, self._group = owners, group
        self.pieces = {name: piece for name, piece in self.pieces.items() if owners[name] == dist.get_rank()}

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self._group,)

    @property
    def stored(self) -> StateEntry:
        return whole_tensors(self.adapter, self.parameters)

    def weights(self) -> list[torch.Tensor]:
        return [self.parameters[name] for name in self.pieces]

    def _gathered(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensor = tensors[key] if key in tensors else torch.empty_like(self.parameters[key])
        dist.broadcast(tensor, self._owners[key])
        return {key: tensor}


class _ShardedOptimizer(OverAll):
    """Has the session's ZeroRedundancyOptimizer, which decides what each rank owns."""

    zero: ZeroRedundancyOptimizer

    def partition(self, session: seam.SessionView, settings: Optimizer) -> Partition:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import: not for the others

        assert isinstance(session.trainable, TrainableModel)
        trained = session.trainable.trained
        chosen = torch_optimizer(settings, list(trained.values()))
        assert chosen, "registry.check_recipe refuses the other optimizers"
        optimizer_class, groups, options = chosen
        self.zero = ZeroRedundancyOptimizer(groups, optimizer_class, **options)
        names = {parameter: name for name, parameter in trained.items()}
        mine = [names[parameter] for group in self.zero.optim.param_groups for parameter in group["params"]]
        ranks = session.adapter.allgather_object(mine, self._group, name="zero_redundancy.owners")
        owners = {name: rank for rank, owned in enumerate(ranks) for name in owned}
        return _WholeTensors(session.adapter, session.trainable.parameters, owners, self._group)


class _ZeroRedundancySession(_DdpSession, TorchOptimSession):
    strategy: _ShardedOptimizer

    def __init__(self, adapter: Adapter, model: Any, optimizer: Optimizer, *others: Any) -> None:
        super().__init__(adapter, model, optimizer, *others)
        self.settings = optimizer

    def _step(self) -> None:
        self.step.gradient_bytes = self._bytes_of(self.trainable.gradients())
        zero = self.strategy.zero
        self._step_by(zero, zero.optim.state)


class ZeroRedundancy(Ddp):
    """DistributedDataParallel with `ZeroRedundancyOptimizer`: each rank updates some parameters and broadcasts them."""

    session_class = _ZeroRedundancySession

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _ShardedOptimizer(mesh.data)
