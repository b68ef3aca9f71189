"""Elastic runs: ranks are killed, frozen and added while four frameworks train with real Horovod."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit.checkpoint.elastic import Commits, Kept
from hvdkit.elastic_line import close_peer_sockets, recording_peer_sockets
from hvdkit.errors import RunError
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import AgentCommand, ElasticBounds, Job
from hvdkit.launch.launchers import elastic
from hvdkit.results.train import TrainResult, read_result
from hvdkit.runtimes.store import find
from tests import hygiene, paced
from tests.cluster import elastic_chaos
from tests.conftest import ROOT, Hvdkit, rest_thorough
from tests.conftest import run as run_command
from tests.launching import wait_until

pytestmark = pytest.mark.long

RECIPE = ROOT / "recipes" / "resnet20-digits.yaml"
ONE_KILLED = ["elastic={min_np: 1, max_np: 3, commit_every: 1}", "log_every=1"]
# Whoever waits for a rank that is gone waits for Gloo's timeout: longer than any of these tests.
FOR_EVER = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600"}


class Run:
    """A run of the command line in the background, its ranks, and how it ended.

    With `pace` it trains at the pace that a file sets (paced.py), `gate`.
    """

    def __init__(self, folder: Path, framework: str, *arguments: str, pace: str = "", **environment: str) -> None:
        self.out, self.gate = folder / "out", folder / "gate"
        command = [sys.executable, "-m", "hvdkit", "train", str(RECIPE), "--framework", framework]
        if pace:
            self.gate.write_text(pace)
            arguments = (*paced.overrides(self.gate), *arguments)
        self.process = subprocess.Popen(
            [*command, "--out", str(self.out), "batch_size=8", *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lines(self) -> list[dict[str, Any]]:
        """What metrics.jsonl has so far."""
        try:
            return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError):
            return []

    def reach(self, step: int, patience_s: float = 60) -> None:
        """Wait until so many updates are logged."""
        assert wait_until(lambda: any(line["step"] >= step for line in self.lines()), patience_s), self.said()

    def ranks(self) -> list[int]:
        """The processes that train; not their agents, nor what stands for a rank that is forked (tests/warm)."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                marks = (entry / "environ").read_text(errors="replace").split("\0") if entry.name.isdigit() else []
                trains = any(mark.startswith("HVDKIT_TRACE=worker") for mark in marks)
                forked = "warm/client.py" in (entry / "cmdline").read_text(errors="replace")
                if trains and f"HVDKIT_RANK_DIR={self.out}/logs" in marks and not forked:
                    found.append(int(entry.name))
        return found

    def said(self) -> str:
        """End it; what it has printed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.communicate(timeout=hygiene.patience(30))[0]

    def end(self, timeout: float = 120) -> tuple[int, str]:
        """Exit status and what it has printed."""
        out = self.process.communicate(timeout=hygiene.patience(timeout))[0]
        return self.process.returncode, out

    def result(self) -> TrainResult:
        """result.json, after a good end."""
        status, out = self.end()
        assert status == 0, out
        return read_result(self.out / "result.json")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start runs; none outlives the test."""
    runs: list[Run] = []

    def begin(framework: str, *arguments: str, pace: str = "", **environment: str) -> Run:
        runs.append(Run(tmp_path, framework, *arguments, pace=pace, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.said()
    assert wait_until(lambda: not any(run.ranks() for run in runs), 30)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "framework", rest_thorough("pytorch", "tensorflow", "mxnet")
)  # Keras is killed under horovodrun below
def test_a_rank_is_killed_and_a_new_one_joins(start: Any, tmp_path: Path, framework: str) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    arguments = ["epochs=1", "steps=160", *ONE_KILLED, "-np", "2", "--host-discovery-script", str(script)]
    run = start(framework, *arguments, pace="slow 0.2")
    run.reach(5)
    before = run.lines()[-1]["step"]
    run.gate.write_text("slow 1")  # of the 160 steps of one rank most are left when the new one is there
    os.kill(run.ranks()[0], signal.SIGKILL)
    assert wait_until(lambda: [line["total_steps"] for line in run.lines()][-1:] == [160], 60)
    assert wait_until(lambda: len(run.ranks()) == 1, 30)
    with hosts.open("a") as file:
        file.write("127.0.0.2:1\n")
    assert wait_until(lambda: [line["total_steps"] for line in run.lines()][-1:] == [89], 60)  # 1437 // 16
    run.gate.unlink()
    result = run.result()
    lost, joined = result.recoveries
    assert (lost.why, lost.np_before, lost.np) == ("lost", 2, 1)
    # what was committed is not done again: 8 images a rank, and a line is written before its update's commit
    assert lost.step * 8 > (before - 1) * 16
    assert (joined.why, joined.np_before, joined.np) == ("hosts", 1, 2)
    assert result.np == 2
    last = run.lines()[-1]
    assert last["epoch"] == 0 and last["ends_epoch"] and last["step"] == last["total_steps"] == 89
    peak = 0.05 * 16 / 32  # of the ranks that there are now; the first epoch warms up to it
    assert last["learning_rate"] == pytest.approx(0.05 + (peak - 0.05) * 88 / 89)


@pytest.mark.usefixtures("warm")
def test_it_goes_on_as_one_rank_would_have_from_there(start: Any, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """The same bits as a run of 2 ranks that is resumed with 1 from the update that was committed last.

    The 2 ranks have shares of the parameters, and the one that is left has all.
    """
    options = ["threads=1", "sharding=parameters"]
    run = start("pytorch", "epochs=1", "steps=170", *options, *ONE_KILLED, "-np", "2", pace="hold 20")
    run.reach(20)
    os.kill(run.ranks()[1], signal.SIGKILL)
    run.gate.unlink()
    result = run.result()
    (lost,) = result.recoveries
    committed = (lost.step - 1) // 2  # updates of two ranks
    common = [RECIPE, "--framework", "pytorch", "--out", tmp_path / "whole", "batch_size=8", "epochs=1"]
    common += [*options, "checkpoint={every_epochs: 1}", *paced.overrides(run.gate)]
    assert hvdkit("train", *common, "-np", 2, f"steps={committed}").returncode == 0
    assert hvdkit("train", *common, "-np", 1, "steps=170", "--resume").returncode == 0
    assert read_result(tmp_path / "whole" / "result.json").final_weights_sha256 == result.final_weights_sha256


@pytest.mark.usefixtures("warm")
def test_horovodruns_ranks_are_outlived_too(start: Any) -> None:
    """On the digits, of which ranks find theirs by the number of the image."""
    hosts = ["--launcher", "horovodrun", "-H", "localhost:2"]
    run = start("keras", "epochs=1", "steps=100", "model.name=resnet8", *ONE_KILLED, "-np", "2", *hosts)
    run.reach(5)
    os.kill(run.ranks()[0], signal.SIGKILL)
    assert [recovery.np for recovery in run.result().recoveries] == [1]


@pytest.mark.parametrize("launcher", ["direct", "horovodrun"])
def test_too_few_slots_are_told_and_not_waited_for_for_ever(start: Any, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o755)
    bounds = ["elastic={min_np: 2, max_np: 2}", "-np", "2", "--launcher", launcher]
    run = start("mxnet", *bounds, "--host-discovery-script", str(script), HOROVOD_ELASTIC_TIMEOUT="4")
    status, out = run.end(60)
    assert status == 1 and "Traceback" not in out, out
    assert "waiting for places: 0 of 2 ranks are there (-np), 1 are offered; it gives up in" in out
    assert "gave up: 0 of 2 ranks are there after 4 s (HOROVOD_ELASTIC_TIMEOUT); continue with --resume" in out


def test_a_frozen_rank_is_ended_and_outlived(start: Any) -> None:
    run = start("mxnet", "epochs=1", "steps=80", *ONE_KILLED, "-np", "2", "--stall-timeout", "6", pace="slow 0.1")
    run.reach(5)
    os.kill(run.ranks()[0], signal.SIGSTOP)
    run.gate.unlink()
    status, out = run.end()
    assert status == 0 and "hangs: no progress" in out, out
    assert "frozen by a signal" in out and "training continues with the others" in out


@pytest.mark.usefixtures("warm")
def test_those_left_over_do_not_wait_for_each_other(start: Any) -> None:
    """Of two, one hears of the loss only from the other, whose sockets Horovod would keep open."""
    options = [*ONE_KILLED, "-np", "3", "threads=1", "checkpoint={}"]
    run = start("mxnet", "epochs=1", "steps=90", *options, pace="hold 8", **FOR_EVER)
    run.reach(8)
    os.kill(run.ranks()[0], signal.SIGKILL)
    run.gate.unlink()
    # In one look: the lines of an epoch are taken back where the number of ranks changes.
    assert wait_until(lambda: [line["total_steps"] for line in run.lines()][-1:] == [89], 100), run.said()
    result = run.result()
    assert [recovery.np for recovery in result.recoveries] == [2]
    again = [sys.executable, *run.process.args[1:], "--resume"]  # asks for 3 ranks, and 2 have done it
    assert (
        subprocess.run(again, timeout=hygiene.patience(60)).returncode == 0
        and read_result(run.out / "result.json") == result
    )


@pytest.mark.usefixtures("warm")
def test_too_few_ranks_are_made_up_for(start: Any) -> None:
    bounds = ["elastic={min_np: 2, max_np: 2, commit_every: 1}", "log_every=1", "-np", "2"]
    run = start("mxnet", "epochs=1", "steps=60", *bounds, pace="hold 8")
    run.reach(8)
    os.kill(run.ranks()[0], signal.SIGKILL)
    run.gate.unlink()
    result = run.result()
    assert result.np == 2 and result.recoveries[-1].np == 2 and result.steps == 60


@pytest.mark.usefixtures("warm")
def test_all_ranks_lost_begin_anew_from_the_last_commit(start: Any) -> None:
    run = start("mxnet", "epochs=1", "steps=60", *ONE_KILLED, "-np", "2", "checkpoint={every_steps: 5}", pace="hold 12")
    run.reach(12)
    assert wait_until((run.out / "checkpoints" / "step-00000010").exists, 30), run.said()
    for pid in run.ranks():
        os.kill(pid, signal.SIGKILL)
    run.gate.unlink()
    result = run.result()
    assert result.np == 2 and result.steps == 60
    assert result.first_step >= 11  # a line is written before its update is committed
    assert (result.recoveries[0].why, result.recoveries[0].np_before, result.recoveries[-1].np) == ("lost", 2, 2)


def test_a_rank_lost_before_it_met_the_others_is_not_waited_for(start: Any, tmp_path: Path) -> None:
    """Ranks are held up as their interpreters start (held/sitecustomize.py): warm ones would have met by then."""
    (tmp_path / "held").touch()
    held = {"PYTHONPATH": str(ROOT / "tests" / "held"), "HELD_BY": str(tmp_path / "held")}
    run = start("mxnet", "epochs=1", "steps=20", *ONE_KILLED, "-np", "3", "threads=1", **held, **FOR_EVER)
    assert wait_until(lambda: len(run.ranks()) == 3, 60)
    os.kill(run.ranks()[1], signal.SIGKILL)
    (tmp_path / "held").unlink()
    status, out = run.end(240)
    assert status == 0 and "training has not begun yet" in out, out
    assert read_result(run.out / "result.json").np == 3


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
def test_a_schedule_of_losses_and_joins_is_survived(tmp_path: Path) -> None:
    """A short one of tests/cluster/elastic_chaos.py: also losses in a recovery, and of all ranks."""
    chaos = elastic_chaos.Chaos("mxnet", 3, tmp_path, events=4, epochs=12, kinds=["two", "joining", "all", "offer"])
    outcome = chaos.run()
    assert not outcome["faults"], outcome
    assert len(outcome["events"]) >= 3 and outcome["aborted"] == 0, outcome


@pytest.mark.usefixtures("warm")
def test_a_ranks_own_fault_ends_the_run_at_once(start: Any) -> None:
    """It would fail again: images of 100 classes for a model of 10."""
    run = start("mxnet", *ONE_KILLED, "-np", "2", "data={name: cifar10, path: /nowhere}")
    status, out = run.end()
    assert status == 2 and "/nowhere" in out and "Traceback" not in out, out
    assert "is started again" not in out and "is starting" not in out, out


@pytest.mark.usefixtures("warm")
def test_sigterm_ends_it_behind_a_checkpoint(start: Any) -> None:
    run = start("mxnet", "epochs=4", *ONE_KILLED, "-np", "2", "checkpoint={every_epochs: 1}", pace="slow 0.1")
    run.reach(5)
    run.process.terminate()
    status, out = run.end(60)
    assert status == 0 and "stopped by SIGTERM after" in out, out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("#!/bin/sh\necho no cloud today >&2; exit 3", "failed with status 3: no cloud today"),
        ("#!/bin/sh\necho Error: the cloud is cloudy", "expected host:slots a line, got 'Error: the cloud is cloudy'"),
        ("#!/bin/sh\necho localhost:1; echo host.invalid:2", "host.invalid is not this machine"),
        (
            "#!/bin/sh\nexec yes localhost:2",
            "it prints more than 1 MiB); expected a program that prints host:slots a line",
        ),
        ("#!/bin/sh\necho localhost:999999", "ranks on this machine, 64 a core"),
        ("#!/nowhere/sh\n", "cannot be run (No such file or directory); expected a program"),
    ],
)
def test_a_discovery_script_is_tried_before_anything_starts(
    inside: Hvdkit, tmp_path: Path, text: str, told: str
) -> None:
    script = tmp_path / "discover"
    script.write_text(text)
    script.chmod(0o755)
    options = ["--out", "out", "elastic={max_np: 2}", "--host-discovery-script", script]
    done = inside("train", RECIPE, "--framework", "mxnet", *options)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_cycle_time_is_refused_where_ranks_may_join(inside: Hvdkit) -> None:
    done = inside("train", RECIPE, "--out", "out", "elastic={max_np: 2}", HOROVOD_CYCLE_TIME="5")
    assert done.returncode == 2 and "HOROVOD_CYCLE_TIME: expected not to be set" in done.stderr


