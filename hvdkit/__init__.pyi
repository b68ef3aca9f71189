"""What type checkers and editors see of the package; `__init__.py` loads it when it is used."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdkit.adapters.own_checkpoints import checkpoints as checkpoints
from hvdkit.adapters.own_loop import mean as mean
from hvdkit.adapters.own_loop import scaled as scaled
from hvdkit.adapters.own_loop import shard as shard
from hvdkit.commands.dry_run import dry_run as dry_run
from hvdkit.commands.submit import Submitted
from hvdkit.core.loop import Handler as Handler
from hvdkit.data.dataset import ArraySplit as ArraySplit
from hvdkit.data.dataset import Batch as Batch
from hvdkit.data.user_pipeline import NativeJob as NativeJob
from hvdkit.data.user_pipeline import NativePipeline as NativePipeline
from hvdkit.errors import HvdkitError as HvdkitError
from hvdkit.errors import RequestError as RequestError
from hvdkit.errors import RunError as RunError
from hvdkit.errors import Stopped as Stopped
from hvdkit.results.bench import Bench
from hvdkit.results.compare import Comparison
from hvdkit.results.diff import Diff
from hvdkit.results.evaluate import EvaluationResult
from hvdkit.results.generate import Generation
from hvdkit.results.ladder import Ladder
from hvdkit.results.memory import MemoryNeed
from hvdkit.results.parity import Parity
from hvdkit.results.predict_images import ImagePredictions
from hvdkit.results.profile import Profile
from hvdkit.results.train import TrainResult
from hvdkit.simulator.advise import Advice
from hvdkit.simulator.predict import Prediction
from hvdkit.simulator.sweep import Sweep
from hvdkit.tasks.own import Own as Own
from hvdkit.tasks.task import Metrics as Metrics
from hvdkit.worker.own_task import run_task as run_task

__version__: str
PathLike = str | os.PathLike[str]
AnyRecipe = PathLike | Mapping[str, Any]  # a file, a name from `hvdkit recipes list`, or the content of a file
Settings = Mapping[str, Any] | Iterable[str]  # {"epochs": 2} or ["epochs=2"]; dots lead to nested keys
Names = str | Iterable[str]  # one or several
Wholes = int | Iterable[int]  # one or several
Paths = PathLike | Iterable[PathLike]  # one or several

def _function(command: str) -> Any: ...

# Written by scripts/stub.py, as the commands declare it.
def advise(
    subject: AnyRecipe | Profile,
    overrides: Settings | None = None,
    *,
    cluster: PathLike | None = None,
    ranks: int | None = None,
    price: float | None = None,
    images: int | None = None,
    tokens: int | None = None,
    epochs: int | None = None,
    budget: float | None = None,
    deadline: str | None = None,
    spot_interruption: float | None = None,
    apply: PathLike | None = None,
    framework: str | None = None,
    np: int | None = None,
    hosts: Names | None = None,
    steps: int | None = None,
    launcher: str | None = None,
    stall_timeout: float | None = None,
    resume: bool = False,
    policy: str | None = None,
    accumulate: int | None = None,
    recompute: bool = False,
    precision: str | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Advice:
    """Rank what would make training faster or cheaper, from a profile, or from a recipe, which is profiled first.

    `overrides`, `framework` to `stall_timeout` and `resume` are for a recipe; None stands for what `profile` takes.
    `images`, or `tokens` of a text, are those of an epoch. `price` and `budget` are in the cluster's currency;
    `deadline` is a time such as `36h`, `friday` or `2026-11-27`.
    `spot_interruption` is how often a host is taken away in an hour. With `apply`, a file, the recipe with the largest
    certain gain is written there.
    """

def bench(
    collective: str,
    *,
    framework: str = "pytorch",
    np: int = 2,
    min_bytes: int = 4,
    max_bytes: int = 67108864,
    factor: float = 4.0,
    dtype: str = "float32",
    redop: str = "sum",
    seconds: float = 2.0,
    device: str = "auto",
    link_mbit_per_s: float | None = None,
    add_to: PathLike | None = None,
    hosts: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Bench:
    """Time a collective by size, check each element, and write a cluster file for `predict`.

    Wrong elements are no error: see `wrong` of the rows.
    """

def compare(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: Names | None = None,
    np: Wholes | None = None,
    parity: PathLike | None = None,
    no_parity: bool = False,
    rival: Names | None = None,
    rounds: int | None = None,
    baseline: PathLike | None = None,
    margin: float = 0.05,
    debug: bool = False,
    resume: bool = False,
    log: Names | None = None,
    hosts: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Check that frameworks (all four, or those named) do the same work, train a recipe under each, on 1 and 2 ranks
    or as many as `np` says, and compare the results. Over several `hosts`, it is on one of them and on all.

    A check that does not pass, or a significant loss against an earlier comparison, is no error here: see
    `parity.passed` and the verdicts in `baseline`.
    """

