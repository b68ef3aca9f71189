"""Attacks by disks: full, slow, read-only."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

from tests.trials.trial import SMALL, attack, expect, running


def faulty(folder: Path, under: Path, **how: object) -> dict[str, str]:
    """The environment of a job whose disk below `under` fails, or is slow, once the file `folder`/fails exists."""
    library = folder / "faulty.so"
    source = Path(__file__).with_name("faulty.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    settings = {f"FAULTY_{name.upper()}": str(value) for name, value in how.items()}
    return {"LD_PRELOAD": str(library), "FAULTY_UNDER": f"{under}/", "FAULTY_WHEN": str(folder / "fails"), **settings}


@attack("each failed checkpoint is named when it fails, with the reason; training ends; status 1")
def read_only_in_the_middle(folder: Path) -> str:
    """The disk of the run's folder becomes read-only at update 30, for good."""
    out = folder / "run"
    with running(*SMALL, "epochs=8", out=out, **faulty(folder, out, errno=errno.EROFS)) as job:
        job.trains(30)
        (folder / "fails").touch()
        job.ends(1)
        return job.line("ead-only file system")


@attack("the failed checkpoint is named; the next ones are written; the run ends with status 0 and all of its results")
def no_space_for_a_while(folder: Path) -> str:
    """The disk of the run's checkpoints is full from update 30 to update 70."""
    out = folder / "run"
    with running(*SMALL, "epochs=8", out=out, **faulty(folder, out / "checkpoints", errno=errno.ENOSPC)) as job:
        job.trains(30)
        (folder / "fails").touch()
        job.trains(70)
        (folder / "fails").unlink()
        job.ends(0)
        expect(job.result()["checkpoints"], "no checkpoints in result.json")
        return job.line("space")
