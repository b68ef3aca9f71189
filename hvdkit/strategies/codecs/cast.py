"""Compression of gradients on the wire, written once over the adapters' `cast`.

A compressor has the two methods that Horovod's own have, so it can be handed to Horovod's optimizers.
"""

from __future__ import annotations

from typing import Any, Protocol

from hvdkit.core.seam import Adapter


class Compressor(Protocol):
    """Turns a gradient into what is sent, and back."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """(what is sent, what `decompress` needs to know)."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The gradient, in the dtype that it came in."""


class NoCompression:
    """Sends gradients as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The tensor itself."""
        return tensor


class Fp16:
    """Sends floating-point gradients as float16: half the bytes of float32. Values beyond 65,504 become infinite."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor in float16, and its old dtype; other dtypes than float32 and float64 go as they are."""
        dtype = self._adapter.dtype(tensor)
        if dtype not in ("float32", "float64"):
            return tensor, None
        return self._adapter.cast(tensor, "float16"), dtype

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The tensor in its old dtype."""
        return tensor if context is None else self._adapter.cast(tensor, context)


def make(name: str, adapter: Adapter) -> Compressor:
    """The compressor of the recipe's `compression` key."""
    return Fp16(adapter) if name == "fp16" else NoCompression()
