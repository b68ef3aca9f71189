"""`hvdkit launch`: programs that know nothing of hvdkit, how they end and how they hang."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from hvdkit import paths
from hvdkit.commands import own_script
from hvdkit.launch.agent.output import OutputReader
from hvdkit.launch.agent.watchdog import ProgramWatch
from hvdkit.launch.diagnosis.quiet import Quiet
from hvdkit.launch.diagnosis.stalls import Hang, Stall
from hvdkit.results.launch import Launched
from hvdkit.runtimes import store
from tests import hygiene
from tests.conftest import ROOT, Hvdkit, rest_thorough, run
from tests.launching import MARK, gone_within, marked, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

PROGRAM = ROOT / "tests" / "launched" / "program.py"
Done = subprocess.CompletedProcess[str]
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# How rank 1 of two ends, the command's exit status, and what is told of it.
KINDS = {
    "killed": (128 + 9, "rank 1 on localhost was killed by SIGKILL"),
    "raises": (1, "rank 1 on localhost failed: ValueError: the seventh image is upside down (ended with exit code 1 "),
    "exits": (3, "rank 1 on localhost ended with exit code 3"),
    "leaves": (1, "rank 1 on localhost ended with exit code 0 after "),
    "escapes": (3, "\n    its last line"),
    "sleeps": (1, "rank 1 on localhost hangs without output or work for "),
    "frozen": (1, "rank 1 on localhost hangs without output or work for "),
    "computes": (0, "rank 1 on localhost did not"),
    "allclose": (0, ""),
    "alldaemons": (0, ""),
    "allfloods": (0, ""),
}
# When a rank that joins is lost or kills another one, what is told of it, and what the ranks print then.
JOINS = {
    "starts": ("was killed by SIGKILL", r"from batch \d\d+ with 1\n(.|\n)*trained"),
    "connects": ("all ranks run the program from its beginning: no rank is left that has its state", "trained"),
    "trains": ("was killed by SIGKILL", r"from batch \d\d+ with 3\n(.|\n)*from batch \d\d+ with 2\n(.|\n)*trained"),
    "dies": ("worker-localhost-2 ended with exit code 1 after ", "trained"),
    "ssh": (
        "worker-192.0.2.7-0 could not be started (exit status 255), it is left out; its words, ends:\n"
        "    No route to host\n",
        "trained",
    ),
}
# What rank 1 removes of the run's folder, and what is told of it.
REMOVED = {
    "removes logs": "run/logs: removed while the run writes there; the logs so far are gone",
    "removes all": "run: removed or renamed while the run writes there; the ranks continue, and the result is written",
    "removes by another name": "run: removed or renamed while the run writes there; the ranks continue, and the result",
}
WITH_MXNET = ("killed", "raises", "sleeps")  # the others import Horovod alone: the verdict is the same
TIMEOUT_S = 3
SECRET = uuid.uuid4().hex  # in the environment of these runs; what bears it is theirs


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Done, Path]]:
    """The command's end and its folder, for each kind; they run side by side, as some wait for the watchdog."""

    folders = {kind: tmp_path_factory.mktemp(kind) for kind in (*KINDS, *REMOVED)}

    def one(kind: str) -> tuple[Done, Path]:
        folder = folders[kind]
        options = ["-np", "2", "--stall-timeout", str(TIMEOUT_S), "--out", "run"]
        command = [sys.executable, "-m", "hvdkit", "launch", *options, str(PROGRAM), kind]
        bare = {} if kind in WITH_MXNET else {"BARE": "1"}
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: SECRET} | bare
        return run(command, 120, cwd=folder, env=environment), folder / "run"

    @cache
    def every() -> dict[str, tuple[Done, Path]]:
        with ThreadPoolExecutor(4) as pool:
            return dict(zip(folders, pool.map(one, folders), strict=True))

    return lambda kind: every()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_how_a_program_ends_is_told_with_the_rank(kind: str, ended: Callable[[str], tuple[Done, Path]]) -> None:
    done, folder = ended(kind)
    status, told = KINDS[kind]
    assert done.returncode == status, done.stderr
    assert told in done.stderr
    assert "[0] rank 0 of 2 " + kind in done.stdout and "[1] rank 1 of 2 " + kind in done.stdout
    assert [end["rank"] for end in json.loads((folder / "logs" / "exits.json").read_text())] == [0, 1]
    failure = Launched.read(folder / "launch.json").failure
    assert failure is None if status == 0 else failure and told in failure
    assert "step 4" in (folder / "logs" / "rank-1.log").read_text()
    assert not [*folder.rglob("*.beat"), *folder.rglob("*.stack"), *folder.rglob("*.failure.json.*")]
    assert not set("\x1b\x07") & set(re.sub(r"\x1b\[\d+m", "", done.stdout + done.stderr)), "but colors"


