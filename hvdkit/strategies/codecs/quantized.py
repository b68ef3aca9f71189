"""Fewer bits a value. What ranks send cannot be added up, so each adds up a part of all: an all-to-all, then a gather.

A rank sends (N - 1) / N of its quantised vector twice, as in a ring, however many ranks there are. Sums are made in the
vector's own dtype and quantised once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvdkit.strategies.codecs.base import RESIDUAL, Call, State, Tensor, corrected, rows_of

_LEVELS = 127.0
_TINY = 1e-30  # in the place of the scale of a bucket of zeros


class Codec(Protocol):
    """Rows of values as rows of bytes."""

    def encode(self, call: Call, rows: Tensor, part: int) -> Tensor:
        """(rows, columns) -> (rows, bytes), uint8; `part` tells apart what is encoded in one update."""

    def decode(self, call: Call, sent: Tensor, dtype: str) -> Tensor:
        """The inverse, but for what was lost."""


class Bits8:
    """A byte a value and a float32 scale a row: q = floor(127 x / s + u), s = max |x|, u random in [0, 1).

    The expectation of s q / 127 is x (stochastic rounding; Alistarh et al. 2017, section 3.1, with the largest value in
    the place of the norm). q is from -127 to 127, and 128 where a sum is rounded up.
    """

    def encode(self, call: Call, rows: Tensor, part: int) -> Tensor:
        """As `Codec.encode`: (rows, columns) -> (rows, columns + 4)."""
        ops, dtype = call.ops, call.dtype(rows)
        scale = call.cast(ops.largest(abs(rows)) + _TINY, "float32")
        noise = ops.uniform(rows, call.random_seed(part))
        levels = ops.floor(rows / call.cast(scale, dtype) * _LEVELS + noise) + _LEVELS
        return ops.concat([call.cast(levels, "uint8"), ops.to_bytes(scale)], axis=1)

    def decode(self, call: Call, sent: Tensor, dtype: str) -> Tensor:
        """As `Codec.decode`."""
        columns = int(sent.shape[1]) - 4
        scale = call.cast(call.ops.from_bytes(sent[:, columns:], "float32"), dtype)
        return (call.cast(sent[:, :columns], dtype) - _LEVELS) * (scale / _LEVELS)


class Bits16:
    """The two upper bytes of a float32 that has been rounded to the 8 significant bits of a bfloat16.

    By Veltkamp's splitting (Dekker 1971), which needs no framework that knows bfloat16: to nearest.
    """

    def encode(self, call: Call, rows: Tensor, part: int) -> Tensor:
        """As `Codec.encode`: (rows, columns) -> (rows, 2 columns)."""
        ops, (count, columns) = call.ops, tuple(rows.shape)
        rows = call.cast(rows, "float32")
        magnified = rows * 65537.0
        upper = magnified - (magnified - rows)
        whole = ops.reshape(ops.to_bytes(upper), (count, columns, 4))
        return ops.reshape(whole[:, :, 2:], (count, 2 * columns))

    def decode(self, call: Call, sent: Tensor, dtype: str) -> Tensor:
        """As `Codec.decode`."""
        ops, count, columns = call.ops, int(sent.shape[0]), int(sent.shape[1]) // 2
        upper = ops.reshape(sent, (count, columns, 2))
        whole = ops.concat([call.zeros((count, columns, 2), "uint8"), upper], axis=2)
        return call.cast(ops.from_bytes(ops.reshape(whole, (count, 4 * columns)), "float32"), dtype)


@dataclass(frozen=True)
class Quantised:
    """Means of quantised values; `bucket_mib` is what a row has at most, in the vector's dtype.

    With `error_feedback` a rank keeps what its own rounding has left out; that of the sums is no one's.
    """

    codec: Codec
    bucket_mib: float
    error_feedback: bool

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        ops, codec, dtype = call.ops, self.codec, call.dtype(vector)
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
        each = int(rows.shape[0]) // ranks
        mine = sum((got[rank * each : (rank + 1) * each] for rank in range(1, ranks)), got[:each]) / ranks
        means = codec.decode(call, call.transport.gather(codec.encode(call, mine, part=1)), dtype)
        return ops.reshape(means, (-1,))[:length], state
