"""Old against new: start-up, step and processor time of `hvdkit train` at two commits.

    .venv/bin/python benchmarks/commits.py OLD [NEW] [--framework pytorch] [--rounds 9] [--steps 40]

A round takes a run of each commit directly after each other, in random order: two ranks of one thread. Printed are the
medians of the rounds' ratios, new over old, with 95 % intervals. Without NEW it is this checkout as it is. Both use the
runtimes of this checkout, so what differs between the commits' patches of Horovod is not seen. The processor time is
that of all processes of the command, and steadier than the others on a busy machine; with `--steps 1` it is mostly that
of the start. The first round, which may read from a cold disk, is not counted.
"""

from __future__ import annotations

import compileall
import json
import os
import resource
import secrets
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import harness
from harness import FRAMEWORKS, interval, with_interval

from hvdkit.rendezvous import SECRET
from hvdkit.runtimes import store

FIGURES = ("startup_s", "step_ms", "cpu_s")
TIMEOUT_S = 300.0


def main() -> None:
    """The command line."""
    options = harness.parser(__doc__, rounds=9, frameworks=True)
    options.add_argument("old", help="a commit")
    options.add_argument("new", nargs="?", help="another; without it this checkout as it is")
    options.add_argument("--steps", type=harness.positive, default=40, help="how long a run is (default 40)")
    args = options.parse_args()
    # Horovod before its patch 30 reads no such key, and hvdkit of that time makes none.
    environment = {
        **os.environ, **harness.ONE_THREAD, "HVDKIT_RUNTIMES": str(store.root()), SECRET: secrets.token_hex(32)
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trees = {"old": tree(args.old, Path(folder) / "old")}
        trees["new"] = tree(args.new, Path(folder) / "new") if args.new else harness.HERE.parent
        run = partial(figures, trees, environment, args.steps)
        taken = harness.rounds(Path(folder), args.framework or FRAMEWORKS, ("old", "new"), args.rounds + 1, run)
    for framework, rounds in taken.items():
        for figure in FIGURES:
            pairs = [(one["old"][figure], one["new"][figure]) for one in rounds[1:]]
            ratio = with_interval(interval([new / old for old, new in pairs]), 3)
            old, new = map(harness.median_and_range, zip(*pairs, strict=True))
            shown = ", ".join(f"{key} {old[key]:.4g} → {new[key]:.4g}" for key in ("median", "low"))
            print(f"{framework} {figure}: ratio {ratio} of {len(pairs)} rounds; {shown}", flush=True)


def tree(commit: str, folder: Path) -> Path:
    """The files of a commit, compiled, so that no run has to."""
    file = folder.with_suffix(".tar")
    harness.run(["git", "-C", harness.HERE.parent, "archive", "--output", file, commit])
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    compileall.compile_dir(folder / "hvdkit", quiet=2)
    return folder


def figures(
    trees: dict[str, Path], environment: dict[str, str], steps: int, framework: str, _: int, side: str, out: Path
) -> dict[str, float]:
    """Seconds from the command to the end of the first step, milliseconds a step, and processor seconds of a run."""
    began = processor_s()
    where = ["--framework", framework, "-np", "2", "--out", str(out.absolute())]
    keys = ["threads=1", "epochs=20", f"steps={steps}", "checkpoint=null"]
    path = {"PYTHONPATH": str(trees[side])}  # from where ranks import hvdkit
    command = ["train", "resnet20-digits", *where, *keys]
    harness.hvdkit(command, TIMEOUT_S, cwd=trees[side], env={**environment, **path})
    result = json.loads((out / "result.json").read_text())  # in another schema, maybe
    return {
        "startup_s": result["startup_s"],
        "step_ms": harness.step_ms(result),
        "cpu_s": processor_s() - began,
    }


def processor_s() -> float:
    """What the processes that this one has started have used, with those that they have started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    harness.exit_with(main)
