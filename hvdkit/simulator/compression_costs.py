"""What each compression method sends, over which collectives, and what it costs to compute.

Bytes are those that a rank puts into a collective, for a gradient of `bytes` in memory. Compute costs are passes over
those bytes at the device's memory rate, counted from the formulas, unless the profile has measured them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from pydantic import Field, model_validator

from hvdkit.recipe.data import Strict
from hvdkit.simulator.cluster import Operation
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.workload import Gradient, Workload

# What choosing a gradient's largest values takes a GPU, for each of its values. It is assumed, and was timed on no GPU
# here. With it top-k loses on fast networks, as Vogels et al. 2019 report: steps of ResNet-18 take 411 and 444 ms in
# place of 312, on 16 GPUs over 10 Gbit/s. These three figures were not compared with the paper.
SELECTION_S = 15e-9
SELECTION_TOLD = f"choosing values is assumed to take {1e9 * SELECTION_S:g} ns each"


class CompressionSetting(Strict):
    """The recipe's `compression`: `ratio` is the fraction that top-k keeps, `rank` that of PowerSGD's factors."""

    method: str = "none"
    ratio: float = Field(0.01, gt=0, le=1)
    rank: int = Field(2, ge=1, le=1024)

    @model_validator(mode="after")
    def _method_is_known(self) -> CompressionSetting:
        if self.method not in METHODS:
            raise ValueError(f"expected one of {', '.join(METHODS)}, got {self.method!r}")
        return self


@dataclass(frozen=True)
class SentBytes:
    """One collective, and the bytes that a rank puts into it for each tensor, shape (tensors,)."""

    operation: Operation
    sizes: Floats


@dataclass(frozen=True)
class Traffic:
    """The collectives of a compression method, one after the other.

    `encode_passes` and `decode_passes` are the passes over each tensor's bytes before and after, shape (tensors,).
    On a GPU, encoding takes at least `encode_least_s`, shape (tensors,).
    """

    phases: tuple[SentBytes, ...]
    encode_passes: Floats
    decode_passes: Floats
    encode_least_s: Floats
    warning: str = ""


@functools.lru_cache(maxsize=4096)
def traffic(compression: CompressionSetting, workload: Workload, ranks: int) -> Traffic:
    """What the ranks send for the workload's gradients."""
    return METHODS[compression.method](compression, workload.tensors, ranks)


def _none(_: CompressionSetting, tensors: Sequence[Gradient], ranks: int) -> Traffic:
    return _passed([SentBytes("allreduce", _bytes(tensors))], 0.0, 0.0)


def _fp16(_: CompressionSetting, tensors: Sequence[Gradient], ranks: int) -> Traffic:
    """Cast to 2 bytes an element and back: 4 bytes read and 2 written are 1.5 passes."""
    halves = 2 * _elements(tensors)
    passes = np.where(_bytes(tensors) > halves, 1.5, 0.0)
    return _passed([SentBytes("allreduce", np.minimum(_bytes(tensors), halves))], passes, passes)


def _bf16(_: CompressionSetting, tensors: Sequence[Gradient], ranks: int) -> Traffic:
    """2 bytes an element: an all-to-all of chunks, which are summed in float32, then an allgather of the sums."""
    sent = 2 * _elements(tensors)
    return _passed([SentBytes("alltoall", sent), SentBytes("allgather", sent / ranks)], 1.5, 1.5)


def _int8(_: CompressionSetting, tensors: Sequence[Gradient], ranks: int) -> Traffic:
    """1 byte an element and a scale for 2,048 of them, sent as bf16 is; the sums are quantised again."""
    sent = _elements(tensors) * (1 + 4 / 2048)
    return _passed([SentBytes("alltoall", sent), SentBytes("allgather", sent / ranks)], 3.25, 2.5)


def _topk(compression: CompressionSetting, tensors: Sequence[Gradient], ranks: int) -> Traffic:
    """An allgather of the largest elements with their indices, 8 bytes each; uncompressed if that is fewer bytes."""
    kept = np.maximum(1.0, np.round(_elements(tensors) * compression.ratio))
    # A rank's k elements go to p - 1 others; a ring allreduce sends 2 (p-1)/p of the uncompressed bytes.
    if 8 * kept.sum() * ranks > 2 * _bytes(tensors).sum():
        more = f"top-k of {compression.ratio:g} sends more than uncompressed gradients at {ranks} ranks"
        return replace(_none(compression, tensors, ranks), warning=f"{more}, so it sends these")
    return _passed([SentBytes("allgather", 8 * kept)], 12.0, 2.0, SELECTION_S * _elements(tensors))


def _powersgd(compression: CompressionSetting, tensors: Sequence[Gradient], ranks: int) -> Traffic:
    """Two factors of `rank` columns (Vogels et al. 2019), averaged one after the other; small tensors uncompressed."""
    dense, first, second, passes = np.zeros((4, len(tensors)))
    for i, tensor in enumerate(tensors):
        rows = tensor.shape[0] if tensor.shape else 1
        columns = prod(tensor.shape) // max(rows, 1)
        rank = min(compression.rank, rows, columns)
        if len(tensor.shape) < 2 or rank * (rows + columns) >= rows * columns:
            dense[i] = tensor.bytes
            continue
        first[i], second[i] = 4.0 * rank * rows, 4.0 * rank * columns
        passes[i] = 2.0 + rank  # error feedback, and a product that reads the matrix
    return _passed([SentBytes("allreduce", dense + first), SentBytes("allreduce", second)], passes, passes)


def _passed(
    phases: Sequence[SentBytes], encode: Floats | float, decode: Floats | float, least_s: Floats | float = 0.0
) -> Traffic:
    ones = np.ones(len(phases[0].sizes))
    return Traffic(tuple(phases), encode * ones, decode * ones, least_s * ones)


METHODS: dict[str, Callable[[CompressionSetting, Sequence[Gradient], int], Traffic]] = {
    "none": _none,
    "fp16": _fp16,
    "bf16": _bf16,
    "int8": _int8,
    "topk": _topk,
    "powersgd": _powersgd,
}


def _bytes(tensors: Sequence[Gradient]) -> Floats:
    return np.array([float(tensor.bytes) for tensor in tensors])


def _elements(tensors: Sequence[Gradient]) -> Floats:
    return np.array([float(prod(tensor.shape)) for tensor in tensors])
