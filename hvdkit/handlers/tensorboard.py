"""TensorBoard's event file `tensorboard/events.out.tfevents.…`, written from the lines of `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdkit.errors import RequestError
from hvdkit.files import unwritable
from hvdkit.results.train import MetricLine

FOLDER = "tensorboard"


def check_installed() -> None:
    """Check that the library that writes events is installed. Raises RequestError."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise RequestError(
            "tensorboard: tensorboardX, which writes TensorBoard's files, is not installed beside the framework; "
            "run `python -m pip install tensorboardX` there, or set tensorboard=false"
        )


def scalars(line: MetricLine) -> dict[str, float]:
    """A line's values for TensorBoard, by tag; they belong to the line's step. Values that are None are left out."""
    if line.ends_epoch:
        values = {
            "epoch/train_loss": line.loss,
            "validation/accuracy": line.val_accuracy,
            "validation/loss": line.val_loss,
            **{f"validation/{name}": value for name, value in (line.validation or {}).items()},
            **{f"average_validation/{name}": value for name, value in (line.average_validation or {}).items()},
        }
    else:
        values = {
            "train/loss": line.loss,
            "train/learning_rate": line.learning_rate,
            f"train/{line.unit}_per_second": line.images_per_second,
            "train/communication_mbit_per_s": line.communication_mbit_per_s,
        }
    return {tag: value for tag, value in values.items() if value is not None}


class EventFile:
    """The event file in `folder`, written by rank 0. TensorBoard's scalars are float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None

    def begin(self, lines: Iterable[MetricLine]) -> None:
        """Replace the event files of earlier runs by one that holds `lines`, with the current time as their time.

        Raises RunError if the folder cannot be written.
        """
        # Imported here because the import is slow, more so if PyTorch is installed.
        from tensorboardX.event_file_writer import EventsWriter

        try:
            self._folder.mkdir(exist_ok=True)
            for earlier in self._folder.glob("events.out.tfevents.*"):
                earlier.unlink()
            self._file = EventsWriter(str(self._folder / "events"))
        except OSError as error:
            raise unwritable(self._folder, error, "and start again") from error
        self.write(lines)

    def write(self, lines: Iterable[MetricLine]) -> None:
        """Append the scalars of lines. Raises RunError if the disk is full."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        try:
            for line in lines:
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()]
                self._file.write_event(Event(wall_time=time.time(), step=line.step, summary=Summary(value=values)))
            self._file.flush()
        except OSError as error:
            raise unwritable(self._folder, error, "and start again") from error
