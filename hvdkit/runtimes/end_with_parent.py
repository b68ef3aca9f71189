"""Runs a command that ends with its parent process: `python end_with_parent.py COMMAND…`.

The parent holds the other end of the pipe on standard input. When that end closes, because the parent cancels the
command or is killed, even by SIGKILL, the command is killed with its whole process group (pip, make, compilers).
Run as a file by any interpreter, so it uses the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command in a new session; returns its exit status, or 128 + signal."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # Not sys.exit: the interpreter would wait at its end for the lock on stdin that the reading thread holds.
    status = main()
    sys.stdout.flush()
    os._exit(status)
