"""TensorFlow models in training (`hvdkit/core/trainable.py`): functions over variables, traced into graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvdkit.core import trace_events
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import AnyLoss, class_weights
from hvdkit.core.state import canonical_name, check_distinct, check_kinds
from hvdkit.core.tensors import Shape
from hvdkit.core.trainable import Function, Slots, Trainable, UpdateKernel, one_tensor
from hvdkit.core.update_rules import decay_of
from hvdkit.data.dataset import Batch, arguments, mapped, on_device
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AdamW, Loss, Optimizer, Sgd

Variables = list[tuple[str, tf.Variable]]
Weights = list[tf.Variable] | list[tf.Tensor]
Corrections = tuple[tf.Tensor, tf.Tensor]
# Of a variable by its gradient and slots; the last is its decay, 0 if it has none.
KernelUpdate = Callable[[tf.Variable, tf.Tensor, Slots, float], None]
# (dtype, rate, corrections) -> the update: what all variables share is once in the graph, which is traced sooner
Kernel = Callable[[tf.DType, tf.Tensor, Corrections], KernelUpdate]


class TrainableModel(Trainable):
    """A model's variables in training. `variables` have canonical names; `trained` are the names of the trainable
    ones, in the order of their gradients. A subclass defines `logits`, and may replace `loss`.

    Raises RequestError if two variables have the same name, a trainable one is not in the dtype of `precision`, or one
    cannot be saved.
    """

    traced = transposed = True
    divided: Any = None

    def __init__(self, variables: Variables, trained: list[str], loss: AnyLoss, precision: str) -> None:
        check_distinct([name for name, _ in variables])
        named = dict(variables)
        check_kinds({name: variable.dtype.name for name, variable in variables}, trained)
        _check_shapes(named)
        self.parameters = {name: named[name] for name in trained}
        self._buffers = {name: variable for name, variable in named.items() if name not in self.parameters}
        self.dtype = PRECISIONS[precision].parameters
        _check_dtypes(self.parameters, self.dtype, precision)
        self._loss = partial(cross_entropy, label_smoothing=loss.label_smoothing) if isinstance(loss, Loss) else loss
        self.stamp = unmarked
        self._pools: dict[int, tf.Tensor] = {}  # of inputs that stay on the device
        self._predict: Any = None
        self._losses: Any = None
        self._observe: Any = None

    @property
    def buffers(self) -> dict[str, tf.Variable]:
        return self._buffers

    def take_divided(self, model: Any, loss: AnyLoss) -> None:
        """Take outputs as this rank's part of them, if they are that (`parts.DividedOutputs`)."""
        self.divided = getattr(model, "divided_outputs", None)
        if self.divided and isinstance(loss, Loss):
            losses = partial(self.divided.losses, label_smoothing=loss.label_smoothing)
            self._loss = lambda logits, labels: tf.reduce_mean(losses(logits, labels))

    def logits(self, inputs: tf.Tensor, training: bool) -> tf.Tensor:
        """Logits (n, classes) in the parameters' dtype. Traced into a graph."""
        raise NotImplementedError

    def loss(self, inputs: tf.Tensor, targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """The batch's mean loss. Traced into a graph."""
        return self._loss(logits, targets)

    def inputs(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        return self.on_device(batch), self.as_dtype(tf.constant(batch.targets))

    def on_device(self, batch: Batch) -> tf.Tensor:
        """A batch's inputs on the device."""
        return on_device(batch, self._pools, tf.constant, tf.gather)

    def as_dtype(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor; in the parameters' dtype if it is floating."""
        return tf.cast(tensor, self.dtype) if tensor.dtype.is_floating else tensor

    def backward(
        self, inputs: tf.Tensor, targets: tf.Tensor, scale: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
        with tf.GradientTape() as tape:
            (logits,) = self.stamp((trace_events.FORWARD,), [self.logits(inputs, True)])
            loss = self.loss(inputs, targets, logits)
            scaled = loss if scale is None else loss * tf.cast(scale, loss.dtype)
        return logits, loss, self.named(tape.gradient(scaled, list(self.parameters.values())))

    def named(self, gradients: list[tf.Tensor | None]) -> dict[str, tf.Tensor]:
        """Dense gradients by name: zeros for an unused variable, and a matrix for an embedding's `IndexedSlices`."""
        return {
            name: tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
            for (name, variable), gradient in zip(self.parameters.items(), gradients, strict=True)
        }

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        def compute(inputs: tf.Tensor) -> tf.Tensor:
            logits = self.logits(inputs, False)
            return self.divided.whole(logits) if self.divided else logits

        self._predict = self._predict or self.compile(compute)
        return np.array(self._predict(mapped(tf.constant, inputs)))

    def losses(self, batch: Batch) -> np.ndarray:
        return np.array(self.losses_of(*self.inputs(batch)))

    def losses_of(self, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        """Each target's cross-entropy in evaluation mode."""

        def compute(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            logits = self.logits(inputs, False)
            if self.divided:
                return self.divided.losses(logits, targets)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)

        self._losses = self._losses or self.compile(compute)
        return self._losses(inputs, targets)

    def observe(self, inputs: tf.Tensor, targets: tf.Tensor) -> None:
        self._observe = self._observe or self.compile(lambda inputs: self.logits(inputs, True))
        self._observe(inputs)

    def compile(self, function: Function) -> Function:
        # AutoGraph would convert all functions, including Horovod's, which is half of a run's start-up time.
        return cast(Function, tf.function(function, autograph=False))

    def outside(self, function: Callable[[tf.Tensor], tf.Tensor], vector: tf.Tensor) -> tf.Tensor:
        if tf.executing_eagerly():
            return function(vector)
        return tf.ensure_shape(tf.py_function(function, [vector], vector.dtype, name="outside"), vector.shape)

    def update_kernel(
        self, settings: Optimizer, shapes: Sequence[Shape], like: Sequence[tf.Variable]
    ) -> UpdateKernel | None:
        # Compiled, core's rules are as fast as kernels, but take longer to trace at each start.
        kernel: Kernel
        if isinstance(settings, AdamW):
            kernel = partial(_adamw, settings)
        elif isinstance(settings, Sgd) and not settings.decoupled:
            kernel = partial(_sgd, settings)
        else:
            return None
        decays = [decay_of(settings, shape) for shape in shapes]
        scratch = tf.Variable(tf.zeros(0, like[0].dtype), trainable=False, shape=tf.TensorShape(None))
        return partial(_by_kernel, kernel, decays, scratch)


class ModuleModel(TrainableModel):
    """A `tf.Module` in training, which is called with inputs and `training`."""

    def __init__(self, model: tf.Module, loss: AnyLoss, precision: str) -> None:
        check_kind(model)
        variables = [(_name(variable), variable) for variable in model.variables]
        # Whole numbers have no gradients, but a `tf.Variable` of them is trainable unless it says otherwise.
        trainable = [own for own in model.trainable_variables if not (own.dtype.is_integer or own.dtype.is_bool)]
        super().__init__(variables, [_name(variable) for variable in trainable], loss, precision)
        self.model, self.transposed = model, getattr(model, "transposed", True)
        self.take_divided(model, loss)

    def logits(self, inputs: tf.Tensor, training: bool) -> tf.Tensor:
        given = arguments(mapped(self.as_dtype, inputs))
        outputs = one_tensor(self.model(*given, training=training))
        check_complete(self.parameters | self.buffers, [_name(variable) for variable in self.model.variables])
        return tf.cast(outputs, self.dtype)


def unmarked(names: tuple[str, ...], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """The stamp that is used while trace events are not recorded."""
    return tensors


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    """Mean softmax cross-entropy of `logits` (…, classes) and `labels` (…), whole numbers; in the logits' dtype.

    Smoothing spreads its share evenly over all classes, the true one included (Szegedy et al. 2016, section 7).
    """
    if label_smoothing == 0:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    else:
        classes = logits.shape[-1]
        hot = tf.one_hot(labels, classes, dtype=logits.dtype) * (1 - label_smoothing) + label_smoothing / classes
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=hot, logits=logits)
    return tf.reduce_mean(losses)


def counted_cross_entropy(loss: Loss, logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of softmax cross-entropies, and its count (`Adapter.cross_entropy`)."""
    weights, smoothing, some = None, loss.label_smoothing, tf.ones(tf.shape(labels), logits.dtype)
    if loss.ignored_label is not None:
        counts = tf.not_equal(labels, tf.cast(loss.ignored_label, labels.dtype))
        some, labels = tf.cast(counts, logits.dtype), tf.where(counts, labels, tf.zeros_like(labels))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    count = some
    if loss.class_weights is not None:
        weights = tf.constant(class_weights(loss, logits.shape), logits.dtype)
        count = some * tf.gather(weights, labels)
    total = tf.reduce_sum((1 - smoothing) * count * losses)
    if smoothing:
        every = -tf.nn.log_softmax(logits)
        spread = tf.reduce_mean(every if weights is None else every * weights, -1)
        total += smoothing * tf.reduce_sum(some * spread)
    return total, tf.reduce_sum(tf.cast(count, tf.float64))


def _by_kernel(
    kernel: Kernel,
    decays: list[float],
    scratch: tf.Variable,
    weights: Weights,
    gradients: list[tf.Tensor],
    slots: list[Slots],
    rate: tf.Tensor,
    corrections: Corrections,
) -> Weights:
    """The new weights, by a `kernel` for each.

    It takes variables: a tensor goes through `scratch`, which takes its memory over, so that nothing is copied.
    """
    update, renewed = kernel(scratch.dtype, rate, corrections), []
    for weight, *others in zip(weights, gradients, slots, decays, strict=True):
        variable = weight
        if isinstance(weight, tf.Tensor):
            variable = scratch
            scratch.assign(weight)
        update(variable, *others)
        renewed.append(tf.reshape(scratch, weight.shape) if variable is scratch else weight)
    return renewed


def _sgd(settings: Sgd, dtype: tf.DType, rate: tf.Tensor, _: Corrections) -> KernelUpdate:
    """Core's SGD with coupled decay. TensorFlow's momentum kernel keeps the rate out of the velocity too."""
    rate, momentum = tf.cast(rate, dtype), tf.constant(settings.momentum, dtype)
    decay = tf.constant(settings.weight_decay, dtype)

    def update(variable: tf.Variable, gradient: tf.Tensor, slots: Slots, decays: float) -> None:
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots[0].handle,
            lr=rate,
            grad=gradient + decay * variable if decays else gradient,
            momentum=momentum,
            use_nesterov=settings.nesterov,
        )

    return update


def _adamw(settings: AdamW, dtype: tf.DType, rate: tf.Tensor, corrections: Corrections) -> KernelUpdate:
    """Core's AdamW by TensorFlow's kernel for Adam, which adds epsilon before the second correction, not after it."""
    own, first, second = partial(tf.cast, dtype=dtype), *corrections
    kept = 1 - own(rate * settings.weight_decay)
    shared = {
        "beta1_power": own(1 - first),
        "beta2_power": own(1 - second),
        "lr": own(rate),
        "beta1": tf.constant(settings.beta1, dtype),
        "beta2": tf.constant(settings.beta2, dtype),
        "epsilon": own(settings.epsilon * tf.sqrt(second)),
    }

    def update(variable: tf.Variable, gradient: tf.Tensor, slots: Slots, decays: float) -> None:
        mean, square = slots
        if decays:
            variable.assign(variable * kept)
        tf.raw_ops.ResourceApplyAdam(var=variable.handle, m=mean.handle, v=square.handle, grad=gradient, **shared)

    return update


def check_kind(model: Any) -> None:
    """Raise RequestError unless it is a `tf.Module`."""
    if not isinstance(model, tf.Module):
        kind = f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
        raise RequestError(f"model: expected a tf.Module, got {kind}; for a Keras model, import hvdkit.adapters.keras")


def check_complete(known: Collection[str], names: list[str]) -> None:
    """Check that a model makes no variables when it is called. Raises RequestError naming one."""
    if new := [name for name in names if name not in known]:
        raise RequestError(
            f"model: it makes variables when it is called, such as {new[0]}, which would not be trained; call it once "
            "in model(), with inputs such as a batch's"
        )


def _check_shapes(variables: dict[str, tf.Variable]) -> None:
    for name, variable in variables.items():
        if not variable.shape.is_fully_defined():
            raise RequestError(f"model: {name}: expected a variable of a fixed shape, got {variable.shape}")


def _check_dtypes(trained: dict[str, tf.Variable], wanted: str, precision: str) -> None:
    """Check that the variables have the dtype of `precision`. Raises RequestError naming one that does not."""
    for name, variable in trained.items():
        if variable.dtype.name != wanted:
            raise RequestError(
                f"precision: {precision} expects a model whose variables are {wanted}, got {variable.dtype.name} in "
                f"{name}; build the model in {wanted} or choose another precision"
            )


def _name(variable: tf.Variable) -> str:
    return canonical_name(variable.name.removesuffix(":0"))
