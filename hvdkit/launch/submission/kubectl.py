"""kubectl, which hands a manifest to the cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.programs import answer

_TIMEOUT_S = 60.0
_OBJECT = re.compile(r"[a-z0-9.-]+/[a-z0-9.-]+")


def create(path: Path, namespace: str | None) -> str:
    """Create all objects of the manifest; returns the last one, the job, such as mpijob.kubeflow.org/NAME.

    Raises RequestError where kubectl is missing, not logged in, or the cluster refuses an object; what it has created
    by then is deleted.
    """
    where = ["--namespace", namespace] if namespace else []
    try:
        done = _run("create", "--output=name", *where, f"--filename={path}")
    except OSError as error:
        raise RequestError(
            f"--apply: kubectl cannot be run ({error.strerror}); nothing was written; run this where kubectl is, or "
            "leave out --apply and run `kubectl create -f` on the manifest there"
        ) from None
    created = [line.strip() for line in done.stdout.splitlines() if _OBJECT.fullmatch(line.strip())]
    if done.returncode == 0 and created:
        return created[-1]
    left = _delete(created, where)
    said = " ".join(" ".join(done.stderr.split()).removeprefix("error: ").split())[:500]
    raise RequestError(
        f"--apply: the cluster refuses the job: {said or f'kubectl ended with status {done.returncode}'}{left}"
    )


def _delete(objects: list[str], where: list[str]) -> str:
    """Delete objects; returns a remark where that fails."""
    if not objects:
        return ""
    try:
        done = _run("delete", "--wait=false", *where, *objects)
    except OSError:
        return f"; {', '.join(objects)} may be left there"
    return "" if done.returncode == 0 else f"; {', '.join(objects)} may be left there"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run kubectl. Raises OSError, and RunError where it does not answer."""
    try:
        return answer(["kubectl", *words], _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"kubectl gives no answer within {_TIMEOUT_S:.0f} s; look with `kubectl cluster-info`") from None
