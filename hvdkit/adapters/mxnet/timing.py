"""MXNet's trace events: operations of its engine that depend on tensors and record the time when these are ready.

Each is a Python call from one of the engine's threads, which needs the interpreter lock of the thread that pushes the
step's operations. That thread releases it every 5 ms, which is a quarter of a small model's backward, so steps with
trace events shorten this interval.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mxnet as mx

from hvdkit.core import seam, trace_events

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind


class _Cpu(ctypes.Structure):
    """The engine's `Context`: always the CPU, as the engine itself waits for tensors on other devices."""

    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


_CPU, _PRIORITISED = _Cpu(1, 0), ctypes.c_int(3)  # runs in separate threads (include/mxnet/engine.h, FnProperty)
_SWITCH_S = 2e-5  # the switch interval of Python's threads in steps with trace events
_names: list[str] = []  # of all trace events; an operation gets its name's index
_order: mx.nd.NDArray | None = None  # a step's trace events write to it, which keeps them in order
_gradients: list[str] | None = None  # names of the parameters whose gradients have their own trace events


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def _now(_: Any, index: int | None) -> None:
    trace_events.mark(_names[index or 0])


def mark(name: str, after: Sequence[mx.nd.NDArray]) -> None:
    """Record a trace event once the tensors are ready, and after the previous trace event."""
    global _order
    if not trace_events.recording():
        return
    if _order is None:
        _order = mx.nd.zeros(1)
    _push(name, after, [_order])


def _push(name: str, after: Sequence[mx.nd.NDArray], writes: Sequence[mx.nd.NDArray] = ()) -> None:
    _names.append(name)
    mx.base.check_call(
        mx.base._LIB.MXEnginePushSyncND(
            _now, ctypes.c_void_p(len(_names) - 1), None, ctypes.byref(_CPU),
            _handles(after), len(after), _handles(writes), len(writes), ctypes.byref(_PRIORITISED), 0, None,
        )
    )  # fmt: skip


def _handles(tensors: Sequence[mx.nd.NDArray]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.handle for tensor in tensors))


def stamp(names: tuple[str, ...], tensors: list[mx.nd.NDArray]) -> list[mx.nd.NDArray]:
    """Record trace events once the tensors are ready, or now if there are none; returns the tensors.

    In detailed steps, each gradient of BACKWARD has its own trace event; gradients are in the parameters' order.
    """
    if trace_events.recording():
        if trace_events.BACKWARD in names:
            # Reversed, so that gradients that are ready together (MXNet runs segments) come in backward's order.
            for name, gradient in reversed(list(zip(_gradients or (), tensors, strict=False))):
                _push(trace_events.READY + name, [gradient])
        for name in names:
            if tensors:
                mark(name, tensors)
            else:
                trace_events.mark(name)
    return tensors


class Observer(seam.Observer):
    """`names` are the names of the trained parameters, in order."""

    def __init__(self, hvd: Any, names: list[str]) -> None:
        super().__init__(hvd)
        self._parameters, self._plain_switch_s = names, sys.getswitchinterval()

    def watch(self, kind: Kind) -> None:
        global _gradients
        mx.nd.waitall()
        _names.clear()
        sys.setswitchinterval(self._plain_switch_s if kind == "plain" else _SWITCH_S)
        _gradients = self._parameters if kind == "detailed" else None