def test_a_driver_whose_agent_is_killed_is_told(tmp_path: Path) -> None:
    """It reports nothing then, and no worker has."""
    hosts = parse_hosts(None, 2)
    job = Job(Path(sys.executable), [], 2, hosts, {}, tmp_path, elastic=ElasticBounds(1, 2))
    killer = [sys.executable, "-c", "import os, time; os.kill(os.getppid(), 9); time.sleep(60)"]
    driver = AgentCommand(None, killer, job.base_environment())
    with pytest.raises(RunError, match=r"^the agent of the elastic driver was killed, .* --resume$"):
        elastic.supervise(job, driver, None)


def test_workers_that_come_and_go_do_not_share_a_gpu() -> None:
    """Two GPUs: the second host stays on its own while others take turns on the first."""
    code = """
import sys
from hvdkit.launch.launchers.elastic_places import Local
places = Local({"places": ["a-0", "b-0"], "discovery": None}, [sys.executable, "-c", "import time; time.sleep(60)"])
places.count = 2
def gpus(*names):
    for name in names:
        places.start(name, {})
    return [places.gpus[name][0] for name in names]
assert gpus("b-0", "a-0") == [0, 1]
places.gpus["a-0"][1].kill()
places.gpus["a-0"][1].wait()
assert gpus("c-0") == [1], "the one that a-0 had"
assert gpus("d-0", "e-0", "f-0") == [0, 1, 0], "more workers than GPUs"
for _, process in places.gpus.values():
    process.kill()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_command([str(find("mxnet").python), "-c", code], 60, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_recovery_lasts_from_the_first_loss_to_the_next_update() -> None:
    commits = Commits()
    said = {"numbers": {"rank": 1}, "fresh": False, "recoveries": [], "kept": {}}
    commits.begin({**said, "interrupted": None})
    commits.stepped(7, 3)
    commits.begin({**said, "interrupted": {"ago_s": 5.0, "why": "lost", "np": 3}})
    commits.stepped(12, 2)
    commits.stepped(13, 2)
    (recovery,) = commits.recoveries
    assert (recovery.why, recovery.step, recovery.np_before, recovery.np) == ("lost", 12, 3, 2)
    assert recovery.seconds >= 5.0


def test_a_commit_outlives_its_rank_unless_it_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two files in turn: a rank that dies while it writes leaves the one before."""
    names = ["hvdkit-test-a", "hvdkit-test-b"]
    files = {f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}": name for name in names}
    kept: Any = Kept(files)
    assert kept.read() is None
    for number in range(5):
        kept.write({"state": np.full(1000 - number, number)})
        assert Kept(files).read()["state"].tolist() == [number] * (1000 - number)

    def dies(*_: object, **__: object) -> None:
        raise SystemExit

    monkeypatch.setattr(pickle, "dump", dies)
    with pytest.raises(SystemExit):
        kept.write({"state": np.zeros(1)})
    assert Kept(files).read()["state"][0] == 4
    other = dict.fromkeys(files, "somebody-elses")
    Kept(other).write({})
    assert Kept(other).read() is None and Kept(files).read()["state"][0] == 4


def test_lines_to_other_ranks_are_hung_up_and_no_others() -> None:
    own, others = socket.socketpair()
    with recording_peer_sockets():
        line, peer = socket.socketpair()
    with own, others, line, peer:
        close_peer_sockets()
        assert peer.recv(1) == b"" and line.fileno() >= 0
        own.send(b"x")
        assert others.recv(1) == b"x"
