"""TensorFlow's trace events: small Python operations in a second compiled version of the step.

TensorFlow's own profiler records the details.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvdkit.core import seam, trace_events
from hvdkit.core.state import layer_of

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind

_RESHAPING = {"Reshape", "Squeeze", "ExpandDims", "Identity", "Cast"}  # the optimizer merges several into one
_THROUGH = {"ReadVariableOp", "Identity", "Cast"}  # operations that pass a weight on unchanged


class Observer(seam.Observer):
    """Compiles a second version of the session's step, with trace events."""

    def __init__(self, hvd: Any, trainable: Any) -> None:
        super().__init__(hvd)
        self._trainable, self._plain_stamp = trainable, trainable.stamp
        self._recording_stamp = self._stamp  # one object, as the session looks up its compiled functions by it
        self._forward: set[str] = set()  # names of the operations of the forward pass
        self._ends: dict[str, list[str]] = {}  # by operation's name, the trace events at its end
        self._folder: Path | None = None  # where the profiler writes

    def watch(self, kind: Kind) -> None:
        if self._folder is not None:
            self._stop_details()
        self._trainable.stamp = self._plain_stamp if kind == "plain" else self._recording_stamp
        if kind == "detailed":
            self._folder = Path(tempfile.mkdtemp(prefix="hvdkit-profile-"))
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
            tf.profiler.experimental.start(str(self._folder), options=options)

    def _stamp(self, names: tuple[str, ...], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors, which are available once the trace events are recorded."""
        ready: tuple[str, ...] = ()
        if trace_events.FORWARD in names:
            self._forward = {operation.name for operation in tensors[0].graph.get_operations()}
        elif trace_events.BACKWARD in names:
            self._ends = _events_by_operation(self._trainable.parameters, tensors, self._forward)
            # Of a stage, which computes them outside of this function: all are ready now.
            pairs = zip(self._trainable.parameters, tensors, strict=True)
            ready = tuple(trace_events.READY + name for name, tensor in pairs if tensor.op.type == "Placeholder")

        def now(_: np.ndarray) -> np.int32:
            for name in (*(ready if self._folder is not None else ()), *names):
                trace_events.mark(name)
            return np.int32(0)

        with tf.control_dependencies(tensors):
            some = tf.reshape(tensors[-1], [-1])[:1]  # copied to the host, so that it has been computed
            seen = tf.numpy_function(now, [some], tf.int32)
        with tf.control_dependencies([seen]):
            return [tf.identity(tensor) for tensor in tensors]

    def _stop_details(self) -> None:
        """Record when each operation of interest ended in each step, from the profiler's output."""
        tf.profiler.experimental.stop()
        assert self._folder is not None
        found = sorted(self._folder.rglob("*.xplane.pb"))
        ahead = time_ns() - perf_counter_ns()
        for path in found:
            for name, end in _ends(path):
                for mark in self._ends.get(name, ()):
                    trace_events.note(mark, end - ahead)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _events_by_operation(
    named: dict[str, Any], gradients: Sequence[tf.Tensor], forward: set[str]
) -> dict[str, list[str]]:
    """Trace events by the operation at whose end they are recorded: gradients, and reads of weights in forward.

    The optimized graph may not have an operation any more, so its inputs' operations count too; the last one is used.
    """
    found: dict[str, list[str]] = {}
    for name, gradient in zip(named, gradients, strict=True):
        for operation in _sources(gradient.op):
            if operation.name not in forward:
                found.setdefault(operation.name, []).append(trace_events.READY + name)
    handles = {id(variable.handle): name for name, variable in named.items()}
    for outside, inside in gradients[0].graph.captures:
        if id(outside) not in handles:
            continue
        layer = layer_of(handles[id(outside)])
        for operation in _users(inside):
            if operation.name in forward:
                found.setdefault(operation.name, []).append(trace_events.LAYER + layer)
    return found


def _sources(operation: Any) -> Iterator[Any]:
    """An operation and those that make its inputs, for one that only reshapes also those before them."""
    yield operation
    for tensor in operation.inputs:
        if operation.type in _RESHAPING:
            yield from _sources(tensor.op)
        else:
            yield tensor.op


def _users(tensor: tf.Tensor) -> Iterator[Any]:
    for operation in tensor.consumers():
        if operation.type in _THROUGH:
            for output in operation.outputs:
                yield from _users(output)
        else:
            yield operation


def _ends(path: Path) -> Iterator[tuple[str, int]]:
    """Name and end time of each operation in a profile in XSpace format; wall clock, in nanoseconds."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    zero = _start(space)
    for plane in space.planes:
        names = {key: each.name.partition(":")[0] for key, each in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name = names.get(event.metadata_id, "").rpartition("PartitionedCall/")[2]
                yield name, zero + line.timestamp_ns + (event.offset_ps + event.duration_ps) // 1000


def _start(space: Any) -> int:
    """The zero of a profile's times: wall clock, in nanoseconds; 0 if they are wall clock times themselves."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return 0
