"""MXNet's marks: operations of its engine that read what is to be there by then, and note the time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from hvdkit.adapters.observers import base
from hvdkit.core import marks
from hvdkit.core.recording import Kind


class _Cpu(ctypes.Structure):
    """The engine's `Context`: on the processor, whatever the tensors are on, as the engine waits for those."""

    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


_CPU, _PRIORITISED = _Cpu(1, 0), ctypes.c_int(3)  # in threads of their own (include/mxnet/engine.h, FnProperty)
_names: list[str] = []  # of the marks under way and past; an operation gets its index
_gradients: list[str] | None = None  # names of the parameters whose gradients are marked one by one


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def _now(_: Any, index: int | None) -> None:
    marks.mark(_names[index or 0])


def mark(name: str, after: Sequence[mx.nd.NDArray]) -> None:
    """Mark when the tensors are there, with all that has been asked of them until now."""
    if not marks.recording():
        return
    _names.append(name)
    handles = (ctypes.c_void_p * len(after))(*(tensor.handle for tensor in after))
    mx.base.check_call(
        mx.base._LIB.MXEnginePushSyncND(
            _now, ctypes.c_void_p(len(_names) - 1), None, ctypes.byref(_CPU), handles, len(after), None, 0,
            ctypes.byref(_PRIORITISED), 0, None,
        )
    )  # fmt: skip


def mark_gradients(parameters: Sequence[Any]) -> None:
    """Mark when backward has finished all gradients and, in detailed steps, when each."""
    if not marks.recording():
        return
    gradients = [parameter.grad() for parameter in parameters]
    for name, gradient in zip(_gradients or (), gradients, strict=False):
        mark(marks.READY + name, [gradient])
    mark(marks.BACKWARD, gradients)


class Observer(base.Observer):
    """`names` are the trained parameters' in their order."""

    def __init__(self, hvd: Any, names: list[str]) -> None:
        super().__init__(hvd)
        self._parameters = names

    def watch(self, kind: Kind) -> None:
        global _gradients
        mx.nd.waitall()
        _names.clear()
        _gradients = self._parameters if kind == "detailed" else None
