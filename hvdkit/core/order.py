"""`order: priority`: which gradients are sent as one, and in how many pieces, most urgent first.

P3 (Jayarajan et al. 2019, MLSys) and ByteScheduler (Peng et al. 2019, SOSP): the next forward pass needs the first
layer's weights first, and backward computes their gradients last. So large gradients are cut up, and a piece that is
needed earlier overtakes those that wait.
"""

from __future__ import annotations

from collections.abc import Sequence


def units(sizes: Sequence[float], piece: float) -> list[range]:
    """The gradients that are sent together, by their indices in forward order.

    `sizes` are their bytes. A unit ends once it has the bytes of a piece; only the last one may have fewer.
    """
    ranges, first, held = [], 0, 0.0
    for index, size in enumerate(sizes):
        held += size
        if held >= piece:
            ranges.append(range(first, index + 1))
            first, held = index + 1, 0.0
    return ranges + ([range(first, len(sizes))] if first < len(sizes) else [])


def pieces(size: float, piece: float) -> int:
    """Into how many pieces of equal size a unit of `size` bytes is cut."""
    return max(1, round(size / piece))
