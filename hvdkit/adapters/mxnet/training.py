"""A Gluon block in training (`hvdkit/core/trainable.py`)."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import mxnet as mx
import numpy as np

from hvdkit.adapters.mxnet import timing
from hvdkit.adapters.mxnet.batch_norm import RunningVariances
from hvdkit.core import trace_events
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import AnyLoss, class_weights
from hvdkit.core.state import canonical_name, cast_lines, check_kinds, is_statistic
from hvdkit.core.tensors import Scalar, Shape
from hvdkit.core.trainable import Slots, Trainable, UpdateKernel, one_tensor
from hvdkit.core.update_rules import decay_of
from hvdkit.data.dataset import Batch, arguments, mapped, on_device
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AdamW, Loss, Optimizer, Sgd

_KERNEL_TENSORS = 50  # the most that one call of MXNet's multi-tensor kernels takes
_SGD_ALONE = (
    16_384  # elements from which SGD's kernel for one tensor is faster: 0.67 ms in place of 1.08 for 8 of 32,768
)
_ALIKE = 16_384  # how many elements more than another tensor of a call its largest may have


class TrainableModel(Trainable):
    """A hybridized block with static memory and shapes: one engine call for a step instead of one per operation."""

    queued = True  # by MXNet's engine, where Horovod's collectives are operations too

    def __init__(self, model: mx.gluon.Block, loss: AnyLoss, precision: str, context: mx.Context) -> None:
        self.model, self._context = model, context
        self.dtype = PRECISIONS[precision].parameters
        self.warnings = _cast(model, precision, self.dtype)
        _initialize(model, context)
        if self.dtype == "float64":
            from hvdkit.adapters.mxnet.synchronized import sum_exactly  # most runs do not need it

            sum_exactly(model)
        self.variances = RunningVariances(model)
        with warnings.catch_warnings():  # of hooks that children would lose; those of the model itself take effect
            if model._forward_hooks or model._forward_pre_hooks:
                warnings.filterwarnings("ignore", f'(?s)"{re.escape(str(model))}" is being hybridized')
            model.hybridize(static_alloc=True, static_shape=True)
        # By canonical name: Gluon's own names depend on the number of models created before.
        named = {canonical_name(name): parameter for name, parameter in model._collect_params_with_prefix().items()}
        first = {id(parameter): name for name, parameter in reversed(named.items())}  # of parameters that layers share
        self._trained = {
            name: parameter
            for name, parameter in named.items()
            if parameter.grad_req != "null" and first[id(parameter)] == name
        }
        self.parameters = {name: parameter.data() for name, parameter in self._trained.items()}
        self._buffers = {name: parameter.data() for name, parameter in named.items() if name not in self._trained}
        self._loss = partial(cross_entropy, smoothing=loss.label_smoothing) if isinstance(loss, Loss) else loss
        self._divided = getattr(model, "divided_outputs", None)  # `parts.DividedOutputs`, if ranks have parts of them
        if self._divided and isinstance(loss, Loss):
            losses = partial(self._divided.losses, smoothing=loss.label_smoothing)
            self._loss = lambda logits, labels: losses(logits, labels).mean()
        self.stamp = timing.stamp
        self._pools: dict[int, mx.nd.NDArray] = {}  # of inputs that stay on the device

    @property
    def buffers(self) -> dict[str, mx.nd.NDArray]:
        return self._buffers

    def inputs(self, batch: Batch) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
        def pick(pool: mx.nd.NDArray, indices: np.ndarray) -> mx.nd.NDArray:
            return mx.nd.take(pool, self._array(indices.astype(np.int64)))

        return on_device(batch, self._pools, self._put, pick), self._as_dtype(batch.targets)

    def backward(
        self, inputs: mx.nd.NDArray, targets: mx.nd.NDArray, scale: Scalar | None
    ) -> tuple[mx.nd.NDArray, mx.nd.NDArray, dict[str, mx.nd.NDArray]]:
        self.variances.before_step()
        with mx.autograd.record():
            logits = self.outputs_of(inputs)
            loss = self.loss_of(logits, targets)
            scaled = loss if scale is None else loss * scale
        self.stamp((trace_events.FORWARD,), [logits])  # not the loss, which backward does not need and may precede
        scaled.backward()
        self.variances.after_step(tuple(array.shape for array in arguments(inputs)))
        return logits, loss, self.gradients()

    def outputs_of(self, inputs: mx.nd.NDArray) -> mx.nd.NDArray:
        """Outputs, in training mode where autograd records."""
        return one_tensor(self.model(*arguments(inputs)))

    def loss_of(self, logits: mx.nd.NDArray, targets: mx.nd.NDArray) -> mx.nd.NDArray:
        """The mean loss of outputs."""
        return self._loss(logits, targets)

    def gradients(self) -> dict[str, mx.nd.NDArray]:
        """Every parameter's gradient, which the next backward pass overwrites."""
        for parameter in self._trained.values():
            weight = parameter.data()
            if not weight._fresh_grad:  # unused in this batch, but maybe used in the last one or on other ranks
                parameter.zero_grad()
            weight._fresh_grad = False
        return {name: _dense(parameter) for name, parameter in self._trained.items()}

    def observe(self, inputs: mx.nd.NDArray, targets: mx.nd.NDArray) -> None:
        self.backward(inputs, targets, None)
        mx.nd.waitall()  # backward writes statistics, and the engine lets others read them before (batch_norm.py)

    def constrain(self) -> None:
        """Have averages read the statistics that backward has written: the engine knows of this write to them alone."""
        if self.averages_weights:
            for name, tensor in self.buffers.items():
                if is_statistic(name):
                    tensor *= 1

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        outputs = self.outputs_of(mapped(self._put, inputs))
        return np.asarray((self._divided.whole(outputs) if self._divided else outputs).asnumpy())

    def losses(self, batch: Batch) -> np.ndarray:
        inputs, targets = self.inputs(batch)
        return np.asarray(self.losses_of(self.outputs_of(inputs), targets).asnumpy())

    def losses_of(self, logits: mx.nd.NDArray, targets: mx.nd.NDArray) -> mx.nd.NDArray:
        """Each target's cross-entropy."""
        if self._divided:
            return self._divided.losses(logits, targets)
        # `log_softmax` adds up one value after the other: of 256 classes in float32, it is ten times as far off.
        logits = mx.nd.broadcast_sub(logits, logits.max(axis=-1, keepdims=True))
        return logits.exp().sum(axis=-1).log() - mx.nd.pick(logits, targets, axis=-1)

    def update_kernel(
        self, settings: Optimizer, shapes: Sequence[Shape], like: Sequence[mx.nd.NDArray]
    ) -> UpdateKernel | None:
        """SGD and AdamW by multi-tensor kernels; with single operations, a small GPT's update takes half of its step.

        None for float64, as MXNet's multi-tensor kernels round 0.9 to 0.89999998.
        """
        if self.dtype != "float32":
            return None
        decays = [decay_of(settings, shape) for shape in shapes]
        parts = _alike([tensor.size for tensor in like], alone=_SGD_ALONE if isinstance(settings, Sgd) else math.inf)
        if isinstance(settings, AdamW):
            return partial(_in_parts, partial(_adamw, settings), parts, decays, [])
        if not isinstance(settings, Sgd) or (settings.decoupled and settings.weight_decay > 0):
            return None
        return partial(_in_parts, partial(_sgd, settings), parts, decays, _scratch(like, parts))

    def _put(self, inputs: np.ndarray) -> mx.nd.NDArray:
        """Inputs on the device; images (n, height, width, channels) as (n, channels, height, width)."""
        if inputs.ndim == 4:
            inputs = inputs.transpose(0, 3, 1, 2)
        return self._as_dtype(inputs)

    def _as_dtype(self, array: np.ndarray) -> mx.nd.NDArray:
        dtype = self.dtype if np.issubdtype(array.dtype, np.floating) else array.dtype
        return self._array(np.ascontiguousarray(array, dtype))

    def _array(self, array: np.ndarray) -> mx.nd.NDArray:
        return mx.nd.array(array, ctx=self._context, dtype=array.dtype)


