"""A network that breaks while ranks train: which host is named, how soon, and that nothing hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import starving
from launching import wait_until

from hvdkit.launch.ends import RankEnd, Record
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.link import DOWN_S, Link
from hvdkit.launch.severed import unreachable

pytestmark = pytest.mark.timeout(120)
ENDLESS = ["epochs=1000", "log_every=1", "batch_size=4", "tune=rule"]


def train(network: Any, recipe: Path, folder: Path, hosts: int) -> subprocess.Popen[str]:
    """Training without an end on that many hosts; returns once it is well under way."""
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "-np", str(hosts)]
    where = ["-H", network.hosts_option(), "--out", str(folder / "out")]
    process = network.start([*command, *where, *ENDLESS], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    lines = folder / "out" / "metrics.jsonl"
    assert wait_until(lambda: lines.exists() and lines.read_text().count("\n") > 5, 60), process.stderr.read()
    return process  # type: ignore[no-any-return]


def test_a_host_whose_link_goes_down_is_named(recipe: Path, tmp_path: Path) -> None:
    with starving.network(2, 200.0) as network:
        process = train(network, recipe, tmp_path, 2)
        network.cut("h2")
        started = time.monotonic()
        _, said = process.communicate(timeout=60)
        seconds = time.monotonic() - started
    assert process.returncode == 1
    assert "host h2 is cut off: its interface eth0 is down for 5 s (rank 1); all ranks were ended" in said, said
    assert seconds < DOWN_S + 8


def test_a_link_that_comes_back_soon_does_no_harm(recipe: Path, tmp_path: Path) -> None:
    with starving.network(2, 200.0) as network:
        process = train(network, recipe, tmp_path, 2)
        lines = tmp_path / "out" / "metrics.jsonl"
        network.cut("h2")
        time.sleep(1.5)
        network.mend("h2")
        then = lines.read_text().count("\n")
        assert wait_until(lambda: lines.read_text().count("\n") > then + 5, 20)
        process.terminate()
        process.communicate(timeout=30)


def test_a_host_whose_packets_vanish_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sign of it at any link: Horovod's own timeout ends the wait, and who got no answer tells."""
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "8")
    with starving.network(3, 200.0) as network:
        process = train(network, recipe, tmp_path, 3)
        network.swallow("h3")
        started = time.monotonic()
        _, said = process.communicate(timeout=60)
        seconds = time.monotonic() - started
    assert process.returncode == 1
    told = said.partition(";")[0]  # whether one host or both noticed is a matter of who sent last
    assert "h3" in told and "did not answer" in told, said
    assert seconds < 8 + 12


def ended(rank: int, *unanswered: str) -> RankEnd:
    lost = Record("communication", "Timed out waiting 30000ms for recv operation to complete", 7)
    return RankEnd(rank, f"h{rank}", exit_code=1, record=lost, address=f"10.0.0.{rank}", unanswered=unanswered)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([ended(1), ended(2)], None),
        ([ended(1, "10.0.0.3"), ended(2, "10.0.0.3"), ended(3, "10.0.0.1")], "host h3 did not answer h1, h2"),
        ([ended(1, "10.0.0.2"), ended(2, "10.0.0.1")], "hosts h1, h2 did not answer each other"),
        ([ended(1, "10.0.0.9"), ended(2)], "host 10.0.0.9 did not answer h1"),
    ],
)
def test_the_host_that_most_accuse(ends: list[RankEnd], said: str | None, tmp_path: Path) -> None:
    job = Job(Path("python"), [], len(ends), [Host(end.host, 1) for end in ends], {}, tmp_path)
    failure = unreachable(job, ends)
    assert failure is None if said is None else said in str(failure)


def test_the_loopback_is_never_watched() -> None:
    for name in ("lo", None):
        link = Link(name)
        assert link.interval_s is None
        assert link.facts() == {"address": None, "unanswered": []}


def test_an_interface_that_is_up_is_no_fault() -> None:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    up = [name for name in names if Path(f"/sys/class/net/{name}/carrier").exists() and _has_carrier(name)]
    for name in up:
        link = Link(name)
        link._down_since = time.monotonic() - 2 * DOWN_S
        assert link.cut() is None


def _has_carrier(name: str) -> bool:
    try:
        return Path(f"/sys/class/net/{name}/carrier").read_text().strip() == "1"
    except OSError:  # it is down
        return False
