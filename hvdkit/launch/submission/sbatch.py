"""A batch script for Slurm, and sbatch, which takes it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.launch.submission.forms import faults_of
from hvdkit.launch.submission.templating import TASK as TASK
from hvdkit.launch.submission.templating import render
from hvdkit.programs import answer

MOST_TASKS = 1000  # of an array; Slurm's MaxArraySize is 1001 by default
NUMBERS = "\1"  # in the name of the log: Slurm's numbers of the job, and of the task in an array
_PLAIN = re.compile(r"[\w./%+:,@=~-]+")
_NAME = r"[A-Za-z0-9_][\w.,:@+-]{0,200}", "a name as Slurm has them, of letters, digits, '_', '-', '.'"
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
        least = {"nodes": 1, "cpus_per_task": 1, "gpus_per_node": 0}
        forms = {
            "time": (r"(\d+-)?\d+(:\d\d?){0,2}|(?i:UNLIMITED)", "minutes, HH:MM:SS or D-HH:MM:SS"),
            "partition": _NAME,
            "account": _NAME,
            "constraint": (r"[\w.,&|*()\[\]-]{1,200}", "features such as a100, joined by & or |"),
            "lines": (
                r"(?!--array\b|-a)--?[A-Za-z][\w-]*([ =][^\x00-\x1f\x7f-\x9f\ud800-\udfff]*)?",
                "an option of sbatch, such as --mail-type=END, and for arrays --array KEY=VALUE,VALUE,... in its place",
            ),
        }
        return faults_of(self, least, forms)


def script(
    resources: Resources,
    name: str,
    command: list[str],
    run: Path,
    log: Path,
    tasks: Sequence[str] = (),
    template: Path | None = None,
) -> str:
    """The batch script of a job that runs `command`, which continues from checkpoints in the folder `run`.

    With `tasks` it is an array of them, each described by a text; `TASK` in a word or a path stands for its number.
    `template` is the user's own.
    """
    values = {
        **dataclasses.asdict(resources),
        "ranks": resources.tasks,
        "name": name,
        "array": [" ".join(text.split()) for text in tasks],
        "log": _path(log, "%A_%a" if tasks else "%j"),
        "command": command,
        "finished": str(run / "result.json"),
    }
    return render("slurm.sbatch.j2", template, values)


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
