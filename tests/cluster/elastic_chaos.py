"""Elastic runs under random schedules: ranks are killed, slots come and go, and training has to continue.

    .venv/bin/python -m tests.cluster.elastic_chaos [--framework pytorch] [--runs 10] [--events 12]

Each run trains ResNet-8 on the digits with three ranks on this machine, two at least and four at most, on slots that a
discovery script prints. A schedule, drawn from the run's number, kills a rank, the oldest, one that joins, two within a
moment, or all; offers a slot or takes one; kills each rank of one slot for a while; or lets the script fail. After each
event the next updates have to come within 30 s. At the end: status 0, all epochs done, no more updates gone than lie
between two commits, and `recoveries` that fit what happened. Runs that are done are kept in `runs/elastic_chaos`: give
`--fresh` after a change of code. Writes elastic.json and elastic.md into benchmarks/; exit status 1 where a
run has faults.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.results.train import read_result

RANKS, LEAST, MOST, BATCH_SIZE, COMMIT_EVERY = 3, 2, 4, 32, 3
TRAIN_IMAGES = 1437
PROMISE_S = 30.0
TIMEOUT_S = 600.0
KINDS = ("kill", "kill", "oldest", "joining", "two", "all", "offer", "offer", "take", "dies again", "script fails")


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, keep="elastic_chaos", frameworks=True)
    parser.add_argument(
        "--runs", type=harness.positive, default=10, help="runs (default 10); of TensorFlow and Keras half as many"
    )
    parser.add_argument("--events", type=harness.positive, default=12, help="events a run (default 12)")
    parser.add_argument("--done", action="store_true", help="run nothing: write the results of the runs that are kept")
    args = parser.parse_args()

    def one(framework: str, number: int, _: str, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        return Chaos(framework, number, folder, args.events).run()

    kept, found = harness.kept(args), {}
    for names, runs in ((("pytorch", "mxnet"), args.runs), (("tensorflow", "keras"), (args.runs + 1) // 2)):
        asked = [name for name in names if name in (args.framework or harness.FRAMEWORKS)]
        if args.done:
            rounds = {name: sorted((kept / name).glob("*/round.json")) for name in asked}
            found |= {name: [json.loads(file.read_text()) for file in files] for name, files in rounds.items()}
        else:
            found |= harness.rounds(kept, asked, ["run"], runs, one)
    outcome = {name: summary([each["run"] for each in runs]) for name, runs in found.items()}
    setting = {"ranks": RANKS, "min_np": LEAST, "max_np": MOST, "batch_size": BATCH_SIZE, "commit_every": COMMIT_EVERY}
    written.publish("elastic", setting | {"promise_s": PROMISE_S, "frameworks": outcome}, args.out)
    return 1 if any(one["faulty"] for one in outcome.values()) else 0


class Chaos:
    """One run and its schedule, whose events are of `kinds`; `epochs` bounds its length."""

    def __init__(
        self,
        framework: str,
        number: int,
        folder: Path,
        events: int,
        epochs: int = 30,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self.draw = random.Random(f"{framework} {number}")
        self.framework, self.folder, self.out = framework, folder, folder / "out"
        self.count, self.epochs, self.kinds = events, epochs, kinds
        self.slots = RANKS
        self.seen: dict[str, float] = {}  # lines of metrics.jsonl, and when
        self.furthest = 0.0  # in epochs
        self.events: list[dict[str, Any]] = []
        self.faults: list[str] = []

    def run(self) -> dict[str, Any]:
        """What happened, with its faults."""
        script = self.folder / "hosts"
        script.write_text(f"#!/bin/sh\n. {self.folder}/state\n")
        script.chmod(0o755)
        self.offer(self.slots)
        command = [sys.executable, "-m", "hvdkit", "train", "resnet20-digits", "--framework", self.framework, "-np"]
        command += [str(RANKS), "--out", str(self.out), "model.name=resnet8", f"batch_size={BATCH_SIZE}", "tune=none"]
        command += [f"epochs={self.epochs}", "log_every=1", "threads=1", "checkpoint=null"]
        command += ["--host-discovery-script", str(script)]
        command += [f"elastic={{min_np: {LEAST}, max_np: {MOST}, commit_every: {COMMIT_EVERY}}}"]
        with (self.folder / "output.txt").open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        status = None
        try:
            if self.wait(3, 4 * PROMISE_S) is not None:
                while len(self.events) < self.count and self.process.poll() is None and not self.faults:
                    self.happen(self.draw.choice(self.kinds))
            self.wait(10**9, TIMEOUT_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(timeout=PROMISE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        said = (self.folder / "output.txt").read_text(errors="replace")
        if status != 0:
            self.faults.append(f"exit status {status}: {said.strip()[-400:]}")
        else:
            self.judge(said)
        recovered = [event["seconds"] for event in self.events if event["seconds"] is not None]
        harness.say(
            f"{self.framework}: {len(self.events)} events, at most {max(recovered, default=0):.1f} s; "
            f"{'; '.join(self.faults) or 'survived'}"
        )
        return {"events": self.events, "faults": self.faults, "aborted": said.count("SIGABRT")}

    def offer(self, slots: int, text: str | None = None) -> None:
        """What the script prints from now on."""
        state = self.folder / "state.new"
        state.write_text(text or f"echo localhost:{slots}\n")
        state.rename(self.folder / "state")

    def happen(self, kind: str) -> None:
        """One event, and the next updates after it."""
        ranks = workers(self.out)
        if not ranks:
            return
        self.look()
        began = time.monotonic()
        if kind in ("kill", "oldest", "joining", "two", "all"):
            joining = [pid for pid, _ in ranks if self.starts(pid)]
            chosen = [self.draw.choice(ranks)[0]]
            if kind == "oldest":
                chosen = [ranks[0][0]]
            elif kind == "joining" and joining:
                chosen = joining[:1]
            elif kind == "two":
                chosen = [pid for pid, _ in self.draw.sample(ranks, min(2, len(ranks)))]
            elif kind == "all":
                chosen = [pid for pid, _ in ranks]
            for number, pid in enumerate(chosen):
                if number and kind == "two":
                    self.pause(self.draw.uniform(0, 2))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif kind in ("offer", "take"):
            self.slots = min(self.slots + 1, MOST + 1) if kind == "offer" else max(self.slots - 1, LEAST)
            self.offer(self.slots)
            if self.draw.random() < 0.5:  # what comes next comes while they join or leave
                self.pause(self.draw.uniform(0.5, 4))
                self.events.append({"kind": kind, "seconds": None})
                return
        elif kind == "dies again" and self.slots > LEAST:
            name, until = f"worker-localhost-{self.draw.randrange(self.slots)}", time.monotonic() + 6
            while time.monotonic() < until:
                for pid, worker in workers(self.out):
                    if worker.startswith((f"{name}-", f"{name}.")):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                self.pause(0.3)
        elif kind == "script fails":
            self.offer(0, self.draw.choice(["exit 1\n", "true\n", "echo cloudy\n", "sleep 3\n"]))
            self.pause(self.draw.uniform(1, 4))
            self.offer(self.slots)
        else:
            return
        happened = time.monotonic()
        seconds = self.wait(2, 2 * PROMISE_S)
        self.events.append({"kind": kind, "seconds": None if seconds is None else round(seconds, 2)})
        if self.process.poll() is None and (seconds is None or seconds > PROMISE_S):
            self.faults.append(f"after {kind}: no update within {PROMISE_S:.0f} s ({happened - began:.1f} s event)")
        self.pause(self.draw.uniform(0, 3))

    def starts(self, pid: int) -> bool:
        """Whether a worker has not trained yet."""
        with contextlib.suppress(OSError):
            variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
            name = next(one for one in variables if one.startswith(b"HVDKIT_TRACE=")).decode().partition("=")[2]
            return " -1 " in (self.out / "logs" / f"{name}.beat").read_text()
        return True

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(0.05)

    def wait(self, updates: int, patience_s: float) -> float | None:
        """Wait for so many new updates; how long it took, None where they did not come or the run ended."""
        self.look()
        before, began = len(self.seen), time.monotonic()
        while self.process.poll() is None and time.monotonic() < began + patience_s:
            self.look()
            if len(self.seen) >= before + updates:
                return time.monotonic() - began
            time.sleep(0.05)
        return None

    def look(self) -> None:
        """Read new lines of metrics.jsonl. No line may lie further back than the last commit before it."""
        with contextlib.suppress(OSError), (self.out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 2**16))
            for text in file.read().decode(errors="replace").split("\n")[:-1]:
                if text in self.seen or not text.startswith('{"step"'):  # the first one may be cut
                    continue
                self.seen[text] = time.monotonic()
                line = json.loads(text)
                done = line["step"] / (line["total_steps"] / self.epochs)
                bound = (COMMIT_EVERY + 2) * MOST * BATCH_SIZE / TRAIN_IMAGES
                if done < self.furthest - bound and not line["ends_epoch"]:
                    self.faults.append(f"back from epoch {self.furthest:.2f} to {done:.2f}")
                self.furthest = max(self.furthest, done)

    def judge(self, said: str) -> None:
        """Faults of a run that ended with status 0."""
        result = read_result(self.out / "result.json")
        lines = [json.loads(text) for text in (self.out / "metrics.jsonl").read_text().splitlines()]
        if [line["epoch"] for line in lines if line["ends_epoch"]] != list(range(self.epochs)):
            self.faults.append("not each epoch ended once")
        if not result.steps == lines[-1]["step"] == self.epochs * (TRAIN_IMAGES // (result.np * BATCH_SIZE)):
            self.faults.append(f"{result.steps} updates at the end with {result.np} ranks")
        chain = [RANKS, *[each.np for each in result.recoveries]]
        if [each.np_before for each in result.recoveries] != chain[:-1] or chain[-1] != result.np:
            self.faults.append(f"recoveries do not fit: {[(each.np_before, each.np) for each in result.recoveries]}")
        if any(event["kind"] in ("all", "oldest") for event in self.events) and not result.recoveries:
            self.faults.append("recoveries are empty")
        if "Traceback" in said:
            self.faults.append("a traceback on the terminal")


def workers(out: Path) -> list[tuple[int, str]]:
    """The processes that train into this folder, not their agents, oldest first, with their names."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            entries = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            variables = dict(one.decode().split("=", 1) for one in entries if b"=" in one)
            name = variables.get("HVDKIT_TRACE", "")
            if variables.get("HVDKIT_RANK_DIR") == str(out / "logs") and name.startswith("worker"):
                began = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
                found.append((began, int(entry.name), name))
    return [(pid, name) for _, pid, name in sorted(found)]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What elastic_chaos.json holds of a framework."""
    events = [event for run in runs for event in run["events"]]
    seconds = [event["seconds"] for event in events if event["seconds"] is not None]
    kinds = sorted({event["kind"] for event in events})
    return {
        "runs": len(runs),
        "events": len(events),
        "by_kind": {kind: sum(event["kind"] == kind for event in events) for kind in kinds},
        "faulty": sum(bool(run["faults"]) for run in runs),
        "aborted": sum(run["aborted"] for run in runs),
        "seconds": harness.median_and_range(seconds) if seconds else {},
        "each": runs,
    }


if __name__ == "__main__":
    harness.exit_with(main)
