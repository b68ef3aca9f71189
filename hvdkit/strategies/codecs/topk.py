"""Top-k sparsification: sends the largest values and their indices; the rest stays in the residual."""

from __future__ import annotations

import math

import numpy as np

from hvdkit.core.tensors import Tensor
from hvdkit.recipe.communication import TopK
from hvdkit.strategies.codecs.base import MOMENTUM, RESIDUAL, SENT, Call, State, corrected, rows_of


class Sparse:
    """Sends each bucket's largest absolute values by an allgather of values and indices, or all if that is fewer bytes.

    With momentum correction (Lin et al. 2018, algorithm 1) each rank computes u = m u + g, selects from v = v + u, and
    sets both to zero where it has sent values (momentum factor masking, section 3.2). The optimizer applies the same
    momentum m, so the result is d - m d', with d the mean sent now and d' the previous one: the optimizer's velocity
    is then d, and weight decay keeps its momentum. Each rank clips its own g to clip_norm / √N.
    """

    def __init__(self, settings: TopK, momentum: float = 0.0, clip_norm: float | None = None) -> None:
        self._settings, self._clip_norm = settings, clip_norm
        self._momentum = momentum if settings.momentum_correction else None

    def ratio(self, epoch: int) -> float:
        """The share of values sent; during W = `warmup_epochs` epochs it is ratio^((epoch + 1) / (W + 1))."""
        share = (epoch + 1) / (self._settings.warmup_epochs + 1)
        return float(self._settings.ratio ** min(1.0, share))

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        state = dict(state)
        if self._momentum is not None:
            vector = self._clipped(call, vector)
            if MOMENTUM in state:
                vector = self._momentum * state[MOMENTUM] + vector
            state[MOMENTUM] = vector
        if self._settings.error_feedback:
            vector = corrected(vector, state)
        mean = self._mean(call, vector, state)
        if self._momentum is None:
            return mean, state
        before = state.get(SENT)
        state[SENT] = mean
        return (mean if before is None else mean - self._momentum * before), state

    def _mean(self, call: Call, vector: Tensor, state: State) -> Tensor:
        length, dtype = int(vector.shape[0]), call.ops.dtype(vector)
        itemsize = np.dtype(dtype).itemsize
        longest = max(1, int(self._settings.bucket_mib * 2**20) // itemsize)
        rows = rows_of(call, vector, longest)
        count, columns = (int(size) for size in rows.shape)
        chosen = min(columns, max(1, math.ceil(self.ratio(call.epoch) * columns - 1e-9)))
        if count * chosen * (itemsize + 4) * call.ranks >= 2 * length * itemsize:  # bytes of an allgather and a ring
            if self._settings.error_feedback:
                state[RESIDUAL] = call.zeros((length,), dtype)
            return call.transport.mean(vector)
        return self._gathered(call, rows, chosen, length, state)

    def _gathered(self, call: Call, rows: Tensor, chosen: int, length: int, state: State) -> Tensor:
        ops, dtype = call.ops, call.ops.dtype(rows)
        count, columns = (int(size) for size in rows.shape)
        starts = call.ops.from_numpy(np.arange(count, dtype=np.int32).reshape(count, 1) * np.int32(columns))
        places = ops.reshape(ops.top_k(abs(rows), chosen) + starts, (-1,))
        vector = ops.reshape(rows, (-1,))
        values = ops.gather(vector, places)
        sent = ops.concat([ops.view(values, "uint8"), ops.view(places, "uint8")])
        if self._settings.error_feedback:
            state[RESIDUAL] = self._without(call, vector, places, values)[:length]
        if self._momentum is not None:
            padded = ops.reshape(rows_of(call, state[MOMENTUM], columns), (-1,))
            state[MOMENTUM] = self._without(call, padded, places, ops.gather(padded, places))[:length]
        got, size = call.transport.gather(sent), int(sent.shape[0])
        border = chosen * count * np.dtype(dtype).itemsize
        total = call.zeros((count * columns,), dtype)
        for rank in range(call.ranks):  # in rank order: the same sum, bit by bit, on every rank
            part = got[rank * size : (rank + 1) * size]
            values, places = ops.view(part[:border], dtype), ops.view(part[border:], "int32")
            total = ops.scatter_add(total, places, values)
        return total[:length] / call.ranks

    def _without(self, call: Call, vector: Tensor, places: Tensor, values: Tensor) -> Tensor:
        """The vector with zeros at `places`, where its elements are `values`."""
        return call.ops.scatter_add(vector * 1.0, places, values * -1.0)

    def _clipped(self, call: Call, vector: Tensor) -> Tensor:
        if self._clip_norm is None:
            return vector
        longest, norm = self._clip_norm / math.sqrt(call.ranks), call.ops.norm(vector)
        return vector * call.ops.where(norm > longest, longest / norm, norm * 0 + 1)
