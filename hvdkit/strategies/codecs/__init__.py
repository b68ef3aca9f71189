"""Compression methods: each averages a vector over all ranks with fewer bytes sent. One file per kind of method.

A method gets all gradients as one vector, and a state that it keeps from one update to the next.
"""

from __future__ import annotations

from hvdkit.recipe.communication import BrainFloat, Compression, Int8, PowerSgd, TopK
from hvdkit.strategies.codecs.base import Call, Method, State
from hvdkit.strategies.codecs.powersgd import LowRank
from hvdkit.strategies.codecs.quantized import Bits8, Bits16, Quantised
from hvdkit.strategies.codecs.topk import Sparse
from hvdkit.strategies.codecs.whole import DenseCodec

__all__ = ["Call", "DenseCodec", "LowRank", "Method", "Quantised", "Sparse", "State", "make"]


def make(settings: Compression, momentum: float = 0.0, clip_norm: float | None = None) -> Method:
    """The method for the recipe's `compression`; `momentum` and `clip_norm` are used by momentum correction only."""
    if isinstance(settings, TopK):
        return Sparse(settings, momentum, clip_norm)
    if isinstance(settings, PowerSgd):
        return LowRank(settings)
    if isinstance(settings, Int8):
        return Quantised(Bits8(), settings.bucket_mib, settings.error_feedback)
    if isinstance(settings, BrainFloat):
        return Quantised(Bits16(), 1.0, settings.error_feedback)
    return DenseCodec(settings.method == "fp16")