def cross_entropy(logits: mx.nd.NDArray, labels: mx.nd.NDArray, smoothing: float) -> mx.nd.NDArray:
    """Mean softmax cross-entropy of logits (…, classes) and labels (…), with label smoothing."""
    classes, every = logits.shape[-1], mx.nd.log_softmax(logits)
    if smoothing == 0:
        losses = -mx.nd.pick(every, labels, axis=-1, keepdims=True)
    else:
        hot = mx.nd.one_hot(labels, classes, dtype=logits.dtype) * (1 - smoothing) + smoothing / classes
        losses = -mx.nd.sum(every * hot, axis=-1, keepdims=True)
    return losses.mean(axis=0, exclude=True).mean()


def counted_cross_entropy(
    loss: Loss, logits: mx.nd.NDArray, labels: mx.nd.NDArray
) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """The sum of softmax cross-entropies, and its count (`Adapter.cross_entropy`)."""
    smoothing, every = loss.label_smoothing, -mx.nd.log_softmax(logits)
    some = mx.nd.ones(labels.shape, ctx=logits.context, dtype=logits.dtype)
    if loss.ignored_label is not None:
        counts = labels != loss.ignored_label
        some, labels = counts.astype(logits.dtype), mx.nd.where(counts, labels, mx.nd.zeros_like(labels))
    count = some
    if loss.class_weights is not None:
        weights = mx.nd.array(class_weights(loss, logits.shape), ctx=logits.context, dtype=logits.dtype)
        count = some * mx.nd.take(weights, labels)
    total = ((1 - smoothing) * count * mx.nd.pick(every, labels, axis=-1)).sum()
    if smoothing:
        spread = (every if loss.class_weights is None else mx.nd.broadcast_mul(every, weights)).mean(axis=-1)
        total = total + smoothing * (some * spread).sum()
    return total, count.astype("float64").sum()


