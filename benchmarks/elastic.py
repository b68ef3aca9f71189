"""What a lost rank costs an elastic run: ranks are killed, lost runs and seconds until training goes on are counted.

    .venv/bin/python benchmarks/elastic.py [--framework pytorch] [--kills 10]

Each run is `hvdkit train` on three ranks of this machine, one of which, drawn by a seeded generator and rank 0 as
likely as others, gets SIGKILL: at a random moment of training, in one run of five while ranks are starting. A run is
lost unless it ends with status 0, with two ranks (killed at the start: two or three), its last epoch done, and no more
updates gone than lie between two commits. Runs that are done are kept in `runs/elastic` and not run again: give
`--fresh` after a change of code. Writes elastic.json and elastic.md beside itself; exit status 1 where a run is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.results.train import read_result

HERE = Path(__file__).resolve().parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
RANKS, BATCH_SIZE, EPOCHS, COMMIT_EVERY = 3, 8, 1, 5
TRAIN_IMAGES = 1437
UPDATES = EPOCHS * (TRAIN_IMAGES // (RANKS * BATCH_SIZE))  # of an undisturbed run
LAST_KILL = UPDATES - 12  # later ones might come when there is nothing left to do
STARTING = 5  # every so many runs the kill comes while ranks are starting
PATIENCE_S = 300.0


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this one (may be repeated)")
    parser.add_argument("--kills", type=int, default=10, help="runs a framework (default 10)")
    parser.add_argument("--fresh", action="store_true", help="forget runs that are done")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "elastic", help="where runs are kept")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills: expected 1 or more, got {args.kills}")
    frameworks, keep = args.framework or list(FRAMEWORKS), args.keep.absolute()
    if args.fresh:
        shutil.rmtree(keep, ignore_errors=True)
    runs: dict[str, list[dict[str, Any]]] = {framework: [] for framework in frameworks}
    for number in range(args.kills):
        for framework in frameworks:
            folder = keep / framework / f"{number:02d}"
            if not (folder / "run.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                outcome = run(framework, number, folder)
                write_atomic(folder / "run.json", json.dumps(outcome, indent=2) + "\n")
            runs[framework].append(json.loads((folder / "run.json").read_text()))
            print(f"{framework} {number:02d}: {told(runs[framework][-1])}", flush=True)
    found = summary(runs)
    write_atomic(HERE / "elastic.json", json.dumps(found, indent=2) + "\n")
    write_atomic(HERE / "elastic.md", page(found))
    print(page(found))
    return 1 if any(one["lost"] for one in found["frameworks"].values()) else 0


def drawn(framework: str, number: int) -> dict[str, Any]:
    """Whom the kill hits and when: behind update `at_step`, or where that is 0 while ranks start; `delay_s` later."""
    draw = random.Random(f"{framework} {number}")
    starting = number % STARTING == STARTING - 1
    return {
        "rank": draw.randrange(RANKS),
        "at_step": 0 if starting else draw.randint(1, LAST_KILL),
        "delay_s": round(draw.uniform(0, 8 if starting else 0.3), 3),
    }


def run(framework: str, number: int, folder: Path) -> dict[str, Any]:
    """One run with its kill: what was drawn, what came of it."""
    kill, out = drawn(framework, number), folder / "out"
    command = [sys.executable, "-m", "hvdkit", "train", "resnet20-digits", "--framework", framework, "-np", str(RANKS)]
    command += ["--out", str(out), f"batch_size={BATCH_SIZE}", f"epochs={EPOCHS}", "log_every=1", "threads=1"]
    command += ["checkpoint=null"]
    command += [f"elastic={{min_np: 1, max_np: {RANKS}, commit_every: {COMMIT_EVERY}}}"]
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            seen = watch(process, out, kill)
            status: int | None = process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            status, seen = None, {}
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # its ranks end with it
            process.wait()
    outcome = {**kill, "status": status, **seen}
    faults = [f"exit status {status}"] if status != 0 else wrong(outcome, out)
    if (out / "result.json").exists():
        result = read_result(out / "result.json")
        outcome["recoveries"] = [recovery.model_dump() for recovery in result.recoveries]
        outcome["framework_version"], outcome["horovod_version"] = result.framework_version, result.horovod_version
        outcome["np"] = result.np
    return outcome | {"faults": faults}


def watch(process: subprocess.Popen[bytes], out: Path, kill: dict[str, Any]) -> dict[str, Any]:
    """Kill at its moment and look when the next update is there, from outside; raises TimeoutExpired."""
    deadline = time.monotonic() + PATIENCE_S

    def wait_for(what: Callable[[], bool]) -> None:
        while not what() and process.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("hvdkit train", PATIENCE_S)
            time.sleep(0.01)

    wait_for(lambda: len(ranks(out)) == RANKS)
    if kill["at_step"]:
        wait_for(lambda: last(out)[0] >= kill["at_step"])
    time.sleep(kill["delay_s"])
    pid = ranks(out).get(kill["rank"])
    if pid is None:
        return {}
    before = last(out)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    # Two ranks make other updates than three; a run that has not begun has none.
    wait_for(lambda: last(out)[1] != before[1] and last(out)[0] > 0)
    return {"killed_behind_step": before[0], "next_update_s": round(time.monotonic() - killed, 3)}


def ranks(out: Path) -> dict[int, int]:
    """The processes that train into this folder, not their guards, by the rank that each began with."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            marks = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            variables = dict(mark.decode().split("=", 1) for mark in marks if mark.count(b"="))
            ours = variables.get("HVDKIT_RANK_DIR") == str(out / "logs")
            if ours and variables.get("HVDKIT_TRACE", "").startswith("worker"):
                found[int(variables["HOROVOD_RANK"])] = int(entry.name)
    return found


