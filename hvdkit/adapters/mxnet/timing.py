"""MXNet's marks: operations of its engine that read what is to be there by then, and note the time.

Each is a call of Python from one of the engine's threads, which must get the interpreter's lock from the thread that
pushes the step's operations. That one gives it away every 5 ms, which is a quarter of a small network's backward, so
marked steps ask for it sooner.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mxnet as mx

from hvdkit.adapters import timing
from hvdkit.core import trace_events

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind


class _Cpu(ctypes.Structure):
    """The engine's `Context`: on the processor, whatever the tensors are on, as the engine waits for those."""

    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


_CPU, _PRIORITISED = _Cpu(1, 0), ctypes.c_int(3)  # in threads of their own (include/mxnet/engine.h, FnProperty)
_SWITCH_S = 2e-5  # between two threads of Python, in marked steps
_names: list[str] = []  # of the marks under way and past; an operation gets its index
_order: mx.nd.NDArray | None = None  # a step's marks write to it, so that one comes behind the other
_gradients: list[str] | None = None  # names of the parameters whose gradients are marked one by one


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def _now(_: Any, index: int | None) -> None:
    trace_events.mark(_names[index or 0])


def mark(name: str, after: Sequence[mx.nd.NDArray]) -> None:
    """Mark when the tensors are there, with all that has been asked of them until now, and behind the mark before."""
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
    """Mark when the tensors are there, or now where there are none; returns the tensors.

    In detailed steps the gradients behind BACKWARD, which are in the parameters' order, are marked one by one too.
    """
    if trace_events.recording():
        if trace_events.BACKWARD in names:
            # Those that are ready together, as MXNet runs backward in segments, come in backward's order then.
            for name, gradient in reversed(list(zip(_gradients or (), tensors, strict=False))):
                _push(trace_events.READY + name, [gradient])
        for name in names:
            if tensors:
                mark(name, tensors)
            else:
                trace_events.mark(name)
    return tensors


class Observer(timing.Observer):
    """`names` are the trained parameters' in their order."""

    def __init__(self, hvd: Any, names: list[str]) -> None:
        super().__init__(hvd)
        self._parameters, self._plain_switch_s = names, sys.getswitchinterval()

    def watch(self, kind: Kind) -> None:
        global _gradients
        mx.nd.waitall()
        _names.clear()
        sys.setswitchinterval(self._plain_switch_s if kind == "plain" else _SWITCH_S)
        _gradients = self._parameters if kind == "detailed" else None
