"""Quantization: fewer bits per value. An allreduce cannot sum quantized values, so this uses alltoall and allgather.

Each rank sums one part of the vector over all ranks, in the vector's own dtype, and quantizes the sum again. A rank
sends (N - 1) / N of its quantized vector twice, as in a ring allreduce of N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvdkit.core.tensors import Tensor
from hvdkit.strategies.codecs.base import RESIDUAL, Call, State, corrected, rows_of

_LEVELS = 127.0
_TINY = 1e-30  # added to the scale, so that it is not zero for a bucket of zeros


class Codec(Protocol):
    """Encodes rows of values as rows of bytes."""

    def encode(self, call: Call, rows: Tensor, part: int) -> Tensor:
        """(rows, columns) -> (rows, bytes), uint8; `part` numbers the calls within one update, for random seeds."""

    def decode(self, call: Call, sent: Tensor, dtype: str) -> Tensor:
        """The inverse of `encode`, up to rounding."""


class Bits8:
    """One byte per value and one float32 scale per row: q = floor(127 x / s + u), s = max |x|, u random in [0, 1).

    The expectation of s q / 127 is x (stochastic rounding; Alistarh et al. 2017, section 3.1, with the largest value
    instead of the norm). q is from -127 to 127, or 128 if a sum is rounded up.
    """

    def encode(self, call: Call, rows: Tensor, part: int) -> Tensor:
        """(rows, columns) -> (rows, columns + 4), uint8: the values, then the scale's four bytes."""
        ops, dtype = call.ops, call.ops.dtype(rows)
        scale = call.cast(ops.largest(abs(rows)) + _TINY, "float32")
        noise = ops.uniform(rows, call.random_seed(part))
        levels = ops.floor(rows / call.cast(scale, dtype) * _LEVELS + noise) + _LEVELS
        return ops.concat([call.cast(levels, "uint8"), ops.view(scale, "uint8")], axis=1)

    def decode(self, call: Call, sent: Tensor, dtype: str) -> Tensor:
        """(rows, columns + 4) -> (rows, columns) in `dtype`."""
        columns = int(sent.shape[1]) - 4
        scale = call.cast(call.ops.view(sent[:, columns:], "float32"), dtype)
        return (call.cast(sent[:, :columns], dtype) - _LEVELS) * (scale / _LEVELS)


class Bits16:
    """bfloat16: the upper two bytes of a float32, rounded to nearest with 8 significant bits.

    It rounds by Veltkamp's splitting (Dekker 1971), so the framework need not support bfloat16.
    """

    def encode(self, call: Call, rows: Tensor, part: int) -> Tensor:
        """(rows, columns) -> (rows, 2 columns), uint8."""
        ops, (count, columns) = call.ops, tuple(rows.shape)
        rows = call.cast(rows, "float32")
        magnified = rows * 65537.0
        upper = magnified - (magnified - rows)
        whole = ops.reshape(ops.view(upper, "uint8"), (count, columns, 4))
        return ops.reshape(whole[:, :, 2:], (count, 2 * columns))

    def decode(self, call: Call, sent: Tensor, dtype: str) -> Tensor:
        """(rows, 2 columns) -> (rows, columns) in `dtype`."""
        ops, count, columns = call.ops, int(sent.shape[0]), int(sent.shape[1]) // 2
        upper = ops.reshape(sent, (count, columns, 2))
        whole = ops.concat([call.zeros((count, columns, 2), "uint8"), upper], axis=2)
        return call.cast(ops.view(ops.reshape(whole, (count, 4 * columns)), "float32"), dtype)


@dataclass(frozen=True)
class Quantised:
    """Means of quantized values; `bucket_mib` is the largest size of a row in MiB, in the vector's dtype.

    With `error_feedback` a rank adds its own rounding error to its next gradient; the rounding of sums is not fed back.
    """

    codec: Codec
    bucket_mib: float
    error_feedback: bool

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        ops, codec, dtype = call.ops, self.codec, call.ops.dtype(vector)
        length, ranks = int(vector.shape[0]), call.ranks
        if self.error_feedback:
            vector = corrected(vector, state)
        longest = max(1, int(self.bucket_mib * 2**20) // (8 if dtype == "float64" else 4))
        rows = rows_of(call, vector, longest, multiple=ranks)
        sent = codec.encode(call, rows, part=0)
        if self.error_feedback:
            left = rows - codec.decode(call, sent, dtype)
            state = state | {RESIDUAL: ops.reshape(left, (-1,))[:length]}
        got = codec.decode(call, call.transport.exchange(sent), dtype)
        height = int(rows.shape[0]) // ranks
        mine = sum((got[rank * height : (rank + 1) * height] for rank in range(1, ranks)), got[:height]) / ranks
        means = codec.decode(call, call.transport.gather(codec.encode(call, mine, part=1)), dtype)
        return ops.reshape(means, (-1,))[:length], state
