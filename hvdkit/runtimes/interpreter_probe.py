"""What Horovod can be built for in an interpreter: `PYTHON interpreter_probe.py MODULE=DISTRIBUTION,…` prints JSON.

It is run as a file by Python 3.9 or later and imports no framework. Keys: `python` (its version), `machine`,
`headers` and `pip` (whether Python.h and pip are there), `versions` (module to version, of numpy and of the modules
asked for), and `cuda` (framework to the version of the CUDA that it was built for, None for a CPU build).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any


def version(module: str, distributions: list[str]) -> str | None:
    """The version of an installed module, None if it is not installed. It is not imported if pip installed it."""
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            pass
    return str(getattr(__import__(module), "__version__", "unknown"))


def cuda_of(module: str) -> str | None:
    """The CUDA that a framework was built for, from a file that imports nothing: the framework itself takes seconds."""
    if module == "mxnet":  # its name for pip says it: mxnet-cu117
        names = (str(one.metadata["Name"]) for one in importlib.metadata.distributions())
        matches = [match for match in (re.fullmatch(r"mxnet-cu(\d+)(\d)", name) for name in names) if match]
        return "{}.{}".format(*matches[0].groups()) if matches else None
    try:
        if module == "torch":
            said = _names_in("torch", "version.py").get("cuda")
        else:
            said = _names_in("tensorflow", "python/platform/build_info.py")["build_info"].get("cuda_version")
    except (OSError, KeyError, AttributeError):
        return None
    return str(said) if said else None


def _names_in(module: str, file: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        exec((Path(spec.origin).parent / file).read_text(encoding="utf-8"), names)
    return names


def main() -> None:
    """Print the answer as the last line."""
    del sys.path[0]  # the folder of this file, whose modules must not hide others
    versions = {}
    for wanted in ["numpy=numpy", *sys.argv[1:]]:
        module, _, distributions = wanted.partition("=")
        installed = version(module, distributions.split(","))
        if installed is not None:
            versions[module] = installed
    answer = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "machine": platform.machine() if sys.maxsize > 2**32 else "a 32-bit build",
        "headers": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        "pip": importlib.util.find_spec("pip") is not None,
        "versions": versions,
        "cuda": {module: cuda_of(module) for module in versions if module != "numpy"},
    }
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
