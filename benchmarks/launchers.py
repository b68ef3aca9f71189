"""What `--launcher slurm` and `--launcher mpirun` cost, beside the same programs' own launch of two bare processes.

    sudo .venv/bin/python -m benchmarks.launchers [--framework pytorch] [--rounds 7]

A round takes these directly after each other, in random order:

- the start of two processes of one thread: `plain/bare.py` under srun and under mpirun (framework, model, optimizer,
  data, one step; no Horovod), and `hvdkit train -np 2` by either launcher, from the command inside the allocation to
  the end of the slower process's first step;
- images per second of four ranks on two hosts (network namespaces with links of 1 Gbit/s): the direct launcher, slurm,
  and mpirun inside the allocation.

Slurm's daemons are started for it, one slurmd a host. Needs root, Slurm and Open MPI, which `make cluster-check`
installs, and a quiet machine. The first round, which may read from a cold disk, is not counted. Rounds that are done
are kept in `runs/launchers`. Writes launchers.json and launchers.md beside itself; exit status 1 if a limit is missed
and the interval leaves no doubt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import interval
from hvdkit.results.train import read_result
from hvdkit.runtimes.store import find
from tests.cluster.hosts import Network, Unavailable
from tests.cluster.slurm_daemons import Slurm

PROGRAMS = {"slurm": "srun", "mpirun": "mpirun"}
STARTS = tuple(f"{side}-{launcher}" for launcher in PROGRAMS for side in ("bare", "hvdkit"))
RATES = ("direct", *PROGRAMS)
RATIO_MARK, MBIT_PER_S, TIMEOUT_S = 1.15, 1000.0, 300.0
RECIPE = ["resnet20-digits", "threads=1", "checkpoint=null"]
BARE = {
    "slurm": ["srun", "-n2", "--mpi=none", "--quiet"],
    "mpirun": ["mpirun", "--allow-run-as-root", "-np", "2", "--bind-to", "none"],
}


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, rounds=7, keep="launchers", frameworks=True)
    args = parser.parse_args()
    missing = [*Slurm.missing(), *(["mpirun"] if shutil.which("mpirun") is None else [])]
    if missing or os.geteuid() != 0:
        raise Unavailable(f"{missing[0] if missing else 'root'}: is needed; sudo make cluster-check installs programs")
    names = args.framework or ["pytorch"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(2, MBIT_PER_S) as network,
        Slurm(network, Path(folder) / "slurm") as slurm,
    ):
        run = side_of(slurm)
        taken = harness.rounds(
            harness.kept(args), names, (*STARTS, *(f"rate-{one}" for one in RATES)), args.rounds + 1, run
        )
    found = {name: summary(name, rounds[1:]) for name, rounds in taken.items()}
    outcome = {"marks": {"start_at_most": RATIO_MARK}, "link_mbit_per_s": MBIT_PER_S, "frameworks": found}
    harness.publish("launchers", outcome, args.out)
    return 1 if any(each["starts"][one]["low"] > RATIO_MARK for each in found.values() for one in PROGRAMS) else 0


def summary(framework: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Each side's figures by round, and the ratios within rounds."""
    return {
        "seconds": {side: interval([one[side] for one in rounds], "each") for side in STARTS},
        "starts": {
            each: interval([one[f"hvdkit-{each}"] / one[f"bare-{each}"] for one in rounds]) for each in PROGRAMS
        },
        "images_per_second": {each: interval([one[f"rate-{each}"] for one in rounds], "each") for each in RATES},
        "rates": {each: interval([one[f"rate-{each}"] / one["rate-direct"] for one in rounds]) for each in PROGRAMS},
        "versions": find(framework).versions,
        "rounds": len(rounds),
        "measured": time.strftime("%-d %B %Y", time.gmtime()),
    }


def side_of(slurm: Slurm) -> Callable[[str, int, str, Path], float]:
    """What gives a side's figure on these hosts: seconds to the first step, or images per second."""

    def run(framework: str, _: int, side: str, out: Path) -> float:
        what, launcher = side.split("-")
        if what == "bare":
            return bare(slurm, framework, launcher)
        if what == "rate":
            return trained(slurm, framework, launcher, 4, ["epochs=3", "steps=60"], out).images_per_second
        startup_s = trained(slurm, framework, launcher, 2, ["epochs=1", "steps=1"], out).startup_s
        assert startup_s is not None
        return float(startup_s)

    return run


def bare(slurm: Slurm, framework: str, launcher: str) -> float:
    """Seconds from the program's start, inside an allocation, to the end of the slower process's first step."""
    program = [*BARE[launcher], str(find(framework).python), str(harness.HERE / "plain" / "bare.py"), framework]
    began, *ended = said(slurm, 2, ["sh", "-c", 'date +%s.%N; exec "$@"', "sh", *program], framework).split()
    assert len(ended) == 2, ended
    return max(map(float, ended)) - float(began)


def trained(slurm: Slurm, framework: str, launcher: str, ranks: int, keys: list[str], out: Path) -> Any:
    """The result of `hvdkit train` into the folder."""
    hosts = ["-H", slurm.network.hosts_option(ranks // 2)] if launcher == "direct" else []
    where = ["--framework", framework, "-np", str(ranks), "--launcher", launcher, *hosts, "--out", str(out)]
    command = [sys.executable, "-m", "hvdkit", "train", *RECIPE, *keys, *where]
    said(slurm, 0 if launcher == "direct" else ranks, command, framework)
    return read_result(out / "result.json")


def said(slurm: Slurm, tasks: int, command: list[str], framework: str) -> str:
    """The output of a command on the first host, inside an allocation of so many tasks on both hosts (0: none)."""
    allocation = ["salloc", "--quiet", "--overcommit", "-N2", f"-n{tasks}"] if tasks else []
    environment = {**find(framework).environment, **harness.ONE_THREAD}
    return harness.run([*allocation, *command], TIMEOUT_S, start=slurm.run, env=environment, stderr=subprocess.PIPE)


if __name__ == "__main__":
    harness.exit_with(main)
