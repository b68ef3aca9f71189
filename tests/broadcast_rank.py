"""One rank: as many broadcasts as the command line says, on one core, where Horovod's thread overtakes MXNet's."""

import os
import sys

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

import horovod.mxnet as hvd  # noqa: E402 - its threads are on that core too
import mxnet as mx  # noqa: E402

hvd.init()
tensors = [mx.nd.ones(64) for _ in range(40)]
for done in range(0, int(sys.argv[1]), len(tensors)):
    for number, tensor in enumerate(tensors):
        hvd.broadcast_(tensor, 0, name=f"a.name.that.needs.memory.of.its.own.{number}")
    mx.nd.waitall()
    os.write(1, f"{done + len(tensors)} broadcasts\n".encode())
os._exit(0)
