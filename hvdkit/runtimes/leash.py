"""Run a command that never outlives the process that wanted it: `python leash.py COMMAND…`.

Standard input is a pipe held open by that process. When it closes, because the process asked for an end or was
itself killed, even by SIGKILL, the command is killed with everything it started (pip, make, compilers). Run as a
file, by any interpreter: standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command in a session of its own; its exit status, or 128 + signal."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_owner() -> None:
        sys.stdin.buffer.read()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=end_with_owner, daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # Not sys.exit: the interpreter's shutdown would wait for the lock on stdin that the reading thread holds.
    status = main()
    sys.stdout.flush()
    os._exit(status)
