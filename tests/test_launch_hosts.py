"""The grammar of -H and the placement of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import hygiene
import pytest

from hvdkit.errors import RequestError
from hvdkit.launch import hosts
from hvdkit.launch.hosts import Host, Slot, discovered, parse_hosts, place


def test_without_hosts_all_ranks_are_here() -> None:
    assert parse_hosts(None, 3) == [Host("localhost", 3)]


def test_hosts_in_the_order_given() -> None:
    assert parse_hosts("b:2,10.0.0.7:1,node-3.cluster_a:16", 5) == [
        Host("b", 2),
        Host("10.0.0.7", 1),
        Host("node-3.cluster_a", 16),
    ]


def test_a_path_names_a_file_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("b slots=2\na:1\n")
    assert parse_hosts("./hosts", 3) == [Host("b", 2), Host("a", 1)]
    with pytest.raises(RequestError, match=r"-np 4: -H offers 3 slots"):
        parse_hosts("./hosts", 4)
    with pytest.raises(RequestError, match="nowhere/hosts: cannot be read"):
        parse_hosts("nowhere/hosts", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty entry"),
        ("a:2,", "empty entry"),
        ("a", "'a': no number of slots"),
        ("a:0", "'a:0': slots"),
        ("a:-1", "'a:-1': slots"),
        ("a:two", "'a:two': slots"),
        ("a:1.5", "'a:1.5': slots"),
        ("a:", "'a:': slots"),
        ("a:1\n", "slots"),
        ("a:²", "slots"),
        ("a:99999999999999999999", "slots"),
        (":2", "':2': the host's name"),
        ("-oProxyCommand=x:2", "the host's name"),
        ("a;reboot:2", "the host's name"),
        ("$(reboot):2", "the host's name"),
        ("a b:2", "the host's name"),
        ("a:2, b:2", "' b:2': the host's name"),
        ("a\n:2", "the host's name"),
        ("hôte:2", "the host's name"),
        ("[::1]:2", "IPv6"),
        ("::1:2", "IPv6"),
        ("a:1,a:2", "host a is named twice"),
        ("x" * 300 + ":1", "the host's name"),
    ],
)
def test_an_odd_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_hosts(text, 1)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        parse_hosts("a:0,b:1,;:2", 1)
    first, second = str(caught.value).splitlines()
    assert "'a:0'" in first
    assert "';:2'" in second


@pytest.mark.parametrize("np", [0, -1])
def test_np_below_one(np: int) -> None:
    with pytest.raises(RequestError, match=f"-np {np}: expected"):
        parse_hosts(None, np)


def test_more_ranks_than_slots() -> None:
    with pytest.raises(RequestError, match=r"-np 4: -H offers 3 slots \(a:1,b:2\); ask for at most 3 or add slots"):
        parse_hosts("a:1,b:2", 4)


def test_placement_fills_one_host_after_the_other() -> None:
    assert place(parse_hosts("a:2,b:1", 3), 3) == [
        Slot("a", rank=0, size=3, local_rank=0, local_size=2, cross_rank=0, cross_size=2),
        Slot("a", rank=1, size=3, local_rank=1, local_size=2, cross_rank=0, cross_size=1),
        Slot("b", rank=2, size=3, local_rank=0, local_size=1, cross_rank=1, cross_size=2),
    ]


def test_placement_leaves_spare_slots_empty() -> None:
    slots = place(parse_hosts("a:1,b:4,c:4", 3), 3)
    assert [(slot.hostname, slot.local_rank, slot.local_size) for slot in slots] == [
        ("a", 0, 1),
        ("b", 0, 2),
        ("b", 1, 2),
    ]
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
    monkeypatch.setattr(hosts, "_DISCOVERY_S", 1.0)
    for text, told in {
        "yes localhost:2": "prints more than 1 MiB",
        "yes >&2": "prints more than 1 MiB",
        "sleep 600": "expected it to end within 1 s",
        "while :; do echo localhost:1; sleep 0.1; done": "expected it to end within 1 s",
        "exec >&- 2>&-; sleep 600": "expected it to end within 1 s",
    }.items():
        with pytest.raises(RequestError, match=told) as caught:
            asked(text)
        assert len(str(caught.value).splitlines()) == 1
