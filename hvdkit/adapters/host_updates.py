"""Horovod's notifications of added and removed hosts, the same for every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.common.elastic import State, notification_manager
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvdkit.checkpoint.elastic import HostsChanged


class Watch:
    """Listens to Horovod's elastic driver until the process ends. Horovod need not be initialized yet."""

    def __init__(self, allgather_object: Callable[..., Any]) -> None:
        def first_ranks(value: Any) -> Any:
            return allgather_object(value, name="hosts")[0]

        self._state = State(bcast_object=first_ranks, get_rank=lambda: 0)
        notification_manager.init()
        notification_manager.register_listener(self._state)

    def look(self) -> None:
        """Raise HostsChanged on all ranks if rank 0 has been notified of a change; collective."""
        try:
            self._state.check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            raise HostsChanged from interrupt

    def forget(self) -> None:
        """Discard earlier notifications, before Horovod is initialized again."""
        self._state.on_reset()
