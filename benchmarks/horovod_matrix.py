"""Horovod's wheel for many environments: builds and tests each, and writes benchmarks/horovod-matrix.md.

    python -m benchmarks.horovod_matrix [ROW…]

A row that is in horovod-matrix.json is not built again. Each environment is made in a temporary folder by the Python
that the row names, which must be on PATH or in ~/.pyenv/versions, and removed afterwards. A CUDA build of torch has
gigabytes of libraries; Horovod is built `--cpu` against it all the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness, written
from hvdkit.files import write_atomic
from hvdkit.runtimes import machine, pins

RESULTS, PAGE = harness.HERE / "horovod-matrix.json", harness.HERE / "horovod-matrix.md"
# The lines of `pip freeze` that name what Horovod is built against; old versions of pip write - for _.
_VERSION = re.compile(r"(torch|tensorflow|tensorflow[-_]cpu|mxnet|numpy|keras)==")
# Row: the version of Python, and what pip installs.
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch 2.13, CPU": ("3.11", ("torch===2.13.0+cpu", "numpy")),
    "torch 2.10, CUDA build": ("3.12", ("torch==2.10.0", "numpy")),
    "torch 2.6, CUDA build": ("3.10", ("torch==2.6.0", "numpy")),
    "TensorFlow 2.15": ("3.9", ("tensorflow-cpu==2.15.1",)),
    "TensorFlow 2.18": ("3.12", ("tensorflow-cpu==2.18.1",)),
    "TensorFlow 2.21": ("3.11", ("tensorflow-cpu==2.21.0",)),
    "TensorFlow 2.21, Python 3.13": ("3.13", ("tensorflow-cpu==2.21.0",)),
    "MXNet 1.9.1": ("3.11", ("mxnet==1.9.1", "numpy==1.23.5")),
    "torch and TensorFlow": ("3.11", ("torch===2.13.0+cpu", "tensorflow-cpu==2.21.0")),
}


def main(names: list[str]) -> None:
    """Build the rows that are missing, or those named, and write the page."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for name in names or [name for name in ROWS if name not in found["rows"]]:
        found["rows"][name] = row(*ROWS[name])
        print(f"{name}: {found['rows'][name]}", flush=True)
        rows = {each: found["rows"][each] for each in ROWS if each in found["rows"]}
        found = {"compiler": machine.compiler(), "rows": rows}
        write_atomic(RESULTS, json.dumps(found, indent=2) + "\n")
    write_atomic(PAGE, written.page("horovod-matrix", found))


def row(version: str, packages: tuple[str, ...]) -> dict[str, object]:
    """One environment: its versions, the seconds of build and test, the size of the wheel in bytes, the result."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-matrix-") as scratch:
        folder = Path(scratch)
        base, python = interpreter(version), folder / "env" / "bin" / "python"
        _run(base, "-m", "venv", folder / "env")
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
        before, began = _run(python, "-m", "pip", "freeze"), time.monotonic()
        command = [sys.executable, "-m", "hvdkit", "horovod", "wheel", "--python", python, "--cpu", "--out", folder]
        # An empty cache, so that the seconds are of a compilation.
        variables = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        taken: dict[str, object] = {"python": _run(python, "-V").split()[1], "seconds": round(time.monotonic() - began)}
        taken["versions"] = [line for line in before.splitlines() if _VERSION.match(line)]
        if done.returncode:
            said = [line.strip() for line in done.stderr.strip().splitlines()]
            return taken | {"result": next((line for line in said if "error:" in line), said[-1])[:300]}
        if _run(python, "-m", "pip", "freeze") != before:
            return taken | {"result": "tested, but the environment changed"}
        made = next(folder.glob("*.whl"))
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", made)
        for pin in pins.RUNTIMES.values():  # as its user imports it
            if any(pin.module in one for one in packages):
                _run(python, "-c", f"import horovod.{pin.module} as hvd; hvd.init(); assert hvd.size() == 1")
        return taken | {"size": made.stat().st_size, "result": "tested, installed, imported"}


def interpreter(version: str) -> Path:
    """A Python of this version: pyenv's, or that on PATH."""
    pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}")
    found = next(pyenv, None) or shutil.which(f"python{version}")
    if found is None:
        sys.exit(f"python{version}: not found; put it on PATH")
    return Path(found)


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1:])
