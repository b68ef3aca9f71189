"""A safetensors file (huggingface.co/docs/safetensors) whose tensors are written as they come, in any order.

The library writes a file, of the same bytes, from tensors that are all in memory, of which it has two more copies.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

Layout = dict[str, tuple[str, tuple[int, ...]]]  # by name: NumPy's dtype, and the shape
_KINDS = {"f": "F", "i": "I", "u": "U", "c": "C"}
# As the library has it: the bytes to which the header is aligned, and the order of types, and then of names.
_ALIGNED = 8
_ORDER = ["U64", "I64", "F64", "C64", "F32", "U32", "I32", "F16", "U16", "I16", "I8", "U8", "BOOL"]


class SafetensorsFile:
    """What is in a new file, with a place for each tensor of the `layout`. Its methods raise OSError as files do."""

    def __init__(self, file: BinaryIO, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        end, header, self._starts = 0, {}, dict[str, int]()
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (_ORDER.index(_name(item[1][0])), item[0])):
            self._starts[name] = end
            end += math.prod(shape) * np.dtype(dtype).itemsize
            header[name] = {"dtype": _name(dtype), "shape": shape, "data_offsets": [self._starts[name], end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNED)
        self._layout, self._first, self._file = layout, len(text) + 8, file
        file.write(len(text).to_bytes(8, "little") + text)
        if end:
            file.seek(end - 1, os.SEEK_CUR)
            file.write(b"\0")

    def put(self, name: str, array: np.ndarray) -> None:
        """Write a tensor, which has the dtype and shape of the layout."""
        assert (str(array.dtype), array.shape) == self._layout[name], name
        self._file.seek(self._first + self._starts.pop(name))
        self._file.write(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)

    def end(self) -> None:
        """All tensors have come."""
        assert not self._starts, f"not written: {', '.join(self._starts)}"


def _name(dtype: str) -> str:
    """The format's name of a dtype."""
    numpy_dtype = np.dtype(dtype)
    return "BOOL" if numpy_dtype.kind == "b" else f"{_KINDS[numpy_dtype.kind]}{8 * numpy_dtype.itemsize}"
