"""A task of the user's own: a rank's program that runs its script, which ends in `run_task`, and errors in its code.

    python own_task.py FRAMEWORK SCRIPT RECIPE.yaml …

An error in the user's own code is a line. Before the first update it is a fault of the request.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules hide the standard library's
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import re
import runpy
import traceback
from pathlib import Path
from typing import NoReturn

import hvdkit
from hvdkit.core.seam import Adapter
from hvdkit.errors import HvdkitError, RequestError, RunError
from hvdkit.heartbeat import Heartbeat, lost_a_peer
from hvdkit.recipe.schema import Recipe
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.tasks.own import Own
from hvdkit.worker.entry import Usage, end_as_rank, run_mode
from hvdkit.worker.setup import RankScript

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST = 300  # characters of a message
_PACKAGE = Path(hvdkit.__file__).parent


def run_task(framework: str | Adapter, task: type[Own]) -> NoReturn:
    """Run one rank of a task of the user's own, by the process's command line, as `entry.main` does.

    `framework` is its name, such as "pytorch", or its adapter.
    """

    def run(heartbeat: Heartbeat) -> None:
        from hvdkit import adapters

        if not (isinstance(task, type) and issubclass(task, Own)):
            raise RequestError(f"run_task: expected a subclass of hvdkit.Own, got {task!r}")
        name = getattr(framework, "NAME", framework)
        if name not in adapters.NAMES:
            raise RequestError(f"run_task: expected a framework, one of {', '.join(adapters.NAMES)}, got {framework!r}")
        adapter = adapters.load(framework) if isinstance(framework, str) else framework
        try:
            run_mode(adapter, RankScript(task.build, _construct), sys.argv[1:], heartbeat)
        except (HvdkitError, Usage):
            raise
        except (Exception, SystemExit) as error:
            script = sys.argv[0]
            if lost_a_peer(error) or not _is_own(error, script):
                raise
            traceback.print_exc()
            kind = RunError if heartbeat.updates else RequestError
            raise kind(f"model.script: {described(error, script, heartbeat.phase)}") from error

    def _construct(recipe: Recipe) -> Own:
        try:
            constructed = task(recipe)
        except TypeError as error:
            error.add_note(f"in {task.__name__}(recipe)")
            raise
        if not hasattr(constructed, "recipe"):
            raise RequestError(f"{task.__name__}.__init__: expected super().__init__(recipe) in it, got none")
        return constructed

    end_as_rank(run)


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
        fault = RequestError(f"model.script: {what}{_hidden_module(error, Path(script).parent)}")

    def fail(heartbeat: Heartbeat) -> None:
        raise fault

    end_as_rank(fail)


def described(error: BaseException, script: str, phase: str = "") -> str:
    """The innermost line of the user's own code that the error has passed, and the error.

    Without such a line there is the `phase` of the run.
    """
    kind = f"{type(error).__name__}: "
    what = kind + _message(error).removeprefix(kind)
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {what}"
    if notes := getattr(error, "__notes__", []):
        what += f" ({notes[0]})"
    frames = _own_frames(error, script)
    if not frames:
        return f"{script}: {what}" + (f" ({phase})" if phase and not notes else "")
    last = frames[-1]
    function = "" if last.name == "<module>" else f", in {last.name}"
    return f"{last.filename}, line {last.lineno}{function}: {what}; the line is `{last.line}`"


def _is_own(error: BaseException, script: str) -> bool:
    """Whether the error comes from code of the user's own, or from a library; a note says that of one on the way."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    noted = bool(getattr(error, "__notes__", []))
    return noted or bool(_own_frames(error, script)) or not raised_in.is_relative_to(_PACKAGE)


def _own_frames(error: BaseException, script: str) -> list[traceback.FrameSummary]:
    """The frames in files of the script's folder; packages that are installed below it are not the user's own."""
    folder = Path(script).absolute().parent

    def is_own(path: Path) -> bool:
        installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_PACKAGE)
        return path.is_relative_to(folder) and not installed

    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_own(Path(frame.filename).absolute())]


def _hidden_module(error: BaseException, folder: Path) -> str:
    """The remedy where a file in the script's folder has taken the place of a module that is imported by its name.

    Python looks there first. Empty if no such file has a part in the error.
    """
    known = {*sys.stdlib_module_names, *FRAMEWORKS, "torch", "horovod", "numpy"}
    text = "".join(traceback.format_exception(error))
    for path in sorted(folder.glob("*.py")):
        if path.stem in known and str(path) in text:
            return f"; {path} hides the module {path.stem}: rename the file"
    return ""


def _message(error: BaseException) -> str:
    """The first two lines of an error's message; the last one of a message that begins with a traceback."""
    if isinstance(error, SystemExit):
        return f"{error}; it left before its work was done".removeprefix("None")
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line for raw in _COLOURS.sub("", text).splitlines() if (line := raw.strip())] or ["no message"]
    joined = " ".join(lines[-1:] if lines[0].startswith("Traceback") else lines[:2])
    return joined if len(joined) <= _MOST else joined[: _MOST - 1] + "…"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