def test_no_process_outlives_a_program_and_no_command_line_shows_the_environment(
    ended: Callable[[str], tuple[Done, Path]],
) -> None:
    done, _ = ended("alldaemons")
    assert done.stdout.count("the secret is on 0 command lines") == 2
    assert not marked(SECRET), "its daemons, or others"


def test_a_hang_is_named_with_its_collective_and_the_stack_of_each_rank(
    ended: Callable[[str], tuple[Done, Path]],
) -> None:
    done, folder = ended("sleeps")
    assert re.search(r"allreduce 'gradients' waits: rank 0 entered it, rank 1 on localhost did not; ", done.stderr)
    assert "executing commit (" in done.stderr and "program.py:" in done.stderr
    stacks = (folder / "logs" / "stacks.txt").read_text()
    assert "rank 0 on localhost" in stacks and "commit (" in stacks


def test_a_flood_of_output_is_whole_in_the_log_and_its_end_is_shown(ended: Callable[[str], tuple[Done, Path]]) -> None:
    done, folder = ended("allfloods")
    for rank in (0, 1):
        assert (folder / "logs" / f"rank-{rank}.log").read_text().count("\nflood ") == 20_000
        assert f"[{rank}] and its last line" in done.stdout
        assert f"[{rank}] done" in done.stdout


@pytest.mark.parametrize("kind", REMOVED)
def test_a_folder_that_is_removed_under_a_program_costs_nothing_but_its_logs(
    kind: str, ended: Callable[[str], tuple[Done, Path]]
) -> None:
    done, folder = ended(kind)
    assert done.returncode == 0 and REMOVED[kind] in done.stderr, done.stderr
    assert done.stderr.count("removed ") == 1 and "Traceback" not in done.stderr
    assert "[0] done" in done.stdout and "[1] done" in done.stdout, "the terminal shows what the file would have"
    result = Launched.read(folder / "launch.json")
    assert (result.failure, [rank.exit_code for rank in result.ranks]) == (None, [0, 0])


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk on which who writes waits, as if it took forever, until `fsfreeze -u`."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4", path=SBIN) is None:
        pytest.skip("needs root and mkfs.ext4")
    disk = tmp_path / "disk"
    disk.mkdir()
    with (tmp_path / "image").open("wb") as file:
        file.truncate(2**23)
    environment = os.environ | {"PATH": SBIN}
    subprocess.run(["mkfs.ext4", "-q", tmp_path / "image"], check=True, env=environment)
    if subprocess.run(["mount", "-o", "loop", tmp_path / "image", disk], env=environment).returncode != 0:
        pytest.skip("needs a loop device")
    try:
        subprocess.run(["fsfreeze", "-f", disk], check=True, env=environment)
        yield disk
    finally:
        subprocess.run(["fsfreeze", "-u", disk], check=False, env=environment, stderr=subprocess.DEVNULL)
        subprocess.run(["umount", "-l", disk], check=True, env=environment)


def test_a_program_that_waits_for_its_disk_is_no_hang(tmp_path: Path, frozen_disk: Path) -> None:
    """Rank 0 waits for rank 1 in a collective meanwhile."""
    words = ["-np", "2", "--stall-timeout", "2", "--out", "run", str(PROGRAM), "writes", str(frozen_disk)]
    told = tmp_path / "told"
    with told.open("w") as file, subprocess.Popen(
        [sys.executable, "-m", "hvdkit", "launch", *words], cwd=tmp_path, stdout=file, stderr=file
    ) as process:  # fmt: skip
        assert wait_until(lambda: " waits: " in told.read_text(), 60)
        time.sleep(3)  # by then it would have been ended
        subprocess.run(["fsfreeze", "-u", frozen_disk], check=True, env=os.environ | {"PATH": SBIN})
        process.wait(hygiene.patience(60))
    said = told.read_text()
    assert process.returncode == 0 and said.count("] done") == 2, said
    assert (
        "rank 1 on localhost did not; " in said and "rank 1 is without output, while it computes or waits for" in said
    )


