"""`--debug`: what the lines of Horovod, NCCL and Gloo come to, by rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdkit.commands import debug_logs
from hvdkit.commands.debug_logs import lines
from hvdkit.results.debug import DebugLog
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

# As Horovod 0.28.1 prints it; microseconds are padded by spaces.
GLOO = """\
[2026-11-23 18:24:20. 97819: D /b/horovod/common/utils/env_parser.cc:107] Using GLOO to perform controller operations.
[2026-11-23 18:24:20.397863: D /b/horovod/common/utils/env_parser.cc:73] Using GLOO to perform CPU operations.
[2026-11-23 18:24:20.398415: D /b/horovod/common/gloo/gloo_context.cc:79] global rendezvous started for rank={rank}, \
size=4, dev={{tcp, pci=, iface={interface}, speed=-1, addr=[{address}]}}, timeout=30
[2026-11-23 18:24:20.439922: D /b/horovod/common/gloo/gloo_context.cc:79] local_{host} rendezvous started for rank=0, \
size=2, dev={{tcp, pci=, iface={interface}, speed=-1, addr=[{address}]}}, timeout=30
[2026-11-23 18:24:20.505350: I /b/horovod/common/operations.cc:689] [{rank}]: Horovod initialized
"""
# As NCCL 2.2x prints it.
NCCL = """\
NCCL version 2.27.3+cuda12.9
{host}:71:88 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
{host}:71:88 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.{rank}<0>
{host}:71:88 [0] NCCL INFO Using network Socket
{host}:71:88 [0] NCCL INFO Channel 00/02 :    0   2   1   3
{host}:71:88 [0] NCCL INFO Channel 01/02 :    0   1   2   3
{host}:71:88 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
{host}:71:88 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
{host}:71:88 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC/read
"""


def logs(folder: Path, text: str, interface: str = "eth0", **added: str) -> Path:
    """Logs of four ranks on two hosts."""
    folder.mkdir()
    for rank in range(4):
        host = f"h{1 + rank // 2}"
        said = text.format(rank=rank, host=host, interface=interface, address=f"10.0.0.{rank}")
        (folder / f"rank-{rank}.log").write_text("epoch 1: loss 2.3\n" + said + added.get(f"rank{rank}", ""))
    (folder / "rank-0.failure.json").write_text("{}")
    return folder


def test_gloos_ring_interfaces_and_hosts(tmp_path: Path) -> None:
    found = debug_logs.collect(logs(tmp_path / "logs", GLOO), tmp_path / "debug")
    assert DebugLog.read(tmp_path / "debug" / "debug.json") == found
    assert (found.controller, found.cpu_operations, found.nccl, found.first_problem) == ("GLOO", "GLOO", None, None)
    assert (found.rings, found.between_hosts) == ([[0, 1, 2, 3]], 2)
    assert [(each.rank, each.host, each.interface, each.addresses, each.lines) for each in found.ranks] == [
        (rank, f"h{1 + rank // 2}", "eth0", f"10.0.0.{rank}", 5) for rank in range(4)
    ]
    kept = (tmp_path / "debug" / "rank-2.log").read_text()
    assert "epoch 1" not in kept and kept.count("\n") == 5
    shown = lines(found)
    assert shown[0] == "debug: tensors by GLOO, negotiation by GLOO"
    assert shown[1] == "  ring: 0 → 1 → 2 → 3 → 0; 2 hops between hosts"
    assert "  rank 3 on h2: tcp over eth0, 10.0.0.3, 5 lines" in shown
    assert "  first warning or error: none" in shown
    assert len(found.records()) == 4


def test_ncclss_rings_network_and_channels(tmp_path: Path) -> None:
    found = debug_logs.collect(logs(tmp_path / "logs", GLOO + NCCL), tmp_path / "debug")
    assert (found.nccl, found.network, found.rings) == ("2.27.3+cuda12.9", "Socket", [[0, 2, 1, 3], [0, 1, 2, 3]])
    assert found.between_hosts == 4, "an order that leaves the host at each hop"
    assert found.ranks[0].ways == {"NET/Socket/0": 1, "P2P/IPC/read": 2}
    assert found.ranks[2].nccl_interface == "[0]eth0:10.0.0.2<0>"
    assert lines(found)[0] == "debug: tensors by NCCL 2.27.3+cuda12.9 over Socket, negotiation by GLOO"


def test_the_earliest_problem_of_all_ranks_comes_first(tmp_path: Path) -> None:
    added = {
        "rank1": "[2026-11-23 18:30:01.000001: E /b/operations.cc:12] [1]: Connection reset\n",
        "rank2": "h2:71:88 [0] misc/socket.cc:441 NCCL WARN socketFinalizeAccept: wrong type 4 != 3\n",
        "rank3": "[2026-11-23 18:30:01.     1: W /b/stall_inspector.cc:107] One or more tensors\n",
    }
    found = debug_logs.collect(logs(tmp_path / "logs", GLOO, **added), tmp_path / "debug")
    assert found.first_problem is not None and found.first_problem.name == "rank-3"
    assert [each.first_problem is not None for each in found.ranks] == [False, True, True, True]
    found = debug_logs.summary({"rank-2": [added["rank2"].strip()]}, {})
    assert found.first_problem is not None and "wrong type" in found.first_problem.text


def test_a_loopback_interface_between_hosts_is_said(tmp_path: Path) -> None:
    found = debug_logs.collect(logs(tmp_path / "logs", GLOO, interface="lo"), tmp_path / "debug")
    assert "  rank 0, 1, 2, 3: other hosts do not reach lo; set HOROVOD_GLOO_IFACE" in lines(found)


def test_ranks_that_never_found_each_other_have_their_launchers_hosts(tmp_path: Path) -> None:
    early = "".join(line for line in GLOO.splitlines(keepends=True) if "local_" not in line)
    folder = logs(tmp_path / "logs", early, interface="lo")
    found = debug_logs.collect(folder, tmp_path / "debug", {0: "h1", 1: "h1", 2: "h2", 3: "h2"})
    assert (found.between_hosts, [each.host for each in found.ranks]) == (2, ["h1", "h1", "h2", "h2"])
    assert "  rank 0, 1, 2, 3: other hosts do not reach lo; set HOROVOD_GLOO_IFACE" in lines(found)


def test_logs_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_bytes(b"epoch 1\n\xff\xfe[\n" + b"x" * 100_000)
    found = debug_logs.collect(tmp_path / "logs", tmp_path / "debug")
    assert (found.ranks[0].lines, found.rings, found.between_hosts) == (0, [], None)
    assert lines(found) == ["debug: neither Horovod nor NCCL has logged anything here; on other hosts see their logs"]


@pytest.mark.ranks
def test_a_run_with_debug_says_how_its_ranks_are_connected(
    warm: None, hvdkit: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    arguments = ["train", recipe, "--framework", "mxnet", "-np", 2, "steps=2", "model.name=resnet8", "checkpoint=null"]
    done = hvdkit(*arguments, "--debug", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "ring: 0 → 1 → 0; 0 hops between hosts" in done.stderr, done.stderr
    assert "rank 1 on localhost: tcp over lo, 127.0.0.1" in done.stderr
    found = DebugLog.read(tmp_path / "run" / "debug" / "debug.json")
    assert found.first_problem is None and [each.rank for each in found.ranks] == [0, 1]
    done = hvdkit(*arguments, "--overwrite", "--out", "run")
    assert done.returncode == 0 and "ring" not in done.stderr and not (tmp_path / "run" / "debug").exists()
    assert "Gloo context" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


def test_a_users_own_level_stays(monkeypatch: pytest.MonkeyPatch, inside: Hvdkit, recipe: Path) -> None:
    def settings(*words: object) -> dict[str, str]:
        done = inside("train", recipe, "--framework", "mxnet", "-np", 2, "--dry-run", "--json", *words)
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)["runs"][0]["environment"]
        return {name: value for name, value in found.items() if name in debug_logs.VARIABLES}

    assert settings() == {}
    assert settings("--debug") == debug_logs.VARIABLES
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "trace")
    assert settings("--debug") == {
        name: value for name, value in debug_logs.VARIABLES.items() if name != "HOROVOD_LOG_LEVEL"
    }
