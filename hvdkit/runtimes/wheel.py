"""Horovod's wheel for an interpreter: built from the pinned and patched sdist, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.version import Version

import hvdkit
from hvdkit.errors import RequestError, RunError
from hvdkit.files import unwritable, write_atomic
from hvdkit.runtimes import cuda, machine, patches, pins, store
from hvdkit.runtimes.process import BuildLog, environment, pip
from hvdkit.runtimes.target import Target

_MADE_FROM = "made-from.json"
_SDIST = f"horovod-{pins.HOROVOD_VERSION}.tar.gz"
_PERCENT = re.compile(r"\[\s*(\d+)%\]")

# The user's variables that change what is compiled: those that CMake and Horovod's build read, except what `flags`
# decides and Horovod's run-time variables (HOROVOD_CYCLE_TIME, ...).
_OF_HOROVOD = (
    *("ALLOW_MIXED_GPU_IMPL", "BUILD_ARCH_FLAGS", "BUILD_CUDA_CC_LIST", "CMAKE", "CUDA_HOME", "DEBUG", "LOCAL_VERSION"),
    *("NCCL_INCLUDE", "NCCL_LIB", "NVTX_INCLUDE", "WITH_NVTX", "WITHOUT_NVTX"),
)
_BUILD_VARIABLES = (
    *("AR", "CC", "CXX", "CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CCL_ROOT", "CCL_CONFIGURATION"),
    *(f"HOROVOD_{name}" for name in _OF_HOROVOD),
)


# What a wheel from elsewhere has in common with one that is built here; the compiler may be another.
_OF_ANY_MACHINE = ("horovod", "patches", "python", "mpi", "cuda", "nccl", "flags")


def key(ingredients: Mapping[str, object]) -> str:
    """The name of what is built from `ingredients`: the first 32 hex digits of the SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:32]


def flags(target: Target) -> dict[str, str]:
    """The environment variables that select what Horovod's build makes for `target`."""
    chosen = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI" if _mpi() else "HOROVOD_WITHOUT_MPI": "1"}
    for pin in pins.RUNTIMES.values():
        chosen[f"HOROVOD_{'WITH' if pin.module in target.versions else 'WITHOUT'}_{pin.horovod_flag}"] = "1"
    here = cuda.find(target.python)
    if target.gpu and here.nvcc and here.nccl:
        chosen |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_HOME": str(here.nccl.home),
            "HOROVOD_CUDA_HOME": str(here.nvcc.home),
            "CUDA_HOME": str(here.nvcc.home),  # read by torch, whose own search ends at the first nvcc on PATH
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
    pin = pins.ALL[name]
    pinned = Target(machine.python_for(name), {pin.module: pin.version(gpu)}, gpu)
    return _ingredients(pinned) | {
        "packages": (*pin.packages(gpu), *pin.sources, *pins.DATA_PACKAGES),
        "constraints": pin.constraints,
    }


def wheel_ingredients(target: Target) -> dict[str, object]:
    """What the wheel for `target` is built from."""
    return _ingredients(target) | {"compiler": machine.compiler(), "framework": dict(target.versions)}


def _ingredients(target: Target) -> dict[str, object]:
    here = cuda.find(target.python)
    return {
        "horovod": [pins.HOROVOD_VERSION, pins.HOROVOD_SDIST_SHA256],
        "patches": patches.fingerprint(patches.chosen(target.versions)),
        "tools": pins.BUILD_TOOLS,
        "python": machine.python_abi(target.python) if target.python else None,
        "mpi": _mpi(),
        "cuda": here.nvcc if target.gpu else None,
        "nccl": here.nccl if target.gpu else None,
        "flags": flags(target),
        "own_settings": own_settings(),
        "architecture": machine.architecture(),
    }


