"""A program in the form of Horovod's documentation, which knows nothing of hvdkit: `program.py FAULT`.

After five collectives rank 1, or that of FAULTY, commits FAULT, or all ranks do if its name begins with `all`.
With BARE in the environment Horovod comes without a framework's Python.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

if "BARE" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    import bare_horovod as hvd
else:
    import horovod.mxnet as hvd
    import mxnet as mx


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # that process has ended
        return b""


def write(path: Path) -> None:
    with path.open("w") as file:
        file.write("a checkpoint")
        file.flush()
        os.fsync(file.fileno())


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
    elif fault == "writes":  # in a thread of its own, as for a checkpoint beside the training
        writer = threading.Thread(target=write, args=(Path(sys.argv[2]) / "checkpoint",))
        writer.start()
        writer.join()
    elif fault.startswith("removes"):  # as somebody does who tidies up
        logs = Path(os.environ["HVDKIT_RANK_DIR"])
        if fault == "removes by another name":
            logs.parent.rename(logs.parent.with_name("other"))
        else:
            shutil.rmtree(logs if fault == "removes logs" else logs.parent, ignore_errors=True)
        time.sleep(2)
    elif fault == "leaves":  # as a script does that has seen enough
        os._exit(0)
    elif fault == "allclose":  # as libraries for daemons do; what is opened next gets their numbers
        sys.stdout.close()
        os.close(2)
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    elif fault == "escapes":
        os.write(1, b"\x1b]0;pwned\x07\x1b[2J\x1b[31mred\x1b[0m\nits last line\n")
        sys.exit(3)
    elif fault == "alldaemons":  # which would outlive it
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
        secret = os.environ["HVDKIT_TEST_MARK"].encode()
        seen = [path for path in Path("/proc").glob("[0-9]*/cmdline") if secret in read(path)]
        print("the secret is on", len(seen), "command lines")
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
    if "BARE" in os.environ:
        summed = [hvd.allreduce(1.0, "gradients")]
    else:
        summed = hvd.allreduce(mx.nd.ones((2,)), average=False, name="gradients").asnumpy().tolist()
    assert set(summed) == {hvd.size()}
    print(f"step {step}")
    while fault == "waits" and not Path("go").exists():
        time.sleep(0.1)
print("done")
