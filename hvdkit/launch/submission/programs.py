"""sbatch, kubectl and `ray job submit`, which hand a job over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.programs import answer

_TIMEOUT_S = 60.0
_OBJECT = re.compile(r"[a-z0-9.-]+/[a-z0-9.-]+")

# Ray's program of this environment, whose version is that of the cluster.
RAY = str(own) if (own := Path(sys.executable).with_name("ray")).exists() else "ray"
# From SIGTERM to SIGKILL where a job is stopped, in place of Ray's 3 s: hvdkit then has written a checkpoint and ended.
_STOP = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}


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


def ray(path: Path, name: str) -> str:
    """Start the script as a job of a Ray cluster, by its job server; returns its name.

    Raises RequestError where there is no cluster, or where it refuses the job.
    """
    done = _run("ray status", RAY, *ray_job(path, "--no-wait", f"--submission-id={name}"))
    if done.returncode != 0:
        raise _refused("Ray", done)
    return name


def ray_job(path: Path, *options: str) -> list[str]:
    """What follows `ray` to start the script as a job."""
    return ["job", "submit", f"--runtime-env-json={json.dumps(_STOP)}", *options, "--", "bash", str(path)]


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
