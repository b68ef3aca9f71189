"""What commands leave in files: the schemas of `result.json`, `metrics.jsonl` and `compare.json`.

Accuracies are fractions of 1, images per second count all ranks together, step times are the slowest rank's.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hvdkit.errors import RequestError


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MetricLine(_Record):
    """One line of `metrics.jsonl`: a logged step or, where `ends_epoch`, the end of an epoch.

    `step` counts finished updates of `total_steps`, `epoch` from 0. `loss` is the mean
    over all ranks' images since the line before (of the whole epoch at its end).
    """

    step: int
    total_steps: int
    epoch: int
    ends_epoch: bool = False
    loss: float
    learning_rate: float
    images_per_second: float
    val_accuracy: float | None = None
    val_loss: float | None = None


class TrainResult(_Record):
    """`result.json` of one run."""

    framework: str
    framework_version: str
    horovod_version: str | None
    hvdkit_version: str
    recipe: str
    model: str
    parameters: int
    np: int
    launcher: str
    device: str
    threads: int
    seed: int
    batch_size: int
    compression: str
    optimizer: str
    precision: str
    accumulate: int
    recompute: bool
    epochs: int
    steps: int
    warmup_steps: int
    measured_steps: int
    images_per_second: float
    step_ms_p50: float
    step_ms_p90: float
    train_loss: float
    val_accuracy: float | None
    val_loss: float | None
    peak_rss_mib: float
    train_s: float
    initial_state_sha256: str
    final_weights_sha256: str


class Machine(_Record):
    """Where a comparison ran."""

    processor: str
    cores: int
    memory_mib: int
    system: str
    python: str


class Comparison(_Record):
    """`compare.json`."""

    runs: list[TrainResult]
    machine: Machine


def this_machine() -> Machine:
    """The machine at hand, from /proc."""
    return Machine(
        processor=_proc_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=int((_proc_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) // 1024,
        system=platform.platform(),
        python=platform.python_version(),
    )


def read_result(path: Path) -> TrainResult:
    """Read a `result.json`. Raises RequestError where it is missing or damaged."""
    try:
        return TrainResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); expected the result of a training run"
        ) from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"])) or "file"
        raise RequestError(f"{path}: not a training result: {key}: {fault['msg']}") from None


def _proc_field(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