def last(out: Path) -> tuple[int, int]:
    """The last update that is logged, and how many there will be; 0, 0 before the first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        return line["step"], line["total_steps"]
    return 0, 0


def wrong(outcome: dict[str, Any], out: Path) -> list[str]:
    """What is not as it should be of a run that says that all is well."""
    if "next_update_s" not in outcome:
        return ["the run was over before the kill"]
    result, faults = read_result(out / "result.json"), []
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    per_epoch = TRAIN_IMAGES // (result.np * BATCH_SIZE)
    if result.np != RANKS - 1 and not (outcome["killed_behind_step"] == 0 and result.np == RANKS):
        faults.append(f"{result.np} rank(s) at the end")
    if result.steps != EPOCHS * per_epoch or lines[-1]["step"] != result.steps:
        faults.append(f"{result.steps} updates, expected {EPOCHS * per_epoch}")
    if [line["epoch"] for line in lines if line["ends_epoch"]] != list(range(EPOCHS)):
        faults.append("not every epoch came to its end once")
    if outcome["killed_behind_step"] and not thrown_back(outcome, result.recoveries[-1].step, result.np):
        faults.append("it went on from elsewhere than the last commit")
    return faults


def thrown_back(outcome: dict[str, Any], step: int, np: int) -> bool:
    """Whether going on with update `step` of `np` ranks fits one of the commits that the kill can have left last."""
    whole = UPDATES // EPOCHS
    behind = outcome["killed_behind_step"]
    for done in range(behind - COMMIT_EVERY, behind + COMMIT_EVERY + 1):
        if done < 0 or done % COMMIT_EVERY:
            continue
        epoch, updates = divmod(done, whole)
        per_epoch = TRAIN_IMAGES // (np * BATCH_SIZE)
        left = (TRAIN_IMAGES - updates * RANKS * BATCH_SIZE) // (np * BATCH_SIZE)
        if (epoch + 1) * per_epoch - left + 1 == step:
            return True
    return False


def told(one: dict[str, Any]) -> str:
    """A run in a line."""
    when = f"behind step {one['at_step']}" if one["at_step"] else f"{one['delay_s']} s after the start"
    how = "LOST: " + "; ".join(one["faults"]) if one["faults"] else f"next update {one['next_update_s']} s later"
    within = [recovery["seconds"] for recovery in one.get("recoveries", [])]
    return f"rank {one['rank']} killed {when}; {how}; recoveries {within}"


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median and range."""
    if not seconds:
        return {"n": 0}
    return {"median": statistics.median(seconds), "low": min(seconds), "high": max(seconds), "n": len(seconds)}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What elastic.json holds."""
    frameworks: dict[str, Any] = {}
    for framework, every in runs.items():
        good = [one for one in every if not one["faults"]]
        training = [one for one in good if one["at_step"]]
        frameworks[framework] = {
            "kills": len(every),
            "lost": len(every) - len(good),
            "recovery_s": spread([one["recoveries"][-1]["seconds"] for one in training]),
            "next_update_s": spread([one["next_update_s"] for one in training]),
            "next_update_at_start_s": spread([one["next_update_s"] for one in good if not one["at_step"]]),
            "versions": {key: good[0][key] for key in ("framework_version", "horovod_version")} if good else {},
            "runs": every,
        }
    return {
        "command": " ".join(["python", "benchmarks/elastic.py", *sys.argv[1:]]),
        "ranks": RANKS,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "commit_every": COMMIT_EVERY,
        "frameworks": frameworks,
        "machine": this_machine().model_dump(),
    }


def page(outcome: dict[str, Any]) -> str:
    """`elastic.md`."""
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: dict[str, Any]) -> Iterator[str]:
    machine = outcome["machine"]
    yield "# What a lost rank costs an elastic run"
    yield ""
    yield (
        f"ResNet-20 on the digits, {outcome['ranks']} ranks of one thread, {outcome['batch_size']} images a rank, "
        f"{outcome['epochs']} epoch(s), a commit each {outcome['commit_every']} updates. In each run one rank gets "
        "SIGKILL at a random moment of training, in one of five while ranks start. A run is lost unless it comes to "
        "its end with the ranks that are left, from the last commit on. Seconds: median (range; n). As a rank sees it: "
        "from noticing the loss to its next update. From outside: from the kill to the next line of metrics.jsonl; "
        "killed at the start, to the first."
    )
    yield ""
    yield "| framework | runs | lost | as a rank sees it, s | from outside, s | killed at the start, s |"
    yield "|:---|---:|---:|---:|---:|---:|"
    for name, one in outcome["frameworks"].items():
        cells = [_cell(one[key]) for key in ("recovery_s", "next_update_s", "next_update_at_start_s")]
        version = one["versions"].get("framework_version", "")
        yield f"| {name} {version} | {one['kills']} | {one['lost']} | {' | '.join(cells)} |"
    yield ""
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_mib']} MiB, {machine['system']}; "
        f"Gloo. Made by `{outcome['command']}`."
    )


def _cell(seconds: dict[str, Any]) -> str:
    if not seconds["n"]:
        return "-"
    return f"{seconds['median']:.1f} ({seconds['low']:.1f}–{seconds['high']:.1f}; {seconds['n']})"


if __name__ == "__main__":
    sys.exit(main())