def sdist(python: Path, scratch: Path, log: BuildLog) -> Path:
    """Horovod's sdist in the cache, downloaded once by way of the folder `scratch`, and checked
    against its SHA-256.

    Raises RunError if it cannot be downloaded, has another hash, or the cache cannot be written.
    """
    target = _writable(store.cache() / "sdist") / _SDIST
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == pins.HOROVOD_SDIST_SHA256:
        return target
    wanted = scratch / "requirements.txt"
    # With its hash, so that pip refuses another archive before it runs the setup.py in it.
    wanted.write_text(f"horovod=={pins.HOROVOD_VERSION} --hash=sha256:{pins.HOROVOD_SDIST_SHA256}\n")
    within = {"TMPDIR": str(scratch)}  # a pip that is killed leaves its own temporary files there
    options = ("--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", wanted, "-d", scratch)
    log.run("fetching Horovod", pip(python, "download", *options), environment=environment(python) | within)
    write_atomic(target, (scratch / _SDIST).read_bytes(), elsewhere="set XDG_CACHE_HOME")
    return target


def cached(target: Target) -> Path | None:
    """The wheel for `target` if it is in the cache, else None."""
    return _wheel_in(_cache_folder(wheel_ingredients(target)))


def obtain(target: Target, scratch: Path, log: BuildLog, on_percent: Callable[[int], None]) -> Path:
    """The wheel for `target`, from the cache, or else built in the folder `scratch`, which is made and removed.

    Nothing is installed into the interpreter. `on_percent` gets the progress of the compilation, 0 to 100. Raises
    RunError if a patch does not apply or the build fails.
    """
    python, ingredients = target.python, wheel_ingredients(target)
    assert python is not None, "a wheel is built by its interpreter"
    folder = _cache_folder(ingredients)
    if ready := _wheel_in(folder):
        log.write(f"from the cache: {ready}")
        return ready
    _writable(folder)
    scratch.mkdir()
    try:
        source = unpack(sdist(python, scratch, log), scratch)
        patches.apply(source, patches.chosen(target.versions))
        options = ("--no-deps", "--target", scratch / "tools", *pins.BUILD_TOOLS)
        log.install("installing the build's tools", python, *options, TMPDIR=str(scratch))
        log.run(
            "compiling Horovod",
            pip(python, "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", scratch, source),
            environment=build_environment(target, scratch / "tools") | {"TMPDIR": str(scratch)},
            cwd=scratch,
            on_line=lambda line: on_percent(int(match[1])) if (match := _PERCENT.search(line)) else None,
        )
        built = _wheel_in(scratch)
        if built is None:
            raise RunError(f"compiling Horovod left no wheel in {scratch}; the whole log: {log.path}")
        made_from = json.dumps(ingredients, indent=2, sort_keys=True, default=str) + "\n"
        write_atomic(folder / _MADE_FROM, made_from, elsewhere="set XDG_CACHE_HOME")
        write_atomic(folder / built.name, built.read_bytes(), elsewhere="set XDG_CACHE_HOME")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder / built.name


def publish(built: Path, target: Target, folder: Path) -> Path:
    """Write the wheel `built` into `folder` as one for others, and return its path.

    Its version says what it is for, such as `0.28.1+torch2.13.0.hvdkit1.0.0`: wheels for several frameworks can lie in
    one folder, and pip prefers each to Horovod's own release. It holds what it was built from, for `published`.
    """
    words = [f"{module}{Version(target.versions[module]).public}" for module in target.modules]
    if target.gpu and (nvcc := cuda.find(target.python).nvcc):
        words.append(f"cu{nvcc.major}")
    version = f"{pins.HOROVOD_VERSION}+{'.'.join(words)}.hvdkit{hvdkit.__version__}"
    old, new = (f"horovod-{number}.dist-info/" for number in (pins.HOROVOD_VERSION, version))
    path = folder / built.name.replace(f"-{pins.HOROVOD_VERSION}-", f"-{version}-")
    made, record = io.BytesIO(), []
    with zipfile.ZipFile(built) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as copy:
        contents = [(member, source.read(member)) for member in source.infolist() if member.filename != f"{old}RECORD"]
        member = zipfile.ZipInfo(f"{old}{_MADE_FROM}")
        member.external_attr = 0o100644 << 16
        contents.append((member, built.with_name(_MADE_FROM).read_bytes()))
        for member, content in contents:
            if member.filename == f"{old}METADATA":
                content = content.replace(
                    f"\nVersion: {pins.HOROVOD_VERSION}\n".encode(), f"\nVersion: {version}\n".encode()
                )
            member.filename = member.filename.replace(old, new)
            copy.writestr(member, content, zipfile.ZIP_DEFLATED)
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record.append(f"{member.filename},sha256={digest},{len(content)}\n")
        copy.writestr(f"{new}RECORD", "".join([*record, f"{new}RECORD,,\n"]))
    write_atomic(path, made.getvalue())
    return path


