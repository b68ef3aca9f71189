"""`hvdkit doctor -H …`: hosts that an `ssh` of the test's own simulates, and network namespaces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands import doctor, host_faults
from hvdkit.errors import RequestError
from hvdkit.launch.hosts import Host, read_hostfile
from hvdkit.results.doctor import HostReport, HostsReport, Interface, Route, RuntimeThere
from hvdkit.results.json_files import read
from tests import hygiene
from tests.cluster import starving
from tests.conftest import ROOT, Hvdkit

pytestmark = pytest.mark.check

# Runs what a real one would run there. The names of some hosts say what is wrong with them.
_SSH = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -T ] && shift || shift 2; done
export FAKE_HOST="$1"; shift
case "$FAKE_HOST" in
    locked*) echo "root@$FAKE_HOST: Permission denied (publickey)." >&2; exit 255;;
    silent*) exec sleep 60;;
    greeting*) echo "Welcome to $FAKE_HOST!"; echo "You have mail." >&2;;
esac
exec sh -c "$*"
"""
# The interpreter of a runtime: this one; on some hosts it is not there, or another one.
_PYTHON = f"""\
#!/bin/sh
case "$FAKE_HOST" in
    broken*) echo "python: error while loading shared libraries: libpython3.so" >&2; exit 127;;
    other*) [ "$2" = -S ] || {{ echo 3.9.2; exit; }};;
esac
exec {sys.executable} "$@"
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with one runtime, and an ssh to hosts of any name."""
    folder = tmp_path / "fake"
    runtime = folder / "runtimes" / "pytorch"
    (runtime / "bin").mkdir(parents=True)
    python = runtime / "bin" / "python"
    for path, text in ((folder / "ssh", _SSH), (python, _PYTHON)):
        path.write_text(text)
        path.chmod(0o755)
    record = {"name": "pytorch", "python": str(python), "key": "", "gpu": False, "added": False, "versions": {},
              "controllers": ["gloo"], "operations": ["gloo"]}  # fmt: skip
    (runtime / "runtime.json").write_text(json.dumps(record))
    return {"HVDKIT_RUNTIMES": str(folder / "runtimes"), "PATH": f"{folder}:{os.environ['PATH']}"}


def hosts(*names: str) -> str:
    return ",".join(f"{name}:1" for name in names)


@pytest.mark.ranks  # each host has a time to answer in
def test_thirty_two_hosts(hvdkit: Hvdkit, fake: dict[str, str], tmp_path: Path) -> None:
    names = [f"node{number:02}" for number in range(1, 33)]
    asked = ["doctor", "-H", hosts(*names), "--interface", "lo", "--out", "found"]
    done = hvdkit(*asked, timeout=60, **fake)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(HostsReport, tmp_path / "found" / "doctor.json", "hosts")
    assert [host.name for host in found.hosts] == names and found.runtimes == ["pytorch"]
    for host in found.hosts:
        assert (host.reachable, host.way, host.interface, host.address) == (True, "ssh", "lo", "127.0.0.1")
        assert host.neighbour and (host.neighbour.latency_us or 0) > 0
        assert host.shared_memory == "works"
        assert host.shares_files and host.runtimes["pytorch"].versions["numpy"]
    assert "32 of 32 hosts answer, ranks can run on them" in done.stdout


@pytest.mark.ranks
def test_each_fault_is_named_with_its_host_and_its_remedy(hvdkit: Hvdkit, fake: dict[str, str], tmp_path: Path) -> None:
    asked = ["doctor", "--hostfile", "hosts", "--interface", "127.0.0.0/8"]
    (tmp_path / "hosts").write_text("greeting1 slots=1\nlocked1\nbroken1\nother1\ngood1 slots=1000 # a GPU\n")
    done = hvdkit(*asked, timeout=60, **fake)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for what, remedy in (
        ("fault: locked1: root@locked1: Permission denied (publickey).", "ssh-copy-id locked1"),
        ("fault: broken1: runtime 'pytorch': python: error while loading shared libraries", "runtime build pytorch"),
        ("fault: other1: runtime 'pytorch': numpy missing, elsewhere", "runtime build pytorch"),
        ("note: good1: 1000 slots on", "give no more slots than cores"),
    ):
        place = next((number for number, line in enumerate(lines) if line.startswith(what)), None)
        assert place is not None and remedy in lines[place + 1], done.stdout
    assert not any(line.startswith(("fault: greeting1", "fault: good1")) for line in lines)
    assert "4 of 5 hosts answer, 3 with faults" in done.stdout


