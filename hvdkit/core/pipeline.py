"""A step of a pipeline: each rank has a stage of the model, and microbatches go through all stages, and back.

A framework gives a stage's passes (`core/passes.py`). Which comes when is a schedule (`core/schedules.py`). Messages
between neighbors are here: broadcasts in groups of two ranks, each with a name of its own. A send only starts one, so
that stages that send to each other do not wait in a circle, and receives begin before they are due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.chunks import Chunks
from hvdkit.core.schedules import Action, actions
from hvdkit.core.tensors import Scalar, Tensor
from hvdkit.data.dataset import Batch, Inputs, PooledBatch, arguments, mapped
from hvdkit.errors import RunError

if TYPE_CHECKING:
    from hvdkit.core.group import Group, Mesh
    from hvdkit.core.passes import Passed
    from hvdkit.core.seam import Adapter, Pending
    from hvdkit.core.trainable import Trainable

_DTYPES = ("float32", "float64", "float16", "bfloat16")  # of activations
_MOST_AXES = 6
_RECEIVES = {"receive activation": "activation", "receive gradient": "gradient"}
_AHEAD = 2  # receives that have begun before they are due: an activation's and a gradient's


class PipelinePlan(NamedTuple):
    """How a model in stages of `chunks` each is trained: batches are divided into `microbatches` each, and go by a
    `schedule`."""

    mesh: Mesh
    schedule: str
    microbatches: int
    chunks: int = 1


class _Link(NamedTuple):
    """Where a chunk ends and the next one begins, which rank `other` has; `number` counts along the chain."""

    number: int
    group: Group
    other: int


class Pipeline:
    """This rank's part in the steps and evaluations of a pipeline.

    `shared` are the parameters that this rank and the other end of the pipeline both have. `bytes_per_step` is what
    this rank has sent in the last step, without gradients that are averaged. `busy` has the seconds of each step's
    forward and backward passes. `adds` says whether gradients are nowhere but in the sums.
    """

    def __init__(self, adapter: Adapter, trainable: Trainable, plan: PipelinePlan, shared: Sequence[str] = ()) -> None:
        mesh = plan.mesh
        stages = self._stages = mesh.pipeline
        self._adapter, self._trainable, self._ends, self._plan = adapter, trainable, mesh.ends, plan
        chunks = trainable.parts if isinstance(trainable, Chunks) else [trainable]
        self._chunks = [adapter.stage(chunk) for chunk in chunks]
        self.adds = all(stage.adds for stage in self._chunks)
        numbers = range(stages.index, stages.size * plan.chunks, stages.size)
        before, after = mesh.before or mesh.ends, mesh.after or mesh.ends
        assert before and after
        earlier, later = stages.ranks[stages.index - 1], stages.ranks[(stages.index + 1) % stages.size]
        self._before = [_Link(number, before, earlier) if number else None for number in numbers]
        last = stages.size * plan.chunks - 1
        self._after = [_Link(number + 1, after, later) if number < last else None for number in numbers]
        self._end = _Link(last + 1, stages, stages.ranks[-1])
        self._shared = list(shared)
        self._layouts: dict[object, tuple[tuple[int, ...], str]] = {}
        self._sent: list[Pending] = []
        self.bytes_per_step = 0.0
        self.busy: list[float] = []

    def __call__(
        self,
        batches: Sequence[Batch],
        to_device: Callable[[Batch], tuple[Tensor, Tensor]],
        scale: Scalar | None,
        sums: dict[str, Tensor],
        add: Callable[[Mapping[str, Tensor]], None],
    ) -> tuple[Tensor | None, int]:
        """Forward and backward of all batches, whose gradients are added to `sums`, by microbatch, in their order.

        `add` adds those that backward returns.

        Returns the mean loss, None but on the last stage, and the number of microbatches. Collective over the pipeline.
        """
        plan, stages = self._plan, self._stages
        microbatches = [part for batch in batches for part in divided(batch, plan.microbatches)]
        alive: dict[tuple[int, int], Passed] = {}
        received: dict[tuple[int, int], Tensor] = {}
        losses: list[Tensor] = []
        self.bytes_per_step = 0.0
        for stage in self._chunks:
            stage.sum_into(sums)
        order = actions(plan.schedule, stages.index, stages.size, len(microbatches), plan.chunks)
        receives, coming = deque(action for action in order if action.kind in _RECEIVES), deque["Pending"]()
        busy, before_ns = 0, perf_counter_ns()
        for kind, number, chunk in order:
            batch, of, before, after = microbatches[number], (number, chunk), self._before[chunk], self._after[chunk]
            while receives and len(coming) < _AHEAD and self._knows(receives[0], microbatches):
                coming.append(self._begin(receives.popleft(), microbatches))
            if kind in _RECEIVES:
                received[of] = (coming.popleft() if coming else self._begin(receives.popleft(), microbatches))()
            elif kind == "forward":
                passed = alive[of] = self._forward(batch, to_device, received.pop(of, None), chunk)
                if after is None:
                    losses.append(passed.outputs)
            elif kind == "send activation":
                assert after
                self.bytes_per_step += self._send(after, alive[of].outputs, batch, f"activation.{number}")
            elif kind == "backward":
                gradient = scale if after is None else received.pop(of)
                of_inputs, gradients = alive.pop(of).backward(gradient)
                add(gradients)
                if of_inputs is not None:
                    received[of] = of_inputs
            else:
                assert before
                self.bytes_per_step += self._send(before, received.pop(of), batch, f"gradient.{number}")
            now = perf_counter_ns()
            trace_events.note(f"{trace_events.ACTION}{kind}:{number}:{chunk}", now)
            busy += now - before_ns if kind in ("forward", "backward") else 0
            before_ns = now
        self._settle()
        trace_events.mark(trace_events.DELIVERED)
        self.busy.append(busy / 1e9)
        loss = sum(losses[1:], losses[0]) / len(losses) if losses else None
        return loss, len(microbatches)

    def _forward(
        self, batch: Batch, to_device: Callable[[Batch], tuple[Tensor, Tensor]], received: Tensor | None, chunk: int
    ) -> Passed:
        is_last = self._after[chunk] is None
        samples, targets = to_device(batch) if received is None or is_last else (None, None)
        inputs = samples if received is None else received
        return self._chunks[chunk].forward(inputs, targets if is_last else None, received is not None)

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
        return self._evaluated(batch, losses=True)

    def predict(self, inputs: Inputs) -> np.ndarray:
        """As `Trainable.predict`, on all ranks of the pipeline; collective."""
        return self._evaluated(Batch(inputs, np.zeros(len(arguments(inputs)[0]))), losses=False)

    def _evaluated(self, batch: Batch, losses: bool) -> np.ndarray:
        """What the last stage returns in evaluation mode: `losses` or outputs.

        By microbatches, so that it needs no more memory than a forward pass of training.
        """
        parts = math.gcd(len(batch.targets), self._plan.microbatches)
        every = [found for part in divided(batch, parts) if (found := self._passed(part, losses)) is not None]
        if every:
            outputs = np.concatenate(every)
            self._send(self._end, self._adapter.from_numpy(outputs), batch, f"evaluated.{losses}")
        else:
            outputs = self._adapter.to_numpy(self._receive(self._end, batch, f"evaluated.{losses}")())
        self._settle()
        return outputs

    def _passed(self, batch: Batch, losses: bool) -> np.ndarray | None:
        """A microbatch through this rank's chunks in evaluation mode; the results where its last chunk ends the chain.

        The next stage computes it while this one takes the next microbatch.
        """
        for stage, before, after in zip(self._chunks, self._before, self._after, strict=True):
            inputs, targets = self._trainable.inputs(batch) if before is None or after is None else (None, None)
            if before is not None:
                inputs = self._receive(before, batch, "evaluation")()
            outputs = stage.evaluate(inputs, targets if losses and after is None else None)
            if after is not None:
                self._send(after, outputs, batch, "evaluation")
        self._settle()
        return self._adapter.to_numpy(outputs) if self._after[-1] is None else None

    def from_last(self, values: Sequence[float]) -> list[float]:
        """The last stage's numbers, on all ranks of the pipeline, which pass as many; collective."""
        tensor = self._adapter.from_numpy(np.array(values, np.float64))
        told = self._adapter.broadcast(tensor, self._stages, self._stages.ranks[-1], "pipeline.from_last")
        return [float(value) for value in self._adapter.to_numpy(told)]

    # Messages

    def _send(self, link: _Link, tensor: Tensor, batch: Batch, name: str) -> float:
        """Start to send a tensor, until `_settle`; returns its bytes. Raises RunError for a shape that the other rank
        does not expect."""
        key, shape = _kind_of(link, batch, name), tuple(int(size) for size in tensor.shape)
        if key not in self._layouts:  # the others do not know it yet
            kind = self._adapter.dtype(tensor)
            self._layouts[key] = shape, kind
            told = np.zeros(2 + _MOST_AXES, np.int64)
            told[: 2 + len(shape)] = _DTYPES.index(kind), len(shape), *shape
            self._start(link, self._adapter.from_numpy(told), f"{name}.layout")
        if shape != (agreed := self._layouts[key][0]):
            told_by = f"rank {link.other} expects {list(agreed)} of this stage"
            raise RunError(f"pipeline.{name}: {told_by}, got {list(shape)}")
        self._start(link, tensor, name)
        return self._bytes(tensor)

    def _start(self, link: _Link, tensor: Tensor, name: str) -> None:
        own = self._stages.ranks[self._stages.index]
        self._sent.append(self._adapter.start_broadcast(tensor, link.group, own, f"pipeline.{link.number}.{name}"))

    def _settle(self) -> None:
        """Wait until all that was sent has come."""
        for pending in self._sent:
            pending()
        self._sent.clear()

    def _begin(self, action: Action, microbatches: Sequence[Batch]) -> Pending:
        """Begin a receive of a step, so that the message comes while this rank computes."""
        what = _RECEIVES[action.kind]
        return self._receive(self._link(action), microbatches[action.microbatch], f"{what}.{action.microbatch}")

    def _knows(self, action: Action, microbatches: Sequence[Batch]) -> bool:
        """Whether the layout of what is received is known, so that nothing has to be waited for."""
        return _kind_of(self._link(action), microbatches[action.microbatch], "") in self._layouts

    def _link(self, action: Action) -> _Link:
        link = (self._before if action.kind == "receive activation" else self._after)[action.chunk]
        assert link
        return link

    def _receive(self, link: _Link, batch: Batch, name: str) -> Pending:
        """What the other rank of a link sends, in a tensor of its own: backward needs it unchanged.

        For the first such batch it sends shape and dtype before, which gradients share with activations.
        """
        key = _kind_of(link, batch, name)
        if key not in self._layouts:
            told = self._received(link, np.zeros(2 + _MOST_AXES, np.int64), f"{name}.layout")()
            number, axes, *sizes = self._adapter.to_numpy(told).tolist()
            self._layouts[key] = tuple(sizes[:axes]), _DTYPES[number]
        shape, dtype = self._layouts[key]
        return self._received(link, np.zeros(shape, dtype), name)

    def _received(self, link: _Link, like: np.ndarray, name: str) -> Pending:
        where = f"pipeline.{link.number}.{name}"
        return self._adapter.start_broadcast(self._adapter.from_numpy(like), link.group, link.other, where)

    def _bytes(self, tensor: Tensor) -> float:
        return float(np.prod(tuple(tensor.shape)) * np.dtype(self._adapter.dtype(tensor)).itemsize)


def _kind_of(link: _Link, batch: Batch, name: str) -> object:
    """What goes over a link in one layout, whatever the microbatch."""
    what = name if name.startswith("evaluated") else ""
    if isinstance(batch, PooledBatch):  # whose arrays are made when they are read
        return link.number, what, len(batch.indices), batch.pool.inputs.shape[1:]
    return link.number, what, batch.targets.shape, *(array.shape for array in arguments(batch.inputs))


def divided(batch: Batch, parts: int) -> Iterator[Batch]:
    """Equal parts of a batch, in the order of its samples."""
    size = len(batch.targets) // parts
    for begin in range(0, size * parts, size):
        rows = slice(begin, begin + size)
        if isinstance(batch, PooledBatch):
            yield PooledBatch(batch.pool, batch.indices[rows])
        else:
            yield Batch(mapped(itemgetter(rows), batch.inputs), batch.targets[rows])
