"""Horovod's own elastic driver. Runs under a runtime's interpreter.

usage: python elastic_driver.py SETTINGS COMMAND...

SETTINGS is JSON: `np` places to wait for, `min_np`, `max_np`, and `places`, a list of names, or `discovery`, a program
that prints host:slots a line as it does for horovodrun. COMMAND is started for each rank; it finds Horovod's variables
in its environment. With `cluster` true, COMMAND is a program that offers places on a cluster and starts ranks there
(elastic_places.py). Ends with status 0 where a worker has succeeded.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import HostUpdateResult
from horovod.runner.http.http_server import RendezvousServer

from hvdkit.launch.launchers.elastic_places import Cluster, Local, Places
from hvdkit.launch.slots import horovod_environment

RESTARTS = 2


def main() -> None:
    """Start workers, and again as others are lost or join, until training is done.

    Where all are lost at once, or one before the rendezvous of all (the others wait for it until they fail), all start
    again from the newest checkpoint.
    """
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    places = Cluster(command) if settings["cluster"] else Local(settings, command)
    for _ in range(1 + RESTARTS):
        train(settings, places)
        if places.succeeded:
            break
        places.renew()
        if settings["cluster"]:  # whose nodes may be gone
            settings["np"] = settings["min_np"]
    sys.stdout.flush()
    os._exit(0 if places.succeeded else 1)


class ClusterDriver(ElasticDriver):
    """Horovod's elastic driver, for places that are gone only once their workers are (elastic_places.Cluster)."""

    def _notify_workers_host_changes(self, current_hosts: Any, update_res: Any) -> None:
        """Notify workers of new places only.

        They notice a lost one by themselves, and wait for the next rendezvous by then. A notice would make them leave
        that one too, and begin again with the same ranks.
        """
        if update_res != HostUpdateResult.removed:
            super()._notify_workers_host_changes(current_hosts, update_res)


def train(settings: dict[str, Any], places: Places) -> None:
    """Horovod's elastic driver from start to end."""
    server = RendezvousServer(0)
    kind = ClusterDriver if settings["cluster"] else ElasticDriver
    driver = kind(server, places, settings["min_np"], settings["max_np"])
    port = server.start(create_rendezvous_handler(driver))

    def work(slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        environment = horovod_environment(slot, places.address, port, places.interface)
        return places.run(slot.hostname, {"HOROVOD_ELASTIC": "1", **environment}, events), time.time()

    driver.wait_for_available_slots(settings["np"])
    driver.start(settings["np"], work)
    driver.get_results()
    driver.stop()


if __name__ == "__main__":
    main()
