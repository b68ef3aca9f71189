"""One rank: 40 broadcasts, each over before MXNet's thread goes on that asked for it; with slow_unlock.c preloaded."""

import ctypes
import os
from pathlib import Path

import horovod.mxnet as hvd
import mxnet as mx


def threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


before = threads()
hvd.init()
horovods = threads() - before
preloaded = ctypes.CDLL(None)
spared = (ctypes.c_int * 64).in_dll(preloaded, "spared")
spared[: len(horovods) + 1] = [os.getpid(), *horovods]
ctypes.c_int.in_dll(preloaded, "pause_us").value = 3000
for number in range(40):
    hvd.broadcast_(mx.nd.ones(64), 0, name=f"a.name.that.needs.memory.of.its.own.{number}")
mx.nd.waitall()
print("all over", flush=True)
os._exit(0)
