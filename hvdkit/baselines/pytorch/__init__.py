"""PyTorch's baselines. Each is imported when it is asked for, as some have slow imports of their own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from hvdkit.baselines.base import Baseline


def _of(module: str, name: str) -> Callable[[], Baseline]:
    return lambda: cast("Baseline", getattr(import_module(f"{__name__}.{module}"), name)())


RIVALS = {
    "plain": _of("plain", "Plain"),
    "ddp": _of("ddp", "Ddp"),
    "zero_redundancy": _of("ddp", "ZeroRedundancy"),
    "fsdp": _of("fsdp", "Fsdp"),
    "deepspeed": _of("deepspeed", "DeepSpeed"),
    "deepspeed_offload": _of("deepspeed", "DeepSpeedOffload"),
    "pipelining": _of("pipelining", "Pipelining"),
    "fsdp-tp": _of("fsdp_tp", "FsdpTp"),
    "independent": _of("plain", "Independent"),
}
