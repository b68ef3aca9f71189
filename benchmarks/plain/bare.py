"""One process, one training step, no Horovod and no hvdkit: the least time from an interpreter's start to there.

    .runtimes/pytorch/bin/python benchmarks/plain/bare.py pytorch

Runs `resnet_<framework>.py` to the end of its first step, and prints the wall clock there, in seconds.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import shared


def first_step_done(clock):
    print(time.time(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    shared.Clock.tick = first_step_done
    script = str(Path(__file__).with_name(f"resnet_{sys.argv[1]}.py"))
    sys.argv = [script, "--steps", "1"]
    runpy.run_path(script, run_name="__main__")
