"""Horovod's `horovodrun`, which starts ranks without first asking whether Horovod has Gloo.

usage: python horovodrun_program.py ARGUMENTS...     (horovodrun's own)

horovodrun imports the framework for that question before it starts the ranks, which takes as long as a rank's own
import. Where Horovod has no Gloo, the ranks say so.
"""

import sys

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from horovod.runner import launch


def main() -> None:
    """Run horovodrun to its end."""
    sys.argv[0] = "horovodrun"
    launch.gloo_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())


if __name__ == "__main__":
    main()
