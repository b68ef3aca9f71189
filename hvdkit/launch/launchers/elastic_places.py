"""Where the elastic driver may start workers (elastic_driver.py). Runs under a runtime's interpreter.

Each place is a host of its own with one slot, so that numbers on a host do not change as others come and go.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import RequestError
from hvdkit.launch.hosts import discovered

LOST_CLUSTER = 3  # the exit status where the cluster's program has ended
_LOOK_S = 0.05


class Places:
    """The places there are now, by name. `address` and `interface` are those of the rendezvous for workers there."""

    address, interface = "127.0.0.1", "lo"

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lock = threading.Lock()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The driver asks this each second."""
        with self.lock:
            return dict.fromkeys(self.names, 1)

    def run(self, name: str, environment: dict[str, str], events: Sequence[threading.Event]) -> int:
        """Run a worker at this place to its end, with this added to its environment; returns its exit status.

        It is ended where one of the events is set.
        """
        raise NotImplementedError


class Local(Places):
    """Places on this machine: a list, or what a script prints."""

    def __init__(self, settings: dict[str, Any], command: list[str]) -> None:
        super().__init__()
        self.command = command
        self.names = settings["places"]
        self.script = settings["discovery"]
        self.count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        self.gpus: dict[str, int] = {}  # by the place whose worker has it
        if self.script:
            self.names = []
            threading.Thread(target=self._ask_script, daemon=True).start()

    def run(self, name: str, environment: dict[str, str], events: Sequence[threading.Event]) -> int:
        """As in the base class."""
        process = subprocess.Popen(self.command, env={**os.environ, **environment, **self.gpu(name)})
        told = False
        while process.poll() is None:
            if not told and any(event.is_set() for event in events):
                process.terminate()
                told = True
            time.sleep(_LOOK_S)
        with self.lock:
            self.gpus.pop(name, None)
        return process.returncode

    def _ask_script(self) -> None:
        """Ask the script for ever; where it fails, hosts stay as they are."""
        while True:
            try:
                hosts = discovered(Path(self.script), here=True)
                with self.lock:
                    self.names = [f"{host.name}-{slot}" for host in hosts for slot in range(host.slots)]
            except RequestError as error:
                print(error, file=sys.stderr, flush=True)
            time.sleep(1.0)

    def gpu(self, name: str) -> dict[str, str]:
        """The GPU of this machine for a worker that starts here: one that the fewest others have.

        To Horovod each worker is alone on its host, and the place's number changes as hosts come and go.
        """
        if not self.count:
            return {}
        with self.lock:
            held = list(self.gpus.values())
            self.gpus[name] = min(range(self.count), key=held.count)
            return {"CUDA_VISIBLE_DEVICES": str(self.gpus[name])}


class ClusterPlaces(Places):
    """Places that a program of a cluster offers (ray_places.py), which starts a worker in each that it is asked for.

    They speak in lines of JSON. The program prints {"places": [NAME, …]} when they change, and {"ended": NAME,
    "status": N}. It reads {"start": NAME, "environment": {…}} and {"end": NAME}. A place has one worker at most: where
    that is lost, the program offers another place.
    """

    address = ""  # the worker's agent finds out which of this machine's it reaches (agent/task.py)
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")

    def __init__(self, command: list[str]) -> None:
        super().__init__()
        self._ends: dict[str, queue.SimpleQueue[int]] = {}
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, name: str, environment: dict[str, str], events: Sequence[threading.Event]) -> int:
        """As in the base class."""
        ended = self._ends[name] = queue.SimpleQueue()
        self._say(start=name, environment=environment)
        told = False
        while True:
            try:
                status = ended.get(timeout=_LOOK_S)
            except queue.Empty:
                if not told and any(event.is_set() for event in events):
                    self._say(end=name)
                    told = True
                continue
            return status

    def _listen(self) -> None:
        """Take in what the program says. Without it nothing can continue."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            said = json.loads(line)
            if "places" in said:
                with self.lock:
                    self.names = said["places"]
            else:
                self._ends[said["ended"]].put(said["status"])
        os._exit(LOST_CLUSTER)

    def _say(self, **order: object) -> None:
        assert self._program.stdin is not None
        with self.lock:
            self._program.stdin.write(json.dumps(order) + "\n")
            self._program.stdin.flush()
