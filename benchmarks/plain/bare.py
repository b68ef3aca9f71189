"""One process, one training step, no Horovod and no hvdkit: the least time from an interpreter's start to there.

    .runtimes/pytorch/bin/python benchmarks/plain/bare.py pytorch

Runs `resnet_<framework>.py` to the end of its first step, with a stand-in for Horovod that does nothing, and prints the
wall clock there, in seconds.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType

import shared


def stand_in(name):
    """What a plain script uses of Horovod, for one rank that sends nothing."""
    module = sys.modules[name] = ModuleType(name)
    module.rank, module.size = lambda: 0, lambda: 1
    module.Average = module.Sum = None
    for nothing in ("init", "broadcast_parameters", "broadcast_optimizer_state", "broadcast_variables"):
        setattr(module, nothing, lambda *_, **__: None)
    for same in ("DistributedOptimizer", "DistributedGradientTape", "grouped_allreduce"):
        setattr(module, same, lambda given, **_: given)
    return module


def first_step_done(clock):
    print(time.time(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    framework = sys.argv[1]
    names = {"pytorch": "torch", "keras": "tensorflow"}
    name = names.get(framework, framework)
    horovod = stand_in("horovod")
    setattr(horovod, name, stand_in(f"horovod.{name}"))
    if framework == "mxnet":
        from mxnet import gluon

        sys.modules["horovod.mxnet"].DistributedTrainer = gluon.Trainer
    shared.Clock.tick = first_step_done
    script = str(Path(__file__).with_name(f"resnet_{framework}.py"))
    sys.argv = [script, "--steps", "1"]
    runpy.run_path(script, run_name="__main__")
