"""Results come home: launch/home.py and agent/mirror.py, with a second folder in place of another host's."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hygiene
import pytest

from hvdkit.handshake import connect
from hvdkit.launch import home
from hvdkit.launch.agent import mirror
from hvdkit.launch.agent.reports import HOME
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job

AGENT = Path(mirror.__file__).with_name("rank_agent.py")


@dataclass(frozen=True)
class Away:
    """A host that does not see the run's folder `home`: it has `folder` instead."""

    home: Path
    folder: Path
    facts: dict[str, Any]

    def variables(self, rank: int, local_rank: int = 0) -> dict[str, str]:
        there = {**self.facts, "folder": str(self.folder), "mark": str(self.folder / "logs" / self.mark)}
        return {HOME: json.dumps(there), "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(local_rank)}

    @property
    def mark(self) -> str:
        return Path(self.facts["mark"]).name

    def run(self, script: str, rank: int = 0, local_rank: int = 0) -> tuple[int, list[dict[str, Any]]]:
        """Run a rank with its agent there; returns its status and what the agent reports."""
        command = [sys.executable, "-I", "-S", str(AGENT), "rank", str(self.folder / "logs"), "3", "0"]
        environment = {**os.environ, **self.variables(rank, local_rank), "RUN": str(self.folder)}
        done = subprocess.run(
            [*command, sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True,
            timeout=hygiene.patience(60), check=False,
        )  # fmt: skip
        return done.returncode, [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()]


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    folder = tmp_path / "home"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    job = Job(Path(sys.executable), [], 2, [Host("elsewhere.invalid", 2)], {}, folder / "logs", home=folder)
    with home.served(job, []) as variables:
        facts = json.loads(variables[HOME]) | {"addresses": ["127.0.0.1"]}
        yield Away(folder, tmp_path / "away", facts)
    assert not list((folder / "logs").glob("home-*"))


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + hygiene.patience(30)
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def content(folder: Path) -> dict[str, str]:
    """Every file and link of a run's folder, but for the mark and hidden names."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith((".", "home-")) and (path.is_symlink() or path.is_file())
    }


RANK = """
import os, pathlib, time
run = pathlib.Path(os.environ["RUN"])
print("recipe", (run / "config.yaml").read_text().strip())
for line in range(3):
    with (run / "metrics.jsonl").open("a") as file:
        print(line, file=file)
for step in (1, 2, 3):
    making = run / "checkpoints" / f".step-{step}.making"
    making.mkdir(parents=True)
    for name in ("model", "optimizer"):
        (making / name).write_text(f"{name} {step}")
    making.rename(making.with_name(f"step-{step}"))
    last = run / "checkpoints" / "last"
    last.unlink(missing_ok=True)
    last.symlink_to(f"step-{step}")
import shutil
shutil.rmtree(run / "checkpoints" / "step-1")
time.sleep(1.5)
(run / "checkpoints" / ".step-3.making").mkdir()
(run / "checkpoints" / ".step-3.making" / "model").write_text("model 3, anew")
shutil.rmtree(run / "checkpoints" / "step-3")
(run / "checkpoints" / ".step-3.making").rename(run / "checkpoints" / "step-3")
(run / "result.json").write_text("{}")
"""


def test_what_a_rank_writes_comes_home(away: Away) -> None:
    status, reports = away.run(RANK)
    assert (status, [report["event"] for report in reports]) == (0, ["started", "ended", "left"])
    assert content(away.home) == {
        "config.yaml": "name: x\n",
        "metrics.jsonl": "0\n1\n2\n",
        "result.json": "{}",
        "checkpoints/last": "-> step-3",
        "checkpoints/step-2/model": "model 2",
        "checkpoints/step-2/optimizer": "optimizer 2",
        "checkpoints/step-3/model": "model 3, anew",
        "logs/rank-0.log": "recipe name: x\n",
    }
    assert not list(away.home.rglob(".*")), "nothing half-sent is left"


def test_it_comes_while_the_rank_runs(away: Away) -> None:
    """Also a file that is written anew, and the deletion of one; and the launcher's request to stop goes there."""
    script = """
import os, pathlib, time
run = pathlib.Path(os.environ["RUN"])
def wait_for(path):
    while not path.exists():
        time.sleep(0.01)
metrics = run / "metrics.jsonl"
metrics.write_text("first\\n")
(run / "extra").write_text("x")
wait_for(run / "logs" / "stop")
new = run / ".metrics"
new.write_text("anew\\n")
new.replace(metrics)
(run / "extra").unlink()
"""
    environment = {**os.environ, **away.variables(0), "RUN": str(away.folder)}
    command = [sys.executable, "-I", "-S", str(AGENT), "rank", str(away.folder / "logs"), "3", "0"]
    with subprocess.Popen([*command, sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        wait_for(lambda: content(away.home).get("metrics.jsonl") == "first\n" and "extra" in content(away.home))
        (away.home / "logs" / "stop").touch()
        agent.stdout.read()
    assert agent.returncode == 0
    assert content(away.home) == {
        "config.yaml": "name: x\n",
        "logs/rank-0.log": "",
        "logs/stop": "",
        "metrics.jsonl": "anew\n",
    }


def test_a_rank_that_resumes_has_the_checkpoints(away: Away) -> None:
    step = away.home / "checkpoints" / "step-5"
    step.mkdir(parents=True)
    (step / "model").write_text("weights")
    (away.home / "checkpoints" / "last").symlink_to("step-5")
    (away.home / "metrics.jsonl").write_text("0\n")
    script = """
import os, pathlib
run = pathlib.Path(os.environ["RUN"])
print((run / "checkpoints" / "last" / "model").read_text(), file=(run / "metrics.jsonl").open("a"))
"""
    before = (step / "model").stat().st_ino
    assert away.run(script)[0] == 0
    assert content(away.home)["metrics.jsonl"] == "0\nweights\n"
    assert (step / "model").stat().st_ino == before, "not sent back"
    assert away.run("import os; print(os.listdir(os.environ['RUN']))", rank=1)[0] == 0
    assert "checkpoints" not in (away.home / "logs" / "rank-1.log").read_text(), "rank 0 alone needs them"
    assert step.exists()


def test_each_rank_of_a_host_sends_its_log(away: Away) -> None:
    assert away.run("print('two')", rank=2)[0] == 0
    script = """
import os, pathlib
run = pathlib.Path(os.environ["RUN"])
print("three")
(run / "metrics.jsonl").write_text("the first agent's to send, which alone knows the newest")
(run / "own-profile").mkdir()
(run / "own-profile" / "rank-3.json").write_text("{}")
"""
    assert away.run(script, rank=3, local_rank=1)[0] == 0
    assert content(away.home) == {
        "config.yaml": "name: x\n",
        "logs/rank-2.log": "two\n",
        "logs/rank-3.log": "three\n",
        "own-profile/rank-3.json": "{}",
    }


def test_a_connection_that_was_closed_is_made_anew(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home._Handler, "timeout", 1.0)
    assert away.run("print('first')", rank=0)[0] == 0
    _, reports = away.run("import time; print('a', flush=True); time.sleep(4); print('b')", rank=1, local_rank=1)
    assert [report["event"] for report in reports] == ["started", "ended", "left"]
    assert content(away.home)["logs/rank-1.log"] == "a\nb\n"


def test_a_folder_of_others_is_not_touched(away: Away) -> None:
    away.folder.mkdir()
    (away.folder / "thesis.tex").write_text("important")
    status, [report] = away.run("print('never')")
    assert (status, report["event"], report["failure"]["kind"]) == (2, "ended", "request")
    assert "not the launcher's folder, and not empty" in report["failure"]["message"]
    assert content(away.folder) == {"thesis.tex": "important"}


def test_where_the_folder_is_seen_nothing_is_sent(away: Away) -> None:
    environment = {**away.variables(0), HOME: json.dumps(away.facts)}
    command = [
        sys.executable,
        "-I",
        "-S",
        str(AGENT),
        "rank",
        str(away.home / "logs"),
        "3",
        "0",
        sys.executable,
        "-c",
        "",
    ]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    assert b"not home" not in done.stdout
    assert not (away.home / ".away").exists()


def test_what_does_not_come_home_is_said(away: Away, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import os, pathlib
place = pathlib.Path(os.environ["RUN"], "metrics.jsonl")
place.rmdir()
place.write_text("x")
"""
    (away.home / "metrics.jsonl").mkdir()
    _, reports = away.run(script)
    [report] = [report for report in reports if report["event"] == "not home"]
    assert report["fault"].endswith(f"; they are in {away.folder} there")
    home.complain("rank-0", "h2", report["fault"])
    assert capsys.readouterr().err.startswith("rank-0 on h2: not all of its files came home: metrics.jsonl: ")


@pytest.mark.parametrize(
    ("verb", "path", "headers"),
    [
        ("GET", "/../secret", {}),
        ("GET", "/%2e%2e/secret", {}),
        ("PUT", "/../new", {}),
        ("PUT", "/leads-out/new", {}),
        ("DELETE", "/../secret", {}),
        ("MOVE", "/config.yaml", {mirror.DESTINATION: "../new"}),
        ("MOVE", "/config.yaml", {mirror.DESTINATION: "/tmp/new"}),
        ("LINK", "/best", {mirror.TARGET: "../../secret"}),
        ("GET", "/link", {}),
        ("PUT", "/link", {mirror.OFFSET: "0"}),
        ("GET", "/fifo", {}),
        ("DELETE", "/", {}),
        ("MOVE", "/config.yaml", {mirror.DESTINATION: ""}),
        ("PUT", "/config.yaml", {"Content-Length": str(2**60)}),
        ("PUT", "/config.yaml", {mirror.OFFSET: "x"}),
    ],
)
def test_nothing_else_is_answered(away: Away, verb: str, path: str, headers: dict[str, str]) -> None:
    (away.home.parent / "secret").write_text("hidden")
    (away.home / "leads-out").symlink_to(away.home.parent)
    (away.home / "link").symlink_to(away.home.parent / "secret")
    os.mkfifo(away.home / "fifo")
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.sock = connect("127.0.0.1", away.facts["port"], away.facts["secret"], hygiene.patience(10))
    connection.request(verb, path, headers={"Content-Length": "0", **headers})
    answer = connection.getresponse()
    assert (answer.status, b"hidden" in answer.read()) == (500, False)
    connection.close()
    assert {path.name for path in away.home.parent.iterdir()} == {"home", "secret"}
    assert (away.home / "config.yaml").read_text() == "name: x\n"
    assert (away.home.parent / "secret").read_text() == "hidden"
