"""What stands for a runtime's interpreter whose framework is imported already (tests/warm/__init__.py):

    python -IS client.py PYTHON FOLDER ARGUMENTS...

A script that lies in a framework's folder, imports its adapter or Horovod for it or has its name as first argument runs
in a process that the server at FOLDER/<framework>.socket forks; command.py, the command line, in one of that at
FOLDER/command.socket. Anything else runs under PYTHON itself, and so does a script in whose environment the import
would have been another one.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().with_name("command.py")
CHECKOUT = str(Path(__file__).resolve().parents[2])
IMPORTS = ("from hvdkit.adapters import ", "import horovod.")
# Which frameworks and Python itself read while they are imported.
READ_AT_IMPORT = (
    "CUDA_", "DMLC_", "GOMP_", "KERAS_", "KMP_", "LD_", "MALLOC_", "MKL_", "MXNET_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "TF_", "TORCH_", "XLA_",
)  # fmt: skip


def variables(environment: "dict[str, str]") -> "dict[str, str]":
    """Those of the environment that make a difference to what is imported.

    hvdkit hashes strings by seed 0. The checkout in PYTHONPATH makes none, and the server's processes have no buffers.
    """
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    read.pop("PYTHONUNBUFFERED", None)
    places = [place for place in read.pop("PYTHONPATH", "").split(os.pathsep) if place not in ("", CHECKOUT)]
    return {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(places), **read}


def server(folder: str, arguments: "list[str]") -> "str | None":
    """The socket of the script or of its framework; None where it is not known or it is no script."""
    if not arguments or not arguments[0].endswith(".py"):
        return None
    script = Path(arguments[0])
    if script == COMMAND:
        return str(Path(folder, "command.socket"))
    text = script.read_text() if script.exists() else ""
    imported = [text.partition(f"\n{line}")[2].partition("\n")[0].partition(" ")[0] for line in IMPORTS]
    for word in (script.parent.name, *imported, *arguments[1:2]):
        word = "pytorch" if word == "torch" else word
        path = Path(folder, word.partition("-")[0] + ".socket")
        if path.exists():
            return str(path)
    return None


def main(python: str, folder: str, arguments: "list[str]") -> None:
    environment = dict(os.environ)
    path = server(folder, arguments)
    if path is None or variables(environment) != json.loads(Path(path).with_suffix(".json").read_text()):
        os.execv(python, [python, *arguments])
    asker = socket.socket(socket.AF_UNIX)
    asker.connect(path)
    asked = {"arguments": arguments, "environment": environment, "folder": str(Path.cwd())}
    streams = array.array("i", [0, 1, 2])
    text = json.dumps(asked).encode() + b"\n"
    sent = asker.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    asker.sendall(text[sent:])
    answers = asker.makefile()
    pid = int(answers.readline())

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on its way
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    for stream in (0, 1, 2):  # the rank's alone from here on
        os.close(stream)
    status = int(answers.readline() or signal.SIGKILL)
    if os.WIFSIGNALED(status):  # end as it ended
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
