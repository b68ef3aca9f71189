"""The program of a rank of a task of the user's own: `python own_script.py FRAMEWORK SCRIPT RECIPE.yaml …`.

It runs the script, which ends in `run_task`. A script that does not get there is a fault of the request.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules hide the standard library's
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import runpy
import traceback
from pathlib import Path
from typing import NoReturn

from hvdkit.errors import HvdkitError, RequestError
from hvdkit.heartbeat import Heartbeat
from hvdkit.worker.entry import end_as_rank
from hvdkit.worker.user_code import described, hidden_module


def main(framework: str, script: str, arguments: list[str]) -> NoReturn:
    """Run the script as a rank under this framework, and end the process."""
    sys.argv = [script, *arguments, "--framework", framework]
    sys.path.insert(0, str(Path(script).parent))  # as if Python ran the script itself
    fault: BaseException
    try:
        runpy.run_path(script, run_name="__main__")  # run_task does not return
        expected = f'`if __name__ == "__main__": hvdkit.run_task("{framework}", …)` at its end'
        fault = RequestError(f"model.script: {script}: it ended without training; expected {expected}")
    except (HvdkitError, KeyboardInterrupt) as error:
        fault = error
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        what = described(error, script)
        if isinstance(error, ModuleNotFoundError):
            what += f"; expected a script for --framework {framework}, and its modules in that runtime "
            what += f"({sys.executable} -m pip install …)"
        what += hidden_module(error, Path(script).parent)
        fault = RequestError(f"model.script: {what}")

    def fail(heartbeat: Heartbeat) -> None:
        raise fault

    end_as_rank(fail)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
