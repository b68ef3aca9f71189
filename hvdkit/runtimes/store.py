"""The runtimes on disk, and which of them are complete.

A runtime is a folder. Its `runtime.json` is written last and atomically. Without a readable one that fits the folder,
the runtime is incomplete and is not used.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

import hvdkit
from hvdkit.errors import RequestError, RunError, nearest
from hvdkit.files import open_lock, open_regular, read_bounded, unwritable, write_atomic
from hvdkit.runtimes import pins

PACKAGE = Path(hvdkit.__file__).resolve().parent

_RECORD = "runtime.json"
# hvdkit installs nothing into an added interpreter: this folder, which holds only a link to hvdkit, goes onto its
# PYTHONPATH instead.
_LINK_FOLDER = ".hvdkit-only"
_LOCK_POLL_S = 0.2
_SELF = Path("/proc/self/exe")


class Runtime(BaseModel):
    """A Python environment with a framework and a Horovod that was tested in it; the content of `runtime.json`.

    `key` identifies what it was built from. `versions` maps package to version. `controllers` and `operations` are what
    Horovod was built with. `added` means that it is a user's own interpreter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    python: Path
    key: str
    gpu: bool
    added: bool
    versions: dict[str, str]
    controllers: list[str]
    operations: list[str]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a process run by `python` needs in addition to those that it inherits."""
        return with_hvdkit() if self.added else {}

    def describe(self) -> str:
        """The runtime in a few words: `torch 2.13.0+cpu, Horovod 0.28.1 with gloo`."""
        module, operations = pins.ALL[self.name].module, " and ".join(self.operations)
        versions = {name: self.versions.get(name, "?") for name in (module, "horovod")}
        text = f"{module} {versions[module]}, Horovod {versions['horovod']} with {operations}"
        return f"{text}, added: {self.python}" if self.added else text


def with_hvdkit() -> dict[str, str]:
    """The environment of an interpreter into which hvdkit is not installed (`link_hvdkit`)."""
    inherited = os.environ.get("PYTHONPATH")
    link = str(root() / _LINK_FOLDER)
    return {"PYTHONPATH": link if not inherited else f"{link}{os.pathsep}{inherited}"}


def root() -> Path:
    """The folder of all runtimes: HVDKIT_RUNTIMES, or `.runtimes` in a checkout, or in the user's data folder."""
    if override := os.environ.get("HVDKIT_RUNTIMES"):
        return Path(override).absolute()
    checkout = PACKAGE.parent
    if (checkout / "setup.cfg").is_file() and (checkout / "recipes").is_dir():
        return checkout / ".runtimes"
    return _xdg("XDG_DATA_HOME", ".local/share") / "runtimes"


