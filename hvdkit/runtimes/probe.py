"""What is installed in an interpreter: `PYTHON probe.py FRAMEWORK_MODULE HOROVOD_MODULE MODULE…` prints a JSON object.

It is run as a file and uses the standard library only, since the interpreter may not have hvdkit. Keys: `python` (its
version, three numbers), `pip` (whether it is there), `versions` (package to version), `missing` (modules that are not
installed), `broken` (module to the error of its import), `controllers` and `operations` (what Horovod was built with).
"""

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import sys

_VERSION_OF = ("keras", "numpy")


def probe(framework: str, horovod: str, modules: "list[str]") -> "dict[str, object]":
    """Import the framework, its Horovod binding and `modules`; returns the keys above."""
    versions: dict[str, str] = {}
    missing: list[str] = []
    broken: dict[str, str] = {}
    loaded = {}
    for name in ["horovod", *modules, framework, horovod]:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            if name.split(".")[0] not in missing:
                missing.append(name.split(".")[0])
            continue
        try:
            loaded[name] = importlib.import_module(name)
        except BaseException as error:
            text = str(error).strip().splitlines()
            broken[name] = type(error).__name__ + (f": {text[-1]}" if text else "")
            continue
        versions[name] = str(getattr(loaded[name], "__version__", "unknown"))
    versions.pop(horovod, None)
    for name in _VERSION_OF:
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    # Only a Horovod with hvdkit's patches has memory that ranks of one host share.
    shares = hasattr(getattr(getattr(loaded.get(horovod), "rank", None), "__self__", None), "shared_memory_ranks")
    built = {"shared memory": shares}
    for library in ("gloo", "mpi", "nccl", "ddl", "ccl"):
        check = getattr(loaded.get(horovod), f"{library}_built", None)
        built[library] = bool(check()) if check else False
    return {
        "python": sys.version_info[:3],
        "pip": importlib.util.find_spec("pip") is not None,
        "versions": versions,
        "missing": missing,
        "broken": broken,
        "controllers": [name for name in ("gloo", "mpi") if built[name]],
        "operations": [name for name in ("nccl", "ddl", "ccl", "mpi", "gloo", "shared memory") if built[name]],
    }


def main() -> None:
    """Print the result of `probe`, without what a framework prints."""
    # The folder of this file is first on the path; its modules must not hide those of the runtime.
    del sys.path[0]
    framework, horovod, *modules = sys.argv[1:]
    # Keras and MXNet import them if they are installed, which takes a second; ranks do without (adapters/loading.py).
    sys.modules |= {"sklearn": None, "scipy.stats": None}  # type: ignore[dict-item]
    gc.disable()  # it frees nothing during an import, and takes a tenth of the time
    with contextlib.redirect_stdout(io.StringIO()):
        report = probe(framework, horovod, modules)
    print("\n" + json.dumps(report), flush=True)
    # Not a usual exit: it skips what frameworks do at their end.
    os._exit(0)


if __name__ == "__main__":
    main()
