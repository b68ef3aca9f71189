"""Where runtimes live on disk, and which of them are whole.

A runtime is a folder. Its `runtime.json` is written last and atomically, so a folder without a readable one, or
with one that does not fit the folder, is half-made and never taken for whole.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

import hvdkit
from hvdkit.errors import RequestError, RunError, nearest
from hvdkit.files import open_lock, open_regular, read_bounded, write_atomic
from hvdkit.runtimes.pins import FRAMEWORKS, RUNTIMES

PACKAGE = Path(hvdkit.__file__).resolve().parent

_RECORD = "runtime.json"
# An added interpreter is not ours to install into: this folder, holding nothing but a link to hvdkit, goes
# onto its PYTHONPATH instead.
_LINK_FOLDER = ".hvdkit-only"
_LOCK_POLL_S = 0.2


class Runtime(BaseModel):
    """One Python environment with a framework and a Horovod proved in it; the content of `runtime.json`.

    `key` tells what it was built from; `versions` maps package to version; `controllers` and `operations` are
    what Horovod was built with; `added` marks a user's own interpreter.
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
        """What a process run by `python` needs in its environment beside what it inherits."""
        if not self.added:
            return {}
        inherited = os.environ.get("PYTHONPATH")
        link = str(root() / _LINK_FOLDER)
        return {"PYTHONPATH": link if not inherited else f"{link}{os.pathsep}{inherited}"}


def root() -> Path:
    """The folder of all runtimes: `.runtimes` in a checkout, else in the user's data folder.

    `HVDKIT_RUNTIMES` names another one.
    """
    if override := os.environ.get("HVDKIT_RUNTIMES"):
        return Path(override).absolute()
    checkout = PACKAGE.parent
    if (checkout / "setup.cfg").is_file() and (checkout / "recipes").is_dir():
        return checkout / ".runtimes"
    return _xdg("XDG_DATA_HOME", ".local/share") / "runtimes"


def cache() -> Path:
    """The user's cache folder for the sdist and the wheels."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    # The XDG specification: a relative path is invalid and to be ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / default) / "hvdkit"


def folder(name: str) -> Path:
    """The folder of the runtime `name`, built or not."""
    return root() / name


def load(name: str) -> Runtime | None:
    """The runtime `name` if it is whole, else None. Starts no process."""
    runtime, _ = inspect(name)
    return runtime


def inspect(name: str) -> tuple[Runtime | None, str | None]:
    """The runtime `name` if it is whole, else the reason why it is not; both None where there is nothing."""
    place = folder(name)
    try:
        runtime = Runtime.model_validate_json(read_bounded(place / _RECORD))
    except FileNotFoundError:
        if not place.exists():
            return None, None
        return None, f"{place} is half-made: a build was interrupted, or is still at work"
    except (OSError, ValidationError):
        return None, f"{place / _RECORD} cannot be read"
    if runtime.name != name or (not runtime.added and runtime.python != python_of(name)):
        return None, f"{place} was built as {runtime.python.parent.parent}; an environment cannot be moved"
    if not os.access(runtime.python, os.X_OK):
        return None, f"the interpreter {runtime.python} is gone"
    return runtime, None


def python_of(name: str) -> Path:
    """The interpreter of a runtime that hvdkit builds."""
    return folder(name) / "bin" / "python"


def save(runtime: Runtime) -> None:
    """Declare the runtime whole; the last act of building or adding it. Raises RunError where it cannot be written."""
    write_atomic(folder(runtime.name) / _RECORD, runtime.model_dump_json(indent=2) + "\n")


def forget(name: str) -> None:
    """Declare the runtime half-made; the first act of replacing it."""
    (folder(name) / _RECORD).unlink(missing_ok=True)


def link_hvdkit(folder: Path | None = None) -> None:
    """Make `import hvdkit` work where `folder` is on sys.path: by one symbolic link to the running package.

    None means the folder that added interpreters have on their PYTHONPATH. A link serves a checkout and an
    installed hvdkit alike and is always current. A `.pth` file, or the package's parent on PYTHONPATH, would bring
    everything that lies beside it: for an installed hvdkit, the driver's whole environment.
    Raises OSError where the folder cannot be written.
    """
    place = folder or root() / _LINK_FOLDER
    place.mkdir(parents=True, exist_ok=True)
    fresh = place / f".hvdkit-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(PACKAGE, target_is_directory=True)
    # By rename: a rank that starts at this moment finds the old link or the new one.
    fresh.replace(place / "hvdkit")


def installed() -> list[Runtime]:
    """All whole runtimes, in the order of pins.py."""
    return [runtime for name in RUNTIMES if (runtime := load(name)) is not None]


def find(framework: str) -> Runtime:
    """The runtime that `framework` runs in. Starts no process.

    Raises RequestError where the framework is unknown or its runtime is not there or not whole.
    """
    if framework not in FRAMEWORKS:
        raise RequestError(unknown("framework", framework, FRAMEWORKS))
    name = FRAMEWORKS[framework]
    runtime, fault = inspect(name)
    if runtime is None:
        why = f"which is broken ({fault})" if fault else "which is not built"
        raise RequestError(
            f"framework '{framework}' needs the runtime '{name}', {why}; run `hvdkit runtime build {name}`"
        )
    return runtime


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The message for a name that is not among the known ones, with the nearest of them."""
    known = list(known)
    return f"unknown {kind} '{given}': expected one of {', '.join(known)}{nearest(given, known)}"


@contextmanager
def lock(
    name: str, on_wait: Callable[[], None] = lambda: None, cancelled: threading.Event | None = None
) -> Iterator[None]:
    """Hold the runtime `name` alone among all processes of this machine; calls `on_wait` once if another holds it.

    The kernel drops the lock with its process, however that ends. Raises RunError if `cancelled` is set while
    waiting, or where the folder cannot be written.
    """
    try:
        root().mkdir(parents=True, exist_ok=True)
        # Beside the runtime's folder, not in it: the folder is removed while the lock is held.
        file = open_lock(root() / f".{name}.lock")
    except OSError as error:
        raise RunError(
            f"{root()}: cannot be written ({error.strerror}); set HVDKIT_RUNTIMES to a folder of yours"
        ) from error
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
    """Whether some process holds the runtime `name`, that is, builds or adds it at this moment."""
    try:
        with open_regular(root() / f".{name}.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
