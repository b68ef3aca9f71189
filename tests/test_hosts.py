"""Slow networks on one machine: what their links carry, that ranks live in them, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands import hosts
from hvdkit.errors import RequestError
from hvdkit.launch import namespaces
from tests import hygiene
from tests.cluster import starving
from tests.conftest import Hvdkit, run
from tests.launching import MARK, gone_within, marked, wait_until

MBIT_PER_S = 40.0
HOSTS = [sys.executable, "-m", "hvdkit", "hosts"]

# Sends COUNT bytes from one host to another, after WAIT_S seconds of silence; the sender prints how many seconds passed
# until it heard that they were there.
_TRANSFER = """
import socket, sys, time
role, address, count, wait_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
if role == "from":
    until = time.monotonic() + 300
    while True:
        try:
            line = socket.create_connection((address, 5201))
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
    time.sleep(wait_s)
    start = time.monotonic()
    line.sendall(b"x" * count)
    line.recv(1)
    print(time.monotonic() - start)
else:
    server = socket.create_server((address, 5201))
    line, _ = server.accept()
    got = 0
    while got < count:
        got += len(line.recv(1 << 20))
    line.sendall(b".")
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    with starving.network(2, MBIT_PER_S) as made:
        yield made


def seconds_for(network: Any, count: int, source: str = "h1", wait_s: float = 0.0) -> float:
    """How long `count` bytes take from a host to h2."""

    def command(role: str) -> list[str]:
        return [sys.executable, "-c", _TRANSFER, role, "10.77.0.2", str(count), str(wait_s)]

    receiver = network.start(command("to"), "h2")
    sender = network.run(
        command("from"), source, check=True, timeout=hygiene.patience(60), stdout=subprocess.PIPE, text=True
    )
    receiver.wait(hygiene.patience(30))
    return float(sender.stdout)


def can_take(network: Any, count: int, seconds: float, source: str = "h1", least: float = 0.0) -> bool:
    """Whether `count` bytes come over in less than `seconds` once; never must they in less than `least`.

    What others do on the machine makes a transfer slower, and never faster: so one in time is the proof that the
    network allows it, however long that is in coming.
    """
    until = time.monotonic() + hygiene.patience(120)
    while time.monotonic() < until:
        took = seconds_for(network, count, source)
        assert took > least, "a limit makes a transfer last so long"
        if took < seconds:
            return True
    return False


def test_a_link_carries_what_it_is_said_to_and_nothing_for_free(network: Any) -> None:
    count = 1_000_000
    at_best = 8 * count / (0.965 * 1e6 * MBIT_PER_S)  # a packet of 1514 bytes has 1448 or 1460 of them
    assert can_take(network, count, 2 * at_best, least=0.99 * at_best)
    assert can_take(network, 20 * count, 8 * 20 / MBIT_PER_S / 4, "h2"), "inside a host there is no limit"
    # After a pause: a limit whose burst were large would let 30 kB through at once.
    assert seconds_for(network, 30_000, wait_s=0.5) > 0.9 * 8 * 30_000 / (1e6 * MBIT_PER_S)
    network.set_rate(4 * MBIT_PER_S)
    try:
        assert can_take(network, count, 0.8 * 8 / MBIT_PER_S), "another rate holds at once"
    finally:
        network.set_rate(MBIT_PER_S)


def test_packets_are_the_wires_own(network: Any) -> None:
    for _ in range(5):  # TCP may send packets twice on a busy machine, though not each time
        bytes_before, packets_before = network.sent_bytes()["h1"], network.sent_packets("h1")
        seconds_for(network, 500_000)
        sent, packets = network.sent_bytes()["h1"] - bytes_before, network.sent_packets("h1") - packets_before
        assert sent > 500_000 and packets >= 500_000 // 1460
        if sent < 560_000:
            return
    pytest.fail(f"{sent} bytes were sent")


def test_two_networks_at_once_do_not_meet(network: Any) -> None:
    with starving.network(2, 10.0) as other:
        assert other.names == network.names
        assert seconds_for(other, 100_000) > 0.07
        assert can_take(network, 100_000, 0.07)


NAMES = {"switch", "eth0", "h1", "to-h1", "end-1"}  # of its interfaces and namespaces


