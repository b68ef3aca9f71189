"""The optimizers' update rules, written once for all frameworks over tensors that support +, -, * and /.

An adapter uses its framework's own kernel if that computes the same, otherwise `update`. The learning rate is passed at
each step and, except in LARS, is not part of any slot, so a change of the rate takes effect at once.
"""

from __future__ import annotations

from typing import Any

from hvdkit.core.tensors import Tensors
from hvdkit.recipe.schema import AdamW, Lamb, Lars, Optimizer, Sgd

Tensor = Any


def slot_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the optimizer's slots for each parameter, in the order that `update` takes; slots start at zero."""
    return ("exp_avg", "exp_avg_sq") if isinstance(optimizer, AdamW | Lamb) else ("momentum",)


def counts_steps(optimizer: Optimizer) -> bool:
    """Whether the optimizer's rule depends on the number of updates made."""
    return isinstance(optimizer, AdamW | Lamb)


def decay_of(optimizer: Optimizer, shape: tuple[int, ...]) -> float:
    """The weight decay of a parameter of this shape; 0 for vectors (biases, batch norm) with `decay: weights`."""
    return 0.0 if _spared(optimizer, shape) else optimizer.weight_decay


def bias_corrections(optimizer: Optimizer, step: Any) -> tuple[Any, Any]:
    """1 - beta1^t and 1 - beta2^t for update t = `step`, counted from 1, in the type of `step`: float64 or wider.

    Kingma and Ba 2015, algorithm 1. (1, 1) if the optimizer has no such terms.
    """
    if not isinstance(optimizer, AdamW | Lamb):
        return 1.0, 1.0
    return 1.0 - optimizer.beta1**step, 1.0 - optimizer.beta2**step


def update(
    optimizer: Optimizer,
    ops: Tensors,
    weight: Tensor,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    rate: Any,
    corrections: tuple[Any, Any] = (1.0, 1.0),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One parameter's update: returns (new weight, new slots) and changes nothing in place.

    `weight`, `gradient` and each of `slots` have one shape and dtype; `rate` and `corrections` are numbers, or tensors
    of one element and that dtype.
    """
    shape = tuple(weight.shape)
    decay, spared = decay_of(optimizer, shape), _spared(optimizer, shape)
    if isinstance(optimizer, Sgd):
        return _sgd(optimizer, weight, gradient, slots, rate, decay)
    if isinstance(optimizer, Lars):
        return _lars(optimizer, ops, weight, gradient, slots, rate, decay, spared)
    if isinstance(optimizer, AdamW):
        direction, slots = _adam(optimizer, ops, gradient, slots, corrections)
        return weight - rate * (direction + decay * weight), slots
    assert isinstance(optimizer, Lamb)
    return _lamb(optimizer, ops, weight, gradient, slots, rate, decay, spared, corrections)


def clip(gradients: list[Tensor], max_norm: float, ops: Tensors) -> list[Tensor]:
    """Scale all gradients by one factor so that their joint Euclidean norm is at most `max_norm`.

    Pascanu et al. 2013, algorithm 1. The gradients have one dtype.
    """
    norms = [ops.norm(gradient) for gradient in gradients]
    total = ops.sqrt(sum((norm * norm for norm in norms[1:]), norms[0] * norms[0]))
    factor = ops.where(total > max_norm, max_norm / total, _one(total))
    return [gradient * factor for gradient in gradients]


def all_finite(tensors: list[Tensor], ops: Tensors) -> Tensor:
    """Whether no element of any tensor is infinite or NaN: a condition for `Tensors.when`."""
    remains = [ops.norm(tensor * 0) for tensor in tensors]  # 0 × inf is NaN
    return sum(remains[1:], remains[0]) == 0


def _spared(optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
    return optimizer.decay == "weights" and len(shape) < 2


def _sgd(
    optimizer: Sgd, weight: Tensor, gradient: Tensor, slots: tuple[Tensor, ...], rate: Any, decay: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sutskever et al. 2013, section 2, in PyTorch's form: the learning rate is not part of the velocity.

    Decoupled decay is SGDW's (Loshchilov and Hutter 2019, algorithm 1), times the rate as in PyTorch's AdamW.
    """
    (velocity,) = slots
    start = weight
    if decay and optimizer.decoupled:
        start = weight - rate * (decay * weight)
    elif decay:
        gradient = gradient + decay * weight
    velocity = optimizer.momentum * velocity + gradient
    direction = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
    return start - rate * direction, (velocity,)


def _lars(
    optimizer: Lars,
    ops: Tensors,
    weight: Tensor,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    rate: Any,
    decay: float,
    spared: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """You et al. 2017, algorithm 1: the local and the global learning rate are part of the velocity.

    The local rate is 1 if a norm is 0, which the paper leaves open, and for parameters exempt from decay.
    """
    (velocity,) = slots
    local: Any = 1.0
    if not spared:
        size, slope = ops.norm(weight), ops.norm(gradient)
        local = _ratio(ops, optimizer.trust_coefficient * size, slope + decay * size)
    if decay:
        gradient = gradient + decay * weight
    velocity = optimizer.momentum * velocity + rate * local * gradient
    return weight - velocity, (velocity,)


def _adam(
    optimizer: AdamW | Lamb, ops: Tensors, gradient: Tensor, slots: tuple[Tensor, ...], corrections: tuple[Any, Any]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Kingma and Ba 2015, algorithm 1: the direction, bias-corrected. AdamW adds its decay to it (Loshchilov and Hutter
    2019, algorithm 2, line 12, where the rate multiplies both terms, as in PyTorch)."""
    mean, square = slots
    mean = optimizer.beta1 * mean + (1.0 - optimizer.beta1) * gradient
    square = optimizer.beta2 * square + (1.0 - optimizer.beta2) * (gradient * gradient)
    direction = (mean / corrections[0]) / (ops.sqrt(square / corrections[1]) + optimizer.epsilon)
    return direction, (mean, square)


def _lamb(
    optimizer: Lamb,
    ops: Tensors,
    weight: Tensor,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    rate: Any,
    decay: float,
    spared: bool,
    corrections: tuple[Any, Any],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """You et al. 2020, algorithm 2, with the identity as phi.

    The trust ratio is 1 if a norm is 0, which the paper leaves open, and for parameters exempt from decay.
    """
    direction, slots = _adam(optimizer, ops, gradient, slots, corrections)
    if decay:
        direction = direction + decay * weight
    trust: Any = 1.0 if spared else _ratio(ops, ops.norm(weight), ops.norm(direction))
    return weight - rate * trust * direction, slots


def _ratio(ops: Tensors, above: Tensor, below: Tensor) -> Tensor:
    """The quotient above / below of two norms, or 1 if either is 0."""
    ratio = ops.where(above > 0, above / ops.where(below > 0, below, _one(below)), _one(above))
    return ops.where(below > 0, ratio, _one(above))


def _one(like: Tensor) -> Tensor:
    return like * 0 + 1
