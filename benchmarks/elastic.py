"""What a lost rank costs an elastic run: ranks are killed, lost runs and seconds until training goes on are counted.

    .venv/bin/python benchmarks/elastic.py [--framework pytorch] [--kills 10]

Each run is `hvdkit train` on three ranks of this machine, one of which, drawn by a seeded generator and rank 0 as
likely as others, gets SIGKILL: at a random moment of training, in one run of five while ranks are starting. A run is
lost unless it ends with status 0, with two ranks (killed at the start: two or three), its last epoch done, and no more
updates gone than lie between two commits. Runs that are done are kept in `runs/elastic` and not run again: give
`--fresh` after a change of code. Writes elastic.json and elastic.md beside itself; exit status 1 where a run is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

from hvdkit.results.train import read_result

RANKS, BATCH_SIZE, EPOCHS, COMMIT_EVERY = 3, 8, 1, 5
TRAIN_IMAGES = 1437
UPDATES = EPOCHS * (TRAIN_IMAGES // (RANKS * BATCH_SIZE))  # of an undisturbed run
LAST_KILL = UPDATES - 12  # later ones might come when there is nothing left to do
STARTING = 5  # every so many runs the kill comes while ranks are starting
TIMEOUT_S = 300.0


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, keep="elastic", frameworks=True)
    parser.add_argument("--kills", type=harness.positive, default=10, help="runs a framework (default 10)")
    args = parser.parse_args()
    keep = harness.kept(args)
    runs: dict[str, list[dict[str, Any]]] = {framework: [] for framework in args.framework or harness.FRAMEWORKS}
    for number in range(args.kills):
        for framework, done in runs.items():

            def one(framework: str, folder: Path, number: int = number) -> dict[str, Any]:
                return run(framework, number, folder)

            done += harness.one_round(keep / framework / f"{number:02d}", [framework], one).values()
            harness.say(f"{framework} {number:02d}: {in_a_line(done[-1])}")
    frameworks = {framework: summary(done) for framework, done in runs.items()}
    setting = {"ranks": RANKS, "batch_size": BATCH_SIZE, "epochs": EPOCHS, "commit_every": COMMIT_EVERY}
    harness.publish("elastic", setting | {"frameworks": frameworks})
    return 1 if any(one["lost"] for one in frameworks.values()) else 0


def drawn(framework: str, number: int) -> dict[str, Any]:
    """Which rank is killed and when: after update `at_step`, or where that is 0 while ranks start; `delay_s` later."""
    draw = random.Random(f"{framework} {number}")
    starting = number % STARTING == STARTING - 1
    return {
        "rank": draw.randrange(RANKS),
        "at_step": 0 if starting else draw.randint(1, LAST_KILL),
        "delay_s": round(draw.uniform(0, 8 if starting else 0.3), 3),
    }


def run(framework: str, number: int, folder: Path) -> dict[str, Any]:
    """One run with its kill: what was drawn, what came of it."""
    folder.mkdir()
    kill, out = drawn(framework, number), folder / "out"
    command = [sys.executable, "-m", "hvdkit", "train", "resnet20-digits", "--framework", framework, "-np", str(RANKS)]
    command += ["--out", str(out), f"batch_size={BATCH_SIZE}", f"epochs={EPOCHS}", "log_every=1", "threads=1"]
    command += ["checkpoint=null"]
    command += [f"elastic={{min_np: 1, max_np: {RANKS}, commit_every: {COMMIT_EVERY}}}"]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            seen = watch(process, out, kill)
            status: int | None = process.wait(timeout=TIMEOUT_S)
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
    deadline = time.monotonic() + TIMEOUT_S

    def wait_for(what: Callable[[], bool]) -> None:
        while not what() and process.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("hvdkit train", TIMEOUT_S)
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
    """The processes that train into this folder, not their agents, by the rank that each began with."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            entries = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            variables = dict(one.decode().split("=", 1) for one in entries if b"=" in one)
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
    """The faults of a run that has ended with status 0."""
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


def in_a_line(one: dict[str, Any]) -> str:
    """A run in a line."""
    when = f"after step {one['at_step']}" if one["at_step"] else f"{one['delay_s']} s after the start"
    how = "LOST: " + "; ".join(one["faults"]) if one["faults"] else f"next update {one['next_update_s']} s later"
    within = [recovery["seconds"] for recovery in one.get("recoveries", [])]
    return f"rank {one['rank']} killed {when}; {how}; recoveries {within}"


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What elastic.json holds of a framework."""
    good = [one for one in runs if not one["faults"]]
    training = [one for one in good if one["at_step"]]
    return {
        "kills": len(runs),
        "lost": len(runs) - len(good),
        "recovery_s": spread([one["recoveries"][-1]["seconds"] for one in training]),
        "next_update_s": spread([one["next_update_s"] for one in training]),
        "next_update_at_start_s": spread([one["next_update_s"] for one in good if not one["at_step"]]),
        "versions": {key: good[0][key] for key in ("framework_version", "horovod_version")} if good else {},
        "runs": runs,
    }


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median and range, and of how many."""
    return (harness.median_and_range(seconds) if seconds else {}) | {"n": len(seconds)}


if __name__ == "__main__":
    harness.exit_with(main)
