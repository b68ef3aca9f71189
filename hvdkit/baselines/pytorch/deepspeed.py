"""DeepSpeed's ZeRO, stages 1 to 3 (Rajbhandari et al. 2020), with an optimizer of `torch.optim`.

It holds weights, gradients and slots in float32 alone. The functions of its `deepspeed.utils` read and set them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hvdkit.baselines.pytorch.by_hand import ByHandSession, Outputs, ProcessGroup, torch_optimizer
from hvdkit.baselines.pytorch.shares import ParameterShares, ShardedTensor, SharesScript
from hvdkit.core.group import Group, Mesh, Ranks, Topology
from hvdkit.core.pieces import Partition
from hvdkit.core.strategy import Strategy
from hvdkit.core.update_rules import rule_of
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AdamW, Optimizer, Recipe

_STAGES = {"optimizer": 1, "gradients": 2, "parameters": 3}


def _weight(parameter: torch.nn.Parameter) -> ShardedTensor:
    """A parameter, which stages 1 and 2 keep whole, beside this rank's share of a copy that the optimizer updates."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    divided = hasattr(parameter, "ds_shape")

    def whole() -> torch.Tensor:
        tensor: torch.Tensor = safe_get_full_fp32_param(parameter) if divided else parameter.detach()
        return tensor

    def set_from(whole: torch.Tensor) -> None:
        # Rank 0's is sent to the others; it is the same there.
        with zero.GatheredParameters([parameter], modifier_rank=0, enabled=divided), torch.no_grad():
            parameter.copy_(whole)
        safe_set_full_fp32_param(parameter, whole)

    shape, held = (parameter.ds_shape, parameter.ds_tensor) if divided else (parameter.shape, parameter)
    return ShardedTensor(shape, parameter.dtype, held.nbytes, whole, set_from)


def _slot(parameter: torch.nn.Parameter, key: str, weight: ShardedTensor) -> ShardedTensor:
    """A slot of a parameter. DeepSpeed has those of all parameters in vectors, whose sizes the session counts."""
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    whole = partial(safe_get_full_optimizer_state, parameter, key)
    set_from = partial(safe_set_full_optimizer_state, parameter, optim_state_key=key)
    return ShardedTensor(weight.shape, weight.dtype, 0, whole, set_from)


