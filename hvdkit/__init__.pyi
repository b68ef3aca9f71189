"""What type checkers and editors see of the package; `__init__.py` loads it when it is used."""

import os
from pathlib import Path

from hvdkit.api import advise as advise
from hvdkit.api import bench as bench
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
from hvdkit.tasks.own import Own as Own
from hvdkit.tasks.task import Metrics as Metrics
from hvdkit.worker.entry import run_task as run_task

__version__: str

def report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[Path, Path]: ...
