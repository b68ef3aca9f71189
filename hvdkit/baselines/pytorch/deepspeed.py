"""DeepSpeed's ZeRO, stages 1 to 3 (Rajbhandari et al. 2020), with an optimizer of `torch.optim`.

It holds weights, gradients and slots in float32 alone. The functions of its `deepspeed.utils` read and set them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines.pytorch.process_group import ProcessGroup
from hvdkit.baselines.pytorch.sessions import torch_optimizer
from hvdkit.baselines.pytorch.shares import Share, SharesSession, Slots
from hvdkit.core import seam
from hvdkit.core.group import Mesh, Ranks, Topology
from hvdkit.core.pieces import Partition
from hvdkit.core.session import Gradients, Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.update_rules import rule_of
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AdamW, Optimizer, Recipe

_STAGES = {"optimizer": 1, "gradients": 2, "parameters": 3}


class _Weight(Share):
    """A parameter, which stages 1 and 2 keep whole, beside this rank's share of a copy that the optimizer updates."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter, self._divided = parameter, hasattr(parameter, "ds_shape")
        self.shape, self.dtype = (parameter.ds_shape if self._divided else parameter.shape), parameter.dtype
        self.nbytes = (parameter.ds_tensor if self._divided else parameter).nbytes

    def detach(self) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        whole: torch.Tensor = safe_get_full_fp32_param(self._parameter) if self._divided else self._parameter.detach()
        return whole

    def copy_(self, whole: torch.Tensor) -> None:
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param

        # Rank 0's is sent to the others; it is the same there.
        with zero.GatheredParameters([self._parameter], modifier_rank=0, enabled=self._divided), torch.no_grad():
            self._parameter.copy_(whole)
        safe_set_full_fp32_param(self._parameter, whole)


class _Slot(Share):
    """A slot of a parameter. DeepSpeed has those of all parameters in vectors, whose sizes the session counts."""

    nbytes = 0

    def __init__(self, parameter: torch.nn.Parameter, key: str, weight: _Weight) -> None:
        self._parameter, self._key = parameter, key
        self.shape, self.dtype = weight.shape, weight.dtype

    def detach(self) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        whole: torch.Tensor = safe_get_full_optimizer_state(self._parameter, self._key)
        return whole

    def copy_(self, whole: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(self._parameter, whole, self._key)


class _Slots(Slots):
    """The slots of one optimizer, in the order of `update_rules.Rule.slots`."""

    def __init__(self, session: Session, trained: dict[str, torch.nn.Parameter], keys: Iterable[str]) -> None:
        super().__init__(session.adapter, session.trainable.parameters)
        self._trained, self._keys = trained, iter(keys)

    def variables(self) -> dict[str, Any]:
        key = next(self._keys)
        return {name: _Slot(self._trained[name], key, weight) for name, weight in self.parameters.items()}


class _Zero(Strategy):
    """Has the session's DeepSpeed engine, of a stage."""

    engine: Any

    def __init__(self, stage: int, offloads: bool) -> None:
        self._stage, self._offloads = stage, offloads

    def partition(self, session: seam.SessionView, settings: Optimizer) -> Partition:
        import deepspeed

        trainable = session.trainable
        assert isinstance(session, Session) and isinstance(trainable, TrainableModel)
        if frozen := [name for name, parameter in trainable.model.named_parameters() if not parameter.requires_grad]:
            raise RequestError(f"--rival deepspeed: expected all parameters to be trained, got the frozen {frozen[0]}")
        chosen = torch_optimizer(settings, list(trainable.trained.values()))
        assert chosen, "registry.check_recipe refuses the other optimizers"
        optimizer_class, groups, options = chosen
        trainable.parameters = {}  # DeepSpeed moves the weights, and nothing else may keep the old ones
        self.engine, *_ = deepspeed.initialize(
            model=trainable.model,
            optimizer=optimizer_class(groups, **options),
            config=self._config(settings),
            dist_init_required=False,
        )
        trainable.forward = self.engine
        trainable.parameters = {name: _Weight(parameter) for name, parameter in trainable.trained.items()}
        keys = rule_of(settings).slots if isinstance(settings, AdamW) else ("momentum_buffer",)
        self._make_slots(keys)
        return _Slots(session, trainable.trained, keys)

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


class _DeepSpeedSession(SharesSession):
    strategy: _Zero

    @property
    def _engine(self) -> Any:
        return self.strategy.engine

    @contextmanager
    def _without_communication(self) -> Iterator[None]:
        """A batch whose gradients DeepSpeed adds up, and sends as the stage does."""
        self._engine.set_gradient_accumulation_boundary(False)
        yield
        self._engine.set_gradient_accumulation_boundary(True)

    def _backward_of(self, batch: Batch, parts: float) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, loss = self.trainable.loss_of(*self.trainable.inputs(batch))
        self._engine.backward(loss / parts)
        return outputs.detach(), loss.detach()

    def _step(self) -> None:
        self.step.gradient_bytes = self.strategy.gradient_bytes()
        steps = self.update.steps.get()
        for state in self._engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        self._step_at(self.update.rate.get())
        self.update.steps.set(steps + 1)

    def _step_at(self, rate: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()

    def gradients(self, batch: Batch) -> Gradients:
        slots = [slot.clone() for slot in self.strategy.slots()]
        reduced = super().gradients(batch)
        for slot, before in zip(self.strategy.slots(), slots, strict=True):
            slot.copy_(before)
        return reduced

    def _reduced(self, batch: Batch, weight: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        from deepspeed.utils import safe_get_full_grad

        outputs, loss = self.trainable.loss_of(*self.trainable.inputs(batch))
        self._engine.backward(loss * weight)
        means = {name: safe_get_full_grad(parameter) for name, parameter in self.trainable.trained.items()}
        self._step_at(0.0)  # ends the update, after which DeepSpeed begins to add up anew
        return outputs.detach(), loss.detach(), means

    def state_bytes(self) -> dict[str, int]:
        optimizer = sum(tensor.nbytes for tensor in (*self.strategy.shares, *self.strategy.slots()))
        return {
            "parameters": self.strategy.parameter_bytes(),
            "gradients": self.step.gradient_bytes,
            "optimizer": optimizer,
        }


class DeepSpeed(ProcessGroup):
    """`deepspeed.initialize` with the stage of the recipe's `sharding`, over PyTorch's process group."""

    session_class = _DeepSpeedSession
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
        return _Zero(_STAGES[recipe.sharding], self.offloads)


class DeepSpeedOffload(DeepSpeed):
    """ZeRO-Offload (Ren et al. 2021): the optimizer works on the CPU, on states in main memory."""

    offloads = True
