"""What Horovod can be built for in an interpreter: `PYTHON interpreter_probe.py MODULE=DISTRIBUTION,…` prints JSON.

It is run as a file by Python 3.9 or later and imports no framework. Keys: `python` (its version), `machine`,
`headers` (whether Python.h is there), `versions` (module to version, of numpy and of the modules asked for), and
`cuda` (the CUDA of torch, None for a CPU build).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys
import sysconfig
from pathlib import Path


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


def torch_cuda() -> str | None:
    """What torch/version.py says of CUDA: that file imports nothing, while torch takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    names: dict[str, object] = {}
    try:
        exec(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"), names)
    except OSError:
        return None
    return None if names.get("cuda") is None else str(names["cuda"])


def main() -> None:
    """Print the answer as the last line."""
    del sys.path[0]  # the folder of this file, whose modules must not hide others
    found = {}
    for asked in ["numpy=numpy", *sys.argv[1:]]:
        module, _, distributions = asked.partition("=")
        installed = version(module, distributions.split(","))
        if installed is not None:
            found[module] = installed
    answer = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "machine": platform.machine() if sys.maxsize > 2**32 else "a 32-bit build",
        "headers": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        "versions": found,
        "cuda": torch_cuda(),
    }
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
