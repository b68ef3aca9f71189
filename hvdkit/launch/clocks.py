"""Other machines' clocks beside this one's."""

from __future__ import annotations

from hvdkit.launch.agent.reports import boot_id


class Clocks:
    """How far other machines' monotonic clocks, which count from their boot, are ahead of or behind this one's.

    Wall clocks are not used: they differ between hosts and can be set at any time.
    """

    def __init__(self) -> None:
        self._boot = boot_id()
        self._behind: dict[str, float] = {}

    def note(self, name: str, clock: float, boot: str | None, received: float) -> None:
        """Use a report of the agent `name`, sent at its `clock`. The report with the shortest way is the most exact."""
        if boot is not None and boot == self._boot and clock <= received:
            self._behind[name] = 0.0  # the same clock
        else:
            self._behind[name] = min(received - clock, self._behind.get(name, float("inf")))

    def here(self, name: str, clock: float) -> float:
        """A time of that agent's clock as a time of this machine's."""
        return clock + self._behind.get(name, 0.0)
