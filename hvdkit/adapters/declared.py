"""What each adapter can do, by the keys of `core.adapter.CAPABILITIES`; here, so that asking loads no framework."""

from __future__ import annotations

_REDUCED = frozenset({"float16", "float32", "float64", "int32", "int64"})
_MODERN = frozenset({"gpu", "fp64", "bf16", "fp16", "gpu-bf16", "gpu-fp16", "exact-sums", "recompute"})

CAPABILITIES: dict[str, frozenset[str]] = {
    "pytorch": _MODERN | _REDUCED | {"scalars", "empty"},
    "tensorflow": _MODERN | _REDUCED | {"int8", "uint8", "scalars", "empty"},
    "keras": _MODERN | _REDUCED | {"int8", "uint8", "scalars", "empty"},
    "mxnet": _REDUCED | {"gpu", "fp64", "int8", "uint8"},
    "local": _REDUCED | {"fp64", "int8", "uint8", "scalars", "empty"},
}
