"""What `hvdkit.adapters.tensorflow` and `keras` do between a rank's gradients and the new weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.adapters.tensorflow import tensors
from hvdkit.adapters.tensorflow.state import Kept, scalar
from hvdkit.core import trace_events
from hvdkit.core.precision import LOSS_SCALING, PRECISIONS
from hvdkit.core.seam import Adapter, Averaging, Gradients
from hvdkit.core.state import to_canonical
from hvdkit.core.update_rules import bias_corrections, clip, counts_steps, decay_of, update
from hvdkit.recipe.schema import Optimizer, Sgd
from hvdkit.strategies.codecs import cast as compression_

Found = tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]  # logits, the batch's mean loss, scaled gradients
Function = TypeVar("Function", bound=Callable[..., Any])


def _as_it_is(function: Function) -> Function:
    """Without AutoGraph, which would convert every function down to Horovod's, and is half of a run's start."""
    return cast(Function, tf.autograph.experimental.do_not_convert(function))


class DistributedUpdate:
    """One update of a network from the gradients of all ranks. All that is saved of the two is in `kept`.

    Its variables are made with it, so that its methods may be called while a step is compiled.
    `variables` are the network's by canonical name, `trained` the names of those that learn; the learning rate is in
    float64, like all that is no tensor of a parameter. Raises RequestError as `Kept` does.
    """

    def __init__(
        self,
        variables: list[tuple[str, tf.Variable]],
        trained: list[str],
        settings: Optimizer,
        compression: str,
        precision: str,
        adapter: Adapter,
        learning_rate: tf.Variable | None = None,
        averaging: Averaging | None = None,
    ) -> None:
        self.kept = Kept(variables, trained, settings, precision)
        self._trained = self.kept.trained
        self._shapes = self.kept.shapes
        self._settings, self.averaging = settings, averaging
        self._compressor = compression_.make(compression, adapter)
        self._scales_loss = PRECISIONS[precision].scales_loss
        self.learning_rate = learning_rate or scalar(settings.learning_rate, tf.float64)
        # What makes gradients their means over all ranks; a rival puts its own here before the first step is compiled.
        self.average: Callable[[list[tf.Tensor]], list[tf.Tensor]] = self._averaged
        if averaging is not None:
            self.average = self._averaged_otherwise
        # Marks when tensors are there; what watches steps puts its own here before it compiles one.
        self.stamp: Callable[[tuple[str, ...], list[tf.Tensor]], list[tf.Tensor]] = _unmarked
        self._sums: list[tf.Variable] = []  # of the gradients of an update's first parts
        self._parts, self._seen = scalar(1, tf.int64), scalar(0, tf.int64)

    @property
    def named(self) -> dict[str, tf.Variable]:
        """Those that learn by canonical name, in the order in which gradients come."""
        return self._trained

    @property
    def variables(self) -> list[tf.Variable]:
        """Those that learn, in the order in which gradients come."""
        return list(self._trained.values())

    def expect(self, parts: int) -> None:
        """Let the next update take so many batches. Not for compiled code."""
        if not self._sums:
            self._sums = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self.variables]
        self._parts.assign(parts)

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss whose gradients `__call__` takes."""
        return loss * self._scale(loss.dtype) if self._scales_loss else loss

    def backward(self, forward: Callable[[], tuple[tf.Tensor, tf.Tensor]]) -> Found:
        """Logits, loss and gradients of `forward`, which returns the first two."""
        with tf.GradientTape() as tape:
            logits, loss = forward()
            scaled = self.scaled(loss)
        return logits, loss, tape.gradient(scaled, self.variables)

    @_as_it_is
    def probe(self, found: Found) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """What `to_gradients` takes, gradients unscaled; nothing is updated. All ranks call it."""
        logits, loss, gradients = found
        own = dense(gradients, self.variables)
        return logits, loss, self._unscaled(own), self._unscaled(self.average(own))

    def to_gradients(
        self, logits: tf.Tensor, loss: tf.Tensor, own: list[tf.Tensor], averaged: list[tf.Tensor]
    ) -> Gradients:
        """As the seam wants them."""
        by_name = [
            {name: to_canonical(gradient.numpy()) for name, gradient in zip(self._trained, gradients, strict=True)}
            for gradients in (own, averaged)
        ]
        return Gradients(logits.numpy(), float(loss), *by_name)

    @_as_it_is
    def __call__(self, gradients: list[tf.Tensor | None], in_parts: bool = False) -> None:
        """Take one batch's gradients, of the scaled loss: update, or, `in_parts`, wait for the last that is expected.

        All ranks are to have their last part at the same time.
        """
        own = self.stamp((trace_events.BACKWARD,), dense(gradients, self.variables))
        if in_parts:
            tf.cond(self._seen + 1 < self._parts, lambda: self._add(own), lambda: self._finish(own))
        else:
            self._update(self._unscaled(self._reduced(own)))

    def _reduced(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.averaging is not None:  # what it sends it marks itself
            return self.stamp((trace_events.REDUCED,), self.average(gradients))
        return self.stamp(
            (trace_events.RECEIVED, trace_events.REDUCED), self.average(self.stamp((trace_events.SENT,), gradients))
        )

    def _add(self, gradients: list[tf.Tensor]) -> None:
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.assign_add(gradient)
        self._seen.assign_add(1)

    def _finish(self, gradients: list[tf.Tensor]) -> None:
        """Update by the mean of all parts; what comes next is a whole update again, unless `expect` says otherwise."""
        means = [
            (total + gradient) / tf.cast(self._parts, gradient.dtype)
            for total, gradient in zip(self._sums, gradients, strict=True)
        ]
        self._update(self._unscaled(self._reduced(means)))
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        self._seen.assign(0)
        self._parts.assign(1)

    def _averaged(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        # A rank with one batch meets ranks with several, whose operation is inside a branch: hence without scopes.
        return list(
            hvd.grouped_allreduce(
                gradients, op=hvd.Average, compression=self._compressor, name="gradients", ignore_name_scope=True
            )
        )

    def _averaged_otherwise(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """By `averaging`, outside of the graph: what it keeps from step to step is none of the graph's affair."""
        scale = self._scale(tf.float64) if self._scales_loss else tf.constant(0.0, tf.float64)
        own = self.kept.packed(dict(zip(self._trained, gradients, strict=True)))
        mean = tf.py_function(self._average_now, [scale, own], own.dtype, name="averaging")
        means = self.kept.unpacked(tf.ensure_shape(mean, own.shape))
        return [means[name] for name in self._trained]

    def _average_now(self, scale: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        assert self.averaging is not None
        return self.averaging.packed(own, self._shapes, float(scale) if self._scales_loss else None)

    def _scale(self, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(self.kept.scalars["optimizer.loss_scale"], dtype)

    def _unscaled(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return [gradient / self._scale(gradient.dtype) for gradient in gradients] if self._scales_loss else gradients

    def _update(self, gradients: list[tf.Tensor]) -> None:
        """Update by unscaled averages, which are the same on all ranks, so that all skip or none."""
        if not self._scales_loss:
            self._apply(gradients)
            return
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        tf.cond(finite, lambda: self._apply(gradients), lambda: None)
        scale, good_steps = self.kept.scalars["optimizer.loss_scale"], self.kept.scalars["optimizer.good_steps"]
        good = good_steps + 1
        grows = good >= LOSS_SCALING.interval
        factor = tf.where(grows, tf.constant(LOSS_SCALING.growth, scale.dtype), 1.0)
        scale.assign(scale * tf.where(finite, factor, LOSS_SCALING.backoff))
        good_steps.assign(tf.where(finite & ~grows, good, 0))

    def _apply(self, gradients: list[tf.Tensor]) -> None:
        settings = self._settings
        if settings.clip_norm is not None:
            gradients = clip(gradients, settings.clip_norm, tensors)
        corrections = (1.0, 1.0)
        if counts_steps(settings):
            step = self.kept.scalars["optimizer.step"].assign_add(1, read_value=True)
            corrections = bias_corrections(settings, tf.cast(step, tf.float64))
        for (name, variable), gradient in zip(self._trained.items(), gradients, strict=True):
            slots, dtype = self.kept.slots[name], variable.dtype
            rate = tf.cast(self.learning_rate, dtype)
            if isinstance(settings, Sgd) and not settings.decoupled:
                _apply_sgd(settings, rate, variable, slots[0], gradient)
                continue
            values = tuple(tf.convert_to_tensor(slot) for slot in slots)
            factors = (tf.cast(corrections[0], dtype), tf.cast(corrections[1], dtype))
            weight, values = update(settings, tensors, tf.convert_to_tensor(variable), gradient, values, rate, factors)
            variable.assign(weight)
            for slot, value in zip(slots, values, strict=True):
                slot.assign(value)


def _unmarked(names: tuple[str, ...], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    return tensors


def dense(gradients: list[tf.Tensor | None], variables: list[tf.Variable]) -> list[tf.Tensor]:
    """Whole gradients: a variable unused on this rank, maybe not on the others, has zeros; an embedding's rows, all."""
    return [
        tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _apply_sgd(
    settings: Sgd, rate: tf.Tensor, variable: tf.Variable, velocity: tf.Variable, gradient: tf.Tensor
) -> None:
    """Core's rule with coupled decay; TensorFlow's momentum kernel has the rate outside the velocity too."""
    decay = decay_of(settings, tuple(variable.shape))
    if decay:
        gradient = gradient + decay * variable
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=velocity.handle,
        lr=rate,
        grad=gradient,
        momentum=tf.constant(settings.momentum, variable.dtype),
        use_nesterov=settings.nesterov,
    )
