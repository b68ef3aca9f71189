"""A batch script for Slurm, and sbatch, which takes it."""

from __future__ import annotations

import re
import shlex
import subprocess
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.programs import answer

WARNING_S = 120  # before the time ends
RESTARTS = 20
MOST_TASKS = 1000  # of an array; Slurm's MaxArraySize is 1001 by default
TASK = "\0"  # which no word of a command has
NUMBERS = "\1"  # in the name of the log: Slurm's numbers of the job, and of the task in an array
_PLAIN = re.compile(r"[\w./%+:,@=~-]+")
_NAME = re.compile(r"[A-Za-z0-9_][\w.,:@+-]{0,200}")
_CONSTRAINT = re.compile(r"[\w.,&|*()\[\]-]{1,200}")
_TIME = re.compile(r"(\d+-)?\d+(:\d\d?){0,2}|UNLIMITED", re.IGNORECASE)
_LINE = re.compile(r"--?[A-Za-z][\w-]*([ =].*)?")
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Resources:
    """What the job asks Slurm for. `time` is as in sbatch --time, `lines` are further options of #SBATCH lines."""

    tasks: int
    nodes: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    lines: tuple[str, ...] = ()

    def faults(self) -> Faults:
        """What is wrong with it: a line for each fault."""
        faults = Faults()
        for option, number in (("--nodes", self.nodes), ("--cpus-per-task", self.cpus_per_task)):
            if number is not None and not 1 <= number <= 10**6:
                faults.append(f"{option} {number}: expected 1 or more")
        if self.gpus_per_node is not None and not 0 <= self.gpus_per_node <= 1000:
            faults.append(f"--gpus-per-node {self.gpus_per_node}: expected 0 or more")
        if self.nodes >= 1 and self.tasks % self.nodes:
            faults.append(f"-np {self.tasks}: expected a multiple of --nodes {self.nodes}, with as many ranks on each")
        if self.time is not None and not _TIME.fullmatch(self.time):
            faults.append(f"--time {self.time}: expected minutes, HH:MM:SS or D-HH:MM:SS")
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None and not _NAME.fullmatch(value):
                faults.append(
                    f"{option} {value!r}: expected a name as Slurm has them, of letters, digits, '_', '-', '.'"
                )
        if self.constraint is not None and not _CONSTRAINT.fullmatch(self.constraint):
            faults.append(f"--constraint {self.constraint!r}: expected features such as a100, joined by & or |")
        for line in self.lines:
            if not _LINE.fullmatch(line) or not line.isprintable():
                faults.append(f"--line {line!r}: expected an option of sbatch, such as --mail-type=END")
            elif re.match(r"--array\b|-a", line):
                faults.append(
                    f"--line {line}: give --array KEY=VALUE,VALUE,... instead, so that each task has a recipe"
                )
        return faults


def script(resources: Resources, name: str, command: list[str], run: Path, log: Path, tasks: Sequence[str] = ()) -> str:
    """The batch script of a job that runs `command`, which continues from checkpoints in the folder `run`.

    With `tasks` it is an array of them, each described by a text; `TASK` in a word or a path stands for its number.
    """
    options = [
        f"--job-name={name}",
        tasks and f"--array=0-{len(tasks) - 1}",
        f"--nodes={resources.nodes}",
        f"--ntasks={resources.tasks}",
        f"--ntasks-per-node={resources.tasks // resources.nodes}",
        resources.cpus_per_task and f"--cpus-per-task={resources.cpus_per_task}",
        resources.gpus_per_node and f"--gpus-per-node={resources.gpus_per_node}",
        resources.time and f"--time={resources.time}",
        resources.partition and f"--partition={resources.partition}",
        resources.account and f"--account={resources.account}",
        resources.constraint and f"--constraint={resources.constraint}",
        f"--output={_path(log, '%A_%a' if tasks else '%j')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR2@{WARNING_S}",
        *resources.lines,
    ]
    lines = "\n".join(f"#SBATCH {option}" for option in options if option)
    # The number of an array's last task is also that of the whole array.
    job = '"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"' if tasks else '"$SLURM_JOB_ID"'
    array = "".join(f"# Task {number}: {text}\n" for number, text in enumerate(tasks))
    if array:
        array = f"\n{array}"
    return f"""\
#!/bin/bash
{lines}
{array}
# Training goes on from the newest checkpoint, if there is one. {WARNING_S} s before the job's time ends, Slurm sends
# USR2 to this script. Training then writes a checkpoint and ends, and the job is queued again, at most
# {RESTARTS} times.
{" ".join(map(_word, command))} &
training=$!
trap 'warned=1; kill -TERM $training' USR2
wait $training
status=$?
while kill -0 $training 2>/dev/null; do # a signal ends `wait` before training has ended
    wait $training
    status=$?
done
finished={_word(str(run / "result.json"))}
if [ "$warned" ] && [ ! -e "$finished" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ]; then
    scontrol requeue {job}
fi
exit $status
"""


def _path(log: Path, numbers: str) -> str:
    """A path as a word of an #SBATCH line, with `numbers` in place of NUMBERS.

    A literal `%` is written twice (sbatch(1), filename pattern). sbatch takes off quotes, and the backslash before a
    character, also between quotes (Slurm's src/sbatch/opt.c, _get_argument).
    """
    text = str(log).replace("%", "%%").replace(NUMBERS, numbers)
    return text if _PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def fault(option: str, path: Path) -> list[str]:
    """A line for a path that cannot be in a batch script."""
    text = str(path)
    if "\\" in text:
        return [f"{option} {path}: expected no backslash in it, as Slurm then writes all jobs' output to one file"]
    if any(unicodedata.category(sign) in ("Cc", "Cs") for sign in text):  # the latter for bytes that are no UTF-8
        return [f"{option} {text!r}: expected no control characters, and UTF-8"]
    return []


def _word(text: str) -> str:
    """A word for a shell, which fills in the task's number and nothing else."""
    pieces = [shlex.quote(piece) if piece else "" for piece in text.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(pieces) or "''"


def submit(path: Path) -> str:
    """Hand the script to sbatch; returns the job's number. Raises RequestError where Slurm refuses it."""
    try:
        done = answer(["sbatch", "--parsable", str(path)], _TIMEOUT_S)
    except OSError as error:
        raise RequestError(
            f"--apply: sbatch cannot be run ({error.strerror}); nothing was written; run this where Slurm's "
            "client programs are, or leave out --apply and give the script to sbatch there"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"sbatch gives no answer within {_TIMEOUT_S:.0f} s; look with `scontrol ping`") from None
    if done.returncode != 0:
        said = " ".join(line.removeprefix("sbatch: error: ").strip() for line in done.stderr.splitlines())
        raise RequestError(f"--apply: Slurm refuses the job: {said or f'status {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]
