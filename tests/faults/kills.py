"""Ranks that get a signal: `python kills.py SIGNAL PHASE TIMES FOLDER`, under PyTorch's runtime.

Forks two ranks TIMES times, without a launcher. Rank 1 gets the signal at a moment that is drawn, while Horovod starts
(PHASE `start`) or in a stream of collectives (`work`). Prints a line of JSON for each turn: the seconds until rank 0
was told, or ended, and what it was told (empty where it ended).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import horovod.torch as hvd
import torch

SERVER = Path(__file__).parents[2] / "hvdkit" / "launch" / "launchers" / "rendezvous.py"
END_S = 60.0


def note(path: Path, text: str = "") -> None:
    path.with_suffix(".new").write_text(f"{time.monotonic()} {text}")
    path.with_suffix(".new").rename(path)


def rank(number: int, port: int, turn: int, phase: str, number_of_signal: int, folder: Path) -> NoReturn:
    os.environ |= {
        "HOROVOD_RANK": str(number), "HOROVOD_LOCAL_RANK": str(number), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }  # fmt: skip
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # none outlives the program
    drawn, lengths = random.Random(turn), random.Random(1)

    def strike() -> None:
        note(folder / "struck")
        os.kill(os.getpid(), number_of_signal)

    def alive() -> None:
        while True:
            note(folder / "alive")
            time.sleep(0.002)

    if number == 0:
        threading.Thread(target=alive, daemon=True).start()
    elif phase == "start":
        threading.Timer(0.05 * drawn.random(), strike).start()
    hvd.init()
    assert hvd.mpi_ops._basics.shared_memory_ranks() == 2
    if number and phase == "work":
        threading.Timer(0.3 * drawn.random(), strike).start()
    try:
        for each in range(1_000_000):
            hvd.allreduce_(torch.ones(lengths.choice((1, 1_000, 300_000, 3_000_000))), name=f"turn.{each % 50}")
    except hvd.mpi_ops.HorovodInternalError as error:
        note(folder / "told", str(error))
    os._exit(0)


def one(turn: int, phase: str, number_of_signal: int, folder: Path) -> None:
    folder.mkdir()
    listening = socket.create_server(("127.0.0.1", 0))
    port, descriptor = listening.getsockname()[1], listening.fileno()
    command = [sys.executable, str(SERVER), str(descriptor), "localhost:2", "2"]
    pipe = subprocess.PIPE
    with listening, subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[descriptor]) as server:
        assert server.stdin and server.stdout
        server.stdout.readline()
        pids = []
        for number in range(2):
            pid = os.fork()
            if not pid:
                errors = os.open(folder / f"rank-{number}", os.O_CREAT | os.O_WRONLY)
                os.dup2(errors, 2)
                rank(number, port, turn, phase, number_of_signal, folder)
            pids.append(pid)
        late = threading.Timer(END_S, os.kill, (pids[0], signal.SIGKILL))
        late.start()
        os.waitpid(pids[0], 0)
        late.cancel()
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
        server.stdin.close()
    at, _, said = ((folder / "told") if (folder / "told").exists() else folder / "alive").read_text().partition(" ")
    struck = float((folder / "struck").read_text().split()[0])
    print(json.dumps({"s": float(at) - struck, "told": said}), flush=True)


def main(name: str, phase: str, times: str, folder: str) -> None:
    os.environ |= {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RENDEZVOUS_SECRET": os.urandom(32).hex(),
    }  # fmt: skip
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")
    Path(folder).mkdir()
    for turn in range(int(times)):
        one(turn, phase, getattr(signal, name), Path(folder) / str(turn))


if __name__ == "__main__":
    main(*sys.argv[1:])
