"""What tests would inherit from whoever starts them, made the same for all; and the end of what a test has started.

A test fails for a reason of its own only where nothing comes from outside: `nohup`, a cron job, an editor's terminal
and a login shell differ in signals, open files, umask, locale, time zone and in a hundred variables. `clean_up_parent`
is called once, before anything of hvdkit is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import locale
import os
import resource
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# Every variable that tests may inherit; all others go, whatever they are for. Places, what a compiler or a package
# index needs, and pytest's own. A test that is about a variable sets it.
KEPT = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR", "HVDKIT_RUNTIMES", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "CC", "CXX",
    "MAKEFLAGS", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC",
}  # fmt: skip
KEPT_PREFIXES = ("HVDKIT_TEST_", "PIP_", "PYTEST_", "LD_", "CUDA_", "NVIDIA_", "CCACHE_", "CONDA_", "NIX_")
UNCHANGED = "HVDKIT_TESTS_UNCHANGED"  # set: leave all as it is, to see what hvdkit itself makes of a hostile parent

MARK = "HVDKIT_TEST_STARTED_BY"  # in the environment of all that a test starts; a process below it inherits it
ENDS_S = float(os.environ.get("HVDKIT_TEST_ENDS_S", "10"))  # for processes that are about to end


def clean_up_parent() -> None:
    """Give this process, and so all that tests start, the state of a fresh login without a terminal."""
    if os.environ.get(UNCHANGED):
        return
    for name in [name for name in os.environ if name not in KEPT and not name.startswith(KEPT_PREFIXES)]:
        del os.environ[name]
    os.environ["LC_ALL"], os.environ["TZ"] = "C.UTF-8", "UTC"
    locale.setlocale(locale.LC_ALL, "C.UTF-8")  # files that this process opens as text are UTF-8 too
    time.tzset()
    os.umask(0o022)
    _signals()
    for number in range(3):  # a closed stream would give its number to the first file that is opened
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    # Ranks that crash on purpose leave no core file behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    home = os.environ.get("HOME", "")
    if not (home and Path(home).is_dir()):  # programs that keep settings there would fail in many ways
        os.environ["HOME"] = tempfile.mkdtemp(prefix="hvdkit-home-")
        atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)


def _signals() -> None:
    """None is blocked, and what tests start ignores none.

    `nohup` ignores SIGHUP, a script's background job SIGINT, and a process that is started inherits that. Under nohup
    the suite itself still outlives its terminal: a handler, unlike ignorance, ends with the next program.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # those two are Python's own choice
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            if number == signal.SIGHUP:
                signal.signal(number, lambda *_: None)


def patience(seconds: float) -> float:
    """How long to wait for what takes less than `seconds` on a quiet machine, before it is taken for a failure.

    Nothing is proved by a timeout, so it may be far away.
    """
    return seconds * 3


def started_by(mark: str, variable: str = MARK) -> list[int]:
    """The processes that bear the mark in their environment, this one and ended ones excepted."""
    wanted, found = f"{variable}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(each.startswith(wanted) for each in (entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def kill_started_by(mark: str) -> None:
    """End all of them by force, also what has a session of its own, and what they start meanwhile."""
    deadline = time.monotonic() + patience(ENDS_S)
    while (found := started_by(mark)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@contextlib.contextmanager
def marking() -> Iterator[str]:
    """A mark for all that is started inside, by this process and below it; a mark inside another begins with it."""
    before = os.environ.get(MARK)
    mark = os.environ[MARK] = f"{before or ''}/{uuid.uuid4().hex}"
    try:
        yield mark
    finally:
        if before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = before


def left_behind(mark: str) -> list[str]:
    """The command lines of what still runs after a while; it is ended then."""
    deadline = time.monotonic() + patience(ENDS_S)
    while (found := started_by(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    told = []
    for pid in found:
        with contextlib.suppress(OSError):
            told.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().decode(errors='replace')}")
    kill_started_by(mark)
    return [line.replace("\0", " ").strip() for line in told]