class _Zero(SharesScript):
    """Has the session's DeepSpeed engine, of a stage."""

    engine: Any

    def __init__(self, group: Group, stage: int, offloads: bool) -> None:
        super().__init__(group)
        self._stage, self._offloads = stage, offloads

    def partition(self, settings: Optimizer) -> Partition:
        import deepspeed

        trainable, trained = self.trainable, self.trainable.trained
        if frozen := [name for name, parameter in trainable.model.named_parameters() if not parameter.requires_grad]:
            raise RequestError(f"--rival deepspeed: expected all parameters to be trained, got the frozen {frozen[0]}")
        optimizer = torch_optimizer(settings, list(trained.values()))
        trainable.parameters = {}  # DeepSpeed moves the weights, and nothing else may keep the old ones
        self.engine, *_ = deepspeed.initialize(
            model=trainable.model,
            optimizer=optimizer,
            config=self._config(settings),
            dist_init_required=False,
        )
        trainable.forward = self.engine
        weights = trainable.parameters = {name: _weight(parameter) for name, parameter in trained.items()}
        keys = rule_of(settings).slots if isinstance(settings, AdamW) else ("momentum_buffer",)
        self._make_slots(keys)
        next_key = iter(keys)  # in the order of `update_rules.Rule.slots`

        def slots() -> dict[str, ShardedTensor]:
            key = next(next_key)
            return {name: _slot(parameter, key, weights[name]) for name, parameter in trained.items()}

        return ParameterShares(self.session, self.group, slots)

    def _config(self, settings: Optimizer) -> dict[str, Any]:
        """DeepSpeed's defaults but for what the recipe says, and small parameters, which stage 3 would keep whole."""
        zero: dict[str, Any] = {"stage": self._stage, "stage3_param_persistence_threshold": 0}
        if self._offloads:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,  # only for its own counts of samples
            "gradient_clipping": settings.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }

    @property
    def shares(self) -> list[torch.Tensor]:
        """The vectors that this rank's optimizer updates, one for each of its groups or parts of them."""
        zero = self.engine.optimizer
        return list(zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups)

    def slots(self) -> Iterator[torch.Tensor]:
        """The optimizer's slots of `shares`."""
        for state in self.engine.optimizer.optimizer.state.values():
            yield from (slot for slot in state.values() if isinstance(slot, torch.Tensor) and slot.dim())

    def _make_slots(self, keys: Sequence[str]) -> None:
        """Make the slots that the optimizer would make in its first step, so that they can be set before it."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self.engine.optimizer
        for share in self.shares:
            state = {key: torch.zeros_like(share, requires_grad=False) for key in keys}
            zero.optimizer.state[share] = state | ({"step": torch.tensor(0.0)} if len(keys) > 1 else {})
        if self._stage < 3:
            for parameters, share in zip(zero.bit16_groups, self.shares, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, share, zero.optimizer.state)

    def gradient_bytes(self) -> int:
        """The size of this rank's share of the gradients, after backward."""
        zero = self.engine.optimizer
        if self._offloads:
            return sum(share.grad.nbytes for share in self.shares)
        if self._stage == 3:
            return int(zero.grad_partitions_flat_buffer.nbytes)
        return sum(gradient.nbytes for held in zero.averaged_gradients.values() for gradient in held)

    def parameter_bytes(self) -> int:
        """The size of the weights that this rank holds between steps, with their padding."""
        zero = self.engine.optimizer
        held = zero.fp16_partitioned_groups_flat if self._stage == 3 else zero.bit16_groups_flat
        return sum(parameter.nbytes for parameter in held)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A batch whose gradients DeepSpeed adds up, and sends as the stage does."""
        self.engine.set_gradient_accumulation_boundary(False)
        yield
        self.engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self, session: ByHandSession) -> None:
        session.step.gradient_bytes = self.gradient_bytes()
        steps = session.update.steps.get()
        for state in self.engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        self._step_at(session.update.rate.get())
        session.update.steps.set(steps + 1)

    def _step_at(self, rate: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()

    def averaged(self, session: ByHandSession, batch: Batch, weight: float = 1.0) -> tuple[Outputs, dict[str, Any]]:
        from deepspeed.utils import safe_get_full_grad

        before = [slot.clone() for slot in self.slots()]
        outputs = session.forward_backward(batch, weight=weight)
        means = {name: safe_get_full_grad(parameter) for name, parameter in session.trainable.trained.items()}
        self._step_at(0.0)  # ends the update, after which DeepSpeed begins to add up anew
        for slot, value in zip(self.slots(), before, strict=True):
            slot.copy_(value)
        return outputs, means


class _ZeroSession(ByHandSession):
    strategy: _Zero

    def state_bytes(self) -> dict[str, int]:
        held = self.strategy
        return {
            "parameters": held.parameter_bytes(),
            "gradients": self.step.gradient_bytes,
            "optimizer": sum(tensor.nbytes for tensor in (*held.shares, *held.slots())),
        }


class DeepSpeed(ProcessGroup):
    """`deepspeed.initialize` with the stage of the recipe's `sharding`, over PyTorch's process group."""

    session_class = _ZeroSession
    offloads = False

    def versions(self) -> dict[str, str]:
        import deepspeed

        versions = super().versions()
        return versions | {"framework": f"{versions['framework']} with DeepSpeed {deepspeed.__version__}"}

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        topology = super().init(device, threads, sets)
        os.environ["DS_ACCELERATOR"] = "cuda" if topology.device == "gpu" else "cpu"
        os.environ["LOCAL_RANK"] = str(topology.local_rank)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # it uses old names there
        from deepspeed import init_distributed, ops
        from deepspeed.utils import logger

        logger.setLevel(logging.WARNING)
        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; each first run would compile it
        init_distributed(dist_backend="nccl" if topology.device == "gpu" else "gloo", verbose=False)
        return topology

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Zero(mesh.data, _STAGES[recipe.sharding], self.offloads)


class DeepSpeedOffload(DeepSpeed):
    """ZeRO-Offload (Ren et al. 2021): the optimizer works on the CPU, on states in main memory."""

    offloads = True
