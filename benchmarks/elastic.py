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

RANKS, BATCH_SIZE, COMMIT_EVERY = 3, 8, 5
TRAIN_IMAGES = 1437
UPDATES = TRAIN_IMAGES // (RANKS * BATCH_SIZE)  # of an undisturbed run: one epoch
LAST_KILL = UPDATES - 12  # later ones might come when there is nothing left to do
STARTING = 5  # every so many runs the kill comes while ranks are starting
TIMEOUT_S = 300.0


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, keep="elastic", frameworks=True)
    parser.add_argument("--kills", type=harness.positive, default=10, help="runs a framework (default 10)")
    args = parser.parse_args()
    frameworks = args.framework or harness.FRAMEWORKS
    found = harness.rounds(harness.kept(args), frameworks, ["run"], args.kills, run)
    outcome: dict[str, Any] = {name: summary([one["run"] for one in runs]) for name, runs in found.items()}
    setting = {"ranks": RANKS, "batch_size": BATCH_SIZE, "epochs": 1, "commit_every": COMMIT_EVERY}
    harness.publish("elastic", setting | {"frameworks": outcome}, args.out)
    return 1 if any(one["lost"] for one in outcome.values()) else 0


def drawn(framework: str, number: int) -> dict[str, Any]:
    """Which rank is killed and when: after update `at_step`, or where that is 0 while ranks start; `delay_s` later."""
    draw = random.Random(f"{framework} {number}")
    starting = number % STARTING == STARTING - 1
    return {
        "rank": draw.randrange(RANKS),
        "at_step": 0 if starting else draw.randint(1, LAST_KILL),
        "delay_s": round(draw.uniform(0, 8 if starting else 0.3), 3),
    }


def run(framework: str, number: int, _: str, folder: Path) -> dict[str, Any]:
    """One run with its kill: what was drawn, what came of it."""
    folder.mkdir()
    kill, out = drawn(framework, number), folder / "out"
    command = [sys.executable, "-m", "hvdkit", "train", "resnet20-digits", "--framework", framework, "-np", str(RANKS)]
    command += ["--out", str(out), f"batch_size={BATCH_SIZE}", "epochs=1", "log_every=1", "threads=1"]
    command += ["checkpoint=null", f"elastic={{min_np: 1, max_np: {RANKS}, commit_every: {COMMIT_EVERY}}}"]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            outcome = kill | watch(process, out, kill)
            outcome["status"] = process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            outcome = kill | {"status": None}
        finally:
            process.kill()  # its ranks end with it
            process.wait()
    outcome["faults"] = [f"exit status {outcome['status']}"] if outcome["status"] != 0 else wrong(outcome, out)
    if (out / "result.json").exists():
        result = harness.result_of(out)
        outcome |= {key: result[key] for key in ("recoveries", "framework_version", "horovod_version", "np")}
    harness.say(f"rank {kill['rank']}, step {kill['at_step']}: {'; '.join(outcome['faults']) or 'survived'}")
    return outcome


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
    result, faults, behind = read_result(out / "result.json"), [], outcome["killed_behind_step"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    updates = TRAIN_IMAGES // (result.np * BATCH_SIZE)
    if result.np != RANKS - 1 and not (behind == 0 and result.np == RANKS):
        faults.append(f"{result.np} rank(s) at the end")
    if not result.steps == lines[-1]["step"] == updates:
        faults.append(f"{result.steps} updates, expected {updates}")
    if [line["epoch"] for line in lines if line["ends_epoch"]] != [0]:
        faults.append("the epoch came not to its end once")
    # Each commit that the kill can have left last, and the update, as fewer ranks count, that comes after it.
    commits = [done for done in range(0, UPDATES, COMMIT_EVERY) if abs(done - behind) <= COMMIT_EVERY]
    after = [updates + 1 - (TRAIN_IMAGES - done * RANKS * BATCH_SIZE) // (result.np * BATCH_SIZE) for done in commits]
    if behind and result.recoveries[-1].step not in after:
        faults.append("it went on from elsewhere than the last commit")
    return faults


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
