"""Make the driver environment `.venv`: the command line and its tests, no framework.

Run by the Makefile under the machine's own Python, so standard library only. Does nothing where `.venv` is whole and
made from what setup.cfg and pyproject.toml say now; a broken or interrupted one is made anew. Exit status 2 where the
machine lacks something, with the command that brings it; 1 where making fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
MARKER = ENVIRONMENT / "made-from"
OLDEST_PYTHON = (3, 11)


def missing() -> list[str]:
    """One line for each thing that this machine lacks, with the command that brings it on Debian."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        return [f"Python 3.11 or later (this is {found}): sudo apt-get install python3, or `make PYTHON=python3.11 …`"]
    debian = f"python3.{sys.version_info.minor}"
    faults = []
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        faults.append(f"the module venv of {sys.executable}: sudo apt-get install {debian}-venv")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        faults.append(f"the headers of {sys.executable} (Python.h): sudo apt-get install {debian}-dev")
    # CXX may name another compiler, as it may for CMake.
    if shutil.which((os.environ.get("CXX") or "c++").split()[0]) is None:
        faults.append("a C++ compiler (g++): sudo apt-get install g++")
    if shutil.which("make") is None:
        faults.append("make: sudo apt-get install make")
    return faults


def fingerprint() -> str:
    """What `.venv` is made from: the package's description, this Python, and where the checkout lies."""
    digest = hashlib.sha256(f"{sys.version}\n{sys.base_prefix}\n{ROOT}\n".encode())
    for name in ("setup.cfg", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def whole() -> bool:
    """Whether `.venv` was made to its end from what is there now, and still runs."""
    try:
        made_from = MARKER.read_text()
    except OSError:
        return False
    return made_from == fingerprint() and all(
        os.access(ENVIRONMENT / "bin" / name, os.X_OK) for name in ("python", "hvdkit")
    )


def make() -> None:
    """Make `.venv` anew; the marker comes last, so that nothing half-made is taken for whole."""
    if ENVIRONMENT.exists():
        MARKER.unlink(missing_ok=True)
        shutil.rmtree(ENVIRONMENT)
    print("making the driver environment .venv (about half a minute)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    pip: list[str | Path] = [
        ENVIRONMENT / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--editable", ".[dev]"], check=True, cwd=ROOT)
    fresh = MARKER.with_suffix(".new")
    fresh.write_text(fingerprint())
    fresh.replace(MARKER)


def main() -> int:
    """Make `.venv` if need be; the exit status."""
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
        if whole():
            return 0
        try:
            make()
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            print(f"making .venv failed (exit status {error.returncode}): {command}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; the next run makes .venv anew", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
