"""PyTorch's baselines. Those with slow imports of their own are imported when one is asked for."""

from __future__ import annotations

from typing import Any

from hvdkit.baselines.pytorch.ddp import Ddp, ZeroRedundancy
from hvdkit.baselines.pytorch.plain import Independent, Plain


def _fsdp(own: Any) -> Any:
    from hvdkit.baselines.pytorch.fsdp import Fsdp

    return Fsdp(own)


def _deepspeed(own: Any) -> Any:
    from hvdkit.baselines.pytorch.deepspeed import DeepSpeed

    return DeepSpeed(own)


def _deepspeed_offload(own: Any) -> Any:
    from hvdkit.baselines.pytorch.deepspeed import DeepSpeedOffload

    return DeepSpeedOffload(own)


RIVALS = {
    "plain": Plain,
    "ddp": Ddp,
    "zero_redundancy": ZeroRedundancy,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
    "deepspeed_offload": _deepspeed_offload,
    "independent": Independent,
}
