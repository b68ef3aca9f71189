"""What each compression sends, by which collectives, and what it costs to compute. One entry for each of the toolkit's.

Bytes are those that a rank puts into the collective, for a gradient of `bytes` in memory. Costs are passes over those
bytes at the device's memory rate, counted from the formulas, unless a measured rate is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.errors import RequestError
from hvdkit.simulator.cluster import Operation
from hvdkit.simulator.lines import Floats
from hvdkit.simulator.workload import Tensor, Workload, elements


@dataclass(frozen=True)
class Phase:
    """One collective, and the bytes that a rank puts in by tensor."""

    operation: Operation
    sizes: Floats


@dataclass(frozen=True)
class Wire:
    """The collectives of a compression one after the other, and by tensor the passes over its bytes on each side."""

    phases: tuple[Phase, ...]
    encode_passes: Floats
    decode_passes: Floats
    told: str = ""


@dataclass(frozen=True)
class Compression:
    """`method` with its settings: `ratio` of top-k (a fraction), `rank` of PowerSGD; defaults are the recipe's."""

    method: str = "none"
    ratio: float = 0.01
    rank: int = 2


@functools.lru_cache(maxsize=4096)
def wire(compression: Compression, workload: Workload, ranks: int) -> Wire:
    """What `compression` makes of a workload's gradients. Raises RequestError for one that is not known."""
    if compression.method not in METHODS:
        raise RequestError(f"compression: expected one of {', '.join(METHODS)}, got {compression.method!r}")
    return METHODS[compression.method](compression, workload.tensors, ranks)


def _none(_: Compression, tensors: Sequence[Tensor], ranks: int) -> Wire:
    zero = np.zeros(len(tensors))
    return Wire((Phase("allreduce", _bytes(tensors)),), zero, zero)


def _half(_: Compression, tensors: Sequence[Tensor], ranks: int) -> Wire:
    """Cast to two bytes a number and back: read 4, write 2."""
    items = _elements(tensors)
    passes = np.where(_bytes(tensors) > 2 * items, 1.5, 0.0)
    return Wire((Phase("allreduce", np.minimum(_bytes(tensors), 2 * items)),), passes, passes)


def _bfloat(_: Compression, tensors: Sequence[Tensor], ranks: int) -> Wire:
    """Two bytes a number, summed in full by all-to-all of chunks, then allgather of each rank's sum."""
    return _exchanged(2 * _elements(tensors), ranks, encode=1.5, decode=1.5)


def _int8(_: Compression, tensors: Sequence[Tensor], ranks: int) -> Wire:
    """A byte a number and a scale for 2,048 of them, by the same two; quantised again between them."""
    return _exchanged(_elements(tensors) * (1 + 4 / 2048), ranks, encode=3.25, decode=2.5)


def _exchanged(sent: Floats, ranks: int, encode: float, decode: float) -> Wire:
    passes = np.ones(len(sent))
    return Wire((Phase("alltoall", sent), Phase("allgather", sent / ranks)), encode * passes, decode * passes)


def _topk(compression: Compression, tensors: Sequence[Tensor], ranks: int) -> Wire:
    """The largest numbers with their places, 8 bytes each, by allgather; dense where that is fewer bytes."""
    items = _elements(tensors)
    kept = np.maximum(1.0, np.round(items * compression.ratio))
    # a rank sends its k numbers to p - 1 others, against 2 (p-1)/p of the dense bytes by a ring
    if 8 * kept.sum() * ranks > 2 * _bytes(tensors).sum():
        dense = _none(compression, tensors, ranks)
        told = (
            f"top-k of {compression.ratio:g} would send more than dense gradients at {ranks} ranks, so it sends these"
        )
        return Wire(dense.phases, dense.encode_passes, dense.decode_passes, told)
    return Wire((Phase("allgather", 8 * kept),), np.full(len(tensors), 12.0), np.full(len(tensors), 2.0))


def _powersgd(compression: Compression, tensors: Sequence[Tensor], ranks: int) -> Wire:
    """Two factors of `rank` columns (Vogels et al. 2019), averaged one after the other; small tensors dense."""
    dense, first, second = (np.zeros(len(tensors)) for _ in range(3))
    passes = np.zeros(len(tensors))
    for i, tensor in enumerate(tensors):
        rows = tensor.shape[0] if tensor.shape else 1
        columns = elements(tensor) // max(rows, 1)
        rank = min(compression.rank, rows, columns)
        if len(tensor.shape) < 2 or rank * (rows + columns) >= rows * columns:
            dense[i] = tensor.bytes
            continue
        first[i], second[i] = 4.0 * rank * rows, 4.0 * rank * columns
        passes[i] = 2.0 + rank  # error feedback, and a product that reads the matrix
    phases = (Phase("allreduce", dense + first), Phase("allreduce", second))
    return Wire(phases, passes, passes)


METHODS: dict[str, Callable[[Compression, Sequence[Tensor], int], Wire]] = {
    "none": _none,
    "fp16": _half,
    "bf16": _bfloat,
    "int8": _int8,
    "topk": _topk,
    "powersgd": _powersgd,
}


def _bytes(tensors: Sequence[Tensor]) -> Floats:
    return np.array([float(tensor.bytes) for tensor in tensors])


def _elements(tensors: Sequence[Tensor]) -> Floats:
    return np.array([float(elements(tensor)) for tensor in tensors])
