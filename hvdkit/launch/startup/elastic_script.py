"""An elastic script, in the form of Horovod's documentation, under hvdkit's elastic driver.

A rank joins a round before Horovod is initialized, again too, and so gets its numbers only once it is ready: one that
still starts, or dies meanwhile, holds up nobody who trains. Horovod's own driver counts on it from when it is started.

Standard library only, and no syntax newer than Python 3.8: it runs under the user's interpreter.
"""

from __future__ import annotations

import functools
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

MIXED = 3  # HostUpdateResult.mixed of Horovod: places may have come and gone

_line: Any = None  # of this process to the driver
_said: set[int] = set()  # rounds of which the driver knows a commit


def follow_horovod() -> None:
    """Have the two modules of Horovod changed as they are imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def changed(module: Any) -> None:
                execute(module)
                _CHANGES[name](module)

            spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def _change_basics(module: Any) -> None:
    """`init` joins a round first, and `shutdown` leaves it."""
    basics = module.HorovodBasics
    init, shutdown = basics.init, basics.shutdown

    @functools.wraps(init)
    def joined(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.is_initialized() or "hvdkit.checkpoint.elastic" in sys.modules:  # a recipe's rank joins by itself
            return init(self, *arguments, **options)
        global _line
        if _line is None:
            sys.path.append(str(Path(__file__).resolve().parents[3]))  # its end: hvdkit hides no module of the program
            from hvdkit.elastic_line import DriverLine

            _line = DriverLine(_hosts_changed)
        from hvdkit.elastic_line import recording_peer_sockets
        from hvdkit.errors import Stopped

        try:
            _line.join()
        except Stopped as left:
            sys.exit(str(left))
        with recording_peer_sockets():
            init(self, *arguments, **options)
        _line.connected()

    @functools.wraps(shutdown)
    def left(self: Any) -> None:
        shutdown(self)
        if _line is not None:
            from hvdkit.elastic_line import close_peer_sockets

            _line.leave()
            close_peer_sockets()

    basics.init, basics.shutdown = joined, left


def _change_elastic(module: Any) -> None:
    """`commit` tells the driver of the round's first one. Changes of hosts come from the driver: no port is opened."""
    module.notification_manager._service = _hosts_changed
    commit = module.State.commit

    @functools.wraps(commit)
    def told(self: Any) -> None:
        if _line is not None and self._rank() == 0 and _line.round not in _said:
            _said.add(_line.round)
            _line.trained(committed=True)
        commit(self)

    module.State.commit = told


def _hosts_changed() -> None:
    """Rank 0 tells the others at the next commit. Horovod forgets it as it begins anew, so it is told again."""
    if (elastic := sys.modules.get("horovod.common.elastic")) is not None:
        elastic.notification_manager.handle_hosts_updated(int(time.time()), MIXED)


_CHANGES = {"horovod.common.basics": _change_basics, "horovod.common.elastic": _change_elastic}
