"""What type checkers and editors see of the package; `__init__.py` loads it when it is used."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdkit.api import advise as advise
from hvdkit.api import compare as compare
from hvdkit.api import diff as diff
from hvdkit.api import dry_run as dry_run
from hvdkit.api import evaluate as evaluate
from hvdkit.api import export as export
from hvdkit.api import generate as generate
from hvdkit.api import memory as memory
from hvdkit.api import parity as parity
from hvdkit.api import predict as predict
from hvdkit.api import predict_images as predict_images
from hvdkit.api import profile as profile
from hvdkit.api import published_profile as published_profile
from hvdkit.api import submit as submit
from hvdkit.api import sweep as sweep
from hvdkit.api import train as train
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
