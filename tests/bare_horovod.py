"""Horovod without a framework's Python: MXNet's C library and Horovod's own, called by ctypes.

For tests of how ranks start, fail and end, in which no framework has a part. The collectives are Horovod's, over Gloo.
Loading takes 0.1 s of processor time, `import mxnet` more than a second. Runs in MXNet's runtime.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from horovod.common import process_sets
from horovod.common.basics import HorovodBasics

_HOROVOD = Path(importlib.util.find_spec("horovod").origin).parent  # type: ignore[union-attr, arg-type]
_mxnet = ctypes.CDLL(str(_HOROVOD.parent / "mxnet" / "libmxnet.so"), ctypes.RTLD_GLOBAL)
_mxnet.MXGetLastError.restype = ctypes.c_char_p
_basics = HorovodBasics(str(_HOROVOD / "mxnet" / "__init__.py"), "mpi_lib")
process_sets._setup(_basics)
init, shutdown, rank, size = _basics.init, _basics.shutdown, _basics.rank, _basics.size
local_rank, local_size, cross_rank, cross_size = (
    _basics.local_rank, _basics.local_size, _basics.cross_rank, _basics.cross_size,
)  # fmt: skip


class HorovodError(RuntimeError):
    """What MXNet's library says of a collective that has failed."""


def _check(status: int) -> None:
    if status:
        raise HorovodError(_mxnet.MXGetLastError().decode())


def _array() -> ctypes.c_void_p:
    """Room for one float32 on the CPU."""
    handle = ctypes.c_void_p()
    _check(_mxnet.MXNDArrayCreate((ctypes.c_uint32 * 1)(1), 1, 1, 0, 0, ctypes.byref(handle)))
    return handle


_sent, _received = _array(), _array()


def allreduce(value: float, name: str = "x") -> float:
    """The sum of the ranks' values. Raises HorovodError where another rank is gone."""
    number = ctypes.c_float(value)
    _check(_mxnet.MXNDArraySyncCopyFromCPU(_sent, ctypes.byref(number), ctypes.c_size_t(1)))
    scale, all_ranks = ctypes.c_double(1), ctypes.c_int(0)
    _check(
        _basics.MPI_LIB_CTYPES.horovod_mxnet_allreduce_async(
            ctypes.byref(_sent), ctypes.byref(_received), name.encode(), _basics.Sum, 0, scale, scale, 1, all_ranks
        )
    )
    _check(_mxnet.MXNDArraySyncCopyToCPU(_received, ctypes.byref(number), ctypes.c_size_t(1)))
    return number.value
