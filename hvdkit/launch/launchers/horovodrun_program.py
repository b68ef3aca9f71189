"""Horovod's `horovodrun`, which starts ranks without first asking whether Horovod has Gloo, has hvdkit's elastic driver
(elastic_driver.py) in place of its own, and a limit on what a host discovery script may take and print.

usage: python horovodrun_program.py ARGUMENTS...     (horovodrun's own)

horovodrun imports the framework for that question before it starts the ranks, which takes as long as a rank's own
import. Where Horovod has no Gloo, the ranks say so.
"""

import sys

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from pathlib import Path

from horovod.runner import gloo_run, launch
from horovod.runner.elastic.discovery import HostDiscoveryScript

from hvdkit.launch.hosts import discovered
from hvdkit.launch.launchers import elastic_driver

_print_hosts = HostDiscoveryScript.find_available_hosts_and_slots


def main() -> None:
    """Run horovodrun to its end."""
    sys.argv[0] = "horovodrun"
    launch.gloo_built = lambda verbose=False: True
    gloo_run.ElasticDriver = elastic_driver.ElasticDriver
    gloo_run.create_rendezvous_handler = elastic_driver.create_rendezvous_handler
    HostDiscoveryScript.find_available_hosts_and_slots = _hosts
    sys.exit(launch.run_commandline())


def _hosts(script: HostDiscoveryScript) -> dict[str, int]:
    """The hosts that the script prints now. Where it fails, Horovod keeps those that it has."""
    if not Path(script._discovery_script).is_file():  # the command that prints the hosts of -H (horovodrun.py)
        hosts: dict[str, int] = _print_hosts(script)
        return hosts
    return {host.name: host.slots for host in discovered(Path(script._discovery_script), here=False)}


if __name__ == "__main__":
    main()
