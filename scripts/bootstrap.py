"""Make the driver environment `.venv`: the command line and, without `--driver`, its tests' tools; no framework.

Run by the Makefile under the machine's own Python, so standard library only. Does nothing where `.venv` is whole and
made from what setup.cfg and pyproject.toml say now; a broken or interrupted one is made anew. With `--driver` the tools
of tests and linters are left out, which a later run without it adds: who only trains need not wait for them.
Exit status 2 where the machine lacks something, with the command that brings it; 1 where making fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
MARKER = ENVIRONMENT / "made-from"
OLDEST_PYTHON = (3, 11)

# What each kind of `.venv` asks pip for; how many seconds that, and making an empty one, usually take.
DRIVER, TOOLS = "driver", "tools"
REQUIREMENTS = {DRIVER: ".", TOOLS: ".[dev]"}
EMPTY_S, INSTALL_S = 5, {DRIVER: 15, TOOLS: 50}


def missing() -> list[str]:
    """One line for each thing that this machine lacks, with the command that brings it on Debian."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        return [f"Python 3.11 or later (this is {found}): sudo apt-get install python3, or `make PYTHON=python3.11 …`"]
    sys.path.insert(0, str(ROOT))
    from hvdkit.runtimes import machine, pins  # which need the standard library alone

    of_this_python = [name for name, pin in pins.RUNTIMES.items() if sys.version_info[:2] in pin.pythons]
    return [f"{fault.what}: {fault.remedy}" for fault in machine.missing(of_this_python)]


def fingerprint(kind: str = TOOLS) -> str:
    """What `.venv` is made from: the package's description, this Python, where the checkout lies, and the kind."""
    digest = hashlib.sha256(f"{sys.version}\n{sys.base_prefix}\n{ROOT}\n{kind}\n".encode())
    for name in ("setup.cfg", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def whole(kind: str = TOOLS) -> bool:
    """Whether `.venv` was made to its end from what is there now, with at least what `kind` has, and still runs."""
    try:
        made_from = MARKER.read_text()
    except OSError:
        return False
    kinds = (DRIVER, TOOLS) if kind == DRIVER else (TOOLS,)
    return made_from in map(fingerprint, kinds) and all(
        os.access(ENVIRONMENT / "bin" / name, os.X_OK) for name in ("python", "hvdkit")
    )


def make(kind: str) -> None:
    """Make `.venv` anew, or add the tools to one without; the marker comes last: nothing half-made passes for whole.

    Raises CalledProcessError, after what venv or pip says.
    """
    if not whole(DRIVER):
        if ENVIRONMENT.exists():
            MARKER.unlink(missing_ok=True)
            shutil.rmtree(ENVIRONMENT)
        print(f"making the driver environment .venv (about {EMPTY_S + INSTALL_S[kind]} s left)", flush=True)
        run(sys.executable, "-m", "venv", ENVIRONMENT)
    MARKER.unlink(missing_ok=True)
    tools = "" if kind == DRIVER else " and the tools of its tests"
    print(f"installing the command line{tools} into .venv (about {INSTALL_S[kind]} s left)", flush=True)
    pip = ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"
    run(*pip, "-qq", "--editable", REQUIREMENTS[kind])
    fresh = MARKER.with_suffix(".new")
    fresh.write_text(fingerprint(kind))
    fresh.replace(MARKER)


def run(*command: str | Path) -> None:
    """Run a command to its end, which says no more than its errors. Raises CalledProcessError."""
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)


def main() -> int:
    """Make `.venv` if need be; the exit status."""
    kind = DRIVER if "--driver" in sys.argv[1:] else TOOLS
    if faults := missing():
        print("hvdkit needs what is missing here:", *faults, sep="\n  ", file=sys.stderr)
        return 2
    # This file is the lock: .venv itself is removed while it is held. The kernel frees it with this process.
    with Path(__file__).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is making .venv; waiting", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if whole(kind):
            return 0
        try:
            make(kind)
        except subprocess.CalledProcessError as error:
            print(f"making .venv failed (exit status {error.returncode})", file=sys.stderr)
            return 1
        except OSError as error:
            print(f"making .venv failed: {error.filename}: {error.strerror}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; the next run makes .venv anew", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
