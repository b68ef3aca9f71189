"""sbatch and kubectl, which hand a job over."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.programs import answer

_TIMEOUT_S = 60.0
_OBJECT = re.compile(r"[a-z0-9.-]+/[a-z0-9.-]+")


def sbatch(path: Path) -> str:
    """Hand the script to Slurm; returns the job's number. Raises RequestError where Slurm refuses it."""
    done = _run("scontrol ping", "sbatch", "--parsable", str(path))
    if done.returncode != 0:
        raise _refused("Slurm", done)
    return done.stdout.strip().partition(";")[0]


def kubectl(path: Path, namespace: str | None) -> str:
    """Create all objects of the manifest; returns the last one, the job, such as mpijob.kubeflow.org/NAME.

    Raises RequestError where the cluster refuses an object; what it has created by then is deleted.
    """
    look, where = "kubectl cluster-info", ["--namespace", namespace] if namespace else []
    done = _run(look, "kubectl", "create", "--output=name", *where, f"--filename={path}")
    created = [line.strip() for line in done.stdout.splitlines() if _OBJECT.fullmatch(line.strip())]
    if done.returncode == 0 and created:
        return created[-1]
    kept = created and _run(look, "kubectl", "delete", "--wait=false", *where, *created).returncode
    raise _refused("the cluster", done, f"; {', '.join(created)} may be left there" if kept else "")


def _run(look: str, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's program. Raises RequestError where it is missing, RunError where it does not answer."""
    try:
        return answer([program, *words], _TIMEOUT_S)
    except OSError as error:
        raise RequestError(
            f"--apply: {program} cannot be run ({error.strerror}); nothing was written; run this where it is, or "
            f"leave out --apply and give the file to {program} there"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{program} gives no answer within {_TIMEOUT_S:.0f} s; look with `{look}`") from None


def _refused(who: str, done: subprocess.CompletedProcess[str], left: str = "") -> RequestError:
    lines = (line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
    said = " ".join(" ".join(lines).split())[:500] or f"status {done.returncode}"
    return RequestError(f"--apply: {who} refuses the job: {said}{left}")
