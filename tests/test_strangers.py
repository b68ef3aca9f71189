"""No stranger gets in: every port of a run is tried by programs that do not know its secret, and no secret is shown."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdkit.handshake import ANSWER_S, connect
from hvdkit.results.train import read_result
from tests import hygiene, paced
from tests.conftest import ROOT
from tests.launching import wait_until
from tests.strangers import command_lines, heard, listening, many_files, silent  # noqa: F401 - a fixture for all

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
# A program that lets in who knows its secret, with few open files of its own left.
SERVER = """
import os, resource, sys
from hvdkit.handshake import Listener
files, left = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
kept = []
with Listener("127.0.0.1") as listener:
    if left:
        while True:
            try:
                kept.append(os.dup(1))
            except OSError:
                break
        for _ in range(left):
            os.close(kept.pop())
    print(listener.port, listener.secret, flush=True)
    while True:
        for connection in listener.admit(0.1):
            connection.send(b"in")
            kept.append(connection)
"""


@contextlib.contextmanager
def served(files: int = 1024, left: int = 0) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    command, path = [sys.executable, "-c", SERVER, str(files), str(left)], {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=os.environ | path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port, secret = process.stdout.readline().split()
            yield process, int(port), secret
            assert process.poll() is None, "it has ended"
        finally:
            process.kill()


def honest(port: int, secret: str) -> bool:
    with connect("127.0.0.1", port, secret, hygiene.patience(20)) as connection:
        return connection.recv(2) == b"in"


def believed(port: int, secret: str) -> bool:
    """Whether the port and a client with this secret believe each other, once one of them has said."""
    seconds = 0.3
    while True:
        try:
            with connect("127.0.0.1", port, secret, seconds):
                return True
        except PermissionError:
            return False
        except OSError:  # a busy machine has given no answer so soon
            seconds *= 2
            assert seconds < hygiene.patience(20)


def refused(connection: socket.socket) -> bool:
    """Whether the port closes the connection, and has sent nothing but its challenge, or that it refuses."""
    connection.settimeout(hygiene.patience(ANSWER_S + 5))
    said = heard(connection)
    return len(said) <= 33 or (said.startswith(b"HTTP/1.") and b" 200 " not in said[:16])


def memory_mib(pid: int) -> float:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) / 1024


@pytest.mark.parametrize(("files", "left"), [(1024, 3), (64, 0), pytest.param(1024, 0, marks=pytest.mark.thorough)])
def test_silent_strangers_neither_end_a_port_nor_keep_others_out(files: int, left: int) -> None:
    with served(files, left) as (process, port, secret):
        strangers = silent(port, 2 * files)
        assert len(strangers) > files
        assert honest(port, secret)
        descriptors = Path(f"/proc/{process.pid}/fd")
        own = files - left if left else 0
        assert wait_until(lambda: len(list(descriptors.iterdir())) < own + 20, ANSWER_S + 10), "theirs are closed"
        assert honest(port, secret)
        for each in strangers:
            each.close()


def test_what_was_recorded_opens_no_port() -> None:
    with served() as (_, port, secret), socket.create_server(("127.0.0.1", 0)) as between:
        recorded: list[bytes] = []

        def pass_on() -> None:
            client, _ = between.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as there:
                client.sendall(there.recv(33))
                recorded.append(client.recv(98, socket.MSG_WAITALL))
                there.sendall(recorded[0])
                client.sendall(there.recv(67, socket.MSG_WAITALL))

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        assert honest(between.getsockname()[1], secret)
        thread.join()
        assert secret.encode() not in recorded[0]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(recorded[0])
            assert refused(stranger)


def test_a_port_that_knows_no_secret_learns_none() -> None:
    """As where a launcher has died, and another program has got its port."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        answers: list[bytes] = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = port.accept()
                    with connection:
                        connection.sendall(b"0" * 32 + b"\n")
                        answers.append(connection.recv(98, socket.MSG_WAITALL))
                        connection.sendall(b"1" * 64 + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        assert not believed(port.getsockname()[1], "a secret of the run")
        assert answers and b"a secret of the run" not in b"".join(answers)


# What strangers say to a port: nothing is read of it but a header.
SAYINGS = {
    "nothing": b"",
    "garbage": random.Random(1).randbytes(2**16),
    "an announced gigabyte": b"PUT /x HTTP/1.1\r\nContent-Length: 1073741824\r\n\r\n" + bytes(2**24),
    "an announced pickle": (2**30).to_bytes(4, "big") + bytes(2**24),
    "a request": b"GET / HTTP/1.1\r\nX-Secret: wrong\r\n\r\n",
    "a wrong secret": b"0" * 32 + b"\n" + b"0" * 64 + b"\n",
}


def say(port: int, what: bytes) -> bool:
    """Say this to a port; whether it closes the connection without an answer."""
    with socket.create_connection(("127.0.0.1", port), hygiene.patience(10)) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(what)
            stranger.shutdown(socket.SHUT_WR)
        return refused(stranger)


@pytest.mark.parametrize("what", SAYINGS)
def test_a_port_reads_no_more_than_a_header_of_strangers(what: str) -> None:
    with served() as (process, port, secret):
        before = memory_mib(process.pid)
        assert all(say(port, SAYINGS[what]) for _ in range(5))
        assert memory_mib(process.pid) < before + 8
        assert not believed(port, "wrong")
        assert honest(port, secret)


# Ports of whole runs.

RECIPE = ROOT / "recipes" / "resnet20-digits.yaml"
PLANTED = {
    name: f"planted-{name.lower()}-0123456789"
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD")
}
ELASTIC = "elastic={min_np: 2, max_np: 2}"
# Open MPI's options, and a task for each rank: a stand-in where there is no mpirun.
MPIRUN = """#!/bin/sh
[ "$1" = --version ] && { echo "mpirun (Open MPI) 4.1.6"; exit; }
while :; do case $1 in
    --allow-run-as-root) shift ;;
    -np) np=$2; shift 2 ;;
    -H | --map-by | --bind-to | --stdin | -x) shift 2 ;;
    *) break ;;
esac; done
for rank in $(seq 0 $((np - 1))); do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" &
    tasks="$tasks $!"
done
trap 'kill $tasks' TERM
status=0
for task in $tasks; do wait $task || status=$?; done
exit $status
"""


def environment(folder: Path) -> dict[str, str]:
    found = {**os.environ, **PLANTED, "OMP_NUM_THREADS": "1"}
    if shutil.which("mpirun") is None:
        (folder / "bin").mkdir()
        (folder / "bin" / "mpirun").write_text(MPIRUN)
        (folder / "bin" / "mpirun").chmod(0o755)
        found["PATH"] = f"{folder / 'bin'}:{found['PATH']}"
    return found


def train(folder: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hvdkit", "train", str(RECIPE), "--framework", "pytorch", "-np", "2"]
    line = [*command, "--out", str(folder / "out"), *paced.overrides(folder / "gate"), "batch_size=16", "epochs=2"]
    return subprocess.Popen(
        [*line, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


def ports_of(mark: str) -> dict[int, tuple[int, str]]:
    """The ports on which processes with this mark listen: the process's number, and the address in hexadecimal.

    Those of Open MPI's own program are left out.
    """
    found = {}
    for pid in hygiene.started_by(mark):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() not in ("mpirun", "orterun"):
                found |= {port: (pid, address) for port, address in listening(pid).items()}
    return found


def secrets_of(mark: str) -> set[str]:
    """The secrets of hvdkit's own in the environments of a run's processes."""
    found = set()
    for pid in hygiene.started_by(mark):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            found |= set(re.findall(r'"secret": "(\w+)"', text))
            found |= set(re.findall(r"HOROVOD_(?:RENDEZVOUS_SECRET|SECRET_KEY)=([^\0]+)", text))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_runtimes: Path) -> list[Any]:
    """The losses of a run without strangers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with train(folder, env={**os.environ, "OMP_NUM_THREADS": "1", "HVDKIT_RUNTIMES": str(warm_runtimes)}) as process:
        said = process.communicate(timeout=hygiene.patience(120))[0]
    assert process.returncode == 0, said
    return losses(folder)


def losses(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("launcher", "elastic"),
    [
        pytest.param("direct", [], id="direct"),
        pytest.param("mpirun", [], id="mpirun", marks=pytest.mark.thorough),
        pytest.param("horovodrun", [], id="horovodrun", marks=pytest.mark.thorough),
        pytest.param("direct", [ELASTIC], id="elastic", marks=pytest.mark.thorough),
        pytest.param("horovodrun", [ELASTIC], id="elastic-horovodrun", marks=pytest.mark.thorough),
    ],
)
def test_a_run_trains_on_among_strangers_and_shows_no_secret(
    launcher: str, elastic: list[str], tmp_path: Path, undisturbed: list[Any]
) -> None:
    (tmp_path / "gate").write_text("slow 0.3")
    with hygiene.marking() as mark:
        variables = environment(tmp_path)
    with (
        command_lines(tmp_path) as lines,
        train(tmp_path, "--launcher", launcher, *elastic, env=variables, preexec_fn=few_files) as process,
    ):
        try:
            metrics = tmp_path / "out" / "metrics.jsonl"
            assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60)
            ports = ports_of(mark)
            assert ports and all(address.endswith("7F") for _, address in ports.values()), "127.… alone"
            secrets = secrets_of(mark)
            assert secrets
            (tmp_path / "gate").write_text("slow 2")  # no epoch ends, and no evaluation needs memory meanwhile
            strangers = [each for port in ports for each in silent(port)]
            for port, (pid, _) in ports.items():
                before = memory_mib(pid)
                assert all(say(port, what) for what in SAYINGS.values())
                assert memory_mib(pid) < before + 16
            time.sleep(1.0)
            (tmp_path / "gate").unlink()
            said = process.communicate(timeout=hygiene.patience(120))[0]
            for each in strangers:
                each.close()
        finally:
            hygiene.kill_started_by(mark)
    assert process.returncode == 0 and "Traceback" not in said, said
    assert read_result(tmp_path / "out" / "result.json").np == 2
    assert losses(tmp_path) == undisturbed
    shown = lines.read_text()
    assert "resnet.py" in shown, "the reader has seen the ranks"
    written = "".join(
        path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*") if stat.S_ISREG(path.stat().st_mode)
    )
    for secret in {*PLANTED.values(), *secrets}:
        for where, text in {"command lines": shown, "output": said, "the run's folder": written}.items():
            assert secret not in text, f"{where}: {secret}"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--launcher", "mpirun"], id="mpirun"),
        pytest.param([], id="direct", marks=pytest.mark.thorough),
        pytest.param(["--max-np", "2", "--host-discovery-script", "./hosts"], id="elastic"),
    ],
)
def test_a_program_runs_on_among_strangers(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts").chmod(0o755)
    with hygiene.marking() as mark:
        variables = environment(tmp_path)
    program = str(ROOT / "tests" / "launched" / "program.py")
    words = ["-np", "2", *options, "--out", "out", program, "waits"]
    with subprocess.Popen(
        [sys.executable, "-m", "hvdkit", "launch", *words], cwd=tmp_path, env=variables, preexec_fn=few_files,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            logs = tmp_path / "out" / "logs"
            assert wait_until(lambda: sum("step 0" in log.read_text() for log in logs.glob("*[01].log")) == 2, 60)
            ports = ports_of(mark)
            assert ports and all(address.endswith("7F") for _, address in ports.values()), "127.… alone"
            strangers = [each for port in ports for each in silent(port)]
            assert all(say(port, what) for port in ports for what in SAYINGS.values())
            (tmp_path / "go").touch()
            said = process.communicate(timeout=hygiene.patience(120))[0]
            for each in strangers:
                each.close()
        finally:
            hygiene.kill_started_by(mark)
    assert process.returncode == 0 and said.count("] done") == 2 and "Traceback" not in said, said
