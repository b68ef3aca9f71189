"""Runs that are broken off and gone on from: whole ones on the null adapter in moments, and how ranks are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hvdkit.checkpoint import snapshots
from hvdkit.core.session import Session
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.train import TrainResult
from hvdkit.tasks import resnet
from hvdkit.worker import setup, train
from tests import local_adapter
from tests.launching import wait_until
from tests.local_adapter import Linear


def local_recipe(**changes: Any) -> Recipe:
    document = {
        "name": "local",
        "model": {"name": "resnet20"},
        "data": {"name": "digits", "augment": "crop"},
        "epochs": 3,
        "accumulate": 3,
        "log_every": 4,
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "schedule": {"warmup_epochs": 0.5},
        "checkpoint": {"every_steps": 4},
    }
    return Recipe.model_validate(document | changes)


class Killed(BaseException):
    """What a test puts in the place of SIGKILL."""


def local_run(
    folder: Path | None, recipe: Recipe, resume: bool = False, kill_at: int | None = None
) -> TrainResult | None:
    """Train on the null adapter, killed before update `kill_at`."""
    adapter: Any = local_adapter.adapter
    if folder:
        folder.mkdir(exist_ok=True)
    sound, steps = Session.train_step, 0

    def train_step(session: Any, batches: Any) -> Any:
        nonlocal steps
        if steps == kill_at:
            raise Killed
        steps += 1
        return sound(session, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "train_step", train_step)
        patch.setattr(resnet.ResNet, "initial_state", lambda architecture, seed: Linear(3072, 10).parameters)
        try:
            script = setup.RankScript(lambda table: Linear(3072, 10))
            return train.train(adapter, script, recipe, folder, Heartbeat(), resume)
        except Killed:
            for writer in (each for each in threading.enumerate() if each.name == "checkpoint"):
                writer.join()  # no process has ended here, so neither has it
            return None


RATE = "communication_mbit_per_s"


def by_tag(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by a tracker's tag, as metrics.jsonl has them."""
    points: dict[str, list[tuple[int, float]]] = {}
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        names = (
            {"epoch/train_loss": "loss", "validation/accuracy": "val_accuracy", "validation/loss": "val_loss"}
            if line["ends_epoch"]
            else {f"train/{name}": name for name in ("loss", "learning_rate", "images_per_second", RATE)}
        )
        for tag, name in names.items():
            if name != RATE or name in line:  # ranks without a Horovod that counts have none
                points.setdefault(tag, []).append((line["step"], line[name]))
    return points


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = ("images_per_second", "bytes_per_step", "rss_mib", RATE)  # of each process
    return [{key: value for key, value in line.items() if key not in own} for line in found]


def rewrite_record(path: Path, **changes: Any) -> None:
    """Change keys of a `checkpoint.json`; None leaves one out."""
    record = json.loads(path.read_text())
    record = {key: value for key, value in (record | changes).items() if key != "sha256" and value is not None}
    path.write_text(snapshots.sealed(json.dumps(record, indent=1)))


@contextmanager
def under_way(
    out: Path, *arguments: object, program: tuple[str, str] = ("-m", "hvdkit")
) -> Iterator[subprocess.Popen[str]]:
    """`hvdkit train` with these arguments and `--out`, once its first checkpoint is there; it does not outlive this."""
    command = [sys.executable, *program, "train", *map(str, arguments), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        written = wait_until(lambda: any((out / "checkpoints").glob("step-*")) or process.poll() is not None, 90)
        assert written and process.poll() is None, "no checkpoint was written"
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # its ranks end with it
        process.communicate()


def kill_ranks(folder: Path, rank: int | None = None) -> None:
    """SIGKILL to the ranks of a run themselves, or one of them, as from the kernel.

    By their environment, not their agents', nor what stands for a rank that is forked (tests/warm).
    """
    names = {f"HVDKIT_TRACE=rank-{number}" for number in (range(99) if rank is None else [rank])}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            marks = (entry / "environ").read_text(errors="replace").split("\0") if entry.name.isdigit() else []
            of_rank = f"HVDKIT_RANK_DIR={folder}/logs" in marks and names & {*marks}
            if of_rank and "warm/client.py" not in (entry / "cmdline").read_text(errors="replace"):
                os.kill(int(entry.name), signal.SIGKILL)