def test_a_host_that_says_nothing_is_not_waited_for_for_long(
    monkeypatch: pytest.MonkeyPatch, fake: dict[str, str], tmp_path: Path
) -> None:
    for name, value in fake.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "START_S", 1.0)
    with hygiene.marking() as mark:
        found = doctor.examine([Host("silent1", 1)], None, tmp_path)
    assert [each.what for each in found.faults] == ["no answer in time"]
    assert hygiene.left_behind(mark) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a host on each line"),
        ("a slots=two", "line 1: expected NAME slots=N"),
        ("a:1\n\n-oProxyCommand=x slots=1", "line 3: expected NAME slots=N"),
        ("a slots=0", "line 1: expected 1 slot or more"),
        ("a\nb\na", "line 3: host a is named twice"),
    ],
)
def test_a_wrong_hostfile(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(RequestError, match=said):
        read_hostfile(tmp_path / "hosts")


def test_hostfiles_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# mine\na slots=2\nb:3\n\n10.0.0.7 slots = 4 max_slots=8\nc\n")
    assert read_hostfile(tmp_path / "hosts") == [Host("a", 2), Host("b", 3), Host("10.0.0.7", 4), Host("c", 1)]


def of_mxnet(version: str, horovod: str) -> dict[str, RuntimeThere]:
    return {"mxnet": RuntimeThere(versions={"mxnet": version}, horovod=horovod)}


def way(**changes: Any) -> list[Route]:
    return [Route.model_validate({"address": "10.0.0.1", **changes})]


def report(name: str, **changes: Any) -> HostReport:
    """A host without any fault."""
    usual = {
        "slots": 2, "way": "ssh", "reachable": True, "cores": 8, "memory_bytes": 2**34, "folders": {"/there": 2**34},
        "shares_files": True, "shared_memory": "works", "hvdkit": "1", "resolves": {name: ["10.0.0.1"]},
        "runtimes": of_mxnet("1.9.1", "2"),
        "interfaces": [Interface(name="eth0", address="10.0.0.1", bits=24)], "interface": "eth0",
        "address": "10.0.0.1",
        "ways": way(),
    }  # fmt: skip
    return HostReport(name=name, **{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "said", "fault"),
    [
        ({"memory_bytes": 2**28}, "256 MiB of memory available", False),
        ({"folders": {"/there": 2**20}}, "1 MiB free on the disk of /there", False),
        ({"gpus": ["H100", "H100"]}, "GPUs: H100, H100; others have none", False),
        ({"hvdkit": None}, "no hvdkit in ", True),
        ({"hvdkit": "2"}, "its hvdkit differs from the other hosts'", True),
        ({"runtimes": of_mxnet("1.9.0", "2")}, "mxnet 1.9.0, elsewhere 1.9.1", True),
        ({"runtimes": of_mxnet("1.9.1", "3")}, "another build of Horovod", True),
        ({"resolves": {"h2": ["127.0.1.1"]}}, "on itself, its name means 127.0.1.1", False),
        ({"resolves": {}}, "the name service gives no answer", False),
        ({"shared_memory": "memfd_create: Not permitted"}, "no shared memory, so all ranks talk through socke", False),
        ({"slots": 3}, "slots: 3, others have 2: ranks of a host talk through sockets", False),
        ({"shares_files": False}, "it does not see the results' folder", False),
        ({"ways": way(fault="Connection refused")}, "no other host reaches it (10.0.0.1: Conn", True),
        ({"address": "fd00::1", "ways": way(address="fd00::1")}, "by IPv6 alone (fd00::1)", True),
        ({"interface": None, "address": None, "ways": []}, "no interface fits --interface ib0; it has eth0", True),
    ],
)  # fmt: skip
def test_faults(changes: dict[str, Any], said: str, fault: bool) -> None:
    reports = [report("h1"), report("h2", **changes), report("h3")]
    found = host_faults.judge(reports, "ib0" if changes.get("ways") == [] else None, Path("/there"))
    assert {"h2"} == {each.host for each in found}, found
    assert said in found[0].what and found[0].fault == fault and found[0].remedy


def test_hosts_without_faults() -> None:
    assert host_faults.judge([report("h1"), report("h2")], None, Path("/there")) == []


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    with starving.network(3, 40.0, control=False) as made:
        yield made


def examined(network: Any, folder: Path, *options: str) -> HostsReport:
    command = [sys.executable, "-m", "hvdkit", "doctor", "-H", network.hosts_option(1), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HVDKIT_RUNTIMES": str(folder / "none")}
    network.run(
        [*command, "--out", str(folder / "found"), "--overwrite"], env=environment, timeout=hygiene.patience(60)
    )
    return read(HostsReport, folder / "found" / "doctor.json", "hosts")


@pytest.mark.ranks
def test_addresses_are_those_of_the_hosts_own_links(network: Any, tmp_path: Path) -> None:
    found = examined(network, tmp_path)
    for number, host in enumerate(found.hosts, 1):
        assert (host.interface, host.address, host.way) == ("eth0", f"10.77.0.{number}", "srun"), found.faults
        assert host.neighbour and host.neighbour.source and host.neighbour.source != host.address


@pytest.mark.ranks
def test_a_second_interface_is_used_where_it_is_asked_for(network: Any, tmp_path: Path) -> None:
    """Each host gets a second network, and all of them the same address for a bridge of containers."""
    for number, name in enumerate(network.names, 1):
        link = ["ip", "link", "add", f"to-{name}-1", "master", "switch", "up", "type", "veth", "peer", "eth1", "netns"]
        network.run([*link, name], check=True)
        for interface, address in (("eth1", f"10.99.0.{number}/24"), ("containers", "172.17.0.1/16")):
            if interface == "containers":
                network.run(["ip", "link", "add", interface, "type", "bridge"], name, check=True)
            network.run(["ip", "address", "add", address, "dev", interface], name, check=True)
            network.run(["ip", "link", "set", interface, "up"], name, check=True)
    by_route = examined(network, tmp_path)
    assert len({(host.address or "").rpartition(".")[0] for host in by_route.hosts}) == 1, "a network that all share"
    assert not any(each.fault for each in by_route.faults)
    found = examined(network, tmp_path, "--interface", "10.99.0.0/16")
    assert [host.address for host in found.hosts] == ["10.99.0.1", "10.99.0.2", "10.99.0.3"], found.faults


@pytest.mark.ranks
def test_a_host_that_nobody_reaches_is_named(network: Any, tmp_path: Path) -> None:
    network.swallow("h2")
    network.run(["ip", "link", "set", "eth1", "down"], "h2")  # of the test above, if it ran
    found = examined(network, tmp_path)
    assert [each.host for each in found.faults if each.fault] == ["h2"]
    assert found.faults[0].what.startswith("no other host reaches it (")
