"""What the benchmarks share: interleaved rounds that are kept and resumed, and medians with intervals.

A benchmark says what one run is. This module runs all sides of a round directly after each other in random order, and
keeps what is done; `written.py` writes the result.

As a program it calls a benchmark's function in another environment: `elsewhere` runs it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hvdkit.errors import HvdkitError, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.launch.namespaces import Unavailable
from hvdkit.results.intervals import of_values

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
# One thread a rank, whatever the framework reads; TensorFlow does not read OpenMP's variable.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
TIMEOUT_S = 900.0
Start = Callable[..., Any]  # subprocess.run, or what takes the same arguments, such as `hosts.Network.run`
_OUTPUT_SHOWN = 2000  # characters of a failed command's output
_BEGAN = time.monotonic()


# -- the command line -------------------------------------------------------------------------------------------------


def parser(
    description: str | None,
    rounds: int | None = None,
    keep: str | None = None,
    frameworks: bool = False,
    out: Path = HERE,
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks have in common; `keep` is the folder in runs/ that runs are kept in."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if frameworks:
        made.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this one (may be repeated)")
    if rounds:
        made.add_argument("--rounds", type=positive, default=rounds, help=f"how many (default {rounds})")
    if keep:
        made.add_argument("--fresh", action="store_true", help="forget what is done")
        made.add_argument("--keep", type=Path, default=Path("runs") / keep, help="where runs are kept")
    made.add_argument("--out", type=Path, default=out, help=f"folder for what is written (default: {out.name})")
    return made


def positive(text: str) -> int:
    """A number of an option, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def kept(args: argparse.Namespace) -> Path:
    """The folder that runs are kept in, absolute; `--fresh` removes it first."""
    folder: Path = args.keep.absolute()
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a script and exit with its status; an error is one line."""
    try:
        sys.exit(main() or 0)
    except (HvdkitError, Unavailable, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_status", 2))


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - _BEGAN:4.0f} s] {text}", flush=True)


# -- rounds and figures -----------------------------------------------------------------------------------------------


def rounds(
    keep: Path, groups: Iterable[str], sides: Sequence[str], count: int, run: Callable[[str, int, str, Path], Any]
) -> dict[str, list[dict[str, Any]]]:
    """Rounds of all sides by group; `run(group, number, side, folder)` gives what a side comes to.

    The groups take turns, so that a noisy hour hits all of them.
    """
    found: dict[str, list[dict[str, Any]]] = {group: [] for group in groups}
    for number in range(count):
        for group, done in found.items():
            done.append(one_round(keep / group / f"{number:02d}", sides, partial(run, group, number)))
    return found


def one_round(folder: Path, sides: Sequence[str], run: Callable[[str, Path], Any]) -> dict[str, Any]:
    """The result of each side, run directly after each other in random order: what `run(side, folder)` returns, JSON.

    A round that is whole is read from the folder. One that was interrupted starts again, as hours may lie between.
    """
    file = folder / "round.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not set(sides) <= found.keys():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        found, name = {}, "/".join(folder.parts[-3:])
        for number in random.Random(name).sample(range(len(sides)), len(sides)):
            found[sides[number]] = result = run(sides[number], folder / f"side-{number:02d}")
            speeds = ("tokens_per_second", "images_per_second")
            figure = next(filter(None, map(result.get, speeds)), None) if isinstance(result, dict) else result
            say(f"{name}: {sides[number]}" + (f": {figure:.2f}" if figure is not None else ""))
        write_atomic(file, json.dumps(found) + "\n")
    return {side: found[side] for side in sides}


def interval(values: Sequence[float], each: str = "ratios") -> dict[str, Any]:
    """The median, its 95 % interval by the percentile bootstrap, and each value under the key `each`."""
    return asdict(of_values(values)) | {each: [round(value, 4) for value in values]}


def median_and_range(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def judged(ratio: Mapping[str, float], least: float | None = None, most: float | None = None) -> str:
    """What the interval of a ratio comes to beside its mark; missed only if all of it misses that."""
    if least is None and most is None:
        return "reported"
    sign, mark = (1, least or 0.0) if most is None else (-1, -most)
    worst, middle, best = sorted(sign * ratio[key] for key in ("low", "median", "high"))
    if worst >= mark:
        return "met"
    return "met by the median" if middle >= mark else "in doubt" if best >= mark else "missed"


# -- what is run ------------------------------------------------------------------------------------------------------


def run(
    command: Sequence[str | Path], timeout_s: float = TIMEOUT_S, start: Start = subprocess.run, **options: Any
) -> str:
    """A command's standard output; `options` are subprocess.run's.

    Raises RunError with the end of its output where it fails or takes too long, RequestError with the output where it
    exits with status 2.
    """
    words = [str(word) for word in command]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": timeout_s} | options
    try:
        done = start(words, **options)
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(words)}: no end within {timeout_s:.0f} s") from None
    if done.returncode:
        output = (done.stdout + (done.stderr or ""))[-_OUTPUT_SHOWN:].strip()
        if done.returncode == 2:
            raise RequestError(output)
        raise RunError(f"{' '.join(words)}: exit status {done.returncode}: {output}")
    return str(done.stdout)


def hvdkit(
    arguments: Sequence[str | Path], timeout_s: float = TIMEOUT_S, start: Start = subprocess.run, **options: Any
) -> float:
    """`hvdkit` with these arguments, under this interpreter: how many seconds it took. Raises as `run` does."""
    began = time.perf_counter()
    run([sys.executable, "-m", "hvdkit", *arguments], timeout_s, start, **options)
    return time.perf_counter() - began


def elsewhere(
    function: Callable[..., Any],
    runtime: str | None = None,
    start: Start = subprocess.run,
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """What a benchmark's function gives in another process: JSON, as its arguments.

    It runs in a framework's `runtime`, or where `start` and the environment `env` have it. Raises as `run` does.
    """
    from hvdkit.runtimes.store import find

    module = f"benchmarks.{Path(function.__code__.co_filename).stem}"
    asked = {"module": module, "function": function.__name__, "arguments": arguments}
    options = {"stderr": subprocess.PIPE, "input": json.dumps(asked), "cwd": ROOT} | ({"env": env} if env else {})
    python = find(runtime).python if runtime else sys.executable
    return json.loads(run([python, "-m", "benchmarks.harness"], start=start, **options).splitlines()[-1])


def train(
    framework: str,
    ranks: int,
    recipe: str,
    keys: Sequence[str],
    folder: Path,
    options: Sequence[str | Path] = (),
    **how: Any,
) -> dict[str, Any]:
    """The result of `hvdkit train` into a folder, without checkpoints; `how` and what is raised as in `run`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    where = ["--framework", framework, "-np", str(ranks), *options, "--out", folder, "--overwrite"]
    hvdkit(["train", recipe, *where, *keys, "checkpoint=null"], **how)
    return result_of(folder)


