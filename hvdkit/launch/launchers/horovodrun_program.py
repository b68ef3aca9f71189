"""Horovod's `horovodrun`, which starts ranks without first asking whether Horovod has Gloo, and has hvdkit's elastic
driver (elastic_driver.py) in place of its own for recipes, its own with `_Insists` for programs, and a limit on what a
host discovery script may take and print.

usage: python horovodrun_program.py ARGUMENTS...     (horovodrun's own)

horovodrun imports the framework for that question before it starts the ranks, which takes as long as a rank's own
import. Where Horovod has no Gloo, the ranks say so.
"""

import sys

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

import os
from pathlib import Path
from typing import Any

from horovod.runner import gloo_run, launch
from horovod.runner.elastic.discovery import HostDiscoveryScript
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.worker import HostUpdateResult

from hvdkit.launch.agent.reports import PROGRAM_RUNS
from hvdkit.launch.hosts import discovered
from hvdkit.launch.launchers import elastic_driver

_print_hosts = HostDiscoveryScript.find_available_hosts_and_slots


def main() -> None:
    """Run horovodrun to its end."""
    sys.argv[0] = "horovodrun"
    launch.gloo_built = lambda verbose=False: True
    if os.environ.get(PROGRAM_RUNS):  # a program speaks with Horovod's own driver
        gloo_run.ElasticDriver = _Insists
    else:
        gloo_run.ElasticDriver = elastic_driver.ElasticDriver
        gloo_run.create_rendezvous_handler = elastic_driver.create_rendezvous_handler
    HostDiscoveryScript.find_available_hosts_and_slots = _hosts
    sys.exit(launch.run_commandline())


class _Insists(ElasticDriver):
    """Horovod's own driver, which tells workers of a change of hosts every second until they have taken it up.

    Horovod's tells it once. So a change is lost for ever while the first worker does not listen yet (until its
    `hvd.elastic.run`), while workers begin anew (`State.on_reset` forgets it), or where the message does not arrive.
    """

    _untold = HostUpdateResult.no_update

    def _discover_hosts(self) -> None:
        discover = self._host_manager.update_available_hosts

        def untold() -> HostUpdateResult:
            self._untold |= discover()
            return self._untold

        self._host_manager.update_available_hosts = untold
        super()._discover_hosts()

    def _notify_workers_host_changes(self, current_hosts: Any, result: HostUpdateResult) -> None:
        super()._notify_workers_host_changes(current_hosts, result)
        if current_hosts.count_available_slots() >= self._min_num_proc:
            assigned, _ = self._get_host_assignments(current_hosts)
            if assigned == self.host_assignments:
                self._untold = HostUpdateResult.no_update


def _hosts(script: HostDiscoveryScript) -> dict[str, int]:
    """The hosts that the script prints now. Where it fails, Horovod keeps those that it has."""
    if not Path(script._discovery_script).is_file():  # the command that prints the hosts of -H (horovodrun.py)
        hosts: dict[str, int] = _print_hosts(script)
        return hosts
    return {host.name: host.slots for host in discovered(Path(script._discovery_script), here=False)}


if __name__ == "__main__":
    main()
