"""A program in the form of Horovod's documentation, which knows nothing of hvdkit: `program.py FAULT`.

After five collectives rank 1, or that of FAULTY, commits FAULT, or all ranks do if its name begins with `all`.
"""

import os
import signal
import sys
import time

import horovod.mxnet as hvd
import mxnet as mx


def commit(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises":
        raise ValueError("the seventh image is upside down")
    elif fault == "exits":
        sys.exit(3)
    elif fault.endswith("sleeps"):
        time.sleep(600)
    elif fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "computes":  # for several times the stall timeout of the test
        until = time.monotonic() + 9
        while time.monotonic() < until:
            sum(range(1000))
    elif fault == "allfloods":
        for number in range(20_000):
            print("flood", number, "x" * 80)
        print("and its last line")


hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}", *sys.argv[1:])
fault = sys.argv[1]
for step in range(8):
    if step == 5 and (fault.startswith("all") or hvd.rank() == int(os.environ.get("FAULTY", "1"))):
        commit(fault)
    summed = hvd.allreduce(mx.nd.ones((2,)), average=False, name="gradients")
    assert summed.asnumpy().tolist() == [hvd.size()] * 2
    print(f"step {step}")
    while fault == "waits":
        time.sleep(0.1)
print("done")
