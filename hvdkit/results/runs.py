"""What commands leave in files: the schemas of `result.json`, `metrics.jsonl`, `compare.json` and `parity.json`.

Accuracies are fractions of 1, images per second count all ranks together, step times are the slowest rank's.
"""

from __future__ import annotations

import os
import platform
import shlex
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hvdkit.errors import LARGEST, RequestError, first_fault
from hvdkit.files import read_bounded

_LARGEST_FLOAT = 1e300  # beyond it sums and ratios leave the range of numbers


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _numbers_can_be_reckoned_with(self) -> Self:
        for name, value in self:
            for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,):
                most = LARGEST if isinstance(each, int) else _LARGEST_FLOAT
                if isinstance(each, int | float) and abs(each) > most:
                    raise ValueError(f"{name}: expected a number of at most {most:g}")
        return self


_R = TypeVar("_R", bound=_Record)
Verdict = Literal["faster", "slower", "tie"]
Count = Annotated[int, Field(ge=0, le=LARGEST)]


class MetricLine(_Record):
    """One line of `metrics.jsonl`: a logged step or, where `ends_epoch`, the end of an epoch.

    `step` counts finished updates of `total_steps`, `epoch` from 0. `loss` is the mean over all ranks and the updates
    since the line before (of the whole epoch at its end), `learning_rate` the last update's. `images_per_second` are
    by rank 0's clock. `val_loss` is without label smoothing. `bytes_per_step` is what one rank has sent of gradients
    and weights for an update, on average since the process began.
    """

    step: Count
    total_steps: Count
    epoch: Count
    ends_epoch: bool = False
    loss: float
    learning_rate: float
    images_per_second: float
    bytes_per_step: float | None = None
    val_accuracy: float | None = None
    val_loss: float | None = None


class Recovery(_Record):
    """What an elastic run has outlived: a rank was `lost`, or `hosts` came or went, and it went on with `np` ranks.

    `seconds` are from when a surviving rank noticed to the end of its next update, the `step`th by the new count (or to
    the end of the run, where no update was left).
    """

    why: Literal["lost", "hosts"]
    step: int
    np_before: int
    np: int
    seconds: float


