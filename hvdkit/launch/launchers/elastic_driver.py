"""Horovod's own elastic driver, for workers on this machine. Runs under a runtime's interpreter.

usage: python elastic_driver.py SETTINGS COMMAND...

SETTINGS is JSON: `np` places to wait for, `min_np`, `max_np`, and `places`, a list of names, or `discovery`, a program
that prints host:slots a line as it does for horovodrun. COMMAND is started for each rank; it finds Horovod's variables
in its environment. To Horovod each place is a host of its own with one slot, since it blacklists a whole host for one
failure. Ends with status 0 where a worker has succeeded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer

from hvdkit.errors import RequestError
from hvdkit.launch.hosts import discovered
from hvdkit.launch.slots import horovod_environment

ADDRESS, INTERFACE = "127.0.0.1", "lo"
RESTARTS = 2


class Places(HostDiscovery):
    """Where workers may run. Without a script a lost place is replaced where too few would be left."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.names: list[str] = settings["places"]
        self.script = settings["discovery"]
        self.min_np = settings["min_np"]
        self.np = settings["np"]
        self.lost: set[str] = set()
        self.good: list[str] = []  # whose workers have succeeded
        self.gpus: dict[str, int] = {}  # by the place whose worker has it
        self.made = 0
        self.lock = threading.Lock()
        if self.script:
            self.names = []
            threading.Thread(target=self._ask_script, daemon=True).start()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Horovod asks this each second."""
        with self.lock:
            return dict.fromkeys(self.names, 1)

    def _ask_script(self) -> None:
        """Ask the script for ever; where it fails, hosts stay as they are.

        Not in Horovod's own thread: no new rendezvous is possible while that waits for a slow script.
        """
        while True:
            try:
                hosts = discovered(Path(self.script), here=True)
                with self.lock:
                    self.names = [f"{host.name}-{slot}" for host in hosts for slot in range(host.slots)]
            except RequestError as error:
                print(error, file=sys.stderr, flush=True)
            time.sleep(1.0)

    def note(self, name: str, good: bool) -> None:
        """The worker of this place has ended."""
        with self.lock:
            self.gpus.pop(name, None)
            if good:
                self.good.append(name)
                return
            self.lost.add(name)
            while not self.script and len(set(self.names) - self.lost) < self.min_np:
                self.names.append(self._another())

    def gpu(self, name: str, count: int) -> int:
        """The GPU of this machine for a worker that starts here: one that the fewest others have.

        The place's number would not do: it changes as hosts come and go.
        """
        with self.lock:
            held = list(self.gpus.values())
            self.gpus[name] = min(range(count), key=held.count)
            return self.gpus[name]

    def renew(self) -> None:
        """Back to the start: `np` places, none of them lost."""
        with self.lock:
            self.lost.clear()
            if not self.script:
                self.names = [self._another() for _ in range(self.np)]

    def _another(self) -> str:
        self.made += 1
        return f"again-{self.made}"


def main() -> None:
    """Start workers, and again as others are lost or join, until training is done.

    Where all are lost at once, or one before the rendezvous of all (the others wait for it until they fail), all start
    again from the newest checkpoint.
    """
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    places = Places(settings)
    for _ in range(1 + RESTARTS):
        if train(settings, places, command):
            break
        places.renew()
    sys.stdout.flush()
    os._exit(0 if places.good else 1)


def train(settings: dict[str, Any], places: Places, command: list[str]) -> bool:
    """Horovod's elastic driver from start to end; returns whether a worker has succeeded."""
    server = RendezvousServer(0)
    driver = ElasticDriver(server, places, settings["min_np"], settings["max_np"])
    port = server.start(create_rendezvous_handler(driver))
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))

    def work(slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        environment = {
            **os.environ,
            "HOROVOD_ELASTIC": "1",
            **horovod_environment(slot, ADDRESS, port, INTERFACE),
        }
        if gpus:  # to Horovod each worker is alone on its host
            environment["CUDA_VISIBLE_DEVICES"] = str(places.gpu(slot.hostname, gpus))
        process = subprocess.Popen(command, env=environment)
        asked = False
        while process.poll() is None:
            if not asked and any(event.is_set() for event in events):
                process.terminate()
                asked = True
            time.sleep(0.05)
        places.note(slot.hostname, process.returncode == 0)
        return process.returncode, time.time()

    driver.wait_for_available_slots(settings["np"])
    driver.start(settings["np"], work)
    driver.get_results()
    driver.stop()
    return bool(places.good)


if __name__ == "__main__":
    main()
