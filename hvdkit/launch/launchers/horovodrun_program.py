"""Horovod's `horovodrun`, which starts ranks without first asking whether Horovod has Gloo, and has hvdkit's elastic
driver (elastic_driver.py) in place of its own.

usage: python horovodrun_program.py ARGUMENTS...     (horovodrun's own)

horovodrun imports the framework for that question before it starts the ranks, which takes as long as a rank's own
import. Where Horovod has no Gloo, the ranks say so.
"""

import sys

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from horovod.runner import gloo_run, launch

from hvdkit.launch.launchers import elastic_driver


def main() -> None:
    """Run horovodrun to its end."""
    sys.argv[0] = "horovodrun"
    launch.gloo_built = lambda verbose=False: True
    gloo_run.ElasticDriver = elastic_driver.Driver
    gloo_run.create_rendezvous_handler = elastic_driver.create_rendezvous_handler
    sys.exit(launch.run_commandline())


if __name__ == "__main__":
    main()