@contextmanager
def variables(changes: Mapping[str, str]) -> Iterator[None]:
    """A context with other environment variables, which the ranks that it starts have too."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def by_hand(
    framework: str,
    kind: str,
    ranks: int,
    folder: Path,
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The result of a script of `plain/`, by its ranks of one thread each, through hvdkit's launcher."""
    script = HERE / "plain" / f"{kind}_{framework}.py"
    arguments = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    arguments += ["--out", str(folder / "result.json")]
    start_directly(framework, [str(script), *arguments], ranks, folder, environment)
    return dict(json.loads((folder / "result.json").read_text()))


def start_directly(
    framework: str, arguments: list[str], ranks: int, folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Start ranks of one thread each on this machine, and wait for them. Raises what the launcher raises."""
    from hvdkit.launch.hosts import Host
    from hvdkit.launch.job import Job
    from hvdkit.launch.launchers import LAUNCHERS
    from hvdkit.runtimes.store import find

    folder.mkdir(parents=True, exist_ok=True)
    runtime = find(framework)
    given, hosts = runtime.environment | ONE_THREAD | dict(environment or {}), [Host("localhost", ranks)]
    LAUNCHERS["direct"].run(Job(runtime.python, arguments, ranks, hosts, given, folder / "logs"))


def result_of(folder: Path) -> dict[str, Any]:
    """What a run has left in its folder, checked."""
    from hvdkit.results.train import read_result

    return read_result(folder / "result.json").model_dump(mode="json")


def step_ms(result: Mapping[str, Any]) -> float:
    """Milliseconds a step: a mean, as with Local SGD only some steps send."""
    return float(1e3 * result["batch_size"] * result["np"] / result["samples_per_second"])


def start_ranks(
    out: str,
    framework: str,
    ranks: int,
    recipe: str,
    keys: list[str],
    script: str | None = None,
    arguments: list[str] | None = None,
    hosts: str | None = None,
    rival: str | None = None,
) -> None:
    """Start a script of this folder, None for the recipe's own, in each rank, with the recipe's file and `arguments`.

    Without `arguments` it trains into the folder `out`. Hosts of a network are known `elsewhere` only. Raises what a
    launcher raises.
    """
    from hvdkit.commands.checked_run import launch, make_plan
    from hvdkit.launch.placement import Placement
    from hvdkit.recipe import registry, schema

    placement = Placement(ranks, hosts, "auto")
    planned = make_plan(schema.load(registry.locate(Path(recipe)), keys), framework, placement, rival)
    file = Path(out) / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, schema.dump(planned.recipe))
    launch(planned.by(HERE / script) if script else planned, file, arguments or ["--out", out], file.with_name("logs"))


def _called() -> None:
    """The other end of `elsewhere`."""
    asked = json.load(sys.stdin)
    function = getattr(importlib.import_module(asked["module"]), asked["function"])
    print("\n" + json.dumps(function(**asked["arguments"])), flush=True)


if __name__ == "__main__":
    exit_with(_called)
