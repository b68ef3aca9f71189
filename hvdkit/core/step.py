"""The training step, the same for every framework and strategy, from top to bottom:

    forward and backward → accumulate → average → unscale → clip → update

Where ranks keep shares only (ZeRO 2 and 3), each microbatch's gradients are averaged first, and shares accumulated.

In a pipeline, forward and backward of all microbatches are `core/pipeline.py`'s.

It is traced, with the strategy and the update, where a framework compiles (TensorFlow, Keras); the others call it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from hvdkit.core import trace_events
from hvdkit.core.pieces import Partition, bytes_of
from hvdkit.core.strategy import Strategy
from hvdkit.core.tensors import Scalar, Tensor, scalar
from hvdkit.core.trainable import Function, Hooks, Stamp
from hvdkit.core.update import Update
from hvdkit.data.dataset import Batch

if TYPE_CHECKING:
    from hvdkit.core.counting import Counting
    from hvdkit.core.pipeline import Pipeline

Reduction = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class Step:
    """One update by the mean gradient of its microbatches, which is communicated once, and what it keeps in between.

    `sums` has the summed gradients of the update's earlier microbatches: zeros between updates, empty before `prepare`.
    Where a pipeline's backward adds gradients up itself, the sums are made anew in each update.
    `gradient_bytes` is the size of the gradients with which an update begins, on this rank, apart from the sums.
    """

    def __init__(
        self, strategy: Strategy, update: Update, counting: Counting | None, pipeline: Pipeline | None = None
    ) -> None:
        trainable = self._trainable = strategy.trainable
        self._adapter = strategy.session.adapter
        self._strategy, self._update, self._counting, self._pipeline = strategy, update, counting, pipeline
        self.sums: dict[str, Tensor] = {}
        self.gradient_bytes = 0
        self._adds = pipeline is not None and pipeline.adds
        self._count = 1  # microbatches of the current update
        self._sends = False  # whether gradients that backward reports are sent after this microbatch
        self.on_batch: Callable[[], None] = lambda: None  # is called as each microbatch begins
        self._compiled: dict[Stamp, dict[str, Callable[..., object]]] = defaultdict(dict)
        # Sending during backward saves time where it overlaps, and memory where each rank keeps shares only.
        during = strategy.overlaps and (trainable.overlaps or strategy.keeps_shares or strategy.by_layer)
        if during and isinstance(trainable, Hooks):
            trainable.on_ready(self._ready)

    def __call__(self, microbatches: Sequence[Batch]) -> Tensor | None:
        """Update once. Returns this rank's mean loss, a tensor of one element that the device may still compute.

        None where a pipeline has its last stage on another rank.
        """
        if self._pipeline is not None:
            self.prepare()
            add = self.compiled(self.add)
            mean, self._count = self._pipeline(microbatches, self.to_device, self.scale, self.sums, add)
            self._pipeline.share(self.sums)
            if self._counting is not None:
                self._counting.tell_stages(self._pipeline)
            self.end(self._count)
            self._mark(trace_events.UPDATED, self._trainable.parameters)
            return mean if mean is None or self._counting is None else self._counting.mean(mean)
        self._count = len(microbatches)
        if self._count > 1:
            self.prepare()
        losses = []
        for number, batch in enumerate(microbatches, start=1):
            last = number == self._count
            self._sends = last or self._strategy.keeps_shares
            if last:
                count = float(number) if number > 1 else None
                losses.append(self.compiled(self._run_last)(*self.to_device(batch), count))
            else:
                losses.append(self.compiled(self._run_earlier)(*self.to_device(batch)))
        self._sends = False
        self._mark(trace_events.UPDATED, self._trainable.parameters)
        loss = sum(losses[1:], losses[0]) / len(losses) if len(losses) > 1 else losses[0]
        return loss if self._counting is None else self._counting.mean(loss)

    def prepare(self) -> None:
        """Make the sums, before a compiled function uses them."""
        if not self.sums and not self._adds:
            partition, parameters = self._update.partition, self._trainable.parameters
            summed = partition if self._strategy.keeps_shares else Partition(self._adapter, parameters)
            self.sums = summed.variables()

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """A batch's inputs and targets on the device."""
        self.on_batch()
        self._mark(trace_events.BEGIN)
        inputs = self._trainable.inputs(batch)
        self._mark(trace_events.INPUTS)
        return inputs

    def _run_earlier(self, inputs: Tensor, targets: Tensor) -> Tensor:
        _, loss, gradients = self._trainable.backward(inputs, targets, self.scale)
        self.add(gradients)
        return loss

    def _run_last(self, inputs: Tensor, targets: Tensor, count: Scalar | None) -> Tensor:
        _, loss, gradients = self._trainable.backward(inputs, targets, self.scale)
        self.finish(gradients, count)
        return loss

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add a microbatch's gradients to the sums; where ranks keep shares, this rank's share of their means."""
        for name, gradient in self._to_sum(gradients).items():  # of a pipeline, those of a chunk
            self._adapter.add(self.sums[name], gradient)

    def finish(self, gradients: Mapping[str, Tensor] | None, count: Scalar | None = None) -> None:
        """Average and update by one microbatch's gradients; with `count`, by the mean of so many.

        That is (`sums` + `gradients`) / count; `gradients` is None if all were added, as `end` has it. The means are
        then where the sums were.
        """
        if count is None:
            assert gradients is not None
            self._average_and_update(self._stamped((trace_events.BACKWARD,), gradients), self._average_over_ranks)
            return
        more = None if gradients is None else self._to_sum(gradients)
        totals = {name: total if more is None else total + more[name] for name, total in self.sums.items()}
        means = {
            name: self._adapter.divided(total, scalar(self._adapter, count, total)) for name, total in totals.items()
        }
        average: Reduction = (
            dict if self._strategy.keeps_shares else self._average_over_ranks
        )  # shares are averaged already
        self._average_and_update(means, average, count)
        if not self._adds:
            for total in self.sums.values():
                self._adapter.clear(total)

    def end(self, count: int) -> None:
        """Update by the mean of `count` microbatches whose gradients were added, by a framework's own loop."""
        self.compiled(self.finish)(None, float(count))

    def _to_sum(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What of one of several microbatches' gradients is summed."""
        gradients = self._stamped((trace_events.BACKWARD,), gradients)
        if self._counting is not None and self._pipeline is None:
            self._counting.add()
        return self._average_over_ranks(gradients) if self._strategy.keeps_shares else gradients

    def _average_over_ranks(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The means over the ranks that hold the same parameters, and read other data; collective."""
        means = self._strategy.average(dict(gradients))
        if not self.gradient_bytes and not self._adds:  # the same in each update, and slow to count
            kept = means if self._strategy.keeps_shares else gradients
            self.gradient_bytes = bytes_of(self._adapter, kept.values())
        return self._stamped((trace_events.REDUCED,), means)

    def _average_and_update(
        self, gradients: Mapping[str, Tensor], average: Reduction, count: Scalar | None = None
    ) -> None:
        """Average gradients of the scaled loss over ranks; unscale, clip, and apply the optimizer's rule."""
        if self._counting is not None and self._counting.counts:
            self._counting.average_and_update(self._strategy, self._update, gradients, average, count)
        elif self._strategy.by_layer:
            self.gradient_bytes = self.gradient_bytes or bytes_of(self._adapter, gradients.values())
            self._strategy.defer(dict(gradients))
        else:
            self._update(average(gradients))

    def _ready(self, name: str, gradient: Tensor) -> bool:
        """Send a gradient that backward has computed, if this microbatch's are to be sent; whether it is taken."""
        if not self._sends:
            return False
        if self._count > 1 and not self._strategy.keeps_shares:
            # As in `finish`, whose value for this name the strategy then ignores.
            gradient = (self.sums[name] + gradient) / self._count
        return self._strategy.begin(name, gradient)

    @property
    def scale(self) -> Scalar | None:
        """The factor by which the loss is multiplied now; None if it is not."""
        return self._update.scale.get() if self._update.scale is not None else None

    def compiled(self, function: Function) -> Function:
        """A bound method of the one object of its class, compiled once for each way of recording trace events."""
        made, name = self._compiled[self._trainable.stamp], function.__qualname__
        if name not in made:
            made[name] = self._trainable.compile(function)
        return cast(Function, made[name])

    def _stamped(self, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(tensors, self._trainable.stamp(names, list(tensors.values())), strict=True))

    def _mark(self, name: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Record a trace event between two compiled functions, or once the tensors are ready."""
        if self._trainable.traced:
            trace_events.mark(name)
        else:
            self._trainable.stamp((name,), list((tensors or {}).values()))
