"""`--launcher slurm` and `hvdkit submit` under a real Slurm: three hosts, each with a slurmd of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvdkit.launch.launchers.slurm import _counts
from tests import hygiene
from tests.cluster import starving
from tests.cluster.slurm_daemons import Slurm
from tests.conftest import ROOT

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

HVDKIT = [sys.executable, "-m", "hvdkit"]
# Enough steps for a job to be stopped among them; the rates are the digits' own.
RECIPE = ["resnet20-digits", "model.name=resnet8", "epochs=10", "threads=1", "log_every=1", "checkpoint.every_steps=5"]
# By name: Slurm is free to choose among three hosts, and takes the third while a node of the others is completing.
ALLOCATION = ["salloc", "--quiet", "--nodelist=h1,h2", "-N2", "-n4"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := Slurm.missing():
        pytest.skip(f"needs Slurm ({missing[0]}): sudo make cluster-check")
    if os.geteuid() != 0:
        pytest.skip("needs root, as Slurm's daemons do")
    folder = tmp_path_factory.mktemp("slurm")
    with starving.network(3, 1000.0, control=False) as network, Slurm(network, folder) as running:
        yield running


def call(slurm: Slurm, command: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return slurm.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        timeout=hygiene.patience(120), **options,
    )  # fmt: skip


def wait_for(what: Callable[[], object], said: Callable[[], str] = str) -> None:
    until = time.monotonic() + hygiene.patience(90)
    while not what():
        assert time.monotonic() < until, said()
        time.sleep(0.1)


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def processes(run: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """The processes that have that run on their command lines, with these and their environments."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                if str(run).encode() in words:
                    yield int(entry.name), words, environment


def rank_of(run: Path, rank: int) -> int:
    """The process of a rank of that run."""
    for number, _, environment in processes(run):
        if f"\0HVDKIT_TRACE=rank-{rank}\0".encode() in environment:
            return number
    raise AssertionError(f"rank {rank} does not run")


def start_again(slurm: Slurm, job: str, said: Callable[[], str]) -> None:
    """Start a job that was queued again: Slurm would let it wait for two minutes.

    A node refuses a job that starts in the second in which its last start was ended ("Job credential revoked"), and
    Slurm then gives the job up. So time has to pass in which the job is no longer COMPLETING.
    """
    shown = partial(call, slurm, ["scontrol", "show", "job", job], slurm.folder)
    wait_for(lambda: re.search(r"JobState=PENDING .* Restarts=1 ", shown().stdout, re.DOTALL), said)
    time.sleep(2)
    done = call(slurm, ["scontrol", "update", f"jobid={job}", "StartTime=now"], slurm.folder)
    assert done.returncode == 0, done.stderr + said()


def hosts_of(slurm: Slurm, job: str) -> list[str]:
    """The hosts that Slurm has chosen for a job that runs."""
    chosen = call(slurm, ["squeue", "-h", "-j", job, "-o", "%N"], slurm.folder).stdout.strip()
    return call(slurm, ["scontrol", "show", "hostnames", chosen], slurm.folder).stdout.split()


