"""Horovod's servers let no stranger in (hvdkit/runtimes/patches/30-no-stranger.patch), and show no secret."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import random
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdkit.runtimes import store
from tests import hygiene
from tests.launching import wait_until
from tests.strangers import MANY, command_lines, heard, listening, many_files, silent  # noqa: F401 - a fixture for all

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
SERVICES = Path(__file__).with_name("horovod_services.py")
HTTP = ("store", "rendezvous", "elastic")
KINDS = (*HTTP, "notification", "driver", "task")


def python() -> str:
    return str(store.find("pytorch").python)


class Server:
    """One of Horovod's servers in a process with 1,024 open files at most."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.port = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def honest(self, port: int | None = None) -> str:
        """What a client with the secret finds at this port, or the server's."""
        assert self.process.stdin is not None
        print(port or self.port, file=self.process.stdin, flush=True)
        return self._line().strip()

    def fact(self, name: str) -> int:
        match = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert match
        return int(match[1])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[Server]:
    command = [python(), str(SERVICES), kind]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=tmp_path
        ) as process,
    ):
        try:
            found = Server(process)
            yield found
            assert found.honest() == "ok"
            assert process.poll() is None
        finally:
            process.kill()
    assert "Traceback" not in (tmp_path / "errors").read_text()


class Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch planted",)


def http(body: bytes, header: str = "", length: int | None = None) -> bytes:
    head = f"PUT /worker_addresses/here:0 HTTP/1.1\r\n{header}Content-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


PICKLE = pickle.dumps(Planted())
WRONG = f"X-Horovod-Signature: {'0' * 32}.1.{'0' * 64}.{'0' * 64}\r\n"
SAYINGS = {
    "garbage": random.Random(1).randbytes(2**16),
    "a pickle": http(base64.b64encode(PICKLE)),
    "a pickle, wrongly signed": http(base64.b64encode(PICKLE), WRONG),
    "a pickle without a name": b"POST /runfunc/func HTTP/1.0\r\n\r\n" + PICKLE,
    "a file": b"HEAD /etc/passwd HTTP/1.0\r\n\r\n",
    "a gigabyte": http(bytes(2**24), WRONG, 2**30),
    "a long line": b"GET /" + b"x" * 2**24,
    "a message as before the patch": bytes(32) + len(PICKLE).to_bytes(4, "little") + PICKLE,
    "a long message as before the patch": bytes(32) + (2**30).to_bytes(4, "little") + bytes(2**24),
    "a wrong digest": bytes(32) + len(PICKLE).to_bytes(8, "big") + bytes(64) + PICKLE,
    "a gigabyte with a wrong digest": bytes(32) + (2**30).to_bytes(8, "big") + bytes(64 + 2**24),
}


def answer(port: int, what: bytes) -> bytes:
    """All that is answered to this until the port closes the connection."""
    with socket.create_connection(("127.0.0.1", port), hygiene.patience(30)) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(what)
            stranger.shutdown(socket.SHUT_WR)
        return heard(stranger)


def test_a_server_reads_no_more_than_a_header_of_strangers(kind: str, server: Server, tmp_path: Path) -> None:
    assert server.honest() == "ok"
    before = server.fact("VmHWM")
    for name, what in SAYINGS.items():
        said = answer(server.port, what)
        if kind in HTTP:
            assert not said or said.split(b" ", 2)[1] in (b"400", b"403", b"414"), name
            assert said.endswith(b"\r\n\r\n") or not said, name
        else:
            assert len(said) <= 32, name
    assert server.fact("VmHWM") < before + 16 * 1024
    assert not (tmp_path / "planted").exists()


