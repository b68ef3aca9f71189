"""A network that breaks while ranks train: which host is named, how soon, and that nothing hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdkit.launch.agent.interfaces import address_of
from hvdkit.launch.agent.link_monitor import DOWN_S, LOST_S, LauncherWatch, LinkMonitor
from hvdkit.launch.diagnosis.blame import unreachable
from hvdkit.launch.diagnosis.exits import FailureRecord, RankEnd
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from tests import hygiene
from tests.cluster import starving
from tests.launching import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
# Nothing but what the test is about ends the run: no watchdog, and no timeout of Gloo's where it is not set.
ENDLESS = ["epochs=1000", "log_every=1", "batch_size=4", "tune=rule", "checkpoint=null", "--stall-timeout", "600"]


@pytest.fixture(autouse=True)
def no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "600")


def train(network: Any, recipe: Path, folder: Path, hosts: int) -> subprocess.Popen[str]:
    """Training without an end on that many hosts; returns once it is well under way."""
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "-np", str(hosts)]
    where = ["-H", network.hosts_option(), "--out", str(folder / "out")]
    process = network.start([*command, *where, *ENDLESS], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    lines = folder / "out" / "metrics.jsonl"
    if not wait_until(lambda: lines.exists() and lines.read_text().count("\n") > 5, 90):
        process.terminate()
        pytest.fail(f"training never began: {process.communicate(timeout=hygiene.patience(60))[1]}")
    return process


def test_a_host_whose_link_goes_down_is_named(recipe: Path, tmp_path: Path) -> None:
    with starving.network(2, 200.0) as network:
        process = train(network, recipe, tmp_path, 2)
        network.cut("h2")
        _, said = process.communicate(timeout=hygiene.patience(120))
    assert process.returncode == 1
    assert "host h2 is cut off: its interface eth0 is down for 5 s (rank 1); all ranks were ended" in said, said


def goes_on_behind_a_short_cut(recipe: Path, folder: Path) -> bool | None:
    """Whether training does; None where the machine was so busy that the cut was a long one."""
    with starving.network(2, 200.0) as network:
        process = train(network, recipe, folder, 2)
        lines = folder / "out" / "metrics.jsonl"
        down = time.monotonic()
        network.cut("h2")
        time.sleep(1.5)  # in which its agent has looked
        network.mend("h2")
        short = time.monotonic() - down < DOWN_S - 1
        then = lines.read_text().count("\n")
        went_on = wait_until(lambda: lines.read_text().count("\n") > then + 5 or process.poll() is not None, 60)
        went_on &= process.poll() is None
        process.terminate()
        process.communicate(timeout=hygiene.patience(60))
    return went_on if short else None


def test_a_link_that_comes_back_soon_does_no_harm(recipe: Path, tmp_path: Path) -> None:
    attempts = (goes_on_behind_a_short_cut(recipe, tmp_path / str(number)) for number in range(5))
    assert next((told for told in attempts if told is not None), "no cut was short: the machine is overloaded") is True


def test_a_host_whose_packets_vanish_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sign of it at any link: Horovod's own timeout ends the wait, and who got no answer tells."""
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "20")  # as long may one rank's start take more than another's
    with starving.network(3, 200.0) as network:
        process = train(network, recipe, tmp_path, 3)
        network.swallow("h3")
        _, said = process.communicate(timeout=hygiene.patience(120))
    assert process.returncode == 1
    failure = next(line for line in said.splitlines() if not line.startswith("-np "))  # more ranks than cores
    told = failure.partition(";")[0]  # which of them noticed is a matter of who was sending
    assert "h3" in told and ("did not answer" in told or "got no answer" in told), said