@pytest.fixture(scope="module")
def unbroken(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks on two hosts, from its first step to its last."""
    folder = tmp_path_factory.mktemp("unbroken")
    train = ["train", *RECIPE, "--framework", "mxnet", "-np", "4", "--out", "run"]
    done = call(slurm, [*ALLOCATION, *HVDKIT, *train], folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_four_ranks_train_on_two_hosts(unbroken: Path) -> None:
    result = json.loads((unbroken / "result.json").read_text())
    assert (result["launcher"], result["np"]) == ("slurm", 4), "chosen by itself inside an allocation"
    ends = json.loads((unbroken / "logs" / "exits.json").read_text())
    assert [(end["host"], end["exit_code"]) for end in ends] == [("h1", 0), ("h1", 0), ("h2", 0), ("h2", 0)]


def test_a_comparison_is_one_command_in_an_allocation(slurm: Slurm, tmp_path: Path) -> None:
    """On one host and on both, by the allocation alone; efficiency is over hosts."""
    words = ["compare", *RECIPE, "steps=6", "warmup_steps=1", "--framework", "mxnet", "--no-parity", "--out", "out"]
    done = call(slurm, [*ALLOCATION, *HVDKIT, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [(run["launcher"], run["hosts"]) for run in told["runs"]] == [
        ("slurm", ["h1", "h1"]),
        ("slurm", ["h1", "h1", "h2", "h2"]),
    ]
    assert [(row["np"], row["against"]) for row in told["ratios"]] == [(4, "np=2")]
    assert "ranks 2 on h1, 2 on h2" in done.stdout


def test_a_script_that_is_warned_goes_on_from_its_own_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    """It is queued again, as `--requeue` says, and ends; what it printed at both starts is in the job's log."""
    kept, script = tmp_path / "kept", str(ROOT / "tests" / "launched" / "resumes.py")
    options = ["-np", "4", "--nodes", "2", "--time", "10", "--requeue", "--out", str(tmp_path / "run"), "--apply"]
    done = call(slurm, [*HVDKIT, "submit", *options, "--", script, "--checkpoint", str(kept)], tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^job (\d+): its output goes to (\S+),", done.stdout, re.MULTILINE)
    assert found, done.stdout
    job, log = found[1], Path(found[2])

    def said() -> str:
        return log.read_text() if log.exists() else slurm.log("slurmctld")[-2000:]

    wait_for(kept.exists, said)
    call(slurm, ["scancel", "--batch", "--signal=USR2", job], tmp_path)
    start_again(slurm, job, said)
    wait_for(lambda: "ended well" in said(), said)
    assert "[3] starts at step 0\n" in said() and re.search(r"\[3\] starts at step [1-9]", said()), said()
    wait_for(lambda: not call(slurm, ["squeue", "-h"], tmp_path).stdout)


def test_a_comparison_is_submitted(slurm: Slurm, tmp_path: Path) -> None:
    """By one command: the job compares one host with both, and writes what the job's log says."""
    compare = ["compare", *RECIPE, "steps=6", "--framework", "mxnet", "--no-parity"]
    options = ["-np", "4", "--nodes", "2", "--line=--nodelist=h1,h2", "--out", "runs/mine", "--apply"]
    done = call(slurm, [*HVDKIT, "submit", *options, "--", *compare], tmp_path)
    assert done.returncode == 0, done.stderr
    result = tmp_path / "runs" / "mine" / "compare.json"
    logs = lambda: "".join(log.read_text() for log in (tmp_path / "runs").glob("mine-*.log"))  # noqa: E731
    wait_for(result.exists, logs)
    assert [len(set(run["hosts"])) for run in json.loads(result.read_text())["runs"]] == [1, 2], logs()


def test_a_host_that_does_not_see_the_folder_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """Before a rank trains: rank 0, which would write the results, is to run there."""
    run = slurm.apart / "run"
    train = ["train", *RECIPE, "steps=6", "--framework", "mxnet", "-np", "4", "-H", "h2:2,h1:2", "--out", str(run)]
    done = call(slurm, [*ALLOCATION, *HVDKIT, *train], tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.search(
        r"run/logs on h2: not the launcher's folder; give --out a folder that all hosts share$", done.stderr
    )
    assert not (run / "metrics.jsonl").exists()


def test_a_rank_that_is_killed_is_named_with_its_host(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ["train", *RECIPE, "epochs=1000", "--framework", "mxnet", "-np", "4", "--out", str(run)]
    started = slurm.start(
        [*ALLOCATION, *HVDKIT, *train], env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: steps(run) > 2 or started.poll() is not None)
    os.kill(rank_of(run, 3), signal.SIGKILL)
    _, said = started.communicate(timeout=hygiene.patience(60))
    assert (started.returncode, "rank 3 on h2 was killed by SIGKILL" in said) == (1, True), said
    with pytest.raises(AssertionError, match="rank 0 does not run"):
        rank_of(run, 0)


@pytest.mark.parametrize("how", ["Ctrl-C", "scancel"])
def test_a_run_that_is_ended_leaves_nothing(slurm: Slurm, tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    train = ["train", *RECIPE, "epochs=1000", "--framework", "mxnet", "-np", "4", "--out", str(run)]
    started = slurm.start(
        [*ALLOCATION, *HVDKIT, *train], env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: steps(run) > 2 or started.poll() is not None)
    if how == "scancel":
        call(slurm, ["scancel", *call(slurm, ["squeue", "-h", "-o", "%i"], tmp_path).stdout.split()], tmp_path)
    else:
        own = [number for number, words, _ in processes(run) if words.split(b"\0")[1:4] == [b"-m", b"hvdkit", b"train"]]
        os.kill(*own, signal.SIGINT)
    _, said = started.communicate(timeout=hygiene.patience(60))
    assert started.returncode == 130 or how == "scancel", said
    wait_for(lambda: not list(processes(run)), lambda: str(list(processes(run))))


def test_a_hang_is_named_with_the_collective_and_the_hosts(slurm: Slurm, tmp_path: Path) -> None:
    recipe = ROOT / "tests" / "debugging" / "recipe.yaml"
    train = ["train", str(recipe), "model.script=hang_in_the_middle.py", "-np", "4", "--stall-timeout", "30"]
    done = call(slurm, [*ALLOCATION, *HVDKIT, *train, "--out", "run"], tmp_path)
    assert done.returncode == 1, done.stderr
    named = "allreduce 'norm' waits: rank 0 entered it, rank 1 on h1, rank 2 on h2, rank 3 on h2 did not"
    assert named in done.stderr, done.stderr
    stacks = (tmp_path / "run" / "logs" / "stacks.txt").read_text()
    assert "hang_in_the_middle.py" in stacks
    assert [line[:6] for line in stacks.splitlines() if line.startswith("rank")] == [
        f"rank {rank}" for rank in range(4)
    ]


def test_a_wrong_interface_is_said(slurm: Slurm, tmp_path: Path) -> None:
    """Ranks whose address is one that other hosts do not reach."""
    train = ["train", *RECIPE, "--framework", "mxnet", "-np", "4", "--debug", "--out", "run"]
    wrong = {"HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    done = call(slurm, [*ALLOCATION, *HVDKIT, *train], tmp_path, env=wrong)
    assert done.returncode == 1
    assert "other hosts do not reach lo; set HOROVOD_GLOO_IFACE" in done.stderr, done.stderr
    assert re.search(r"first warning or error: rank-\d: .*Connection refused", done.stderr), done.stderr


@pytest.fixture
def drained(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Drains a host, which takes no new job then; it is the scheduler's again at the end."""
    hosts: list[str] = []

    def update(host: str, *state: str) -> None:
        done = call(slurm, ["scontrol", "update", f"nodename={host}", *state], tmp_path)
        assert done.returncode == 0, done.stderr

    def drain(host: str) -> None:
        hosts.append(host)
        update(host, "state=drain", "reason=maintenance")

    yield drain
    for host in hosts:
        update(host, "state=resume")


def test_a_job_that_is_warned_goes_on_where_it_stopped(
    slurm: Slurm, unbroken: Path, tmp_path: Path, drained: Callable[[str], None]
) -> None:
    """On USR2, as before the time ends, it writes a checkpoint and is queued again; it ends with the same bits.

    One of its hosts is drained meanwhile: it trains on there until it is warned, and goes on without that host.
    """
    run = tmp_path / "run"
    submit = [*HVDKIT, "submit", *RECIPE, "--framework", "mxnet", "-np", "4", "--nodes", "2", "--time", "10"]
    done = call(slurm, [*submit, "--out", str(run), "--apply"], tmp_path)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "run.sbatch").read_text()
    assert "\n#SBATCH --signal=B:USR2@120\n" in script and "\n#SBATCH --ntasks-per-node=2\n" in script
    found = re.search(r"^job (\d+): its output goes to (\S+),", done.stdout, re.MULTILINE)
    assert found, done.stdout
    job, log = found[1], Path(found[2])

    def said() -> str:
        state = call(slurm, ["scontrol", "show", "job", job], tmp_path).stdout
        return (log.read_text() if log.exists() else done.stdout) + state + slurm.log("slurmctld")[-2000:]

    wait_for(lambda: steps(run) > 5, said)
    first, second = hosts_of(slurm, job)
    drained(second)
    call(slurm, ["scancel", "--batch", "--signal=USR2", job], tmp_path)
    wait_for(lambda: "stopped by SIGTERM after" in said(), said)
    assert not (run / "result.json").exists()
    start_again(slurm, job, said)
    wait_for((run / "result.json").exists, said)
    assert re.search(r"^\S+/run: continues from step \d+, epoch \d+/10$", said(), re.MULTILINE), "appended to its log"
    results = [json.loads((each / "result.json").read_text()) for each in (run, unbroken)]
    assert results[0]["first_step"] > 0
    assert len({result["final_weights_sha256"] for result in results}) == 1
    wait_for(lambda: not call(slurm, ["squeue", "-h"], tmp_path).stdout)
    ends = json.loads((run / "logs" / "exits.json").read_text())
    left = sorted({"h1", "h2", "h3"} - {second})
    assert [end["host"] for end in ends] == [left[0], left[0], left[1], left[1]] and first in left


def test_each_task_of_an_array_is_warned_and_goes_on_by_itself(slurm: Slurm, tmp_path: Path) -> None:
    runs = [tmp_path / "run" / str(task) for task in range(2)]
    submit = [*HVDKIT, "submit", *RECIPE, "epochs=4", "--framework", "mxnet", "--array", "seed=1,2", "--time", "10"]
    done = call(slurm, [*submit, "--out", str(tmp_path / "run"), "--apply"], tmp_path)
    found = re.search(r"^job (\d+), 2 tasks: ", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    log = tmp_path / f"run-{found[1]}_1.log"

    def said() -> str:
        return (log.read_text() if log.exists() else "") + call(slurm, ["squeue"], tmp_path).stdout

    wait_for(lambda: steps(runs[1]) > 5, said)
    call(slurm, ["scancel", "--batch", "--signal=USR2", f"{found[1]}_1"], tmp_path)
    wait_for(lambda: "stopped by SIGTERM after" in said(), said)
    wait_for((runs[0] / "result.json").exists, said)
    start_again(slurm, f"{found[1]}_1", said)
    wait_for((runs[1] / "result.json").exists, said)
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    assert results[0]["first_step"] == 0 < results[1]["first_step"]
    assert "\nseed: 2\n" in (runs[1] / "config.yaml").read_text()
    wait_for(lambda: not call(slurm, ["squeue", "-h"], tmp_path).stdout)


def test_the_doctor_examines_the_hosts_of_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    done = call(slurm, [*ALLOCATION, *HVDKIT, "doctor", "--out", "found"], tmp_path)
    found = json.loads((tmp_path / "found" / "doctor.json").read_text())
    for number, host in enumerate(found["hosts"], 1):
        assert (host["name"], host["way"], host["slots"]) == (f"h{number}", "srun", 2), done.stdout
        assert (host["interface"], host["address"]) == ("eth0", f"10.77.0.{number}"), done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_slurm_refuses_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    refused = call(slurm, [*HVDKIT, "submit", *RECIPE, "--partition", "nowhere", "--apply"], tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("--apply: Slurm refuses the job: invalid partition specified: nowhere")
    train = ["train", *RECIPE, "--framework", "mxnet", "--launcher", "slurm"]
    for command, told in (
        ([*HVDKIT, *train, "-np", "4"], "--launcher slurm: expected a Slurm allocation"),
        ([*ALLOCATION, *HVDKIT, *train, "-np", "5"], "-np 5: the Slurm allocation has 4 slots (h1:2,h2:2)"),
        ([*ALLOCATION, *HVDKIT, *train, "-np", "2", "-H", "h1:1,h3:1"], "-H: h3: not in the allocation"),
    ):
        done = call(slurm, command, tmp_path)
        assert (done.returncode, done.stderr.startswith(told)) == (2, True), done.stderr
    assert not list(tmp_path.rglob("*"))


def test_a_host_that_is_killed_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """With its slurmd and all else: the last of the tests that use it."""
    run = tmp_path / "run"
    train = ["train", *RECIPE, "epochs=1000", "--framework", "mxnet", "-np", "4", "--out", str(run)]
    started = slurm.start(
        ["salloc", "--quiet", "--nodelist=h1,h3", "-N2", "-n4", *HVDKIT, *train],
        env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: steps(run) > 2 or started.poll() is not None)
    space = slurm.network.run(["readlink", "/proc/self/ns/net"], "h3", stdout=subprocess.PIPE, text=True).stdout.strip()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str((entry / "ns" / "net").readlink()) == space:
                os.kill(int(entry.name), signal.SIGKILL)
    _, said = started.communicate(timeout=hygiene.patience(60))
    assert started.returncode == 1 and re.search(r"rank [23] on h3 (vanished|was )", said), said
    with pytest.raises(AssertionError, match="rank 0 does not run"):
        rank_of(run, 0)


def test_counts_of_tasks_as_slurm_writes_them() -> None:
    assert _counts("2(x3),1") == [2, 2, 2, 1] and _counts("16") == [16]