def _dense(parameter: mx.gluon.Parameter) -> mx.nd.NDArray:
    """A parameter's gradient for all elements: `sparse_grad` of an embedding makes one of some rows."""
    gradient = parameter.grad()
    return gradient if parameter._grad_stype == "default" else gradient.tostype("default")


def _cast(model: mx.gluon.Block, precision: str, dtype: str) -> list[str]:
    """Cast a block's floating tensors to `dtype`, that of the precision.

    Returns a line for each dtype that they lose. Raises RequestError naming a tensor that cannot be trained or kept.
    """
    named = {canonical_name(name): parameter for name, parameter in model._collect_params_with_prefix().items()}
    dtypes = {name: np.dtype(parameter.dtype).name for name, parameter in named.items()}
    check_kinds(dtypes, {name for name, parameter in named.items() if parameter.grad_req != "null"})
    if sparse := [name for name, parameter in named.items() if parameter._stype != "default"]:
        raise RequestError(f"model: {sparse[0]}: expected a dense parameter, got the storage type row_sparse")
    kept = [parameter for name, parameter in named.items() if "float" not in dtypes[name]]
    for parameter in kept:
        parameter.cast = lambda dtype: None  # the block casts all of its parameters
    model.cast(dtype)
    for parameter in kept:
        del parameter.cast
    return cast_lines(dtypes, precision, dtype)


def _initialize(model: mx.gluon.Block, context: mx.Context) -> None:
    """Initialize parameters that are not initialized yet, and move all to the device. Raises RequestError."""
    parameters = model.collect_params()
    shapeless = [name for name, parameter in parameters.items() if not np.prod(parameter.shape or 0)]
    if shapeless:
        raise RequestError(
            f"model: expected the shapes of all parameters, got none for {', '.join(shapeless)}; "
            "give these layers their in_units or in_channels"
        )
    for parameter in parameters.values():
        if parameter._data is None:
            parameter.initialize(ctx=context)
    parameters.reset_ctx(context)


Arrays = list[mx.nd.NDArray]
Corrections = tuple[float, float]


