"""The program of a rank of a task of the user's own: `python own_script.py FRAMEWORK SCRIPT RECIPE.yaml …`.

It runs the script, which ends in `run_task`. A script that does not get there is a fault of the request.
"""

import sys

if __name__ == "__main__":
    # As if Python ran the script itself. Python has put this folder there, whose modules hide the standard library's.
    sys.path[0] = sys.argv[2].rpartition("/")[0] or "."

import runpy
import traceback
from typing import NoReturn

import hvdkit.worker.startup  # noqa: F401 - before the framework, whose start-up it makes faster
from hvdkit.core.heartbeat import Heartbeat, first_line
from hvdkit.errors import HvdkitError, RequestError
from hvdkit.worker.entry import end_as_rank


def main(framework: str, script: str, arguments: list[str]) -> NoReturn:
    """Run the script as a rank under this framework, and end the process."""
    sys.argv = [script, *arguments, "--framework", framework]
    fault: HvdkitError
    try:
        runpy.run_path(script, run_name="__main__")  # run_task does not return
        expected = f'`if __name__ == "__main__": run_task({framework}, …)` at its end'
        fault = RequestError(f"model.script: {script}: it ended without training; expected {expected}")
    except HvdkitError as error:
        fault = error
    except Exception as error:
        traceback.print_exc()
        fault = RequestError(f"model.script: {_place(error, script)}: {_reason(error, framework)}")

    def fail(heartbeat: Heartbeat) -> None:
        raise fault

    end_as_rank(fail)


def _place(error: Exception, script: str) -> str:
    """The script, with the line that failed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    return f"{script}, line {lines[-1]}" if lines else script


def _reason(error: Exception, framework: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        install = f"{sys.executable} -m pip install …"
        return f"{error}; expected a script for --framework {framework}, and its modules in that runtime ({install})"
    what = error.msg if isinstance(error, SyntaxError) else first_line(error)
    return f"{type(error).__name__}: {what}; the rank's log has the traceback"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
