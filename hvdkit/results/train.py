"""The schemas of `metrics.jsonl` and `result.json`.

Accuracies are fractions of 1, images per second count all ranks together, step times are the slowest rank's.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator

from hvdkit.errors import RequestError
from hvdkit.files import open_regular
from hvdkit.results.json_files import Count, Figures, Result, flat


def scores(validation: dict[str, float], average: dict[str, float]) -> dict[str, Any]:
    """The fields for a task's validation metrics, and those of the `average` of the weights; both may be empty."""
    accuracy, loss = validation.get("accuracy"), validation.get("loss")
    values = {"validation": validation or None, "val_accuracy": accuracy, "val_loss": loss}
    return values | {"average_validation": average or None}


def readable(metric: str) -> str:
    """A metric's name where people read it."""
    return {"bits_per_byte": "bits/byte"}.get(metric, metric)


def shown_scores(
    validation: dict[str, float] | None, average: dict[str, float] | None = None, of: str = "validation"
) -> str:
    """The validation metrics for the end of a line, such as `, validation mae 0.2175`, and those of the average.

    Accuracy is in percent. With it, the loss is left out.
    """
    shown = dict(validation or {})
    texts = [f"accuracy {100 * accuracy:.2f} %"] if (accuracy := shown.pop("accuracy", None)) is not None else []
    if texts:
        shown.pop("loss", None)
    texts += [f"{readable(name)} {value:.4f}" for name, value in shown.items()]
    line = "".join(f", {of} {text}" for text in texts)
    return line + (shown_scores(average, of="averaged weights") if average else "")


_LONGEST_LINE = 2**16  # bytes; one has a few hundred


class MetricLine(Figures):
    """One line of `metrics.jsonl`: a logged step or, if `ends_epoch`, the end of an epoch.

    `step` counts finished updates out of `total_steps`, `epoch` counts from 0. `loss` is the mean over all ranks
    and the updates since the previous line (of the whole epoch at its end), `learning_rate` is the last update's.
    `images_per_second` is measured by rank 0's clock. `validation` has the task's metrics by name at the end of an
    epoch; accuracy and loss are `val_accuracy` and `val_loss` too (cross-entropy without label smoothing, or the
    task's own loss), and `average_validation` those of the averaged weights, if there are any. `bytes_per_step` is
    what one rank sends of gradients and weights for an update, on average since the process started. `rss_mib` is
    the resident memory of rank 0's process then. `communication_mbit_per_s` is the bus bandwidth of the collectives
    since the previous line (of the epoch's steps at its end), None where nobody counts it. `unit` names the samples
    in the plural; where it is not images, `images_per_second` counts those. `warnings` are lines for the user, in
    the first line after they came up.
    """

    step: Count
    total_steps: Count
    epoch: Count
    ends_epoch: bool = False
    loss: float
    learning_rate: float
    images_per_second: float
    bytes_per_step: float | None = None
    rss_mib: float | None = None
    communication_mbit_per_s: float | None = None
    val_accuracy: float | None = None
    val_loss: float | None = None
    validation: dict[str, float] | None = None
    average_validation: dict[str, float] | None = None
    unit: str = "images"
    warnings: list[str] | None = None

    def row(self) -> dict[str, Any]:
        """The line as a row of a table: a column `validation.NAME` for each metric of the validation, and of the
        averaged weights `average_validation.NAME`.
        """
        scores = {key: getattr(self, key) or {} for key in ("validation", "average_validation")}
        return self.model_dump(exclude=set(scores)) | flat(scores)


class Recovery(Figures):
    """A recovery of an elastic run: a rank was `lost`, or `hosts` came or went, and it continued with `np` ranks.

    `seconds` is the time from when a surviving rank noticed to the end of its next update, number `step` by the new
    count (or to the end of the run, if no update was left).
    """

    why: Literal["lost", "hosts"]
    step: int
    np_before: int
    np: int
    seconds: float


class PlannedStage(Figures):
    """The `ranks` that have these `blocks` of a model, and what comes before or after them, in one part or several.

    `parameters` counts those of all parts, `work` is their share (0 to 1) of a forward pass's multiply-adds, None where
    it is unknown. `hosts` has the host of each of the ranks. `needs_bytes` is what a rank keeps by the count of `hvdkit
    memory`, where that was asked. `passes_ms` is what the passes of a step take by the times of the blocks
    (`parallel.costs`), None without such. `with_last` is what the first stage exchanges with the last: activations
    where stages have several chunks, else gradients of what both have, if there is such.
    """

    blocks: list[str]
    parameters: Count
    work: float | None = None
    ranks: list[int]
    hosts: list[str]
    needs_bytes: int | None = None
    passes_ms: float | None = None
    with_last: Literal["activations", "gradients"] | None = None


class TrainedStage(PlannedStage):
    """A stage in a run. `busy_ms` is how long its forward and backward passes take in a step, the mean over the
    measured steps and its ranks; None without a pipeline, and where an engine computes in the background.
    `state_bytes` are as the run's, of its largest rank. `peak_rss_mib` has the most memory that each of its ranks'
    processes had.
    """

    busy_ms: float | None
    state_bytes: dict[str, int]
    peak_rss_mib: list[float] = Field(default_factory=list)


