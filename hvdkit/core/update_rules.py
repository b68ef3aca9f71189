"""What optimizers do, once for every framework: the rules work on any tensors that know +, -, * and /.

An adapter uses its framework's own optimizer where that computes the same; elsewhere it calls `update`. Learning
rates come by the step and, LARS excepted, stay outside of every slot, so that a change of rate acts at once.
"""

from __future__ import annotations

from typing import Any

from hvdkit.core.tensors import Tensors
from hvdkit.recipe.schema import AdamW, Lamb, Lars, Optimizer, Sgd

Tensor = Any


def slot_names(optimizer: Optimizer) -> tuple[str, ...]:
    """What the optimizer keeps for each parameter, in the order in which `update` takes it; all start at zero."""
    return ("exp_avg", "exp_avg_sq") if isinstance(optimizer, AdamW | Lamb) else ("momentum",)


def counts_steps(optimizer: Optimizer) -> bool:
    """Whether the optimizer's arithmetic depends on how many updates it has made."""
    return isinstance(optimizer, AdamW | Lamb)


def decay_of(optimizer: Optimizer, shape: tuple[int, ...]) -> float:
    """The weight decay of a parameter of this shape; `decay: weights` spares vectors: biases and batch norm."""
    return 0.0 if _spared(optimizer, shape) else optimizer.weight_decay


def bias_corrections(optimizer: Optimizer, step: Any) -> tuple[Any, Any]:
    """1 - beta1^t and 1 - beta2^t for the t-th update, from 1; in `step`'s own type, which must be float64 or better.

    Kingma and Ba 2015, algorithm 1. (1, 1) where the optimizer has no such terms.
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
    """One parameter's update: (new weight, new slots), nothing changed in place.

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
    """Sutskever et al. 2013, section 2, in PyTorch's form: the learning rate is not inside the velocity.

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
    """You et al. 2017, algorithm 1: the learning rate, local and global, is inside the velocity.

    The local rate is 1 where a norm is 0, which the paper leaves open, and for parameters that decay spares.
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

    The trust ratio is 1 where a norm is 0, which the paper leaves open, and for parameters that decay spares.
    """
    direction, slots = _adam(optimizer, ops, gradient, slots, corrections)
    if decay:
        direction = direction + decay * weight
    trust: Any = 1.0 if spared else _ratio(ops, ops.norm(weight), ops.norm(direction))
    return weight - rate * trust * direction, slots


def _ratio(ops: Tensors, above: Tensor, below: Tensor) -> Tensor:
    """above / below of two norms, 1 where either is 0."""
    ratio = ops.where(above > 0, above / ops.where(below > 0, below, _one(below)), _one(above))
    return ops.where(below > 0, ratio, _one(above))


def _one(like: Tensor) -> Tensor:
    return like * 0 + 1