def ended(rank: int, *unanswered: str) -> RankEnd:
    lost = FailureRecord("communication", "Timed out waiting 30000ms for recv operation to complete", 7)
    return RankEnd(rank, f"h{rank}", exit_code=1, record=lost, address=f"10.0.0.{rank}", unanswered=unanswered)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([ended(1), ended(2)], None),
        ([ended(1, "10.0.0.3"), ended(2, "10.0.0.3"), ended(3, "10.0.0.1")], "host h3 did not answer h1, h2"),
        ([ended(1, "10.0.0.2"), ended(2, "10.0.0.1")], "hosts h1, h2 did not answer each other"),
        ([ended(1, "10.0.0.9"), ended(2)], "host 10.0.0.9 did not answer h1"),
        ([ended(1), ended(2), ended(3, "10.0.0.1", "10.0.0.2")], "host h3 got no answer from h1, h2"),
        ([ended(1, "10.0.0.3"), ended(2), ended(3, "10.0.0.2")], "host h3 did not answer h1"),
    ],
)
def test_the_host_that_has_lost_most_others(ends: list[RankEnd], said: str | None, tmp_path: Path) -> None:
    job = Job(Path("python"), [], len(ends), [Host(end.host, 1) for end in ends], {}, tmp_path)
    failure = unreachable(job, ends)
    assert failure is None if said is None else said in str(failure)


def test_the_loopback_is_never_watched() -> None:
    for name in ("lo", None):
        link = LinkMonitor(name)
        assert link.interval_s == 0
        assert link.facts() == {"address": None, "unanswered": []}


UP, RUNNING = 0x1, 0x40


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (UP | RUNNING, None),
        (None, None),  # there is no such interface
        (UP, {"interface": "wire0", "up": True}),
        (RUNNING, {"interface": "wire0", "up": False}),
    ],
)
def test_a_link_that_stays_down_is_told_once(
    flags: int | None, told: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinkMonitor, "_flags", lambda link: flags)
    link = LinkMonitor("wire0")
    assert link.look() is None, "it may come back"
    link._down_since = time.monotonic() - 2 * DOWN_S
    assert link.look() == (told and ("link down", told))
    assert link.look() is None


def test_the_flags_are_the_interfaces_own() -> None:
    """Of the loopback, which every machine has; by its name it would not be asked."""
    link = LinkMonitor("lo")
    link._interface = "lo"
    flags, kept = link._flags(), int(Path("/sys/class/net/lo/flags").read_text(), 16)
    assert flags is not None and flags & UP == kept & UP == UP
    assert address_of("lo") == "127.0.0.1"


def of_the_rendezvous(port: int) -> dict[str, str]:
    return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}


def test_a_launcher_that_has_answered_and_then_not_for_a_minute_is_lost() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    watch = LauncherWatch(of_the_rendezvous(port.getsockname()[1]))
    assert watch.interval_s > 0 and watch.look() is None
    port.close()
    watch._ask_at = 0.0
    assert watch.look() is None, "it may come back"
    assert watch._heard_at is not None
    watch._ask_at, watch._heard_at = 0.0, watch._heard_at - LOST_S
    assert watch.look() == ("launcher lost", {})


def test_a_launcher_that_has_never_answered_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:
        number = port.getsockname()[1]
    watch = LauncherWatch(of_the_rendezvous(number))
    for _ in range(2):
        watch._ask_at = 0.0
        assert watch.look() is None
    assert LauncherWatch({}).interval_s == 0 and LauncherWatch({}).look() is None


SOON = """
import sys
from hvdkit.launch.agent import link_monitor, rank_agent
link_monitor.ASK_S, link_monitor.LOST_S = 0.1, 0.5
sys.exit(rank_agent.main())
"""


@pytest.mark.parametrize("command", [["sleep", "1000"], ["false"]])
def test_an_agent_that_ssh_has_started_ends_with_its_rank_where_the_launcher_is_lost(
    command: list[str], tmp_path: Path
) -> None:
    """A rank that runs, and one that has failed, whose agent waits for the launcher to end all."""
    with hygiene.marking() as mark, socket.create_server(("127.0.0.1", 0)) as port:
        there = {**of_the_rendezvous(port.getsockname()[1]), "HOROVOD_RANK": "1", hygiene.MARK: mark}
        words = [sys.executable, "-c", SOON, "shell-rank", str(tmp_path), "1", "0", *command]
        process = subprocess.Popen(words, env={**os.environ, **there}, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert process.stdout and b'"started"' in process.stdout.readline()
            assert not wait_until(lambda: process.poll() is not None, 1), "as long as the launcher answers"
            port.close()
            process.wait(hygiene.patience(30))
        finally:
            hygiene.kill_started_by(mark)
            process.communicate()
    assert process.returncode == (1 if command == ["false"] else 128 + signal.SIGTERM)
