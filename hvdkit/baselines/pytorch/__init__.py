"""PyTorch's baselines. Those with slow imports of their own are imported when one is asked for."""

from __future__ import annotations

from hvdkit.baselines.base import Baseline
from hvdkit.baselines.pytorch.ddp import Ddp, ZeroRedundancy
from hvdkit.baselines.pytorch.plain import Independent, Plain


def _fsdp() -> Baseline:
    from hvdkit.baselines.pytorch.fsdp import Fsdp

    return Fsdp()


def _deepspeed() -> Baseline:
    from hvdkit.baselines.pytorch.deepspeed import DeepSpeed

    return DeepSpeed()


def _deepspeed_offload() -> Baseline:
    from hvdkit.baselines.pytorch.deepspeed import DeepSpeedOffload

    return DeepSpeedOffload()


RIVALS = {
    "plain": Plain,
    "ddp": Ddp,
    "zero_redundancy": ZeroRedundancy,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
    "deepspeed_offload": _deepspeed_offload,
    "independent": Independent,
}
