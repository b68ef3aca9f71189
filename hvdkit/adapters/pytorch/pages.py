"""Vectors in pages of their own, outside of the C library's heap."""

from __future__ import annotations

import contextlib
import mmap

import torch


class Pages:
    """The memory of a `vector` on the CPU. It can be returned to the kernel while tensors refer to it.

    The pages are as large as the kernel has them, so that it has fewer of them to clear.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._map = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.vector = torch.frombuffer(self._map, dtype=dtype, count=size)

    def free(self) -> None:
        """Return the memory. The vector is zero when it is used again."""
        self._map.madvise(mmap.MADV_DONTNEED)