def published(name: str, gpu: bool, folder: Path) -> Path:
    """The wheel in `folder`, by `publish`, that serves the runtime `name`.

    Raises RequestError where there is none, with what each wheel for the framework was built from that differs here.
    """
    pin, why = pins.ALL[name], []
    here = json.loads(json.dumps(runtime_ingredients(name, gpu), default=str))
    for path in sorted(folder.glob("horovod-*.whl"), reverse=True):
        try:
            with zipfile.ZipFile(path) as archive:
                inside = [member for member in archive.namelist() if member.endswith(f"/{_MADE_FROM}")]
                made = json.loads(archive.read(inside[0])) if inside else {}
        except (OSError, zipfile.BadZipFile) as error:
            raise RequestError(f"--find-links: {path} cannot be read ({error}); fetch it again") from error
        if pin.module not in made.get("framework", {}):
            continue
        differing = [key for key in _OF_ANY_MACHINE if made[key] != here[key]]
        if Version(made["framework"][pin.module]).public != pin.version(gpu):
            differing.append("framework")
        # The processor may have more than the one for which it was compiled.
        if not set(made["architecture"].split()) <= set(here["architecture"].split()):
            differing.append("architecture")
        if not differing:
            return path
        why.append(f"; {path.name} differs in {', '.join(differing)}")
    raise RequestError(
        f"--find-links {folder}: expected a wheel of Horovod for the runtime '{name}' of this hvdkit, Python and "
        f"machine, found none{''.join(why)}; make one with `hvdkit horovod wheel {name} --out {folder}`"
    )


def build_environment(target: Target, tools: Path) -> dict[str, str]:
    """The variables of Horovod's build: the user's settings, except for what `flags` decides. `tools` has CMake."""
    assert target.python is not None
    inherited = {name: value for name, value in environment(target.python).items() if not name.startswith("HOROVOD_")}
    chosen, first = flags(target), [str(tools / "bin")]
    paths = {"PYTHONPATH": str(tools)}
    if "HOROVOD_CUDA_HOME" in chosen:
        home = Path(chosen["HOROVOD_CUDA_HOME"])
        # Horovod asks the first nvcc on PATH for its architectures, and compiles with that of HOROVOD_CUDA_HOME.
        first.append(str(home / "bin"))
        # nvcc links what is in lib64; pip's CUDA has its libraries in lib.
        if (home / "lib" / "libcudart_static.a").exists() and not (home / "lib64").exists():
            paths["LIBRARY_PATH"] = os.pathsep.join(
                [str(home / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
            )
    paths["PATH"] = os.pathsep.join([*first, inherited["PATH"]])
    parallel = {"MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}"}
    return inherited | own_settings() | chosen | paths | parallel


def _cache_folder(ingredients: Mapping[str, object]) -> Path:
    return store.cache() / "wheels" / key(ingredients)


def _wheel_in(folder: Path) -> Path | None:
    return next(folder.glob("horovod-*.whl"), None)


def unpack(archive: Path, into: Path) -> Path:
    """Unpack the sdist into the folder `into`; returns the folder of its sources."""
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
        raise unwritable(folder, error, "or set XDG_CACHE_HOME to a folder of yours") from error
    return folder
