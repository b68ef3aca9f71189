"""Tensor parallelism by DTensor, with FSDP2 over the data axis: PyTorch's own way to train parts of layers.

The parts are hvdkit's (`Architecture.cuts`), so that each rank has the same heads and columns. The layers are given
the styles of `torch.distributed.tensor.parallel`; the loss is its `loss_parallel`, on logits that stay divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import embedding

from hvdkit.adapters.parts import LayerParts
from hvdkit.adapters.pytorch.training import cross_entropy
from hvdkit.baselines.pytorch.by_hand import ByHandSession, Outputs
from hvdkit.baselines.pytorch.fsdp import ShardedModel, ShardedScript
from hvdkit.baselines.pytorch.meshed import Meshed
from hvdkit.baselines.pytorch.shares import Gather, ShardedTensor
from hvdkit.core.group import Group, Mesh
from hvdkit.core.pieces import ROOT_BLOCK, Partition, Piece, sum_of_squares
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Optimizer, Recipe


def _cut(placements: Mapping[str, Placement], _: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Make this rank's parts, which a module has, those of DTensors."""
    for name, placement in placements.items():
        part = DTensor.from_local(getattr(module, name).detach(), mesh, [placement], run_check=False)
        module.register_parameter(name, torch.nn.Parameter(part))


class _Columns(ColwiseParallel):
    """Of a layer whose matrix is (in, out)."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partial(_cut, {"weight": Shard(1), "bias": Shard(0)}),
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


class _Rows(RowwiseParallel):
    """Of a layer whose matrix is (in, out)."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return distribute_module(
            module,
            device_mesh,
            partial(_cut, {"weight": Shard(0), "bias": Replicate()}),
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


class _Table(torch.nn.Embedding):
    """The vectors of tokens, divided by tokens: returns the rows, and the table for its second use."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = embedding(_everywhere(tokens, self.weight.device_mesh), self.weight)
        return rows.redistribute(placements=[Replicate()]).to_local(), self.weight


class _Logits:
    """Outputs of which each rank has those of some tokens (`parts.DividedOutputs`), as a DTensor."""

    def cross_entropy(self, logits: DTensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
        how.pop("label_smoothing", None)  # 0, as the recipe is checked for it
        with loss_parallel():
            return cross_entropy(logits, labels, **how).full_tensor()

    def whole(self, logits: DTensor) -> torch.Tensor:
        return logits.full_tensor()


class _Enter:
    """What the last layer does to its inputs before it uses the divided table."""

    group = None

    def __init__(self, mesh: DeviceMesh) -> None:
        self.enter: Callable[[torch.Tensor], torch.Tensor] = partial(_everywhere, mesh=mesh)


def _everywhere(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


class _Model(ShardedModel):
    """A module of which each rank of a tensor group has a part, and with FSDP each data rank a share of that."""

    def __init__(self, model: torch.nn.Module, *how: Any, **named: Any) -> None:
        model.divided_outputs = _Logits()
        for module in model.modules():
            if isinstance(parts := getattr(module, "parts", None), LayerParts):
                module.parts = None if hasattr(module, "weight") else replace(parts, group=None)
        super().__init__(model, *how, **named)

    def divide_layers(self, mesh: DeviceMesh, data: Group, gather: Gather) -> None:
        """Divide the model over a mesh of (data, tensor). `gather` concatenates shares over the data axis."""
        tensor, model = mesh["tensor"], self.model
        table = model.transformer["wte"]
        model.transformer["wte"] = _Table(*table.weight.shape, _weight=table.weight)
        model.parts = _Enter(tensor)
        plan = {"attn.c_attn": _Columns(), "attn.c_proj": _Rows(), "mlp.c_fc": _Columns(), "mlp.c_proj": _Rows()}
        parallelize_module(model, tensor, {f"transformer.h.*.{name}": style for name, style in plan.items()})
        _cut({"weight": Shard(0)}, "", model.transformer["wte"], tensor)
        self._blocks = [] if data.size == 1 else [model.get_submodule(n) for n in self.blocks() if n != ROOT_BLOCK]
        for module in (*self._blocks, model) if self._blocks else ():
            fully_shard(module, mesh=mesh["data"])
        self.take_shares(data, gather)

    def loss_of(self, inputs: torch.Tensor, targets: torch.Tensor) -> Outputs:
        logits, loss = super().loss_of(inputs, targets)
        return logits.to_local(), loss


class _Pieces(Partition):
    """Each rank of a tensor group has a part, and each data rank a share of that."""

    by_kernel = False

    def __init__(self, session: Stateful, data: Group, slots: Callable[[], dict[str, ShardedTensor]]) -> None:
        super().__init__(session.adapter, session.trainable.parameters, session.pieces)
        self._over_tensor, self._slots = Partition(self.adapter, self.parameters, session.pieces), slots

        def over_data(piece: Piece) -> Piece:
            return replace(piece, groups=(*piece.groups, data)) if data.size > 1 else piece

        self.pieces = {name: over_data(piece) for name, piece in self.pieces.items()}

    def variables(self) -> dict[str, Any]:
        return self._slots()

    def _gathered(self, key: str, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return self._over_tensor._gathered(key, {key: tensors[key].detach()})


class _Layers(ShardedScript):
    """Divides the session's model, whose parts are `ShardedTensor`s."""

    trainable: _Model

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.data)
        self._mesh = mesh

    def bind(self, session: Stateful) -> None:
        super().bind(session)
        groups, device = self._mesh, self.trainable.device.type
        sizes = groups.data.size, groups.tensor.size
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "tensor"))
        self.trainable.divide_layers(mesh, groups.data, partial(session.adapter.allgather, group=groups.data))

    def partition(self, settings: Optimizer) -> Partition:
        super().partition(settings)
        return _Pieces(self.session, self.group, self.trainable.slots)

    def backward(self, loss: torch.Tensor) -> None:
        with loss_parallel():
            loss.backward()

    def _total(self, session: ByHandSession, norms: list[torch.Tensor]) -> torch.Tensor:
        """Over all parts, where what each rank of a tensor group has whole counts once."""
        named, cut = list(zip(self.trainable.trained, norms, strict=True)), session.pieces
        parts, wholes = ([norm for name, norm in named if (name in cut) == divided] for divided in (True, False))
        total = sum_of_squares(session.adapter, parts)
        dist.all_reduce(total, group=self._mesh.tensor.handle)
        total += sum_of_squares(session.adapter, wholes)
        if self.group.size > 1:
            dist.all_reduce(total, group=self.group.handle)
        return total


class _Session(ByHandSession):
    def arrays(self, gradients: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._arrays(dict(self.update.partition.gather(gradients)))


class FsdpTp(Meshed):
    """`parallelize_module` of the layers over the tensor axis, then `fully_shard` of blocks over the data axis."""

    trainable_class = _Model
    session_class = _Session

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Layers(mesh)
