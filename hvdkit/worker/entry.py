"""The entry point of every recipe script: one rank of a run, from its command line to its exit status."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hvdkit.core.seam import Adapter
from hvdkit.errors import HvdkitError, RequestError, Stopped
from hvdkit.heartbeat import Heartbeat, first_line, hidden, lost_a_peer
from hvdkit.recipe import schema
from hvdkit.worker import startup
from hvdkit.worker.setup import RankScript


def main(adapter: Adapter, build: Callable[[Any], Any], argv: list[str]) -> NoReturn:
    """Run one rank and end its process, as `end_as_rank` does.

    `build` makes the framework's model from the architecture table.
    """
    end_as_rank(lambda heartbeat: run_mode(adapter, RankScript(build), argv, heartbeat))


def end_as_rank(work: Callable[[Heartbeat], None]) -> NoReturn:
    """Do a rank's work and end its process.

    The exit status is 0, 1 if the run failed, or 2 if the request was wrong; errors are printed on standard error.
    The interpreter's shutdown is skipped, because threads of TensorFlow and Horovod can hang it. All files are written
    by then.
    """
    startup.begin()  # a script of the user's own has not
    _report_crashes()
    status = _exit_status(work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report_crashes() -> None:
    """If native code crashes, print each thread's stack and end the process at once.

    MXNet installs a handler on import. It prints nothing and then waits for threads that it has already destroyed.
    """
    faulthandler.disable()  # if PYTHONFAULTHANDLER enabled it, it would call MXNet's handler
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable()


def run_mode(adapter: Adapter, script: RankScript, argv: list[str], heartbeat: Heartbeat) -> None:
    """Do what the command line asks for: train, or another mode, whose module alone is imported."""
    given = _parse(argv)
    if given.framework not in (None, adapter.NAME):
        raise RequestError(
            f"model.script: {sys.argv[0]}: it trains with {adapter.NAME}, got --framework {given.framework}; "
            f"give --framework {adapter.NAME}, or a script for {given.framework}"
        )
    out: Path | None = given.out
    if out and not out.is_dir() and _first():
        what = "is a file; expected a folder" if out.exists() else "no such folder; make it with mkdir -p"
        raise RequestError(f"--out {out}: {what}")
    recipe = _recipe(given)
    if given.rival:
        from hvdkit import baselines

        adapter = baselines.load(adapter.NAME, given.rival)
    if given.parity:
        from hvdkit.worker import parity

        part = parity.ParityPart(given.parity, given.steps, given.leads, given.precision)
        parity.take_part(adapter, script, recipe, part, heartbeat)
    elif given.profile:
        from hvdkit.worker import profile

        profile.profile(
            adapter, script, recipe, profile.ProfilePart(given.profile, given.steps, given.own_profile), heartbeat
        )
    elif given.try_batches:
        from hvdkit.worker import fitting

        fitting.try_batches(adapter, script, recipe)
    elif given.evaluate or given.predict_images or given.generate:
        from hvdkit.worker import inference

        if given.evaluate:
            average = not given.no_average
            inference.evaluate(adapter, script, recipe, given.evaluate, out, heartbeat, average)
        elif given.predict_images:
            inference.predict_images(adapter, script, recipe, given.predict_images, given.out, heartbeat)
        else:
            inference.generate(adapter, script, recipe, given.generate, given.out, heartbeat)
    else:
        from hvdkit.worker.train import train

        train(adapter, script, recipe, out, heartbeat, given.resume)


def _recipe(given: argparse.Namespace) -> schema.Recipe:
    notes: list[str] = []
    if not os.path.lexists(given.recipe):  # the name of a recipe that comes with hvdkit
        from hvdkit.recipe import registry

        given.recipe = registry.locate(given.recipe)
    recipe = schema.load(given.recipe, given.overrides, notes, "command line")
    if recipe.undecided:  # without the command line, which decides once for all ranks
        from hvdkit.tasks import folder

        recipe = folder.decide(recipe).recipe
    if notes and _first():
        print("\n".join(notes), file=sys.stderr, flush=True)
    return recipe


def _first() -> bool:
    """Whether this is rank 0, which alone writes files, as far as the launcher's variables say."""
    ranks = (os.environ.get(name) for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    return next((rank for rank in ranks if rank), "0") == "0"


def _exit_status(work: Callable[[Heartbeat], None]) -> int:
    heartbeat = Heartbeat()
    try:
        work(heartbeat)
    except Stopped as stopped:
        print(stopped, flush=True)
    except Usage as usage:
        heartbeat.finished()  # the parser has said all
        return usage.status
    except HvdkitError as error:
        heartbeat.failed("request" if isinstance(error, RequestError) else "error", str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        return _left_with(error.__cause__) or error.exit_status
    except BaseException as raised:  # the shutdown is skipped for all: if it is slow, other ranks fail first
        cause = hidden[0] if hidden and isinstance(raised, Exception) else raised
        if isinstance(cause, Exception) and lost_a_peer(cause):
            heartbeat.failed("communication", str(cause))
            print(f"error: another rank is gone: {first_line(cause)}", file=sys.stderr, flush=True)
            return 1
        heartbeat.failed("error", _unexpected(cause))
        traceback.print_exc()
        return _left_with(cause) or 1
    heartbeat.finished()
    return 0


def _left_with(error: BaseException | None) -> int:
    """The status with which sys.exit() was called, if it was; 0 too where it was called with a text."""
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0


def _unexpected(error: BaseException) -> str:
    """An error that nobody handles, in words."""
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt: it got SIGINT, or its code raised it"
    left = "; it left before its work was done" if isinstance(error, SystemExit) else ""
    return f"{type(error).__name__}: {error}".removesuffix(": ") + left


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(description="Train one rank of a recipe; start it with horovodrun for more ranks.")
    parser.add_argument("recipe", type=_path, metavar="RECIPE.yaml", help="a recipe's file, or a name: resnet20-digits")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe, such as epochs=2")
    parser.add_argument("--out", type=_path, help="an existing folder for metrics.jsonl, result.json and checkpoints")
    parser.add_argument("--resume", action="store_true", help="begin at the newest checkpoint in the folder of --out")
    parser.add_argument("--evaluate", type=Path, metavar="CHECKPOINT", help="do not train: evaluate a checkpoint")
    parser.add_argument("--no-average", action="store_true", help="for --evaluate: the weights, not their average")
    parser.add_argument("--predict-images", type=Path, metavar="REQUEST", help="do not train: classify pictures")
    parser.add_argument("--generate", type=Path, metavar="REQUEST", help="do not train: continue a text")
    parser.add_argument("--parity", type=Path, metavar="FOLDER", help="do not train: take part in `hvdkit parity`")
    parser.add_argument("--steps", type=int, default=20, help="for --parity and --profile: steps to look at")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="do not train: take part in `hvdkit profile`")
    parser.add_argument("--own-profile", action="store_true", help="for --profile: the framework's own too")
    parser.add_argument("--try-batches", action="store_true", help="do not train: see hvdkit/worker/fitting.py")
    parser.add_argument("--leads", action="store_true", help="for --parity: leave the trace that others follow")
    parser.add_argument("--precision", default="fp64", help="for --parity: fp32 for what cannot train in float64")
    parser.add_argument("--framework", help="refuse to run with another one")
    parser.add_argument("--rival", help="train with another method: see hvdkit/baselines/registry.py")
    return parser.parse_intermixed_args(argv)


def _path(text: str) -> Path:
    if not text.startswith("~"):
        return Path(text)
    from hvdkit.paths import expanded  # the command line has done it, and most runs come from there

    return expanded(text)


class Usage(BaseException):
    """The command line asks for help, or is wrong; all is said. `status` is the exit status."""

    def __init__(self, status: int) -> None:
        self.status = status


class _Parser(argparse.ArgumentParser):
    """Recognizes keys of the recipe that are given as options."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        print(message or "", end="", file=sys.stderr, flush=True)
        raise Usage(status)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            from hvdkit.recipe.hints import as_overrides

            message = as_overrides(sys.argv[1:], self._option_string_actions, schema.Recipe) or message
        elif "required: RECIPE.yaml" in message:
            self.print_help(sys.stderr)
            self.exit(2, "\nexpected a recipe, such as resnet20-digits\n")
        self.exit(2, "".join(f"error: {line}\n" for line in message.splitlines()))
