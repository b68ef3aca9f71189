"""What type checkers and editors see of the package; `__init__.py` loads it when it is used."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
from hvdkit.worker.entry import run_task as run_task

__version__: str
PathLike = str | os.PathLike[str]
AnyRecipe = PathLike | Mapping[str, Any]  # a file, a name from `hvdkit recipes list`, or the content of a file
Settings = Mapping[str, Any] | Iterable[str]  # {"epochs": 2} or ["epochs=2"]; dots lead to nested keys
Names = str | Iterable[str]  # one or several
Wholes = int | Iterable[int]  # one or several
Paths = PathLike | Iterable[PathLike]  # one or several

def report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[Path, Path]: ...

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
    policy: str | None = None,
    settings: Settings | None = None,
    framework: str | None = None,
    np: int | None = None,
    hosts: Names | None = None,
    steps: int | None = None,
    launcher: str | None = None,
    stall_timeout: float | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Advice: ...
def bench(
    collective: str,
    *,
    framework: str = "pytorch",
    np: int = 2,
    hosts: Names | None = None,
    min_bytes: int = 4,
    max_bytes: int = 67108864,
    factor: float = 4.0,
    dtype: str = "float32",
    redop: str = "sum",
    seconds: float = 2.0,
    device: str = "auto",
    link_mbit_per_s: float | None = None,
    add_to: PathLike | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Bench: ...
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
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    log: Names | None = None,
) -> Comparison: ...
def diff(
    first: PathLike,
    second: PathLike,
    *,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Diff: ...
def evaluate(
    checkpoint: PathLike,
    overrides: Settings | None = None,
    *,
    framework: str | None = None,
    np: int = 1,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> EvaluationResult: ...
def export(
    checkpoint: PathLike,
    out: PathLike,
    *,
    average: bool = True,
    overwrite: bool = False,
) -> Path: ...
def generate(
    checkpoint: PathLike,
    prompt: str,
    *,
    framework: str | None = None,
    tokens: int = 200,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Generation: ...
def memory(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    ranks: Wholes | None = None,
    device: str | None = None,
    framework: str = "pytorch",
    out: PathLike | None = None,
    overwrite: bool = False,
) -> MemoryNeed: ...
def parity(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: Names | None = None,
    steps: int = 20,
    np: int = 2,
    rival: Names | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Parity: ...
def predict(
    profile: PathLike | Profile,
    *,
    cluster: PathLike,
    ranks: Wholes,
    policy: str | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Prediction: ...
def predict_images(
    checkpoint: PathLike,
    images: Paths,
    *,
    framework: str | None = None,
    top: int = 3,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> ImagePredictions: ...
def profile(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: str = "pytorch",
    np: int = 2,
    hosts: Names | None = None,
    steps: int = 20,
    torch_profiler: bool = False,
    batch_sizes: Wholes | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile: ...
def published_profile(
    model: str,
    *,
    batch_size: int,
    device: str,
    images_per_second: float | None = None,
    tokens_per_second: float | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile: ...
def submit(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    to: str = "slurm",
    framework: str = "pytorch",
    np: int = 1,
    rival: str | None = None,
    resources: Mapping[str, Any] | None = None,
    out: PathLike | None = None,
    template: PathLike | None = None,
    overwrite: bool = False,
    apply: bool = False,
    run: PathLike | None = None,
    array: Settings | None = None,
) -> Submitted: ...
def sweep(
    profile: PathLike | Profile,
    grid: Settings,
    *,
    cluster: PathLike,
    ranks: Wholes | None = None,
    policy: str | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Sweep: ...
def train(
    recipe: AnyRecipe,
    overrides: Settings | None = None,
    *,
    framework: str | None = None,
    np: int = 1,
    hosts: Names | None = None,
    rival: str | None = None,
    launcher: str = "auto",
    stall_timeout: float = 60.0,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    host_discovery_script: PathLike | None = None,
    log: Names | None = None,
) -> TrainResult: ...