def _alike(sizes: Sequence[int], alone: float) -> list[list[int]]:
    """Which tensors one call of a kernel takes: of similar sizes, as for each element it goes through all of them; one
    from `alone` elements on."""
    parts: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        most = min(sizes[number] + _ALIKE, alone - 1)
        if not parts or len(parts[-1]) == _KERNEL_TENSORS or sizes[parts[-1][0]] > most:
            parts.append([])
        parts[-1].append(number)
    return parts


def _scratch(like: Sequence[mx.nd.NDArray], parts: list[list[int]]) -> Arrays:
    """Tensors of the same shapes, of which those of each part lie in the same memory."""
    if not like:
        return []
    memory = mx.nd.zeros(max(sum(like[number].size for number in part) for part in parts), like[0].context)
    scratch: dict[int, mx.nd.NDArray] = {}
    for part in parts:
        end = 0
        for number in part:
            begin, end = end, end + like[number].size
            scratch[number] = memory[begin:end].reshape(like[number].shape)
    return [scratch[number] for number in range(len(like))]


def _in_parts(
    kernel: Callable[..., None],
    parts: list[list[int]],
    decays: list[float],
    scratch: Arrays,
    weights: Arrays,
    gradients: Arrays,
    slots: list[Slots],
    rate: float,
    corrections: Corrections,
) -> Arrays:
    """The weights, updated by a kernel for some tensors at a time."""
    for part in parts:
        by_slot = [list(slot) for slot in zip(*(slots[number] for number in part), strict=True)]
        some, written, read = (
            [arrays[number] for number in part] for arrays in (weights, scratch or weights, gradients)
        )
        kernel([decays[number] for number in part], written, some, read, by_slot, rate, corrections)
    return weights


def _sgd(
    settings: Sgd,
    decays: list[float],
    scratch: Arrays,
    weights: Arrays,
    gradients: Arrays,
    slots: list[Arrays],
    rate: float,
    _: Corrections,
) -> None:
    """Core's SGD with coupled decay; MXNet's own includes the learning rate in the velocity.

    velocity = momentum × velocity + gradient + decay × weight: the kernel's formula at a rate of -1. The weights that
    it writes, old weights plus velocity, are not used.
    """
    (velocities,) = slots
    none = [0.0] * len(weights)
    how = {"momentum": settings.momentum}
    _many("sgd_mom_update", [-1.0] * len(weights), decays, scratch, weights, gradients, velocities, **how)
    if settings.nesterov:
        _many("sgd_update", [rate] * len(weights), decays, weights, weights, gradients)
        rate *= settings.momentum
    _many("sgd_update", [rate] * len(weights), none, weights, weights, velocities)


def _many(kernel: str, rates: list[float], decays: list[float], out: Arrays, *tensors: Arrays, **how: float) -> None:
    """A kernel for one tensor, or MXNet's for many."""
    if len(out) == 1:
        (rate,), (decay,), arrays = rates, decays, [tensor for (tensor,) in tensors]
        getattr(mx.nd, kernel)(*arrays, lr=rate, wd=decay, out=out[0], **how)
    else:
        together = {"lrs": rates, "wds": decays, "num_weights": len(out), **how}
        getattr(mx.nd, f"multi_{kernel}")(*_interleaved(*tensors), out=out, **together)


def _adamw(
    settings: AdamW,
    decays: list[float],
    scratch: Arrays,
    weights: Arrays,
    gradients: Arrays,
    slots: list[Arrays],
    rate: float,
    corrections: Corrections,
) -> None:
    """Core's AdamW. MXNet's kernel corrects no bias, and multiplies only `lrs` by the direction, not the decay."""
    count, root = len(weights), math.sqrt(corrections[1])
    mx.nd.contrib.multi_adamw_update(
        weights, gradients, *slots, mx.nd.ones(1, weights[0].context),  # times the gradients
        lrs=[rate * root / corrections[0]] * count, wds=[rate * decay for decay in decays], etas=[1.0] * count,
        beta1=settings.beta1, beta2=settings.beta2, epsilon=settings.epsilon * root, out=weights,
    )  # fmt: skip


def _interleaved(*tensors: Arrays) -> Arrays:
    return [tensor for group in zip(*tensors, strict=True) for tensor in group]
