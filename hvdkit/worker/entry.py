"""What every recipe script does once its framework is loaded: one rank of a run, from command line to result."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdkit.core.heartbeat import Heartbeat, first_line, lost_a_peer
from hvdkit.core.seam import Adapter
from hvdkit.errors import HvdkitError, RequestError, Stopped
from hvdkit.recipe import schema
from hvdkit.worker.setup import Build


def main(adapter: Adapter, build: Build, argv: list[str]) -> NoReturn:
    """Run one rank and end its process. `build` makes the framework's network from the architecture table.

    Ends as `end_as_rank` says.
    """
    end_as_rank(lambda heartbeat: _run(adapter, build, argv, heartbeat))


def end_as_rank(work: Callable[[Heartbeat], None]) -> NoReturn:
    """Do a rank's work and end its process.

    The exit status is 0, 1 where the run failed, 2 where the request was wrong; the fault is told on standard error.
    The process ends without the interpreter's own farewell: everything is written by then, and threads of TensorFlow
    and Horovod have been seen to hang it.
    """
    _tell_of_crashes()
    try:
        status = _guarded(work)
    except SystemExit as leaving:  # at once too: a slow farewell would let its peers fail before it
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tell_of_crashes() -> None:
    """Where native code crashes, the log says what each thread was executing, and the process ends at once.

    MXNet's own handler, in force since its import, says nothing and then waits for threads that it has taken apart.
    """
    faulthandler.disable()  # as PYTHONFAULTHANDLER had it, it would call MXNet's
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable()


def _run(adapter: Adapter, build: Build, argv: list[str], heartbeat: Heartbeat) -> None:
    arguments = _parse(argv)
    recipe = schema.load(arguments.recipe, arguments.overrides)
    if arguments.rival:
        from hvdkit import baselines

        adapter = baselines.load(adapter.NAME, arguments.rival)
    # Each mode loads its own files: training is not to wait for those of the others.
    if arguments.parity:
        from hvdkit.worker import parity

        part = parity.Part(arguments.parity, arguments.steps, arguments.leads)
        parity.take_part(adapter, build, recipe, part, heartbeat)
    elif arguments.profile:
        from hvdkit.worker import profile

        seen = profile.Part(arguments.profile, arguments.steps, arguments.own_profile)
        profile.profile(adapter, build, recipe, seen, heartbeat)
    elif arguments.evaluate:
        from hvdkit.worker.evaluate import evaluate

        evaluate(adapter, build, recipe, arguments.evaluate, arguments.out, heartbeat)
    else:
        from hvdkit.worker.train import train

        train(adapter, build, recipe, arguments.out, heartbeat, arguments.resume)


def _guarded(work: Callable[[Heartbeat], None]) -> int:
    heartbeat = Heartbeat()
    try:
        work(heartbeat)
    except Stopped as stopped:
        print(stopped, flush=True)
        return stopped.exit_status
    except HvdkitError as error:
        heartbeat.failed("request" if isinstance(error, RequestError) else "error", str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except Exception as error:
        if lost_a_peer(error):
            heartbeat.failed("communication", str(error))
            print(f"error: another rank is gone: {first_line(error)}", file=sys.stderr, flush=True)
            return 1
        heartbeat.failed("error", f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one rank of a recipe; start it with horovodrun for more ranks.")
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, help="an existing folder for metrics.jsonl, result.json and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder of --out")
    parser.add_argument("--evaluate", type=Path, metavar="CHECKPOINT", help="do not train: evaluate a checkpoint")
    parser.add_argument("--parity", type=Path, metavar="FOLDER", help="do not train: take part in `hvdkit parity`")
    parser.add_argument("--steps", type=int, default=20, help="for --parity and --profile: steps to look at")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="do not train: take part in `hvdkit profile`")
    parser.add_argument("--own-profile", action="store_true", help="for --profile: the framework's own too")
    parser.add_argument("--leads", action="store_true", help="for --parity: leave the trace that others follow")
    parser.add_argument("--rival", help="train by other means than hvdkit's: see hvdkit/baselines/registry.py")
    return parser.parse_intermixed_args(argv)