@pytest.mark.parametrize("when", rest_thorough(*JOINS))
def test_an_elastic_program_survives_what_befalls_it_as_a_rank_joins(hvdkit: Hvdkit, tmp_path: Path, when: str) -> None:
    """The rank that joins kills the first one, at the time that `when` says, or is lost itself."""
    told, printed = JOINS[when]
    ssh = "echo No route to host >&2; touch killed" if when == "ssh" else "exit 1"
    for name, text in (("hosts", "cat slots"), ("ssh", f"{ssh}; exit 255")):
        (tmp_path / name).write_text(f"#!/bin/sh\ncd '{tmp_path}'; {text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slots").write_text("localhost:2\n")
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", tmp_path / "hosts"]
    settings = {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = hvdkit("launch", *elastic, "--out", "run", PROGRAM.with_name("joins.py"), tmp_path, when, **settings)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr and re.search(printed, done.stdout), done.stderr + done.stdout


def test_an_elastic_program_with_too_few_slots_says_what_it_waits_for(hvdkit: Hvdkit, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("#!/bin/sh\necho localhost:1\n")
    hosts.chmod(0o755)
    words = ["-np", "2", "--max-np", "3", "--host-discovery-script", hosts, "-x", "HOROVOD_ELASTIC_TIMEOUT=4"]
    done = hvdkit("launch", *words, "--out", "run", PROGRAM.with_name("joins.py"), tmp_path, "starts")
    assert done.returncode == 1
    waits, gave_up = done.stderr.splitlines()[-2:]
    assert "0 of 2 ranks are there (-np), 1 are offered" in waits and "HOROVOD_ELASTIC_TIMEOUT" in waits
    assert "gave up: 0 of 2 ranks are there after 4 s" in gave_up and "Traceback" not in done.stderr


def test_horovods_elastic_driver_tells_of_places_until_they_are_taken_up() -> None:
    command = [str(store.find("mxnet").python), str(PROGRAM.with_name("told.py"))]
    done = run(command, 120, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout == "places [0, 1]\n", done.stderr


@pytest.mark.thorough
def test_an_elastic_program_grows_and_shrinks(hvdkit: Hvdkit, tmp_path: Path) -> None:
    """The place comes before the first rank listens to Horovod's driver, which tells of it only once."""
    slots, hosts = tmp_path / "slots", tmp_path / "hosts"
    slots.write_text("localhost:1\n")
    hosts.write_text(f"#!/bin/sh\ncat '{slots}'\n")
    hosts.chmod(0o755)
    elastic = ["-np", "1", "--max-np", "2", "--host-discovery-script", hosts]
    # The first rank waits for the second, which has to load PyTorch first.
    settings = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}
    done = hvdkit("launch", *elastic, "--out", "run", PROGRAM.with_name("grows.py"), slots, timeout=170, **settings)
    assert done.returncode == 0, done.stderr
    assert "sizes [1, 2, 1] after" in done.stdout
    assert "worker-localhost-1 leaves: its host is not there any more" in done.stderr
    assert "1 rank ended well" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["cifar_resnet18", "gradient_tape"])
def test_a_script_of_2023_runs_unchanged(script: str, hvdkit: Hvdkit) -> None:
    settings = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = hvdkit("launch", "-np", 2, "--out", "run", PROGRAM.with_name(f"{script}.py"), **settings)
    assert done.returncode == 0, done.stderr
    weights = dict(re.findall(r"^\[(\d)\] weights (\S+)$", done.stdout, re.MULTILINE))
    assert set(weights) == {"0", "1"} and weights["0"] == weights["1"], done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_is_ended_leaves_no_orphan(number: signal.Signals, tmp_path: Path, mark: str) -> None:
    command = [sys.executable, "-m", "hvdkit", "launch", "-np", "2", "--out", "run", str(PROGRAM), "waits"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "run" / "logs" / "rank-1.log"
    assert wait_until(lambda: log.exists() and "step 0" in log.read_text(), 60), "it never began"
    process.send_signal(number)
    _, told = process.communicate(timeout=hygiene.patience(60))
    assert gone_within(mark, 30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in told
    if number == signal.SIGTERM:
        assert Launched.read(tmp_path / "run" / "launch.json").failure == "ended by SIGTERM, and all ranks with it"


def test_a_command_has_the_runtime_and_a_module_and_options_of_horovodrun(hvdkit: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__main__.py").write_text(
        "import sys\nimport horovod.mxnet as hvd\nhvd.init()\nprint(sys.argv[1:])\n"
    )
    options = ["--fusion-threshold-mb", "4", "--cycle-time-ms", "2.5", "--gloo", "-x", "SECRET=two words"]
    done = hvdkit("launch", *options, "--profile", "--out", "module", "-m", "own", "--np", "4")
    assert done.returncode == 0 and "[0] ['--np', '4']" in done.stdout, done.stderr
    shown = 'echo "$HOROVOD_FUSION_THRESHOLD $HOROVOD_CYCLE_TIME $SECRET"; which python'
    done = hvdkit("launch", "--runtime", "mxnet", *options, "--out", "command", "--", "sh", "-c", shown)
    assert done.returncode == 0 and "[0] 4194304 2.5 two words" in done.stdout, done.stderr
    assert "/mxnet/bin/python" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "nowhere.py: no such file; expected a script, a module after -m, or a command after --"),
        (["--", "nowhere"], "nowhere: no such command"),
        (["plain.py"], "plain.py: no import of Horovod is seen in it; give --framework, --runtime or --python"),
        (["both.py"], "both.py: it imports Horovod for mxnet and pytorch; give --framework"),
        (["--python", "plain.py", "--runtime", "mxnet", "plain.py"], "--python: leave out --runtime"),
        (["--runtime", "mxnett", "plain.py"], "unknown runtime 'mxnett'"),
        (["--python", sys.executable, "plain.py"], "it has no Horovod; see `hvdkit horovod wheel`"),
        ([sys.executable, "plain.py"], f"or leave out {sys.executable}, so that a runtime runs plain.py\n"),
        (
            ["--framework", "keras", "both.py"],
            "both.py: it imports mxnet and pytorch, got --framework keras; leave that",
        ),
        (["-m", "nowhere"], "nowhere: it is not in this folder; give --framework, --runtime or --python\n"),
        (
            ["--timeline-filename", "nowhere/t.json", "--runtime", "mxnet", "plain.py"],
            "nowhere/t.json: expected a file in a folder in which you may write\n",
        ),
        (["-x", "1A", "plain.py"], "-x '1A': expected NAME, or NAME=VALUE"),
        (["-x", "NOT_SET_HERE", "--runtime", "mxnet", "plain.py"], "-x NOT_SET_HERE: expected a variable that is set"),
        (
            ["--min-np", "3", "--runtime", "mxnet", "plain.py"],
            "-np 1: expected at least 3, as --min-np and --max-np say",
        ),
        (
            ["--min-np", "3", "--max-np", "2", "--runtime", "mxnet", "plain.py"],
            "--min-np 3: expected at most --max-np 2",
        ),
        (
            ["--min-np", "1", "--launcher", "mpirun", "--runtime", "mxnet", "plain.py"],
            "--launcher mpirun: no elastic runs; expected direct or horovodrun\n",
        ),
        (["wrong.py"], "wrong.py, line 1: no Python: "),
        (["--hostfile", "hosts", "plain.py"], "--hostfile: an option of horovodrun; here -H ./FILE"),
        (["--elastic-timeout", "9", "plain.py"], "--elastic-timeout: an option of horovodrun; here -x HOROVOD_ELASTIC"),
        (["--num-nccl-streams", "2", "plain.py"], "; here -x HOROVOD_NUM_NCCL_STREAMS=VALUE\n"),
        (["--tcp", "plain.py"], "--tcp: an option of horovodrun; here nothing: ranks use Gloo, over TCP\n"),
        (["--autotune", "plain.py"], "--autotune: an option of horovodrun; here -x HOROVOD_AUTOTUNE=1"),
        (
            ["--profile", "--timeline-filename", "t", "--runtime", "mxnet", "plain.py"],
            "--timeline-filename: leave it out",
        ),
    ],
)
def test_what_is_refused_is_told_by_its_option(words: list[str], told: str, inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print()\n")
    (tmp_path / "both.py").write_text("import helper\nimport horovod.torch as hvd\n")
    (tmp_path / "helper.py").write_text("from horovod import mxnet\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    done = inside("launch", *words)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_second_launch_into_a_folder_is_refused_and_leaves_it(inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import horovod.mxnet\n")
    with paths.claimed(tmp_path / "run", overwrite=False) as folder:
        (folder / "launch.json").write_text("of the first")
        done = inside("launch", "--out", "run", "--overwrite", "plain.py")
        assert done.returncode == 2 and "another run" in done.stderr, done.stderr
        assert (folder / "launch.json").read_text() == "of the first"


@pytest.mark.check
@pytest.mark.parametrize(
    ("text", "frameworks"),
    [
        ("import horovod.torch as hvd", ["pytorch"]),
        ("import tensorflow as tf\nimport horovod.tensorflow.keras as hvd", ["keras"]),
        ("from horovod.tensorflow import keras as hvd", ["keras"]),
        ("import horovod.keras", ["keras"]),
        ("import keras, horovod.tensorflow as hvd", ["tensorflow"]),
        ("def main():\n    from horovod import mxnet as hvd", ["mxnet"]),
        ("import torch.nn", ["pytorch"]),
        ("import torchlight, numpy", []),
    ],
)
def test_the_framework_of_a_program_is_that_of_its_imports(text: str, frameworks: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    assert own_script.frameworks_of(tmp_path / "train.py") == frameworks
    told = own_script.train_apart(tmp_path / "train.py", 2)
    assert bool(told) == (bool(frameworks) and "horovod" not in text)
    assert own_script.train_apart(tmp_path / "train.py", 1) == []


@pytest.mark.check
@pytest.mark.parametrize(
    "text", ["from .work import main", "from . import work", "import package.work", "from .. import work"]
)
def test_a_module_of_a_package_has_the_imports_of_those_that_it_imports(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner = Path("package") / "inner" if ".. " in text else Path("package")
    inner.mkdir(parents=True)
    (inner / "train.py").write_text(text)
    Path("package", "work.py").write_text("import horovod.mxnet, package.work\n")
    assert own_script.frameworks_of(inner / "train.py", root=Path()) == ["mxnet"]


def hang(rank: int, seconds: float, busy: bool = False, frozen: bool = False, blocked: bool = True) -> Hang:
    return Hang(rank, "h", None, "program", seconds, frozen, [], 100.0, busy, blocked and not busy)


@pytest.mark.check
@pytest.mark.parametrize(
    ("hangs", "stalled", "now", "hung"),
    [
        ([hang(0, 10), hang(1, 10)], True, 101, True),  # nobody works, and a collective waits
        ([hang(0, 10), hang(1, 10)], False, 101, False),  # without evidence, ten times as long
        ([hang(0, 10), hang(1, 10)], False, 200, True),
        ([hang(0, 10), hang(1, 10, blocked=False)], False, 1e6, False),  # it wakes up, as one does that uses a GPU
        ([hang(0, 10), hang(1, 10, frozen=True)], False, 101, True),
        ([hang(0, 10), hang(1, 10, busy=True)], True, 101, False),  # it computes: long work, at first
        ([hang(0, 10), hang(1, 10, busy=True)], True, 200, True),
        ([hang(0, 10), hang(1, 10, busy=True)], False, 1e6, False),  # nobody waits for it
        ([hang(0, 10)], True, 1e6, False),  # the other one prints
    ],
)
def test_a_hang_is_told_from_long_work(hangs: list[Hang], stalled: bool, now: float, hung: bool) -> None:
    quiet = Quiet(10.0)
    stalls = [Stall({1: ["allreduce.gradients"]}, now - 1)] if stalled else []
    running = {"rank-0": (0, "h"), "rank-1": (1, "there")}
    line = quiet.look({f"rank-{hang.rank}": hang for hang in hangs}, running, stalls, now)
    assert quiet.hang == hung
    assert line is None or not stalled or "rank 1 on there did not" in line
    assert (line is None) == (hung or not (stalled or (len(hangs) == 2 and not hangs[1].busy))), line


@pytest.mark.check
def test_a_collective_that_waited_long_ago_is_no_evidence() -> None:
    quiet, hangs = Quiet(10.0), {"rank-0": hang(0, 10), "rank-1": hang(1, 10)}
    quiet.look(hangs, {"rank-0": (0, "h"), "rank-1": (1, "h")}, [Stall({1: ["allreduce.gradients"]}, 92.0)], 101.0)
    assert not quiet.hang


@pytest.mark.parametrize(
    ("code", "busy", "blocked"),
    [
        ("time.sleep(60)", False, True),
        ("while True: time.sleep(0.01)", False, False),
        ("while True: pass", True, False),
    ],
)
def test_the_agent_sees_whether_a_quiet_program_computes_or_is_blocked(
    code: str, busy: bool, blocked: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", f"import time\nprint(flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "\n", "it would be an interpreter that starts"
            watch = ProgramWatch(tmp_path / "beat", tmp_path / "stack", process.pid, 1.0, OutputReader())
            told: list[tuple[str, dict[str, object]]] = []
            assert wait_until(lambda: told.extend(filter(None, [watch.look()])) or bool(told), 20)
            assert told[0][0] == "hung" and (told[0][1]["busy"], told[0][1]["blocked"]) == (busy, blocked)
        finally:
            process.kill()


@pytest.mark.check
def test_what_horovod_logs_is_no_output_of_the_program() -> None:
    reader = OutputReader()
    stall = "[2026-11-23 18:00:00.1: W /a/stall_inspector.cc:107] One or more tensors\nMissing ranks:\n1: [a, b]\n"
    assert reader.events(stall.encode()) and reader.printed == 0
    assert not reader.events(b"step 1\n 10 %\r 20 %\r") and reader.printed == 3
