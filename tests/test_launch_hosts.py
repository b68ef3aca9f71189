"""The grammar of -H and the placement of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hvdkit.errors import RequestError
from hvdkit.launch import hosts
from hvdkit.launch.hosts import Host, discovered, parse_hosts
from hvdkit.launch.slots import Slot, fill
from tests import hygiene

pytestmark = pytest.mark.check


def test_hosts_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_hosts(None, 3) == [Host("localhost", 3)]
    by_name = [Host("b", 2), Host("10.0.0.7", 1), Host("node-3.cluster_a", 16)]
    assert parse_hosts("b:2,10.0.0.7:1,node-3.cluster_a:16", 5) == by_name
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("b slots=2\na:1\n")
    assert parse_hosts("./hosts", 3) == [Host("b", 2), Host("a", 1)]


@pytest.mark.parametrize(
    "text",
    ["", "a:2,", "a", "a:0", "a:-1", "a:two", "a:1.5", "a:", "a:1\n", "a:²", "a:99999999999999999999", ":2",
     "-oProxyCommand=x:2", "a;reboot:2", "$(reboot):2", "a b:2", "a:2, b:2", "a\n:2", "hôte:2", "x" * 300 + ":1"],
)  # fmt: skip
def test_an_odd_entry_is_named(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_hosts(text, 1)
    entry = next(repr(entry[:80]) for entry in text.split(",") if entry != "a:2")
    assert str(caught.value).startswith(f"-H: {entry}: expected host:slots") and len(str(caught.value)) < 320


@pytest.mark.parametrize(
    ("text", "np", "said"),
    [
        ("[::1]:2", 1, "IPv6"),
        ("::1:2", 1, "IPv6"),
        ("a:1,a:2", 1, "host a is named twice"),
        ("a:0,b:1,;:2", 1, r"'a:0'.*\n.*';:2'"),  # all faults at once
        (None, 0, "-np 0: expected"),
        (None, -1, "-np -1: expected"),
        ("a:1,b:2", 4, r"-np 4: -H offers 3 slots \(a:1,b:2\)"),
        ("nowhere/hosts", 1, "nowhere/hosts: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(text: str | None, np: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_hosts(text, np)


def test_placement_fills_one_host_after_the_other_and_leaves_spare_slots_empty() -> None:
    assert fill(parse_hosts("a:2,b:1", 3), 3) == [
        Slot("a", rank=0, size=3, local_rank=0, local_size=2, cross_rank=0, cross_size=2),
        Slot("a", rank=1, size=3, local_rank=1, local_size=2, cross_rank=0, cross_size=1),
        Slot("b", rank=2, size=3, local_rank=0, local_size=1, cross_rank=1, cross_size=2),
    ]
    slots = fill(parse_hosts("a:1,b:4,c:4", 3), 3)
    placed = [(slot.hostname, slot.local_rank, slot.local_size) for slot in slots]
    assert placed == [("a", 0, 1), ("b", 0, 2), ("b", 1, 2)]
    assert [(slot.cross_rank, slot.cross_size) for slot in slots] == [(0, 2), (1, 2), (0, 1)]


def test_a_discovery_script_is_bounded_in_time_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it leaves a program in the background that holds its output open."""
    script = tmp_path / "discover"

    def asked(text: str) -> list[Host]:
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        return discovered(script, here=True)

    begin = time.monotonic()
    left = tmp_path / "left"
    assert asked(f"sleep 600 & echo $! >{left}; echo localhost:2; echo localhost:1") == [Host("localhost", 1)]
    os.kill(int(left.read_text()), signal.SIGKILL)
    assert asked("") == []
    assert time.monotonic() < begin + hygiene.patience(60)
    for text, seconds, told in [
        ("yes localhost:2", hygiene.patience(20), "prints more than 1 MiB"),
        ("yes >&2", hygiene.patience(20), "prints more than 1 MiB"),
        ("sleep 600", 1, "no answer within 1 s"),
        ("while :; do echo localhost:1; sleep 0.1; done", 1, "no answer within 1 s"),
        ("exec >&- 2>&-; sleep 600", 1, "no answer within 1 s"),
    ]:
        monkeypatch.setattr(hosts, "_DISCOVERY_S", seconds)
        with pytest.raises(RequestError, match=told) as caught:
            asked(text)
        assert "\n" not in str(caught.value)