def here() -> set[str]:
    """Which of those names the machine itself has: as interfaces, or as named namespaces."""
    folders = [Path("/sys/class/net"), Path("/run/netns")]
    return NAMES & {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_of_a_killed_program(number: signal.Signals) -> None:
    starving.network(1, 10.0)
    before, mark = here(), uuid.uuid4().hex
    command = [*HOSTS, "--n", "1", "--", "sleep", "3600"]
    program = subprocess.Popen(command, env=os.environ | {MARK: mark})
    assert wait_until(lambda: "sleep" in names(mark), 60)
    assert len(names(mark)) >= 3, "the program, what holds the network, and the command"
    program.send_signal(number)
    program.wait(hygiene.patience(60))
    assert gone_within(mark, 60), names(mark)
    assert here() == before


def names(mark: str) -> list[str]:
    """Of the processes that bear the mark."""
    found = []
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            found.append((Path("/proc") / str(pid) / "comm").read_text().strip())
    return found


def open_to_all(folder: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


_ADDRESS = """
import sys
from namespaces import Network, Unavailable
try:
    with Network(1, 10.0) as network:
        network.run(["ip", "-br", "address"], "h1", check=True)
except Unavailable as error:
    print(error)
    sys.exit(2)
"""


def test_without_root() -> None:
    """By a user without any right, where the kernel allows user namespaces; elsewhere it says so in one line."""
    starving.network(1, 10.0)
    # Where that user may look: the folder for temporary files may be the caller's alone.
    public = (Path(name) for name in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"))
    folder = Path(tempfile.mkdtemp(dir=next(each for each in public if open_to_all(each))))
    try:
        folder.chmod(0o755)
        Path(shutil.copy(namespaces.__file__, folder)).chmod(0o644)
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        python = next(p for p in ("/usr/bin/python3", sys.executable) if Path(p).exists())
        done = run([*drop, python, "-c", _ADDRESS], 30, cwd=folder)
        if done.returncode == 2:
            assert done.stdout.startswith("network namespaces cannot be made here: ")
            pytest.skip(done.stdout.strip())
        assert done.returncode == 0, done.stderr
        assert "10.77.0.1/24" in done.stdout
    finally:
        shutil.rmtree(folder)


def test_a_command_runs_on_the_hosts_and_its_status_is_the_answer(network: Any, inside: Hvdkit) -> None:
    done = inside("hosts")
    assert (done.returncode, done.stdout) == (0, "this machine can play h1:1,h2:1, with links of 100 Mbit/s\n")
    there = "nsenter --net=/run/netns/h3 ip -br address; echo $SLURM_JOB_NODELIST HOSTS $OMP_NUM_THREADS; exit 3"
    done = run([*HOSTS, "--n", "3", "--slots", "2", "sh", "-c", there], 60)
    assert done.returncode == 3 and "10.77.0.3/24" in done.stdout, done.stderr
    threads = os.environ.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // 6))
    assert f"h1,h2,h3 h1:2,h2:2,h3:2 {threads}\n" in done.stdout, "the six ranks share the cores"
    assert run([*HOSTS, "sh", "-c", "kill -9 $$"], 60).returncode == 137


def test_where_a_tool_is_missing_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_path", lambda: "/nowhere")
    with pytest.raises(RequestError, match="ip, tc, unshare, nsenter: not found; install iproute2"):
        hosts.run(hosts.HostsRequest())


def asked(network: Any, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of hvdkit that ended well, on one rank of each host."""
    command = [sys.executable, "-m", "hvdkit", *words, "-H", network.hosts_option(1)]
    options = {"timeout": hygiene.patience(200), "cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done: subprocess.CompletedProcess[str] = network.run(command, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done


SHORT = ["resnet20-digits", "model.name=resnet8", "threads=1", "steps=4", "warmup_steps=1"]


def test_a_comparison_over_hosts_names_them(network: Any, tmp_path: Path) -> None:
    """On one host and on both, as nothing else is asked for; the frameworks' networks are the links between them."""
    before = network.sent_bytes()["h1"]
    done = asked(network, tmp_path, "compare", *SHORT, "--framework", "mxnet", "--no-parity", "--out", "out")
    told = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [run["hosts"] for run in told["runs"]] == [["h1"], ["h1", "h2"]]
    assert [(row["np"], row["against"]) for row in told["ratios"]] == [(2, "np=1")]
    assert "ranks 1 on h1, 1 on h2" in done.stdout and network.sent_bytes()["h1"] - before > 4 * 300_000


@pytest.mark.thorough
def test_parity_and_evaluation_are_over_hosts(network: Any, tmp_path: Path) -> None:
    asked(network, tmp_path, "parity", *SHORT, "--framework", "mxnet", "--steps", "2", "-np", "2", "--out", "parity")
    told = json.loads((tmp_path / "parity" / "parity.json").read_text())
    assert told["passed"] and told["hosts"] == ["h1", "h2"]
    assert "; ranks: 1 on h1, 1 on h2." in (tmp_path / "parity" / "parity.md").read_text()
    asked(network, tmp_path, "train", *SHORT, "--framework", "mxnet", "-np", "2", "--out", "run")
    alone = tmp_path / "run" / "checkpoints" / "last"
    asked(network, tmp_path, "evaluate", str(alone), "-np", "2", "--out", "evaluated")
    told = json.loads((tmp_path / "evaluated" / "evaluate.json").read_text())
    trained = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["hosts"] == trained["hosts"] == ["h1", "h2"] and told["accuracy"] == trained["val_accuracy"]


def test_ranks_live_in_the_hosts(network: Any, tmp_path: Path) -> None:
    """Two on each of two: Horovod counts two hosts, and between them goes what has to, at the link's pace."""
    out, before = tmp_path / "out", network.sent_bytes()
    command = [sys.executable, "-m", "hvdkit", "bench", "allreduce", "--framework", "mxnet", "-np", "4"]
    options = ["-H", network.hosts_option(2), "--min-bytes", "1000000", "--max-bytes", "1000000", "--seconds", "0.1"]
    network.run([*command, *options, "--out", str(out)], check=True, timeout=hygiene.patience(120), cwd=tmp_path)
    told = json.loads((out / "bench.json").read_text())
    assert told["hosts"] == ["h1", "h1", "h2", "h2"]
    assert [row["wrong"] for row in told["rows"]] == [0]
    sent = network.sent_bytes()["h1"] - before["h1"]
    times = told["rows"][0]["repeats"] + 2  # at least: those that warm up
    assert sent > times * 1_000_000