def cache() -> Path:
    """The user's cache folder, for the sdist and the wheels."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    # By the XDG specification a relative path is invalid and ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / default) / "hvdkit"


def folder(name: str) -> Path:
    """The folder of the runtime `name`, built or not."""
    return root() / name


def load(name: str) -> Runtime | None:
    """The runtime `name` if it is complete, else None. Starts no process."""
    return inspect(name)[0]


def inspect(name: str) -> tuple[Runtime | None, str | None]:
    """The runtime `name` if it is complete, else the reason why it is not; both None if there is no folder."""
    home = folder(name)
    try:
        runtime = Runtime.model_validate_json(read_bounded(home / _RECORD))
    except FileNotFoundError:
        if not home.exists():
            return None, None
        return None, f"{home} is incomplete: a build was interrupted, or is still running"
    except OSError as error:
        return None, f"{home / _RECORD} cannot be read: {error.strerror}"
    except ValidationError:
        return None, f"{home / _RECORD} cannot be read"
    if runtime.name != name or (not runtime.added and runtime.python != python_of(name)):
        return None, f"{home} was built as {runtime.python.parent.parent}; an environment cannot be moved"
    if fault := fault_of(runtime.python):
        return None, f"the interpreter {runtime.python} {fault}"
    return runtime, None


def fault_of(python: Path) -> str | None:
    """Why this process cannot run an interpreter, as far as can be seen without a try; None where nothing is."""
    try:
        python.stat()
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be reached: {error.strerror}"
    if python.is_dir():
        return "is a folder"
    if not os.access(python, os.X_OK):
        return "may not be run by this user: Permission denied"
    with suppress(OSError), _SELF.open("rb") as mine, python.open("rb") as its:  # what may be run need not be readable
        own, other = mine.read(20), its.read(20)
        if own[:4] == other[:4] == b"\x7fELF" and own[18:] != other[18:]:  # e_machine of elf(5)
            return "is for another kind of processor than this machine's"
    return None


def python_of(name: str) -> Path:
    """The interpreter of a runtime that hvdkit builds."""
    return folder(name) / "bin" / "python"


def save(runtime: Runtime) -> None:
    """Declare the runtime complete, as the last step of a build. Raises RunError if the record cannot be written."""
    record = runtime.model_dump_json(indent=2) + "\n"
    write_atomic(folder(runtime.name) / _RECORD, record, elsewhere="set HVDKIT_RUNTIMES")


def forget(name: str) -> None:
    """Declare the runtime incomplete, as the first step of replacing it."""
    (folder(name) / _RECORD).unlink(missing_ok=True)


def link_hvdkit(folder: Path | None = None) -> None:
    """Make `import hvdkit` work if `folder` is on sys.path, by a symbolic link to this package.

    Without `folder`, it is the one that added interpreters have on their PYTHONPATH. A link works for a checkout and
    for an installed hvdkit, and is always current. A `.pth` file, or the package's parent on PYTHONPATH, would add
    everything else in that folder: for an installed hvdkit, the whole environment of the driver.
    Raises OSError if the folder cannot be written.
    """
    links = folder or root() / _LINK_FOLDER
    links.mkdir(parents=True, exist_ok=True)
    fresh = links / f".hvdkit-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(PACKAGE, target_is_directory=True)
    # By rename, so that a rank that starts at this moment finds the old link or the new one.
    fresh.replace(links / "hvdkit")


def installed() -> list[Runtime]:
    """All complete runtimes, in the order of pins.py."""
    return [runtime for name in pins.ALL if (runtime := load(name)) is not None]


def find(framework: str, baseline: str | None = None) -> Runtime:
    """The runtime of `framework`, or the one that a baseline or who asks by its name needs. Starts no process.

    Raises RequestError if the framework is unknown, or its runtime is missing or incomplete.
    """
    if framework not in pins.FRAMEWORKS:
        raise RequestError(unknown("framework", framework, pins.FRAMEWORKS))
    name = baseline or pins.FRAMEWORKS[framework]
    runtime, fault = inspect(name)
    if runtime is None:
        why = f"which is broken ({fault})" if fault else "which is not built"
        who = "this" if baseline else f"framework '{framework}'"
        raise RequestError(f"{who} needs the runtime '{name}', {why}; run `hvdkit runtime build {name}`")
    return runtime


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The message for an unknown name, with the known ones and the nearest of them."""
    known = list(known)
    return f"unknown {kind} {given[:60]!r}: expected one of {', '.join(known)}{nearest(given, known)}"


@contextmanager
def lock(
    name: str, on_wait: Callable[[], None] = lambda: None, cancelled: threading.Event | None = None
) -> Iterator[None]:
    """Lock the runtime `name` against all other processes; calls `on_wait` once if another one holds the lock.

    The kernel releases the lock when the process ends, in whatever way. Raises RunError if `cancelled` is set while
    waiting, or if the folder cannot be written.
    """
    try:
        root().mkdir(parents=True, exist_ok=True)
        # Next to the runtime's folder, not in it, since the folder is removed while the lock is held.
        file = open_lock(root() / f".{name}.lock")
    except OSError as error:
        raise unwritable(root(), error, "or set HVDKIT_RUNTIMES to a folder of yours") from error
    with file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    on_wait()
                    waited = True
                if (cancelled or threading.Event()).wait(_LOCK_POLL_S):
                    raise RunError(f"runtime '{name}': waiting for another build was cancelled") from None
        yield


def locked(name: str) -> bool:
    """Whether a process holds the lock of the runtime `name`, that is, builds or adds it at this moment."""
    try:
        with open_regular(root() / f".{name}.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
