"""Attacks on exactness: training that is ended at any update and resumed gives the bits of one that was not."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from pathlib import Path
from typing import Any

from tests.trials.trial import attack, expect, ran, running

# (framework, keys): what keeps state of its own between updates.
KEPT = {
    "fp16_sgd": ("pytorch", "precision=fp16"),
    "fp16_lars": ("pytorch", "precision=fp16", "optimizer.name=lars", "optimizer.learning_rate=1"),
    "lars": ("pytorch", "optimizer.name=lars", "optimizer.learning_rate=1"),
    "bf16_lamb": ("pytorch", "precision=bf16", "optimizer.name=lamb", "optimizer.learning_rate=0.01"),
    "adamw_clipped": ("pytorch", "optimizer.name=adamw", "optimizer.learning_rate=0.01", "optimizer.clip_norm=0.5"),
    "topk": ("pytorch", "compression=topk"),
    "powersgd": ("pytorch", "compression=powersgd"),
    "local_sgd": ("pytorch", "sync={every: 4}"),
    "average": ("pytorch", "average_weights={decay: 0.99}"),
    "accumulated": ("pytorch", "accumulate=3", "batch_size=8"),
    "augmented": ("pytorch", "data.augment=crop"),
    "sharded": ("pytorch", "sharding=gradients"),
    "sharded_fp16": ("pytorch", "sharding=optimizer", "precision=fp16"),
    "mxnet_lars": ("mxnet", "optimizer.name=lars", "optimizer.learning_rate=1"),
    "mxnet_topk": ("mxnet", "compression=topk"),
    "tensorflow_lamb": ("tensorflow", "optimizer.name=lamb", "optimizer.learning_rate=0.01"),
    "tensorflow_fp16": ("tensorflow", "precision=fp16"),
    "keras_average": ("keras", "average_weights={decay: 0.99}"),
}


def trained(framework: str, *keys: str) -> tuple[str, ...]:
    """66 updates, a checkpoint every 5; with fp16, which takes seconds a batch here, 30 of batches of two."""
    if "precision=fp16" in keys:
        keys = (*keys, "steps=30", "batch_size=2")
    base = ("train", "resnet20-digits", "-np", "2", "--framework", framework, "model.name=resnet8", "epochs=3")
    return (*base, "log_every=1", "tune=none", "checkpoint={every_steps: 5}", *keys)


def bits(job: Any) -> dict[str, str]:
    """SHA-256 of each file of the last checkpoint, and losses, rates and validation of all lines of metrics."""
    last = job.folder / "checkpoints" / "last"
    expect(last.exists(), f"no checkpoint\n{job.text()}")
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.glob("*.safetensors"))}
    for line in (job.folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept = {key: row.get(key) for key in ("loss", "learning_rate", "val_loss", "val_accuracy")}
        found[f"line {row['step']} {row['ends_epoch']}"] = json.dumps(kept)
    return found


def ended_and_resumed(folder: Path, number: int, framework: str, *keys: str) -> str:
    """Ended by a signal at three updates that are drawn from a seed, resumed each time, and compared."""
    words = trained(framework, *keys)
    whole = ran(*words, out=folder / "whole")
    expect(whole.process.returncode == 0, whole.text())
    drawn = random.Random(str((framework, keys, number)))
    at = sorted(drawn.sample(range(3, 28 if "precision=fp16" in keys else 60), 3))
    more: tuple[str, ...] = ()
    for update in at:
        with running(*words, *more, out=folder / "run") as job:
            job.trains(update)
            if number == signal.SIGKILL:
                job.kill(drawn.randrange(2), number)
            else:
                job.process.send_signal(number)
            job.ended()
            job.sound()
            more = ("--resume",)
    job = ran(*words, *more, out=folder / "run")
    job.sound()
    expect(job.process.returncode == 0, job.text())
    first, second = bits(whole), bits(job)
    other = [name for name in first | second if first.get(name) != second.get(name)]
    if number == signal.SIGTERM and "sync={every: 4}" in keys:
        expect(first.keys() == second.keys(), f"other lines or files: {sorted(first.keys() ^ second.keys())[:6]}")
        return f"ended after updates {at}; all {len(first)} digests and lines are there, {len(other)} differ"
    expect(
        not other,
        f"after updates {at}, other bits in {other[:6]}: {[(first.get(n), second.get(n)) for n in other[:2]]}",
    )
    return f"ended after updates {at}; {len(first)} digests and lines are equal"


def _declare(name: str, number: int, framework: str, *keys: str) -> None:
    def function(folder: Path) -> str:
        return ended_and_resumed(folder, number, framework, *keys)

    how = "kill -9 of a rank" if number == signal.SIGKILL else "SIGTERM to hvdkit"
    function.__name__ = f"{name}_{'killed' if number == signal.SIGKILL else 'terminated'}"
    function.__doc__ = f"{framework} {' '.join(keys)}: {how} at three updates drawn from a seed, each time --resume."
    function.__module__ = __name__
    expected = "weights, optimizer, statistics and losses of a run that was not ended, bit for bit"
    if function.__name__ == "local_sgd_terminated":
        expected = "all updates and files; other bits, as docs/checkpoints.md says of `sync`"
    attack(expected)(function)


for _name, (_framework, *_keys) in KEPT.items():
    _declare(_name, signal.SIGKILL, _framework, *_keys)
for _name in (
    "fp16_sgd",
    "lars",
    "topk",
    "local_sgd",
    "average",
    "sharded",
    "mxnet_lars",
    "tensorflow_lamb",
    "keras_average",
):
    _declare(_name, signal.SIGTERM, *KEPT[_name])
