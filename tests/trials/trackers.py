"""Attacks by trackers: a server that is down, slow, refuses or answers garbage."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trial import SMALL, Running, attack, expect, running


@contextmanager
def server(status: int = 200, body: bytes = b"", delay_s: float = 0.0) -> Iterator[str]:
    """A tracking server that gives each request this answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            time.sleep(delay_s)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = answer

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()


def logged(folder: Path, tracker: str, seconds: float = 240, **environment: str) -> Running:
    with running(*SMALL, "--log", tracker, out=folder / "run", **environment) as job:
        job.ended(seconds)
        job.sound()
    return job


def honest(job: Running) -> str:
    """Refused before training, or trained to the end with a line about the tracker."""
    status = job.process.returncode
    lines = [line for line in job.text().splitlines() if "mlflow" in line.lower() or "wandb" in line.lower()]
    expect(status in (0, 2) and lines, f"status {status}\n{job.text()}")
    expect(status == 2 or (job.folder / "result.json").exists(), job.text())
    return f"status {status}: {lines[0]}"


@attack("refused in one line before ranks start, within 150 s; status 2")
def mlflow_down(folder: Path) -> str:
    """MLFLOW_TRACKING_URI names a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return honest(logged(folder, "mlflow", MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}"))


@attack("refused in one line, or trained with a warning; never a hang")
def mlflow_refuses(folder: Path) -> str:
    """The MLflow server answers each request with status 500."""
    with server(500, b"no") as url:
        return honest(logged(folder, "mlflow", MLFLOW_TRACKING_URI=url))


@attack("refused in one line, or trained with a warning")
def mlflow_garbage(folder: Path) -> str:
    """The MLflow server answers each request with status 200 and bytes that are no JSON."""
    with server(200, b"\x00\xff\x1b[2J<html>") as url:
        return honest(logged(folder, "mlflow", MLFLOW_TRACKING_URI=url))


@attack("refused in one line after the time that is documented; never a hang")
def mlflow_slow(folder: Path) -> str:
    """The MLflow server takes 300 s for each answer."""
    with server(200, b"{}", 300) as url:
        return honest(logged(folder, "mlflow", 300, MLFLOW_TRACKING_URI=url))


@attack("refused in one line, or trained with a warning; the key is in no file and no line")
def wandb_refuses(folder: Path) -> str:
    """The W&B server answers each request with status 401."""
    key = "0123456789abcdef0123456789abcdef01234567"
    with server(401, b'{"error": "no"}') as url:
        job = logged(folder, "wandb", 300, WANDB_BASE_URL=url, WANDB_API_KEY=key, WANDB_INIT_TIMEOUT="20")
    found = [str(path) for path in job.folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    expect(not found and key not in job.text(), f"the key is in {found or 'the terminal'}")
    return honest(job)


@attack("refused in one line, or trained with a warning; never a hang")
def wandb_slow(folder: Path) -> str:
    """The W&B server takes 300 s for each answer."""
    with server(200, b"{}", 300) as url:
        return honest(logged(folder, "wandb", 400, WANDB_BASE_URL=url, WANDB_API_KEY="0" * 40, WANDB_INIT_TIMEOUT="20"))


@attack("trained to the end with one or two warnings")
def wandb_lost_in_the_middle(folder: Path) -> str:
    """W&B's process gets SIGKILL at update 30."""
    with running(*SMALL, "--log", "wandb", out=folder / "run", WANDB_MODE="offline") as job:
        job.trains(30)
        for pid in job.pids():
            if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        expect(job.ended() == 0, job.text())
        job.sound()
    return honest(job)
