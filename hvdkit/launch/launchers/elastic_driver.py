"""Horovod's own elastic driver, for workers on this machine. Runs under a runtime's interpreter.

usage: python elastic_driver.py SETTINGS COMMAND...

SETTINGS is JSON: `np` places to wait for, `min_np`, `max_np`, and `places`, a list of names, or `script`, which prints
host:slots a line as it does for horovodrun. COMMAND is started for each rank; it finds Horovod's variables in its
environment. To Horovod each place is a host of its own with one slot, since it forsakes a whole host for one failure.
Ends with status 0 where a worker has come to a good end.
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

# The folder of a script comes first in sys.path; its files' names are no business of Horovod's imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer

from hvdkit.errors import RequestError
from hvdkit.launch.hosts import discovered

ADDRESS, INTERFACE = "127.0.0.1", "lo"
BEGIN_ANEW = 2  # times


class Places(HostDiscovery):
    """Where workers may run. Without a script a lost place is made up for where too few would be left."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.names: list[str] = settings["places"]
        self.script = settings["script"]
        self.min_np = settings["min_np"]
        self.np = settings["np"]
        self.lost: set[str] = set()
        self.good: list[str] = []  # whose workers came to a good end
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

        Not from Horovod's own thread: ranks could not meet anew while that waits for a slow script.
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
        """Which of this machine's GPUs a worker gets that begins here: one that the fewest others have.

        Not by the place's number, which is another one as soon as hosts come and go.
        """
        with self.lock:
            held = list(self.gpus.values())
            self.gpus[name] = min(range(count), key=held.count)
            return self.gpus[name]

    def renew(self) -> None:
        """As at the start: `np` places, none of them lost."""
        with self.lock:
            self.lost.clear()
            if not self.script:
                self.names = [self._another() for _ in range(self.np)]

    def _another(self) -> str:
        self.made += 1
        return f"again-{self.made}"


def main() -> None:
    """Start workers, again as others are lost or join, until training is done.

    Where all are lost at once, or one before the others have met it (they wait for it until they fail), all begin anew
    from what is on the disk.
    """
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    places = Places(settings)
    for _ in range(1 + BEGIN_ANEW):
        if train(settings, places, command):
            break
        places.renew()
    sys.stdout.flush()
    os._exit(0 if places.good else 1)


def train(settings: dict[str, Any], places: Places, command: list[str]) -> bool:
    """Horovod's elastic driver from start to end; returns whether a worker has come to a good end."""
    server = RendezvousServer(0)
    driver = ElasticDriver(server, places, settings["min_np"], settings["max_np"])
    port = server.start(create_rendezvous_handler(driver))
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))

    def work(slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        environment = {
            **os.environ,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESS,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": INTERFACE,
        }
        if gpus:  # each worker believes itself alone on its host
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