class TrainResult(Figures, Result, file="result.json", of="the result of a training run"):
    """`result.json` of one run.

    `parameters` counts the trainable ones. `batch_size` (samples) and `threads` are per rank. `steps` counts updates.
    The first `warmup_steps` of them do not count for `images_per_second` and for `step_ms_…`, the percentiles over the
    `measured_steps`. `train_loss` is the last epoch's mean. `validation` and `val_…`, as in `MetricLine`, are measured
    at the end on `val_samples` samples (None if they are not counted), None without any; so is `average_validation`.
    `peak_rss_mib` is the largest rank's. `train_s` is rank 0's, with evaluation and checkpoints, which are not part of
    a step.

    `rival` is the other method that trained it (`hvdkit.baselines.registry`), None for hvdkit itself. `round` counts
    the rounds of a comparison from 1. `step_ms` are the measured steps on their slowest rank, 2,000 of them evenly
    spaced if there are more. `cpu_s_per_image` is the CPU time of all ranks and threads over the measured steps'
    units. `startup_s` is the time from the command's start to the end of the slowest rank's first step. `load` is the
    share of CPU time (on rank 0's machine, 0 to 1) that other processes used after the warm-up, `noisy` is whether it
    was more than a tenth, `idle_cores` the cores that they left to each rank there. `pinned` are the cores by rank, an
    empty list for a rank without cores of its own, None without pinning. `hosts` has the host of each rank.

    `shared_memory_ranks` are the ranks of rank 0's host that exchange tensors on CPUs through memory; 0 where they talk
    through sockets, None with a rival that does without Horovod. `communication_mbit_per_s` is the bus bandwidth of
    the collectives of at least 64 KiB: the median of the lines of metrics.jsonl, and `…_lowest` the lowest; None for
    one rank, on GPUs, and if Horovod does not count. `communication_notes` say when links became slow, and when they
    were back.

    `corrupt_images` counts the files, over all ranks, that could not be read and were replaced by others. With
    `native_pipeline` the batches came from the user's own code, so frameworks may have trained on different ones.
    `tuning` has each setting that was chosen automatically: `value` (None for the library's default) and `why`.
    `ended_at` is the wall clock, UTC. `bytes_per_step` is what one rank (the one that sends most) sends of gradients
    and weights for an update, without protocol overhead; None with a rival. `state_bytes` are the sizes of the largest
    rank's tensors: `parameters`, `gradients` as an update begins, `optimizer`, its slots, and `average`, if weights are
    averaged; None with a rival that does not shard. A model that is divided over ranks has `stages`, in their order;
    with several of them, `bubble` is the share of a step (0 to 1) in which a rank computes neither forward nor
    backward, the mean over the stages; None where `busy_ms` is.
    `compression` names the method and its
    options that differ from the default, `sync` is the recipe's. `checkpoints` are the folders of the weights that are
    kept, relative to this file: `last`, and `best` by validation accuracy if there is one. `stopped_early` says why
    training ended before the recipe's epochs, None if it did not; `epochs` are then those that were trained.

    `unit` is as in `MetricLine`; a sample has `units_per_sample` of them, such as the tokens of a window. `task` names
    the file in hvdkit/tasks. `samples_per_second` counts images or windows; `tokens_per_second` counts the tokens of a
    text, `model_flop_per_second` the arithmetic of a language model's training (Chowdhery et al. 2022, appendix B), and
    `text_sha256` is that of the whole text; these three are None for others.
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
    hosts: list[str] = Field(default_factory=list)
    device: str
    threads: int
    seed: int
    batch_size: int
    compression: str
    sync: dict[str, Any] | None = None
    allreduce: str = "ring"
    shared_memory_ranks: int | None = None
    communication_mbit_per_s: float | None = None
    communication_mbit_per_s_lowest: float | None = None
    communication_notes: list[str] | None = None
    bytes_per_step: float | None = None
    sharding: str = "none"
    state_bytes: dict[str, int] | None = None
    bubble: float | None = None
    stages: list[TrainedStage] | None = None
    optimizer: str
    precision: str
    accumulate: int
    recompute: bool
    epochs: int
    stopped_early: str | None = None
    steps: int
    first_step: int
    warmup_steps: int
    measured_steps: int
    images_per_second: float
    step_ms_p50: float
    step_ms_p90: float
    step_ms_p99: float | None = None
    step_ms: list[float] = Field(default_factory=list, repr=False)
    cpu_s_per_image: float | None = None
    startup_s: float | None = None
    load: float | None = None
    noisy: bool = False
    idle_cores: float | None = None
    pinned: list[list[int]] | None = None
    train_loss: float
    val_accuracy: float | None
    val_loss: float | None
    validation: dict[str, float] | None = None
    average_validation: dict[str, float] | None = None
    val_samples: int | None = None
    peak_rss_mib: float
    train_s: float
    corrupt_images: int = 0
    native_pipeline: bool = False
    recoveries: list[Recovery] = Field(default_factory=list)
    tuning: dict[str, dict[str, Any]] | None = Field(None, repr=False)
    ended_at: datetime | None = None
    checkpoints: dict[str, str] = Field(default_factory=dict)
    unit: str = "images"
    units_per_sample: int = 1
    task: str | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    model_flop_per_second: float | None = None
    text_sha256: str | None = None
    initial_state_sha256: str
    final_weights_sha256: str

    @property
    def batch(self) -> str:
        """A rank's batch, such as `32 images`, or `8 × 64 tokens` of eight windows."""
        times = f" × {self.units_per_sample}" if self.units_per_sample > 1 else ""
        return f"{self.batch_size}{times} {self.unit}"

    @property
    def cpu_of(self) -> tuple[str, float]:
        """Of what tables show CPU time, such as `image` or `1,000 tokens`; from `cpu_s_per_image` to its ms."""
        many = self.units_per_sample > 1
        return (f"1,000 {self.unit}", 1e6) if many else (self.unit.removesuffix("s"), 1e3)

    def lines(self) -> list[MetricLine]:
        """The lines of the run's metrics.jsonl. Raises RequestError if it is missing or damaged."""
        path, lines = self.folder / "metrics.jsonl", []
        try:
            for number, (text, line) in enumerate(scan_metrics(path), start=1):
                if line:
                    lines.append(line)
                elif text.endswith(b"\n"):  # else a killed run left it incomplete
                    raise RequestError(f"{path}: line {number} is damaged; `hvdkit train … --resume` drops such lines")
        except OSError as error:
            expected = "expected the metrics.jsonl of `hvdkit train`"
            raise RequestError(f"{path}: cannot be read ({error.strerror}); {expected}") from None
        return lines

    @classmethod
    def read(cls, path: Path) -> Self:
        """As in the base class; the message says how the file is made anew."""
        try:
            return super().read(path)
        except RequestError as error:
            if not os.path.lexists(path) or not (path.parent / "checkpoints").is_dir():
                raise
            out = shlex.quote(str(path.parent))
            remedy = f"`hvdkit train RECIPE --out {out} --resume` makes it anew from the newest checkpoint"
            raise RequestError(f"{error}; {remedy}") from None

    def records(self) -> list[dict[str, Any]]:
        """The rows of `lines`."""
        return [line.row() for line in self.lines()]

    @field_validator("sync")
    @classmethod
    def _check_sync(cls, sync: dict[str, Any] | None) -> dict[str, Any] | None:
        if sync is not None and not isinstance(sync.get("every"), int):
            raise ValueError("expected the key every with a whole number")
        return sync

    @field_validator("tuning")
    @classmethod
    def _check_tuning(cls, tuning: dict[str, dict[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
        for name, choice in (tuning or {}).items():
            if not isinstance(choice.get("why"), str):
                raise ValueError(f"{name}: expected the key why with a text")
        return tuning


def result_lines(result: TrainResult) -> str:
    """The result in a line, and a line if images were corrupt, or training has stopped early."""
    scores = shown_scores(result.validation, result.average_validation)
    if not scores and result.val_accuracy is not None:  # of an earlier version
        scores = f", validation accuracy {100 * result.val_accuracy:.2f} %"
    if result.corrupt_images:
        scores += f"\n{result.corrupt_images} corrupt image(s) replaced; the logs name them"
    if result.stopped_early:
        scores += f"\n{result.stopped_early}"
    by = f" by {result.rival}" if result.rival else ""
    rate = f" ({result.model_flop_per_second / 1e9:.3g} GFLOP/s)" if result.model_flop_per_second else ""
    return (
        f"{result.framework} {result.framework_version}{by}, {result.np} rank(s): "
        f"{result.images_per_second:.1f} {result.unit}/s{rate}, "
        f"step {result.step_ms_p50:.1f} ms (p90 {result.step_ms_p90:.1f} ms), loss {result.train_loss:.4f}{scores}"
    )


def kept_lines(result: TrainResult, folder: Path) -> list[str]:
    """Where the weights of the run in `folder` are, and the command that evaluates them; empty if none were kept."""
    checkpoints = folder / "checkpoints"
    lines = [f"weights: {checkpoints / name} ({Path(kept).name})" for name, kept in result.checkpoints.items()]
    if "best" in result.checkpoints:  # without it there are no validation images
        words = ["hvdkit", "evaluate", str(checkpoints / "best"), "--framework", result.framework]
        lines.append(f"evaluate them: {shlex.join(words)}")
    return lines


def read_metrics(path: Path) -> Iterator[MetricLine]:
    """The lines of a `metrics.jsonl`, none if it is missing; those that cannot be read are left out. Raises OSError."""
    if path.exists():
        yield from (line for _, line in scan_metrics(path) if line)


def scan_metrics(path: Path) -> Iterator[tuple[bytes, MetricLine | None]]:
    """Each line of a `metrics.jsonl` of any size as it is read, and what it says; None for one that cannot be read.

    Only the last one may lack its line end. Raises OSError.
    """
    with open_regular(path) as file:
        while text := file.readline(_LONGEST_LINE):
            try:
                yield text, MetricLine.model_validate_json(text)
            except ValidationError:
                yield text, None


read_result = TrainResult.read
