"""Attacks on the files of a run: removed, renamed or replaced while it runs, damaged between runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from tests.trials.trial import SMALL, UPDATES, Running, attack, expect, ran, running

STEPS = (*SMALL, "checkpoint={every_steps: 5, keep: 3}")


def disturbed(folder: Path, disturb: Callable[[Path], object], words: tuple[str, ...] = STEPS) -> Running:
    """A run whose files are disturbed at update 30, at its end."""
    with running(*words, out=folder / "run") as job:
        job.trains(30)
        disturb(job.folder)
        job.ends()
    return job


def interrupted(folder: Path, update: int = 52) -> Running:
    """A run with checkpoints every 5 updates that was killed at this update."""
    with running(*STEPS, out=folder / "run") as job:
        job.trains(update)
        job.kill(0, signal.SIGKILL)
        job.ended()
    return job


def resumed(folder: Path, *more: str) -> Running:
    job = ran(*STEPS, *more, "--resume", out=folder / "run")
    job.sound()
    return job


@attack("said once when it happens, with the file's name; training is done; the lines from then on are there")
def metrics_removed(folder: Path) -> str:
    """metrics.jsonl is removed at update 30."""
    job = disturbed(folder, lambda run: (run / "metrics.jsonl").unlink())
    return job.line("metrics.jsonl")


@attack("said once when it happens; status and text tell the truth")
def metrics_replaced(folder: Path) -> str:
    """metrics.jsonl is replaced by a folder of that name at update 30."""

    def replace(run: Path) -> None:
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").mkdir()

    return disturbed(folder, replace).line("metrics.jsonl")


@attack("said once when it happens; training is done, with its result; status 0")
def logs_removed(folder: Path) -> str:
    """The folder of logs is removed at update 30."""
    job = disturbed(folder, lambda run: shutil.rmtree(run / "logs"))
    expect(job.process.returncode == 0, f"status {job.process.returncode}\n{job.text()}")
    expect(f"step {UPDATES}/{UPDATES}" in job.text() and job.result(), job.text())
    return job.line("logs")


@attack("said when it happens; new checkpoints are written, or the end says that they are not; never silence")
def checkpoints_removed(folder: Path) -> str:
    """The folder of checkpoints is removed at update 30."""
    job = disturbed(folder, lambda run: shutil.rmtree(run / "checkpoints"))
    return job.line("checkpoints", "removed") if "removed" in job.text() else job.line("checkpoint")


@attack("said when it happens; the end says where the results are; status 1, no traceback")
def run_removed(folder: Path) -> str:
    """The whole folder of the run is removed at update 30."""
    job = disturbed(folder, shutil.rmtree)
    expect(job.process.returncode != 0 or job.result(), f"status 0 without a result\n{job.text()}")
    return job.line(str(folder / "run"), "removed") if "removed" in job.text() else job.line(str(folder / "run"))


@attack("said when it happens; the end says where the results are; no results in two folders")
def run_renamed(folder: Path) -> str:
    """The folder of the run is renamed at update 30."""
    job = disturbed(folder, lambda run: run.rename(run.with_name("elsewhere")))
    there = [name for name in ("run", "elsewhere") if (folder / name / "result.json").exists()]
    expect(len(there) < 2, f"result.json in {there}\n{job.text()}")
    return f"result.json in {there}: {job.text().splitlines()[-1]}"


@attack("the damaged checkpoint is named and the one before is used; results as of a run that was not disturbed")
def newest_cut(folder: Path) -> str:
    """The newest checkpoint's model.safetensors is cut to half between kill and --resume."""
    job = interrupted(folder)
    newest = sorted((job.folder / "checkpoints").glob("step-*"))[-1]
    weights = newest / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return resumed(folder).line(newest.name)


@attack("refused by the file's name; the one before is used")
def progress_forged(folder: Path) -> str:
    """A digit of checkpoint.json's step is changed between kill and --resume."""
    job = interrupted(folder)
    newest = sorted((job.folder / "checkpoints").glob("step-*"))[-1]
    path = newest / "checkpoint.json"
    step = json.loads(path.read_text())["progress"]["step"]
    path.write_text(path.read_text().replace(f'"step": {step}', f'"step": {step + 4}', 1))
    return resumed(folder).line(newest.name)


@attack("refused or said: it is another run's")
def checkpoint_of_another_run(folder: Path) -> str:
    """The newest checkpoint is replaced by one of a run with another learning rate and the same step."""
    job = interrupted(folder)
    newest = sorted((job.folder / "checkpoints").glob("step-*"))[-1]
    other = ran(*STEPS, "optimizer.learning_rate=0.2", f"steps={int(newest.name[5:])}", out=folder / "other")
    shutil.rmtree(newest)
    shutil.copytree(other.folder / "checkpoints" / newest.name, newest)
    after = resumed(folder)
    expect(after.process.returncode == 2 or newest.name in after.text(), after.text())
    return after.text().splitlines()[0]