def diff(
    first: PathLike,
    second: PathLike,
    *,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Diff:
    """What differs between two runs: settings, versions, the first step with another loss, weights.

    `same` of the result says whether the training is. Without `out` nothing is written.
    """

def evaluate(
    checkpoint: PathLike,
    overrides: Settings | None = None,
    *,
    framework: str | None = None,
    np: int = 1,
    average: bool = True,
    hosts: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> EvaluationResult:
    """Evaluate a checkpoint, under its own framework or another; of a run's folder the best one, else the last.

    With `average` they are the averaged weights, if the checkpoint has any.
    """

def export(
    checkpoint: PathLike,
    out: PathLike,
    *,
    average: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write a model as one file, FILE.safetensors, FILE.onnx or FILE.keras; returns its absolute path.

    Of a run's folder it is the best checkpoint's, else the last one's.
    """

def generate(
    checkpoint: PathLike,
    prompt: str,
    *,
    framework: str | None = None,
    tokens: int = 200,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Generation:
    """Continue a text: a run's or a checkpoint's language model adds the most probable token again and again.

    Without `out` nothing is written.
    """

def memory(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    ranks: Wholes | None = None,
    device: str | None = None,
    framework: str = "pytorch",
    out: PathLike | None = None,
    overwrite: bool = False,
) -> MemoryNeed:
    """Count the memory that a recipe needs at each number of ranks and stage of sharding; nothing is started.

    `device` is a GPU's name, such as `h100`, or its memory, such as `24GiB`. Without `out` nothing is written.
    """

def parity(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: Names | None = None,
    steps: int = 20,
    np: int = 2,
    rival: Names | None = None,
    hosts: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Parity:
    """Check in float64, step by step, that frameworks compute what PyTorch computes.

    If one does not, `passed` of the result is false, which is no error.
    """

def plan(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    cluster: PathLike,
    ranks: int,
    framework: str = "pytorch",
    profile: PathLike | Profile | None = None,
    speed: float = 1.0,
    device: str | None = None,
    samples: int | None = None,
    apply: PathLike | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Ladder:
    """Say which strategy trains a recipe on a cluster, and why not another; nothing is started.

    With a `profile`, measured or `--from` a published figure, each way has its predicted time of an update; `speed` is
    how many times as fast as the profile's a device of the cluster is. `device` stands for the cluster's, or is its
    memory. `samples` are those of an epoch. With `apply`, a file, the recipe is written so that `train` runs it.
    """

def predict(
    profile: PathLike | Profile,
    *,
    cluster: PathLike,
    ranks: Wholes,
    policy: str | None = None,
    accumulate: int | None = None,
    recompute: bool = False,
    precision: str | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Prediction:
    """Predict step time, images/s and what bounds them, at any number of ranks, from a profile and a cluster file.

    `cluster` is a file, or the name of one of hvdkit's; `settings` is a what-if, such as `{"batch_size": 64}`.
    """

def predict_images(
    checkpoint: PathLike,
    images: Paths,
    *,
    framework: str | None = None,
    top: int = 3,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> ImagePredictions:
    """Say what is in pictures: the `top` most probable classes of each, by a run's or a checkpoint's model.

    `images` are JPEG or PNG files, or folders of them. Without `out` nothing is written.
    """

def profile(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: str = "pytorch",
    np: int = 2,
    steps: int = 20,
    torch_profiler: bool = False,
    batch_sizes: Wholes | None = None,
    debug: bool = False,
    hosts: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile:
    """Measure where the time of a step goes, by layer and by rank.

    `batch_sizes` also measures compute at these, so that `predict` knows which part of it does not depend on them.
    """

def published_profile(
    model: str,
    *,
    batch_size: int,
    device: str,
    images_per_second: float | None = None,
    tokens_per_second: float | None = None,
    sequences_per_second: float | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    gradients: str | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile:
    """Make a profile for `predict` and `advise` from a published figure of one device; nothing is measured.

    `model` is one of hvdkit's, such as `resnet50` or `gpt2`, or `bert-base`, `vit-b-16`, `t5-base` and their sizes;
    `device` is a GPU's name, or `cpu`. `batch_size` counts images, or windows of `sequence_length` tokens.
    """

def report(
    folder: PathLike,
    out: PathLike | None = None,
) -> tuple[Path, Path]:
    """Write report.html and report.md about the results in `folder`, into `out` or there; returns their paths."""

def submit(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    to: str = "slurm",
    framework: str | None = None,
    np: int = 1,
    rival: str | None = None,
    resources: Mapping[str, Any] | None = None,
    script: PathLike | None = None,
    template: PathLike | None = None,
    overwrite: bool = False,
    apply: bool = False,
    out: PathLike | None = None,
    array: Settings | None = None,
) -> Submitted:
    """Write training as a job for a scheduler, `slurm`, `kubernetes` or `ray`; with `apply` hand it over.

    In place of the recipe it may be a script of your own, or a command of hvdkit, with the words after it in
    `overrides`: `-- compare RECIPE --rounds 6`.

    `resources` are the scheduler's own options by their names, such as `{"nodes": 2, "time": "1:00:00"}`:
    `hvdkit submit --help` has them all, and of those that may be repeated the name is in the plural.
    `template` is a Jinja template in place of hvdkit's own (docs/slurm.md#a-template-of-your-own).
    `array` makes a task of a Slurm array of each combination of values, such as `{"seed": [1, 2, 3]}`.
    """

def sweep(
    profile: PathLike | Profile,
    grid: Settings,
    *,
    cluster: PathLike,
    ranks: Wholes | None = None,
    policy: str | None = None,
    accumulate: int | None = None,
    recompute: bool = False,
    precision: str | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Sweep:
    """Predict a grid of what-ifs, such as `{"n": [8, 16, 32], "batch_size": [32, 64]}`, or `["n=8,16,...,1024"]`.

    `n` is the number of ranks, which `ranks` may say instead; the other keys are those of `predict`'s `settings`.
    """

def train(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: str | None = None,
    np: int = 1,
    rival: str | None = None,
    debug: bool = False,
    resume: bool = False,
    host_discovery_script: PathLike | None = None,
    log: Names | None = None,
    hosts: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> TrainResult:
    """Train a recipe under one framework, on `np` ranks; `hosts` is `"host:slots,…"` or a list of such parts.

    Without a `framework` it is that of the run that is resumed, or of the recipe's script, else PyTorch.
    `log` names trackers: wandb, mlflow, tensorboard.

    Raises Stopped if SIGTERM ended training after a checkpoint.
    """
