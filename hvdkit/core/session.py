"""A model with its optimizer and strategy, the same for every framework and strategy; `step.py` has the training step.

Frameworks that trace (TensorFlow, Keras) compile the private methods of this class; the others call them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.core.pieces import Piece, bytes_of
from hvdkit.core.seam import Adapter, AnyLoss, Model
from hvdkit.core.state import digest
from hvdkit.core.stateful import Stateful
from hvdkit.core.step import Step
from hvdkit.core.strategy import Strategy
from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Function
from hvdkit.core.update import Update
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AverageWeights, Loss, Optimizer

if TYPE_CHECKING:
    from hvdkit.core.counting import Counting
    from hvdkit.core.pipeline import Pipeline, PipelinePlan


@dataclass(frozen=True)
class Gradients:
    """The results of one batch in training mode: the `outputs`, the rank's mean `loss`, and gradients by
    parameter: the rank's `own`, and those `averaged` over the strategy's group, before clipping.

    With a loss that returns (sum, count), `own` is what the rank contributes to that average: ∇sum × ranks / Σ count.

    Arrays have the parameters' dtype, and names and layouts as in `Session.state`. They are divided by the loss
    scale.
    """

    outputs: np.ndarray
    loss: float
    own: dict[str, np.ndarray]
    averaged: dict[str, np.ndarray]


class Session(Stateful):
    """`trainable` is the framework's part (`core.trainable.Trainable`), `update` the optimizer with its slots.

    `loss` returns the mean over a batch, or (sum, count): then an update minimizes Σ sum / Σ count over its batches and
    all ranks (`core/counting.py`), and `targets`, about how many a batch has, keeps sums in float16's range.
    `initial` makes a `model_state` to start from, which is never in memory beside the slots; an empty one changes
    nothing, and of a pipeline it has this rank's stage. With `digests`, `initial_sha256` is the digest
    (`core.state.digest`) of what this rank starts from.
    `pieces` are those of the parameters of which the model has only this rank's part; its whole state is collective.
    With a `plan` the model is this rank's stage of a pipeline; of several chunks, a list of them.
    Raises RequestError for a model that cannot be trained, for example because two variables share a name.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: Model,
        optimizer: Optimizer,
        loss: AnyLoss,
        strategy: Strategy | None = None,
        precision: str = "fp32",
        initial: Callable[[], Mapping[str, np.ndarray]] | None = None,
        targets: int = 1,
        digests: bool = False,
        pieces: Mapping[str, Piece] | None = None,
        plan: PipelinePlan | None = None,
    ) -> None:
        self.adapter, self.strategy = adapter, strategy or Strategy()
        self.counting: Counting | None = None  # of a loss that may return (sum, count)
        if not isinstance(loss, Loss) or loss.counts:
            from hvdkit.core.counting import Counting  # a loss that is a mean does not need it

            function = adapter.cross_entropy(loss) if isinstance(loss, Loss) else loss
            self.counting = Counting(adapter, function, targets, in_stages=plan is not None)
        self.custom_loss = None if isinstance(loss, Loss) else self.counting
        if plan is not None and plan.chunks > 1:
            from hvdkit.core.chunks import Chunks  # most models are in one piece

            self.trainable = Chunks([adapter.bind(chunk, self.counting or loss, precision) for chunk in model])
        else:
            self.trainable = adapter.bind(model, self.counting or loss, precision)
        self.trainable.used_by(self)
        if not self.trainable.parameters:
            raise RequestError(
                "model: expected parameters to train, got a model without any; give layers that are built in their "
                "first call the shape of their inputs, or call the model once in `model`"
            )
        if pieces and self.trainable.transposed:
            from hvdkit.core.slices import turned  # most models are whole

            pieces = {name: turned(piece) for name, piece in pieces.items()}
        self.pieces, self.stages = dict(pieces or {}), plan and plan.mesh.pipeline
        held = self.held()
        stored = held.stored
        if pieces or plan:
            from hvdkit.core.slices import check_pieces  # most models are whole

            self.buffer_pieces = self.as_pieces(self.trainable.buffers, self.stages, "buffers")
            check_pieces(stored, self.stored_buffers())
        self.shapes = {name: self._turned_shape(held.shapes[name]) for name in sorted(held.shapes)}
        self.dtype = held.dtypes[next(iter(self.shapes))]
        if initial is not None and (state := initial()):
            both = self.trainable.parameters, self.trainable.buffers
            self._load_all(
                [self.as_pieces(own, None).stored for own in both], state
            )  # of a pipeline, this stage's alone
            del both, state
        entries = [stored, self.stored_buffers()]
        # Before a strategy divides parameters further: what a rank has of its own model.
        named = ((name, self.array(tensor)) for name, tensor in self._sorted(entries))
        self.initial_sha256 = digest(named) if digests else None
        shared = held.shared
        del held, stored, entries, named  # sharding replaces the parameters, and frees their memory
        self.strategy.bind(self)
        settings = self.strategy.optimizer(optimizer)
        self.update = Update(adapter, self.trainable, settings, precision, self.strategy.partition(settings))
        self.pipeline: Pipeline | None = None
        if plan is not None:
            from hvdkit.core.pipeline import Pipeline  # most models are in one piece

            self.pipeline = Pipeline(adapter, self.trainable, plan, shared)
        self.step = Step(self.strategy, self.update, self.counting, self.pipeline)

    def train_step(self, batches: Sequence[Batch]) -> Tensor | None:
        """One update by the mean of the batches' gradients, which is communicated once.

        Returns this rank's mean loss over the batches, a tensor of one element; the device may still be computing it.
        Of a pipeline, only the last stage has one, the others None.
        With `precision: fp16` an update that overflows on any rank is skipped on all ranks.
        """
        return self.step(batches)

    def complete(self) -> None:
        """Make the updates that the strategy has left to the next forward pass; collective."""
        self.strategy.complete()

    def gradients(self, batch: Batch) -> Gradients:
        """What a training step computes and sends, without the update; collective.

        Buffers change as in a training step.
        """
        with self.strategy.peek():
            outputs, loss, own, averaged = self.compiled(self._probe)(*self.step.to_device(batch))
        own = dict(self.held().gather(own)) if self.pieces else own
        to_numpy, loss = self.adapter.to_numpy, loss if self.counting is None else self.counting.mean(loss)
        return Gradients(to_numpy(outputs), float(to_numpy(loss).mean()), self._arrays(own), self._arrays(averaged))

    def _arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return {name: self.array(tensor) for name, tensor in tensors.items()}

    def _probe(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        outputs, loss, gradients = self.trainable.backward(inputs, targets, self.step.scale)
        own = {name: gradient * 1 for name, gradient in gradients.items()}  # copies: averaging may overwrite the others
        if self.counting is not None and self.counting.counts:
            own, shares = self.counting.probed(self.strategy, own, gradients)
        else:
            shares = self.strategy.average(gradients)
        means = dict(self.update.partition.gather(shares))
        return outputs, loss, self.update.unscaled(own), self.update.unscaled({name: means[name] for name in own})

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """The model's outputs in the parameters' dtype for inputs (n, …), in evaluation mode.

        On all stages of a pipeline, and collective over them.
        """
        return self.trainable.predict(inputs) if self.pipeline is None else self.pipeline.predict(inputs)

    def losses(self, batch: Batch) -> np.ndarray:
        """As `Trainable.losses`, on all stages of a pipeline; collective over them."""
        return self.trainable.losses(batch) if self.pipeline is None else self.pipeline.losses(batch)

    def mean_loss(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        """The `custom_loss` of outputs that `predict` has returned, and of their targets. No gradient is computed."""
        value, count = self.loss_of(outputs, targets)
        return value if count is None else value / (count or 1)

    def loss_of(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float | None]:
        """As `mean_loss`: the mean and None, or the sum and its count, as the loss has returned them."""
        assert self.custom_loss
        if np.issubdtype(targets.dtype, np.floating):
            targets = targets.astype(outputs.dtype)  # as in training
        from_numpy = self.adapter.from_numpy
        return self.custom_loss.of(from_numpy(outputs), from_numpy(np.ascontiguousarray(targets)))

    def keep_average(self, settings: AverageWeights) -> None:
        """Average the weights from now on: with `decay` after each update, with `from_epoch` by `add_to_average`.

        Called before the first step, and before a state with an average is loaded.
        """
        from hvdkit.core.averaged_weights import WeightAverage  # most runs do not need it

        self.trainable.averages_weights = True
        self.update.weight_average = WeightAverage(
            self.adapter, self.update.partition, self.trainable.buffers, settings
        )

    def add_to_average(self) -> None:
        """Add the weights as they are to the average."""
        assert self.update.weight_average
        self.compiled(self.update.weight_average.add)()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context with the averaged weights and statistics; collective at both ends. They stay if its body raises."""
        assert self.update.weight_average
        swap = self.compiled(self.update.weight_average.swap)
        swap()
        yield
        swap()

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that this rank sends per update, averaged over this process; None if they are not counted."""
        sent = self.strategy.bytes_per_step
        return sent if self.pipeline is None or sent is None else sent + self.pipeline.bytes_per_step

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next updates."""
        self.update.rate.set(value)

    def state_bytes(self) -> dict[str, int]:
        """The sizes of this rank's tensors: `parameters`, `gradients` when an update begins, `optimizer` (slots), and
        `average` if there is one.

        Gradients include the sums over an update's batches.
        """
        average = self.update.weight_average
        return {
            "parameters": self._bytes_of(self.update.partition.stored.tensors),
            "gradients": self.step.gradient_bytes + self._bytes_of(self.step.sums),
            "optimizer": sum(self._bytes_of(slot.tensors) for slot in self.update.slot_entries()),
        } | ({"average": self._bytes_of(average.weights)} if average else {})

    def _bytes_of(self, tensors: Mapping[str, Tensor]) -> int:
        return bytes_of(self.adapter, tensors.values())

    def compiled(self, function: Function) -> Function:
        """A bound method of the one object of its class, compiled once for each way of recording trace events."""
        return self.step.compiled(function)
