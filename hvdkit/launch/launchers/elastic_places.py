"""Where the elastic driver may start workers (elastic_driver.py). Runs under a runtime's interpreter.

Each place is a host of its own with one slot, so that numbers on a host do not change as others come and go.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.launch.hosts import discovered

LOST_CLUSTER = 3  # the exit status where the cluster's program has ended
_LOOK_S = 0.05


class Places:
    """The places there are now, by name. `address` and `interface` are those of the rendezvous for workers there."""

    address, interface = "127.0.0.1", "lo"

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lock = threading.Lock()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The driver asks this each second; where it raises, places stay as they are."""
        return dict.fromkeys(self.names, 1)

    def start(self, name: str, environment: dict[str, str]) -> tuple[Callable[[], int | None], Callable[[], object]]:
        """Start a worker at this place, with this added to its environment.

        Returns two functions: one gives its exit status, None until it has ended, the other asks it to end.
        """
        raise NotImplementedError

    def run(self, name: str, environment: dict[str, str], events: Sequence[threading.Event]) -> int:
        """Run a worker to its end, which is asked for where one of the events is set; returns its exit status."""
        status, end = self.start(name, environment)
        told = False
        while (code := status()) is None:
            if not told and any(event.is_set() for event in events):
                end()
                told = True
            time.sleep(_LOOK_S)
        return code


class Local(Places):
    """Places on this machine: a list, or what a script prints."""

    def __init__(self, settings: dict[str, Any], command: list[str]) -> None:
        super().__init__(settings["places"])
        self.command, self.script = command, settings["discovery"]
        self.count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        self.gpus: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}  # of the last worker at each place

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """As in the base class."""
        if self.script:
            hosts = discovered(Path(self.script), here=True)
            self.names = [f"{host.name}-{slot}" for host in hosts for slot in range(host.slots)]
        return super().find_available_hosts_and_slots()

    def start(self, name: str, environment: dict[str, str]) -> tuple[Callable[[], int | None], Callable[[], object]]:
        """As in the base class.

        It gets a GPU that the fewest others have: to Horovod each worker is alone on its host, and the place's number
        changes as hosts come and go.
        """
        with self.lock:
            held = [gpu for gpu, other in self.gpus.values() if other.poll() is None]
            gpu = min(range(self.count), key=held.count, default=0)
            visible = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.count else {}
            process = subprocess.Popen(self.command, env={**os.environ, **environment, **visible})
            self.gpus[name] = gpu, process
        return process.poll, process.terminate


class ClusterPlaces(Places):
    """Places that a program of a cluster offers (ray_program.py), which starts a worker in each that it is asked for.

    They speak in lines of JSON. The program prints {"places": [NAME, …]} when they change, and {"ended": NAME,
    "status": N}. It reads {"start": NAME, "environment": {…}} and {"end": NAME}. A place has one worker at most: where
    that is lost, the program offers another place.
    """

    address = ""  # the worker's agent finds out which of this machine's it reaches (agent/task.py)
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")

    def __init__(self, command: list[str]) -> None:
        super().__init__([])
        self._statuses: dict[str, int] = {}
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, name: str, environment: dict[str, str]) -> tuple[Callable[[], int | None], Callable[[], object]]:
        """As in the base class."""
        self._say(start=name, environment=environment)
        return lambda: self._statuses.get(name), lambda: self._say(end=name)

    def _listen(self) -> None:
        """Take in what the program says. Without it nothing can continue."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            said = json.loads(line)
            if "places" in said:
                self.names = said["places"]
            else:
                self._statuses[said["ended"]] = said["status"]
        os._exit(LOST_CLUSTER)

    def _say(self, **order: object) -> None:
        assert self._program.stdin is not None
        with self.lock:
            self._program.stdin.write(json.dumps(order) + "\n")
            self._program.stdin.flush()