class TrainResult(_Record):
    """`result.json` of one run.

    `parameters` counts the trainable ones; `batch_size` (images) and `threads` are a rank's. `steps` counts updates, of
    which the `warmup_steps` first are left out of `images_per_second` and of `step_ms_…`, percentiles over the
    `measured_steps`. `train_loss` is the last epoch's mean; `val_…` are of the end, None without validation images.
    `peak_rss_mib` is the largest rank's, `train_s` rank 0's, evaluation and checkpoints included, which no step is.

    `rival` says by what other means it was trained (`hvdkit.baselines.registry`), None by hvdkit's; `round` counts the
    rounds of a comparison from 1. `step_ms` are the measured steps on their slowest rank, 2,000 of them evenly spaced
    where there are more. `cpu_s_per_image` is the CPU time of all ranks and threads over the measured steps' images.
    `startup_s` goes from the command's start to the end of the slowest rank's first step. `load` is the share of the
    machine's CPU time (rank 0's machine; 0 to 1) that others used from the end of the warm-up on, `noisy` says that it
    was more than a tenth. `pinned` are the cores by rank, an empty list where a rank had none of its own, None where
    nobody asked.

    `corrupt_images` counts the files, of all ranks together, that could not be read and had others in their place. With
    `native_pipeline` the batches came from the user's own code: other frameworks need not have been fed with the same.
    `tuning` is what was chosen by itself, by name: `value` (None for the library's own) and `why`. `ended_at` is the
    wall clock, UTC. `bytes_per_step` is what one rank (that which sends most) sends of gradients and weights for an
    update, without what protocols add; None with a rival. `compression` names the method and what of it is not at its
    default, `sync` is the recipe's. `checkpoints` are the folders of the weights that are kept, from this file's own:
    `last`, and `best` by validation accuracy where there is one.
    """

    framework: str
    rival: str | None = None
    round: int | None = None
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
    sync: dict[str, Any] | None = None
    allreduce: str = "ring"
    bytes_per_step: float | None = None
    optimizer: str
    precision: str
    accumulate: int
    recompute: bool
    epochs: int
    steps: int
    first_step: int
    warmup_steps: int
    measured_steps: int
    images_per_second: float
    step_ms_p50: float
    step_ms_p90: float
    step_ms_p99: float | None = None
    step_ms: list[float] = []
    cpu_s_per_image: float | None = None
    startup_s: float | None = None
    load: float | None = None
    noisy: bool = False
    pinned: list[list[int]] | None = None
    train_loss: float
    val_accuracy: float | None
    val_loss: float | None
    peak_rss_mib: float
    train_s: float
    corrupt_images: int = 0
    native_pipeline: bool = False
    recoveries: list[Recovery] = []
    tuning: dict[str, dict[str, Any]] | None = None
    ended_at: datetime | None = None
    checkpoints: dict[str, str] = {}
    initial_state_sha256: str
    final_weights_sha256: str

    @field_validator("sync")
    @classmethod
    def _says_how_often(cls, sync: dict[str, Any] | None) -> dict[str, Any] | None:
        if sync is not None and not isinstance(sync.get("every"), int):
            raise ValueError("expected the key every with a whole number")
        return sync

    @field_validator("tuning")
    @classmethod
    def _says_why(cls, tuning: dict[str, dict[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
        for name, choice in (tuning or {}).items():
            if not isinstance(choice.get("why"), str):
                raise ValueError(f"{name}: expected the key why with a text")
        return tuning


def kept_lines(result: TrainResult, folder: Path) -> list[str]:
    """Where the weights of a run in `folder` are, and the command that evaluates them; nothing where none were kept."""
    place = folder / "checkpoints"
    lines = [f"weights: {place / name} ({Path(kept).name})" for name, kept in result.checkpoints.items()]
    if "best" in result.checkpoints:  # else there are no images to evaluate them on
        words = ["hvdkit", "evaluate", str(place / "best"), "--framework", result.framework]
        lines.append(f"evaluate them: {shlex.join(words)}")
    return lines


class EvaluationResult(_Record):
    """`evaluate.json`: a checkpoint, `trained_by` one framework and evaluated by `framework`. `loss` is a mean."""

    framework: str
    framework_version: str
    hvdkit_version: str
    recipe: str
    model: str
    np: int
    trained_by: str
    step: int
    correct: int
    total: int
    accuracy: float
    loss: float


class Machine(_Record):
    """Where a comparison ran. `cores` are those that the process may use."""

    processor: str
    cores: int
    memory_mib: int
    system: str
    python: str


# The figures of a FrameworkParity that have a mark of their own.
MARKED = (
    "logits_f64", "gradients_f64", "applied_f64", "buffers_f64", "weights_f64", "losses_f64", "step_f64",
    "evaluation_f64",
)  # fmt: skip


class FrameworkParity(_Record):
    """One framework beside the reference: relative errors, in float64 (`_f64`) and float32 (`_f32`).

    `logits`, `gradients` are of the first batch on the initial weights; in float32 of the worst of the first five, held
    against the reference's float64, and `reference_…_f32` is how far the reference's own float32 is off. `applied` is
    the averaged gradient against the mean of the ranks' own. `buffers` and `weights` are after one step, `losses` the
    worst of the first five of a free run, `step` the worst tensor (weights, buffers, slots) over all steps from the
    reference's states (`worst_step` counts from 1), `evaluation` the worst of logits and loss. What has no error, such
    as a wrong count or NaN, has 1e300. `missed` names the figures beyond their marks.
    """

    passed: bool
    missed: list[str]
    f32_factor: float
    version: str
    batches_equal: bool
    initial_weights_equal: bool
    logits_f64: float
    gradients_f64: float
    worst_gradient: str
    applied_f64: float
    buffers_f64: float
    worst_buffer: str
    weights_f64: float
    worst_weight: str
    losses_f64: float
    step_f64: float
    worst_step: int
    evaluation_f64: float
    evaluation_correct: int
    evaluation_total: int
    logits_f32: float
    gradients_f32: float
    reference_logits_f32: float
    reference_gradients_f32: float
    first_deviation: str | None
    likely_cause: str | None
    gradient_errors_f64: dict[str, float]
    gradient_errors_f32: dict[str, float]
    reference_gradient_errors_f32: dict[str, float]
    step_errors_f64: list[float]


class Parity(_Record):
    """`parity.json`. `recipe_keys` is what of the recipe the proof is about, by dotted key.

    `marks` are the largest errors that pass; in float32 each framework's own `f32_factor` times the reference's error.
    """

    passed: bool
    reference: str
    recipe: str
    model: str
    optimizer: str
    batch_size: int
    np: int
    steps: int
    seed: int
    recipe_keys: dict[str, Any]
    marks: dict[str, float]
    frameworks: Annotated[dict[str, FrameworkParity], Field(min_length=1)]
    machine: Machine

    @field_validator("marks")
    @classmethod
    def _of_known_figures(cls, marks: dict[str, float]) -> dict[str, float]:
        if marks.keys() != set(MARKED):
            raise ValueError(f"expected {', '.join(MARKED)}, got {', '.join(marks) or 'none'}")
        return marks


class Ratio(_Record):
    """hvdkit against something else, by rounds: the median, and `low` to `high`, its bootstrap interval.

    `against` is a rival's name: images per second over the rival's. Or `np=1`: images per second over `np` times those
    of one rank, the scaling efficiency. Both sides of a round's ratio were run in that round. `confidence` is what the
    interval can have with so many rounds, 0.95 at most. The verdict is `tie` where the interval touches 0.99 to 1.01;
    for an efficiency it is None, as nobody expects more than 1.
    """

    framework: str
    np: int
    against: str
    median: float
    low: float
    high: float
    rounds: int
    confidence: float
    verdict: Verdict | None = None


class BaselineRow(_Record):
    """One kind of run held against an earlier comparison: the ratio of the medians of images per second, new ÷ old.

    `worse` where the whole interval is below 1 - `margin`, `better` where it is above 1 + `margin`, else `tie`.
    `rounds` and `old_rounds` are of the two sides.
    """

    framework: str
    np: int
    rival: str | None = None
    median: float
    low: float
    high: float
    rounds: int
    old_rounds: int
    margin: float
    verdict: Literal["better", "worse", "tie"]


class Comparison(_Record):
    """`compare.json`; `parity` is None where nobody asked for it.

    `runs` are told by round, then in the order that was asked for; `order` has their names as they were run, shuffled
    within each round by `order_seed`. `baseline` is None where nobody named one.
    """

    runs: list[TrainResult]
    rounds: int = 1
    order_seed: int | None = None
    order: list[str] = []
    ratios: list[Ratio] = []
    baseline: list[BaselineRow] | None = None
    parity: Parity | None = None
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
    return _read(TrainResult, path, "the result of a training run")


def read_comparison(path: Path) -> Comparison:
    """Read a `compare.json`. Raises RequestError where it is missing, damaged or without runs."""
    found = _read(Comparison, path, "the compare.json of `hvdkit compare`")
    if not found.runs:
        raise RequestError(f"{path}: not the compare.json of `hvdkit compare`: it has no runs")
    return found


def read_evaluation(path: Path) -> EvaluationResult:
    """Read an `evaluate.json`. Raises RequestError where it is missing or damaged."""
    return _read(EvaluationResult, path, "the result of an evaluation")


def read_parity(path: Path) -> Parity:
    """Read a `parity.json`. Raises RequestError where it is missing or damaged."""
    return _read(Parity, path, "the parity.json of `hvdkit parity`")


def _read(kind: type[_R], path: Path, expected: str) -> _R:
    try:
        return kind.model_validate_json(read_bounded(path))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); expected {expected}") from None
    except ValidationError as error:
        raise RequestError(f"{path}: not {expected}: {first_fault(error)}") from None


def _proc_field(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
