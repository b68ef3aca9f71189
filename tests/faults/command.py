"""The command line, whose ranks of a recipe do as PLANTED says (planted.py): `python command.py train RECIPE …`.

Their program is this file too, with the framework and the recipe's script before its arguments; so tests/warm knows it.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

if __name__ == "__main__":
    if "HVDKIT_TRACE" in os.environ:  # a rank
        from tests.faults.planted import plant

        del sys.argv[:2]
        plant(os.environ["PLANTED"])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from hvdkit.cli import app
        from hvdkit.commands import checked_run

        scripts = checked_run.program
        checked_run.program = lambda run: [__file__, run.framework, *scripts(run)]
        app.main(own_process=True)
