"""A step of a pipeline: each rank has a stage of the model, and microbatches go through all stages, and back.

A framework gives a stage's passes (`core/passes.py`). Which comes when is a schedule (`core/schedules.py`). Messages
between neighbors are here: broadcasts in groups of two ranks, each with a name of its own. A send only starts one, so
that stages that send to each other do not wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.schedules import actions
from hvdkit.core.tensors import Scalar, Tensor
from hvdkit.data.dataset import Batch, PooledBatch, mapped
from hvdkit.errors import RunError

if TYPE_CHECKING:
    from hvdkit.core.group import Group, Mesh
    from hvdkit.core.passes import Passed
    from hvdkit.core.seam import Adapter, Pending
    from hvdkit.core.trainable import Trainable

_DTYPES = ("float32", "float64", "float16", "bfloat16")  # of activations
_MOST_AXES = 6


class Plan(NamedTuple):
    """How a model in stages is trained: batches are divided into `microbatches` each, and go by a `schedule`."""

    mesh: Mesh
    schedule: str
    microbatches: int


class Pipeline:
    """This rank's part in the steps and evaluations of a pipeline.

    `shared` are the parameters that this rank and the other end of the pipeline both have. `bytes_per_step` is what
    this rank has sent in the last step, without gradients that are averaged. `busy` has the seconds of each step's
    forward and backward passes.
    """

    def __init__(self, adapter: Adapter, trainable: Trainable, plan: Plan, shared: Sequence[str] = ()) -> None:
        mesh = plan.mesh
        self._adapter, self._trainable, self._stage = adapter, trainable, adapter.stage(trainable)
        self._stages, self._before, self._after, self._ends = mesh.pipeline, mesh.before, mesh.after, mesh.ends
        self._plan, self._shared = plan, list(shared)
        self._layouts: dict[tuple[Group, tuple[int, ...]], tuple[tuple[int, ...], str]] = {}
        self.bytes_per_step = 0.0
        self.busy: list[float] = []

    def __call__(
        self,
        batches: Sequence[Batch],
        to_device: Callable[[Batch], tuple[Tensor, Tensor]],
        scale: Scalar | None,
        add: Callable[[Mapping[str, Tensor]], None],
    ) -> tuple[Tensor | None, int]:
        """Forward and backward of all batches, whose gradients are handed to `add` by microbatch, in their order.

        Returns the mean loss, None but on the last stage, and the number of microbatches. Collective over the pipeline.
        """
        microbatches = [part for batch in batches for part in divided(batch, self._plan.microbatches)]
        alive: dict[int, Passed] = {}
        received: dict[int, Tensor] = {}
        losses: list[Tensor] = []
        sent: list[Pending] = []
        self.bytes_per_step = 0.0
        busy, before = 0, perf_counter_ns()
        for kind, number in actions(self._plan.schedule, self._stages.index, self._stages.size, len(microbatches)):
            batch = microbatches[number]
            if kind == "receive activation":
                assert self._before
                received[number] = self._receive(self._before, batch, f"activation.{number}")
            elif kind == "forward":
                passed = alive[number] = self._forward(batch, to_device, received.pop(number, None))
                if self._after is None:
                    losses.append(passed.outputs)
            elif kind == "send activation":
                assert self._after
                tensor = alive[number].outputs
                sent.append(self._send(self._after, tensor, batch, f"activation.{number}"))
                self.bytes_per_step += self._bytes(tensor)
            elif kind == "receive gradient":
                assert self._after
                received[number] = self._receive(self._after, batch, f"gradient.{number}")
            elif kind == "backward":
                gradient = scale if self._after is None else received.pop(number)
                of_inputs, gradients = alive.pop(number).backward(gradient)
                add(gradients)
                if of_inputs is not None:
                    received[number] = of_inputs
            else:
                assert self._before
                tensor = received.pop(number)
                sent.append(self._send(self._before, tensor, batch, f"gradient.{number}"))
                self.bytes_per_step += self._bytes(tensor)
            now = perf_counter_ns()
            trace_events.note(f"{trace_events.ACTION}{kind}:{number}:0", now)
            busy += now - before if kind in ("forward", "backward") else 0
            before = now
        for pending in sent:
            pending()
        trace_events.mark(trace_events.DELIVERED)
        self.busy.append(busy / 1e9)
        loss = sum(losses[1:], losses[0]) / len(losses) if losses else None
        return loss, len(microbatches)

    def _forward(
        self, batch: Batch, to_device: Callable[[Batch], tuple[Tensor, Tensor]], received: Tensor | None
    ) -> Passed:
        samples, targets = to_device(batch)
        inputs = samples if received is None else received
        return self._stage.forward(inputs, targets if self._after is None else None, received is not None)

    def share(self, sums: Mapping[str, Tensor]) -> None:
        """Add up, in place, the gradients of what both ends of the pipeline have."""
        if not self._shared:
            return
        assert self._ends
        own = [sums[name] for name in self._shared]
        self.bytes_per_step += sum(map(self._bytes, own))
        for tensor, total in zip(own, self._adapter.allreduce(own, self._ends, "sum", "pipeline.shared"), strict=True):
            self._adapter.assign(tensor, total)

    def losses(self, batch: Batch) -> np.ndarray:
        """As `Trainable.losses`, on all ranks of the pipeline; collective."""
        inputs, targets = self._trainable.inputs(batch)
        if self._before is not None:
            inputs = self._receive(self._before, batch, "evaluation")
        is_last = self._after is None
        outputs = self._stage.evaluate(inputs, targets if is_last else None)
        if self._after is not None:
            self._send(self._after, outputs, batch, "evaluation")()
            parameter = next(iter(self._trainable.parameters.values()))
            outputs = self._adapter.from_numpy(np.zeros(batch.targets.shape, self._adapter.dtype(parameter)))
        found = self._adapter.broadcast(outputs, self._stages, self._stages.ranks[-1], "pipeline.losses")
        return self._adapter.to_numpy(found)

    def from_last(self, values: Sequence[float]) -> list[float]:
        """The last stage's numbers, on all ranks of the pipeline, which pass as many; collective."""
        tensor = self._adapter.from_numpy(np.array(values, np.float64))
        found = self._adapter.broadcast(tensor, self._stages, self._stages.ranks[-1], "pipeline.from_last")
        return [float(value) for value in self._adapter.to_numpy(found)]

    # Messages

    def _send(self, pair: Group, tensor: Tensor, batch: Batch, name: str) -> Pending:
        agreed, shape = self._layout(pair, batch, tensor)[0], tuple(int(size) for size in tensor.shape)
        if shape != agreed:
            other = pair.ranks[1 - pair.index]
            raise RunError(f"pipeline.{name}: rank {other} expects {list(agreed)} of this stage, got {list(shape)}")
        return self._adapter.start_broadcast(tensor, pair, pair.ranks[pair.index], f"pipeline.{name}")

    def _receive(self, pair: Group, batch: Batch, name: str) -> Tensor:
        """What the other rank of the pair has sent, in a tensor of its own: backward needs it unchanged."""
        shape, dtype = self._layout(pair, batch)
        empty = self._adapter.from_numpy(np.zeros(shape, dtype))
        received: Tensor = self._adapter.start_broadcast(empty, pair, pair.ranks[1 - pair.index], f"pipeline.{name}")()
        return received

    def _layout(self, pair: Group, batch: Batch, tensor: Tensor = None) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what goes between two stages for a batch like this, both ways.

        For the first such batch the earlier stage tells the later one.
        """
        key = (pair, batch.targets.shape)
        if key not in self._layouts:
            told = np.zeros(2 + _MOST_AXES, np.int64)
            if tensor is not None:
                shape = tuple(int(size) for size in tensor.shape)
                told[: 2 + len(shape)] = _DTYPES.index(self._adapter.dtype(tensor)), len(shape), *shape
            heard = self._adapter.broadcast(self._adapter.from_numpy(told), pair, pair.root, "pipeline.layout")
            dtype, axes, *sizes = self._adapter.to_numpy(heard).tolist()
            self._layouts[key] = tuple(sizes[:axes]), _DTYPES[dtype]
        return self._layouts[key]

    def _bytes(self, tensor: Tensor) -> float:
        return float(np.prod(tuple(tensor.shape)) * np.dtype(self._adapter.dtype(tensor)).itemsize)


def divided(batch: Batch, parts: int) -> Iterator[Batch]:
    """Equal parts of a batch, in the order of its samples."""
    size = len(batch.targets) // parts
    for begin in range(0, size * parts, size):
        rows = slice(begin, begin + size)
        if isinstance(batch, PooledBatch):
            yield PooledBatch(batch.pool, batch.indices[rows])
        else:
            yield Batch(mapped(itemgetter(rows), batch.inputs), batch.targets[rows])
