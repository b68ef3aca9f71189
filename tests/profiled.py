"""A profiled run that never was: two ranks on two hosts, whose steps are known to the nanosecond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdkit.core import trace_events
from hvdkit.core.schedules import actions
from hvdkit.results.recording import Kind, RankRecord, RunRecord, Samples, StepRecord, TensorRecord
from hvdkit.worker.tuning import CACHE, CYCLE, FUSION

MS = 1_000_000
AHEAD = 5_000 * MS  # rank 1's clock
EPOCH = 1_700_000_000_000 * MS  # rank 0's wall clock is so far ahead of its own
FORWARD, BACKWARD, SLOWER, NEGOTIATION, TRANSFER, UPDATE = 20, 40, 15, 3, 7, 2  # ms; rank 1's forward is slower
STEP = 1 + 1 + 1 + FORWARD + SLOWER + BACKWARD + NEGOTIATION + TRANSFER + UPDATE + 1
TENSORS = {"conv1.weight": [4, 3, 3, 3], "bn1.weight": [4], "bn1.bias": [4], "fc.weight": [10, 4]}
READY = {"fc.weight": 5, "bn1.bias": 20, "bn1.weight": 20, "conv1.weight": 40}  # ms after backward's start
ENDS = {"conv1": 10, "bn1": 12, "fc": 18}  # ms after forward's start; rank 1's in proportion


def marks_of(rank: int, start: int) -> list[tuple[str, int]]:
    """Of one step that begins at `start` by rank 0's clock, by the rank's own."""
    forward = FORWARD + (SLOWER if rank else 0)
    met = 3 + FORWARD + SLOWER + BACKWARD
    asked, over = 3 + forward + BACKWARD, met + NEGOTIATION + TRANSFER
    at = {
        trace_events.OPEN: 0,
        trace_events.STEP: 1,
        trace_events.BEGIN: 2,
        trace_events.INPUTS: 3,
        trace_events.FORWARD: 3 + forward,
        trace_events.BACKWARD: asked,
        trace_events.SENT: asked,
        trace_events.RECEIVED: over,
        trace_events.REDUCED: over,
        trace_events.UPDATED: over + UPDATE,
        trace_events.END: over + UPDATE + 1,
    }
    for name, after in READY.items():
        at[trace_events.READY + name] = 3 + forward + after
    for name, after in ENDS.items():
        at[trace_events.LAYER + name] = 3 + after * forward // FORWARD
    found = [(name, start + ms * MS + (AHEAD if rank else 0)) for name, ms in at.items()]
    return sorted(found, key=lambda each: each[1])


def steps(rank: int) -> list[StepRecord]:
    kinds: list[tuple[Kind, int]] = [("plain", 0), ("marked", 0), ("marked", 1), ("plain", 1)]
    kinds += [("detailed", 2), ("traced", 3)]
    found = []
    for place, (kind, turn) in enumerate(kinds):
        for number in range(4):
            made = marks_of(rank, 1000 * MS + (10 * place + number) * STEP * MS) if kind != "plain" else []
            found.append(StepRecord(kind=kind, turn=turn, ns=STEP * MS - (kind == "plain") * MS, marks=made))
    return found


def record(boots: tuple[str, str] = ("here", "there")) -> RunRecord:
    ranks = []
    for rank in (0, 1):
        ahead = AHEAD if rank else 0
        # A meeting is over 2 ms after the last has come to it, by turns rank 1 and rank 0.
        meetings = [
            [
                (ahead + at + MS * ((at // (10 * MS) + rank + 1) % 2), ahead + at + 3 * MS)
                for at in range(begin, begin + 90 * MS, 10 * MS)
            ]
            for begin in (0, 90_000 * MS)
        ]
        alone = [(at + ahead, at + ahead + 4 * MS) for at in range(95_000 * MS, 95_100 * MS, 10 * MS)]
        collectives = [Samples(operation="allreduce", bytes=4_000_000, times=alone)]
        ranks.append(
            RankRecord(
                rank=rank, host=f"host{rank}", boot=boots[rank], epoch=(EPOCH, EPOCH), meetings=meetings,
                steps=steps(rank), collectives=collectives, interface="eth0", rated_mbit_per_s=10_000.0,
                peak_rss_mib=100.0 + rank, device_peak_mib=None,
            )
        )  # fmt: skip
    tensors = [TensorRecord(name=name, shape=shape, dtype="float32") for name, shape in TENSORS.items()]
    return RunRecord(
        framework="pytorch", versions={"framework": "9.9", "horovod": "0.28.1"}, device="cpu", threads=1,
        launcher="direct", processor="a processor", hosts=2, tuning={CYCLE: 5.0, FUSION: 2.0**27, CACHE: 1024.0},
        tells_layers=True, parameter_bytes=4 * 156, optimizer_bytes=4 * 156, bytes_per_step=4.0 * 156,
        tensors=tensors, ranks=ranks,
    )  # fmt: skip


def pipelined(stages: int, microbatches: int, forward: int, backward: int) -> RunRecord:
    """A run in as many ranks as stages by 1F1B, all of whose passes take equally long (ms), and messages no time.

    Input takes 1 ms; after the last pass come 1 ms until messages have come, 3 ms of update and 1 ms of other work.
    """
    length, made = (microbatches + stages - 1) * (forward + backward), record(("here", "here"))
    ranks = []
    for stage in range(stages):
        listed = actions("1f1b", stage, stages, microbatches)
        # Forward passes follow each other in time, then those after a stage's first backward pass alternate.
        first = {"forward": stage * forward, "backward": stages * forward + (stages - 1 - stage) * backward}
        ahead, ends = stages - 1 - stage, dict[tuple[str, int], int]()
        for number in range(microbatches):
            begin = first["backward"] + number * (forward + backward)
            ends["backward", number] = begin + backward
            warm = number <= ahead
            ends["forward", number] = (
                first["forward"] + (number + 1) * forward if warm else ends["backward", number - ahead - 1] + forward
            )
        marks, last = [(trace_events.OPEN, 0), (trace_events.STEP, 1)], 1
        for action in listed:
            took = {"forward": forward, "backward": backward}
            what = "forward" if action.kind.endswith("activation") else "backward"
            if action.kind in took:
                last = 1 + ends[action.kind, action.microbatch]
            elif action.kind.startswith("receive"):
                last = 1 + ends[what, action.microbatch] - took[what]
            marks.append((f"{trace_events.ACTION}{action.kind}:{action.microbatch}:0", last))
        marks += [
            (trace_events.DELIVERED, 2 + length),
            (trace_events.UPDATED, 5 + length),
            (trace_events.END, 6 + length),
        ]
        several = [
            StepRecord(
                kind="marked", turn=0, ns=(6 + length) * MS,
                marks=[(name, (1000 + number * (6 + length) + ms) * MS) for name, ms in marks],
            )
            for number in range(3)
        ]  # fmt: skip
        ranks.append(made.ranks[0].model_copy(update={"rank": stage, "steps": several}))
    return made.model_copy(update={"ranks": ranks})


def timeline() -> list[dict[str, Any]]:
    """Horovod's events of the traced steps: both gradients' halves as one collective."""
    begin = EPOCH // 1000  # microseconds; the timeline begins when rank 0's clock is at 0
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": begin}}
    ]
    for pid, name in enumerate(TENSORS, start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
    for made in (step for step in steps(0) if step.kind == "traced"):
        start = made.marks[0][1] // 1000
        asked = start + 1000 * (3 + FORWARD + BACKWARD)
        moving = start + 1000 * (3 + FORWARD + SLOWER + BACKWARD + NEGOTIATION)
        over = moving + 1000 * TRANSFER
        pids = range(1, len(TENSORS) + 1)
        for name, ph, ts in (
            ("NEGOTIATE_ALLREDUCE", "B", asked),
            ("", "E", moving - 500),
            ("ALLREDUCE", "B", moving - 400),
            ("INIT_FUSION_BUFFER", "B", moving - 400),
            ("", "E", moving),
            ("MEMCPY_IN_FUSION_BUFFER", "B", moving),
            ("", "E", moving + 10),
            ("GLOO_ALLREDUCE", "B", moving + 20),
            ("", "E", over - 10),
        ):
            events += [{"name": name, "ph": ph, "ts": ts, "pid": pid} for pid in pids]
        for pid, shape in zip(pids, TENSORS.values(), strict=True):
            args = {"dtype": "float32", "shape": str(shape)}
            events.append({"ph": "E", "ts": over, "pid": pid, "args": args})
    return events


def write(folder: Path) -> Path:
    """Both files into the folder; the timeline's path."""
    (folder / "record.json").write_text(record().model_dump_json())
    (folder / "timeline.json").write_text(json.dumps(timeline()))
    return folder / "timeline.json"
