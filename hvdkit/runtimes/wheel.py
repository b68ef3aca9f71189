"""Horovod's wheel for a runtime: built from the pinned and edited sdist, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdkit.errors import RunError
from hvdkit.files import write_atomic
from hvdkit.runtimes import edits, machine, pins, store
from hvdkit.runtimes.process import Log, environment, pip

_SDIST = f"horovod-{pins.HOROVOD_VERSION}.tar.gz"
_PERCENT = re.compile(r"\[\s*(\d+)%\]")

# The user's variables that change what is compiled: those that CMake and Horovod's build read, except what `flags`
# decides and Horovod's run-time variables (HOROVOD_CYCLE_TIME, ...).
_BUILD_VARIABLES = [
    "AR",
    "CC",
    "CXX",
    "CFLAGS",
    "CPPFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDAFLAGS",
    "CCL_ROOT",
    "CCL_CONFIGURATION",
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CMAKE",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_DEBUG",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NVTX_INCLUDE",
    "HOROVOD_WITH_NVTX",
    "HOROVOD_WITHOUT_NVTX",
]


def key(ingredients: Mapping[str, object]) -> str:
    """The name of what is built from `ingredients`: the first 32 hex digits of the SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:32]


def flags(name: str, gpu: bool) -> dict[str, str]:
    """The environment variables that select what Horovod's build makes for the runtime `name`."""
    chosen = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI" if _mpi() else "HOROVOD_WITHOUT_MPI": "1"}
    for other, pin in pins.RUNTIMES.items():
        chosen[f"HOROVOD_{'WITH' if other == name else 'WITHOUT'}_{pin.horovod_flag}"] = "1"
    cuda = machine.cuda()
    if gpu and cuda.nvcc and cuda.nccl:
        chosen |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_HOME": str(cuda.nccl.home),
            "HOROVOD_CUDA_HOME": str(cuda.nvcc.home),
        }
    # Gloo's CMake list asks for a version that CMake 4, if a user selects it by HOROVOD_CMAKE, would refuse.
    return chosen | {"CMAKE_POLICY_VERSION_MINIMUM": "3.5"}


def _mpi() -> str | None:
    """The MPI to build with, unless the user refuses it by Horovod's own variable."""
    return None if os.environ.get("HOROVOD_WITHOUT_MPI") == "1" else machine.mpi()


def own_settings() -> dict[str, str]:
    """The user's variables that change what is compiled."""
    return {name: os.environ[name] for name in _BUILD_VARIABLES if name in os.environ}


def runtime_ingredients(name: str, gpu: bool) -> dict[str, object]:
    """What a runtime is built from, as far as it is known before anything is installed.

    The compiler's version is not included, so that its update does not rebuild a runtime that works.
    """
    cuda, python, pin = machine.cuda(), machine.python_for(name), pins.RUNTIMES[name]
    return {
        "horovod": [pins.HOROVOD_VERSION, pins.HOROVOD_SDIST_SHA256],
        "edits": edits.fingerprint(edits.EDITS[name]),
        "packages": (*pin.packages(gpu), *pins.DATA_PACKAGES),
        "constraints": pin.constraints,
        "python": machine.python_abi(python) if python else None,
        "mpi": _mpi(),
        "cuda": cuda.nvcc if gpu else None,
        "nccl": cuda.nccl if gpu else None,
        "flags": flags(name, gpu),
        "own_settings": own_settings(),
        "architecture": machine.architecture(),
    }


def wheel_ingredients(name: str, gpu: bool, versions: Mapping[str, str]) -> dict[str, object]:
    """What Horovod's wheel is built from; `versions` are those installed in the runtime, with local parts."""
    ingredients = runtime_ingredients(name, gpu)
    # Horovod is not compiled against the other packages, so other pins of these need no other wheel.
    del ingredients["packages"], ingredients["constraints"]
    return ingredients | {"compiler": machine.compiler(), "framework": dict(versions)}


def sdist(python: Path, scratch: Path, log: Log) -> Path:
    """Horovod's sdist in the cache, downloaded once by the pip of `python`, by way of the folder `scratch`, and checked
    against its SHA-256.

    Raises RunError if it cannot be downloaded, has another hash, or the cache cannot be written.
    """
    target = _writable(store.cache() / "sdist") / _SDIST
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == pins.HOROVOD_SDIST_SHA256:
        return target
    wanted = scratch / "requirements.txt"
    # With its hash, so that pip refuses another archive before it runs the setup.py in it.
    wanted.write_text(f"horovod=={pins.HOROVOD_VERSION} --hash=sha256:{pins.HOROVOD_SDIST_SHA256}\n")
    options = ("--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", wanted, "-d", scratch)
    log.run("fetching Horovod", pip(python, "download", *options), environment=environment(python))
    write_atomic(target, (scratch / _SDIST).read_bytes())
    return target


def cached(name: str, gpu: bool, versions: Mapping[str, str]) -> Path | None:
    """Horovod's wheel for the runtime `name` if it is in the cache, else None."""
    return _wheel_in(_cache_folder(wheel_ingredients(name, gpu, versions)))


def obtain(
    name: str, gpu: bool, python: Path, versions: Mapping[str, str], log: Log, on_percent: Callable[[int], None]
) -> Path:
    """Horovod's wheel for the runtime `name`, from the cache, or else built in the runtime's folder and copied there.

    `python` is the runtime's interpreter, with the framework and the build tools installed; the caller holds the
    runtime's lock. `on_percent` gets the progress of the compilation, 0 to 100. Raises RunError if an edit does not
    apply or the build fails.
    """
    ingredients = wheel_ingredients(name, gpu, versions)
    folder = _cache_folder(ingredients)
    if ready := _wheel_in(folder):
        log.write(f"from the cache: {ready}")
        return ready
    _writable(folder)
    # What a build that is killed leaves there goes with the runtime's folder, when the next one begins.
    scratch = store.folder(name) / "horovod"
    scratch.mkdir()
    try:
        source = _unpack(sdist(python, scratch, log), scratch)
        edits.apply(source, edits.EDITS[name])
        log.run(
            "compiling Horovod",
            pip(python, "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", scratch, source),
            environment=build_environment(name, gpu, python),
            cwd=scratch,
            on_line=lambda line: on_percent(int(found[1])) if (found := _PERCENT.search(line)) else None,
        )
        built = _wheel_in(scratch)
        if built is None:
            raise RunError(f"compiling Horovod left no wheel in {scratch}; the whole log: {log.path}")
        write_atomic(folder / "made-from.json", json.dumps(ingredients, indent=2, sort_keys=True, default=str) + "\n")
        write_atomic(folder / built.name, built.read_bytes())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder / built.name


def build_environment(name: str, gpu: bool, python: Path) -> dict[str, str]:
    """The variables of Horovod's build: the user's settings, except for what `flags` decides."""
    inherited = {name: value for name, value in environment(python).items() if not name.startswith("HOROVOD_")}
    parallel = {"MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}"}
    return inherited | own_settings() | flags(name, gpu) | parallel


def _cache_folder(ingredients: Mapping[str, object]) -> Path:
    return store.cache() / "wheels" / key(ingredients)


def _wheel_in(folder: Path) -> Path | None:
    return next(folder.glob("horovod-*.whl"), None)


def _unpack(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as tar:
        # The hash has been checked, so the paths are safe; the filter only avoids a warning of later Pythons.
        # Python 3.11.2 of Debian 12 has no filters yet.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(into)
    return into / f"horovod-{pins.HOROVOD_VERSION}"


def _writable(folder: Path) -> Path:
    """The folder of the cache, made if it is missing. Raises RunError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
        ) from error
    return folder
