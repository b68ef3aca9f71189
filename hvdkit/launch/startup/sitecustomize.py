"""What Python imports first in a rank of `hvdkit launch`, whose program knows nothing of hvdkit.

It lets the launcher see the stacks of its threads (SIGUSR2), and what an error says that ends it; in an elastic run it
has Horovod follow hvdkit's elastic driver (elastic_script.py). The first Python process of a rank is meant; what that
starts is left alone, as is the program's own `sitecustomize`, which comes next.

Standard library only, and no syntax newer than Python 3.8: it runs under the user's interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - every Python process of a rank waits


def _is_there(pid: int) -> bool:
    """Whether a process of this number runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _register(stacks: str) -> bool:
    """Print stacks into this file on SIGUSR2, whose first line says who does; False where another process does it."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(stacks, encoding="utf-8") as file:  # noqa: PTH123
        owner = int(file.readline().split()[1])
        if owner != os.getpid() and _is_there(owner):
            return False
    file = open(stacks, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR2, file, all_threads=True)
    file.write(f"process {os.getpid()}\n")
    file.flush()
    return True


def _recorded(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """`sys.excepthook`: leave a record of what ends the rank, then do as before."""
    with contextlib.suppress(Exception):
        sys.path.append(str(Path(_HERE).parents[2]))  # at its end hvdkit hides nothing of the program's
        from hvdkit import heartbeat

        what = "communication" if heartbeat.lost_a_peer(error) else "error"
        said = str(error)
        heartbeat.write_failure(Path(_folder), _name, what, f"{kind.__name__}: {said}" if said else kind.__name__)
    _hook(kind, error, trace)  # type: ignore[arg-type]


def _next() -> None:
    """Run the `sitecustomize` that Python would have imported without this one."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_hook = sys.excepthook
_folder, _name = os.environ.get("HVDKIT_RANK_DIR", ""), os.environ.get("HVDKIT_TRACE", "")
with contextlib.suppress(OSError):  # the disk is full, say: the program matters more
    if _folder and _name and _register(os.path.join(_folder, f"{_name}.stack")):  # noqa: PTH118
        sys.excepthook = _recorded
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            import_module("elastic_script").follow_horovod()  # beside this file
_next()