def test_what_was_recorded_is_refused(kind: str, server: Server) -> None:
    recorded: list[bytes] = []

    def pass_on(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", server.port)) as there:
            said = b""
            back = threading.Thread(target=copy, args=(there, client), daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                while part := client.recv(65536):
                    said += part
                    there.sendall(part)
            recorded.append(said)

    def copy(there: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := there.recv(65536):
                client.sendall(part)
            client.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as between:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=pass_on, args=(between.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        assert server.honest(between.getsockname()[1]) == "ok"
    assert wait_until(lambda: len(recorded) >= (1 if kind in ("rendezvous", "elastic") else 2), 20)
    for what in recorded:
        said = answer(server.port, what)
        assert b" 403 " in said if kind in HTTP else len(said) == 32


@pytest.mark.parametrize("kind", ["elastic", "notification"], indirect=True)
def test_silent_strangers_keep_nobody_out(server: Server) -> None:
    strangers = silent(server.port)
    assert len(strangers) > MANY / 2
    assert server.honest() == "ok"
    assert server.fact("Threads") < 300
    assert wait_until(lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 40, 30), "all are closed"
    for each in strangers:
        each.close()


def test_a_client_believes_no_stranger(kind: str, server: Server, tmp_path: Path) -> None:
    """As where the server has ended, and another program has got its port."""
    body = base64.b64encode(PICKLE)
    said = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    if kind not in HTTP:
        said = bytes(64) + len(PICKLE).to_bytes(8, "big") + bytes(64) + PICKLE
    with socket.create_server(("127.0.0.1", 0)) as port:

        def lie() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = port.accept()
                    with connection:
                        connection.recv(1 if kind in HTTP else 0)
                        connection.sendall(said)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):
                            pass

        threading.Thread(target=lie, daemon=True).start()
        assert server.honest(port.getsockname()[1]) != "ok"
    assert not (tmp_path / "planted").exists()


# What a rank does: the environment of the server's process has the key.
RANK = """
import sys
import horovod.torch as hvd
hvd.init()
print("size", hvd.size(), hvd.allgather_object(hvd.rank()))
"""
# A server of one's own and two ranks. `late`: the second one comes as soon as there is a line to read.
OWN = """
import os, subprocess, sys
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
server = RendezvousServer(0)
port = server.start(address="127.0.0.1")
server.init(get_host_assignments(parse_hosts("localhost:2"), 2))
ranks = []
for rank in "01":
    if rank == "1" and sys.argv[2] == "late":
        print(ranks[0].pid, flush=True)
        sys.stdin.readline()
    numbers = dict(HOROVOD_RANK=rank, HOROVOD_SIZE="2", HOROVOD_LOCAL_RANK=rank, HOROVOD_LOCAL_SIZE="2",
                   HOROVOD_CROSS_RANK="0", HOROVOD_CROSS_SIZE="1", HOROVOD_HOSTNAME="localhost",
                   HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
                   HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_GLOO_IFACE="lo")
    environment = {**os.environ, **numbers}
    if sys.argv[2] == "without":
        del environment["HOROVOD_RENDEZVOUS_SECRET"]
    ranks.append(subprocess.Popen([sys.executable, sys.argv[1]], env=environment))
print([rank.wait() != 0 for rank in ranks])
"""


def test_a_rank_without_the_key_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [python(), "-c", OWN, str(tmp_path / "rank.py"), "without"],
        capture_output=True, text=True, timeout=hygiene.patience(120),
    )  # fmt: skip
    assert "[True, True]" in done.stdout, done.stderr
    assert "refuses this process: HOROVOD_RENDEZVOUS_SECRET is not set" in done.stderr


def test_nobody_takes_the_place_of_a_rank(tmp_path: Path) -> None:
    """In Gloo, while a rank waits for another one to connect."""
    (tmp_path / "rank.py").write_text(RANK)

    command = [python(), "-c", OWN, str(tmp_path / "rank.py"), "late"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            found: set[int] = set()
            assert wait_until(lambda: bool(found.update(listening(pid)) or found), 60)
            strangers = []
            for port in found:
                assert answer(port, bytes(8) + random.Random(2).randbytes(2**12)) == b""
                strangers += [socket.create_connection(("127.0.0.1", port), 5) for _ in range(50)]
            said, _ = process.communicate("\n", timeout=hygiene.patience(120))
        finally:
            process.kill()
    assert said.count("size 2 [0, 1]") == 2 and "[False, False]" in said, said
    assert strangers


LISTENING = """
import os, psutil, horovod.torch as hvd
hvd.init()
from horovod.common.elastic import notification_manager
if "HOROVOD_ELASTIC" in os.environ:
    notification_manager.init()
for each in psutil.net_connections("tcp"):
    if each.status == "LISTEN" and each.pid in (os.getpid(), *(parent.pid for parent in psutil.Process().parents())):
        print("listens at", each.laddr.ip, flush=True)
assert os.environ["MY_TOKEN"] == "planted-0123456789 'value'"
print("ran on", hvd.size(), flush=True)
"""


@pytest.mark.parametrize("elastic", [False, True], ids=["", "elastic"])
def test_horovodrun_shows_no_value_of_the_environment(elastic: bool, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(LISTENING)
    (tmp_path / "hosts").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts").chmod(0o755)
    places = ["-H", "localhost:2"]
    if elastic:
        places = ["--host-discovery-script", str(tmp_path / "hosts"), "--network-interfaces", "lo"]
    command = [python(), "-m", "horovod.runner.launch", "-np", "2", *places, "--gloo", "--verbose"]
    with command_lines(tmp_path) as lines:
        done = subprocess.run(
            [*command, python(), str(tmp_path / "rank.py")],
            capture_output=True, text=True, timeout=hygiene.patience(180), cwd=tmp_path,
            env={**os.environ, "MY_TOKEN": "planted-0123456789 'value'"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran on 2") == 2, done.stdout
    assert set(re.findall(r"listens at (\S+)", done.stdout)) == {"127.0.0.1"}
    shown = set(lines.read_text().splitlines())
    assert any("rank.py" in line for line in shown), "the reader has seen the ranks"
    for where, text in {"command lines": "\n".join(shown), "output": done.stdout + done.stderr}.items():
        assert "planted-0123456789" not in text, where
        assert not re.search("RENDEZVOUS_SECRET=", text), where
