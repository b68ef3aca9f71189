"""A user's own input pipeline in place of hvdkit's: tf.data, a DataLoader, DALI or anything that yields batches.

The recipe names a Python file with a function `open_pipeline(job: NativeJob) -> NativePipeline`.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.data import Shard
from hvdkit.data.dataset import ArraySplit, Batch, Dataset
from hvdkit.errors import RequestError, RunError
from hvdkit.recipe.schema import Native

_MODULE = "hvdkit_native_pipeline"


@dataclass(frozen=True)
class NativeJob:
    """What a pipeline is opened for: `batch_size` samples per rank and step, and the recipe's `data.options`."""

    batch_size: int
    classes: int
    seed: int
    topology: Shard
    options: Mapping[str, Any]


@dataclass(frozen=True)
class NativePipeline:
    """What `open_pipeline` returns.

    `train(epoch)` yields this rank's batches of an epoch, each of exactly `batch_size` samples; every rank takes
    `train_samples // (batch_size × size)` of them. `val()`, if given, yields this rank's share of the validation
    samples, in batches that may be shorter; the ranks together must yield each sample exactly once.
    A batch is (samples, labels): (n, *shape) float32, and (n,) integers. They are NumPy arrays, or anything that
    numpy.asarray accepts, such as tensors on the CPU.
    """

    shape: tuple[int, int, int]
    train: Callable[[int], Iterable[tuple[Any, Any]]]
    train_samples: int
    val: Callable[[], Iterable[tuple[Any, Any]]] | None = None


def check_module(data: Native) -> Path:
    """The user's file. Raises RequestError if there is none."""
    path = Path(data.module)
    if not path.is_file():
        raise RequestError(f"data.module: {path}: no such file; expected a Python file with a function open_pipeline")
    return path


def open_native(data: Native, job: NativeJob) -> Dataset:
    """The data set of the user's file. Raises RequestError if the file cannot be used."""
    path = check_module(data)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise RequestError(f"data.module: {path}: no Python file; expected one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # its dataclasses and worker processes look for it there
    spec.loader.exec_module(module)
    opener = getattr(module, "open_pipeline", None)
    if not callable(opener):
        raise RequestError(f"data.module: {path}: expected a function open_pipeline(job), found none")
    pipeline = opener(job)
    if not isinstance(pipeline, NativePipeline):
        raise RequestError(
            f"data.module: {path}: expected open_pipeline to return a NativePipeline, got {type(pipeline).__name__}"
        )
    train = PipelineSplit(pipeline, job, str(path))
    nothing = ArraySplit(np.empty((0, *pipeline.shape), np.float32), np.empty(0, np.int64))
    return Dataset(train, train if pipeline.val else nothing, pipeline.shape, job.classes, native=True)


@dataclass(frozen=True)
class PipelineSplit:
    """A pipeline as both splits of a data set. Its samples have no indices."""

    pipeline: NativePipeline
    job: NativeJob
    where: str

    def __len__(self) -> int:
        return self.pipeline.train_samples

    def batch(self, indices: np.ndarray) -> Batch:
        """Raises RequestError."""
        raise RequestError(f"{self.where}: the samples of a user pipeline cannot be selected by index")

    def train_batches(self, epoch: int, batches: int) -> Iterator[Batch]:
        """This rank's `batches` batches of one epoch. Raises RunError if there are fewer, or one has another form."""
        count = 0
        for images, labels in itertools.islice(self.pipeline.train(epoch), batches):
            batch = self._checked(images, labels)
            if len(batch.targets) != self.job.batch_size:
                raise self._fault(f"expected {self.job.batch_size} samples a batch, got {len(batch.targets)}")
            count += 1
            yield batch
        if count < batches:
            raise self._fault(f"expected {batches} batches in epoch {epoch} on each rank, got {count}")

    def evaluation_batches(self) -> Iterator[tuple[Batch, int]]:
        """Yields (batch, valid) of this rank's validation samples, as `batches.evaluation_batches` does."""
        if self.pipeline.val is None:
            return
        for images, labels in self.pipeline.val():
            batch = self._checked(images, labels)
            count, wanted = len(batch.targets), self.job.batch_size
            if not 0 < count <= wanted:
                raise self._fault(f"expected 1 to {wanted} samples in a validation batch, got {count}")
            rows = np.concatenate([np.arange(count), np.zeros(wanted - count, int)])
            yield (batch if count == wanted else Batch(batch.inputs[rows], batch.targets[rows])), count

    def _checked(self, images: Any, labels: Any) -> Batch:
        images, labels = np.asarray(images), np.asarray(labels)
        if images.dtype != np.float32 or images.shape[1:] != self.pipeline.shape:
            expected = f"float32 (n, {', '.join(map(str, self.pipeline.shape))})"
            raise self._fault(f"expected samples as {expected}, got {images.dtype} {images.shape}")
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise self._fault(f"expected labels as int64 ({len(images)},), got {labels.dtype} {labels.shape}")
        outside = labels[(labels < 0) | (labels >= self.job.classes)]
        if len(outside):
            raise self._fault(f"expected labels from 0 to {self.job.classes - 1}, got {outside[0]}")
        return Batch(images, labels.astype(np.int64))

    def _fault(self, text: str) -> RunError:
        return RunError(f"data.module: {self.where}: {text}")