@attack("made anew from the last checkpoint, or one line, status 2; never a damaged file served")
def result_cut(folder: Path) -> str:
    """result.json of a finished run is cut to 300 bytes, then --resume."""
    job = ran(*STEPS, out=folder / "run")
    os.truncate(job.folder / "result.json", 300)
    after = resumed(folder)
    if after.process.returncode == 0:
        json.loads((job.folder / "result.json").read_text())
    return after.last()


@attack("one line names the file and the remedy; status 2")
def report_of_a_cut_result(folder: Path) -> str:
    """result.json of a finished run is cut, then `hvdkit report`."""
    job = ran(*STEPS, out=folder / "run")
    os.truncate(job.folder / "result.json", 300)
    report = ran("report", str(job.folder), out=folder / "page")
    report.ends(2)
    return report.line("result.json")


@attack("said, and made anew from what is good, or refused with status 2 before ranks start")
def metrics_damaged(folder: Path) -> str:
    """A line in the middle of metrics.jsonl is damaged between kill and --resume."""
    job = interrupted(folder)
    path = job.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[10] = lines[10][:20] + "\n"
    path.write_text("".join(lines))
    return resumed(folder).line("metrics.jsonl")


@attack("resumes; the torn line is gone; lines are those of a run that was not killed")
def metrics_torn(folder: Path) -> str:
    """The last line of metrics.jsonl is torn, as after a power cut."""
    job = interrupted(folder)
    path = job.folder / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 7)
    after = resumed(folder)
    after.ends(0)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    expect(sorted(set(steps)) == list(range(1, UPDATES + 1)), f"steps {steps}")
    return "88 updates, each with its line"


@attack("made anew from the checkpoint, or one line with the remedy; status 2")
def config_missing(folder: Path) -> str:
    """config.yaml is removed between kill and --resume."""
    job = interrupted(folder)
    (job.folder / "config.yaml").unlink()
    after = resumed(folder)
    expect(after.process.returncode in (0, 2), after.text())
    expect(after.process.returncode == 2 or (job.folder / "config.yaml").exists(), "no config.yaml at the end")
    return f"status {after.process.returncode}: {after.text().splitlines()[0]}"


@attack("resumes within a minute with less than 1 GiB")
def metrics_of_300_mib(folder: Path) -> str:
    """metrics.jsonl has grown to 300 MiB between kill and --resume."""
    job = interrupted(folder)
    path = job.folder / "metrics.jsonl"
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first * (300 * 2**20 // len(first)) + path.read_bytes())
    after = ran(*STEPS, "--resume", out=folder / "run", prefix=("prlimit", "--as=4294967296"), seconds=240)
    after.ends(0, 2)
    return after.last()


@attack("the old results are there as before, byte for byte")
def overwrite_interrupted(folder: Path) -> str:
    """A finished run, then --overwrite and SIGINT as soon as ranks start."""
    job = ran(*STEPS, out=folder / "run")
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    with running(*STEPS, "--overwrite", out=folder / "run") as again:
        again.until(again.ranks, name="ranks")
        again.process.send_signal(signal.SIGINT)
        again.ended()
    after = {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()}
    expect(before == after, f"others: {[str(path) for path in before.keys() ^ after.keys()][:8]}")
    return f"all {len(before)} files are as before"


@attack("the next command finds the old results and puts them back")
def overwrite_killed(folder: Path) -> str:
    """A finished run, then --overwrite and kill -9 of everything as soon as ranks start; then hvdkit report."""
    job = ran(*STEPS, out=folder / "run")
    before = (job.folder / "result.json").read_bytes()
    with running(*STEPS, "--overwrite", out=folder / "run") as again:
        again.until(again.ranks, name="ranks")
        again.end()
    report = ran("report", str(job.folder), out=folder / "page")
    report.sound()
    kept = (job.folder / "result.json").exists() and (job.folder / "result.json").read_bytes() == before
    expect(kept or "overwrite" in report.text(), report.text())
    return f"status {report.process.returncode}: {report.text().splitlines()[0]}"


@attack("refused with status 2 and the name of who writes there")
def two_at_once(folder: Path) -> str:
    """A second `hvdkit train` into the folder of one that runs."""
    with running(*STEPS, out=folder / "run") as job:
        job.trains(5)
        second = ran(*STEPS, "--resume", out=folder / "run")
        expect(second.process.returncode == 2, second.text())
        expect(job.ended() == 0, job.text())
    return second.last()


@attack("the lock of the dead is taken over; resumes")
def lock_of_the_dead(folder: Path) -> str:
    """All processes of a run get SIGKILL at once; then --resume."""
    with running(*STEPS, out=folder / "run") as job:
        job.trains(30)
        job.end()
    after = resumed(folder)
    after.ends(0)
    return after.text().splitlines()[0]
