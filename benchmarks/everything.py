"""All figures of README.md and docs/ anew, on one machine in one go: `make bench-all`.

    .venv/bin/python -m benchmarks.everything [--list] [--only cost] [--short]

Benchmarks run one after the other, the README's first. Whatever stops it (Ctrl-C, a signal, a crash), the same command
continues: a benchmark that has written its result is not run again, and each keeps the rounds that are done, in
`runs/bench-all`. Another machine is refused, as its speeds are others. A benchmark that fails is named, and the next
one runs. Exit status 0 once all are done; then `python -m scripts.figures` has written the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.errors import RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.runtimes import end_with_parent

# The result, how to make it, and minutes on two quiet cores, as far as is known; options of one short run.
ONE = ["--rounds", "1", "--framework", "pytorch"]
STEPS: dict[str, tuple[list[str], int, list[str]]] = {
    "parity": (["benchmarks.parities"], 20, ["--recipe", "gpt-tiny"]),
    "cost": (["benchmarks.cost"], 360, [*ONE, "--recipe", "resnet20-digits"]),
    "start": (["benchmarks.start"], 8, ONE),
    "shared_memory": (["benchmarks.shared_memory", "--framework", "pytorch"], 10, ONE),
    "accuracy": (["benchmarks.accuracy"], 6, ONE),
    "tools": (["benchmarks.tools"], 2, ["--runs", "1"]),
    "elastic": (["tests.cluster.elastic_chaos"], 60, ["--framework", "pytorch", "--runs", "1", "--events", "2"]),
    "parallel": (["benchmarks.parallel", "--central", "--ranks", "2", "--model", "0.8M"], 30, ["--rounds", "1"]),
    "sharding": (["benchmarks.sharding"], 15, ONE),
    "gpt_loss": (["benchmarks.gpt_loss"], 25, ONE),
    "memory": (["benchmarks.memory"], 20, ["--framework", "pytorch", "--steps", "100"]),
    "ways": (["benchmarks.ways"], 10, ["--rounds", "1"]),
    "gpt_network": (["benchmarks.gpt_network"], 30, ["--rounds", "1", "--method", "dense"]),
    "bench-network": (["benchmarks.network"], 60, ["--rounds", "1"]),
    "data": (["benchmarks.data"], 10, ONE),
}
_WITHOUT_KEEP = {"start", "tools", "ways"}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what is done and what is left, and run nothing")
    parser.add_argument("--only", action="append", choices=list(STEPS), help="only this one (may be repeated)")
    parser.add_argument("--short", action="store_true", help="one round each, to try it; results stay in the folder")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "bench-all", help="where runs are kept")
    args = parser.parse_args()
    folder = args.keep.absolute() / ("short" if args.short else "whole")
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    done = begun(folder)
    asked = [name for name in STEPS if name in (args.only or STEPS)]
    tell(asked, done["results"])
    if args.list:
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    for name in asked:
        if name in done["results"]:
            continue
        try:
            done["results"][name] = measured(name, folder, args.short)
        except RunError as error:
            failed.append(name)
            print(f"error: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            raise RunError("stopped; the same command continues") from None
        write_atomic(folder / "done.json", json.dumps(done, indent=2) + "\n")
        tell(asked, done["results"])
    if failed:
        raise RunError(f"not measured: {', '.join(failed)}; the same command tries them again")
    if not args.short and set(done["results"]) == set(STEPS):
        for module in ("scripts.figures", "scripts.draw_front"):
            harness.run([sys.executable, "-m", module], cwd=harness.ROOT)
        print("the pages have today's figures: read the changes (git diff), as words around a figure may not fit it")
    return 0


def begun(folder: Path) -> dict[str, Any]:
    """What was done in this folder. Raises RequestError for another machine's."""
    file, machine = folder / "done.json", this_machine().model_dump()
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"machine": machine, "results": {}}
    if done["machine"] != machine:
        raise RequestError(f"{file}: begun on {written.machine_line(done['machine'])}; give --fresh to begin anew here")
    commits = {result["commit"] for result in done["results"].values()} | {written.code()["commit"]}
    if len(commits) > 1:
        print("some results are of an earlier commit; give --fresh to measure all of this one")
    return done


def tell(asked: list[str], results: dict[str, Any]) -> None:
    """What is done, and what is left."""
    left = [name for name in asked if name not in results]
    minutes = sum(STEPS[name][1] for name in left)
    print(f"{len(asked) - len(left)} of {len(asked)} results are done", end="")
    print(f"; left, about {minutes // 60}:{minutes % 60:02d} h: {', '.join(left)}" if left else "", flush=True)


def measured(name: str, folder: Path, short: bool) -> dict[str, Any]:
    """Run the benchmark until it has written its result; how long it took, and of which commit. Raises RunError."""
    (module, *options), _, few = STEPS[name]
    out = folder / "results" if short else harness.HERE
    options += ["--out", str(out), *few] if short else []
    # Results name their command, so it says no machine's path.
    options += [] if name in _WITHOUT_KEEP else ["--keep", os.path.relpath(folder / name, harness.ROOT)]
    began, commit = time.time(), written.code()["commit"]
    harness.say(f"{name}: python -m {' '.join([module, *options])}")
    command = [sys.executable, end_with_parent.__file__, sys.executable, "-m", module, *options]
    # In a session of its own, as Ctrl-C would end what has to end the benchmark.
    with subprocess.Popen(command, cwd=harness.ROOT, stdin=subprocess.PIPE, start_new_session=True) as running:
        status = running.wait()
    file = out / f"{name}.json"
    if not file.exists() or file.stat().st_mtime < began:  # status 1 with a result: a limit was missed
        raise RunError(f"{name}: exit status {status}, and no result")
    return {"seconds": round(time.time() - began), "commit": commit, "status": status}


if __name__ == "__main__":
    harness.exit_with(main)
