"""The optimizers' update rules, written once for all frameworks over tensors that support +, -, * and /.

An adapter uses its framework's own kernel if that computes the same, otherwise `update`. The learning rate is passed at
each step and, except in LARS, is not part of any slot, so a change of the rate takes effect at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from hvdkit.recipe.schema import AdamW, Lamb, Lars, Optimizer, Sgd

if TYPE_CHECKING:  # the command line counts slots and starts without NumPy
    from hvdkit.core.tensors import Scalar, Tensor, Tensors


def slot_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the optimizer's slots for each parameter, in the order that `update` takes; slots start at zero."""
    if isinstance(optimizer, AdamW | Lamb):
        return "exp_avg", "exp_avg_sq"
    if isinstance(optimizer, Sgd | Lars):
        return ("momentum",)
    raise TypeError(f"{type(optimizer).__name__} has no rule here")


def counts_steps(optimizer: Optimizer) -> bool:
    """Whether the optimizer's rule depends on the number of updates made."""
    return isinstance(optimizer, AdamW | Lamb)


def decay_of(optimizer: Optimizer, shape: tuple[int, ...]) -> float:
    """The weight decay of a parameter of this shape; 0 for vectors (biases, batch norm) with `decay: weights`."""
    return 0.0 if _spared(optimizer, shape) else optimizer.weight_decay


def bias_corrections(optimizer: Optimizer, step: Scalar) -> tuple[Scalar, Scalar]:
    """1 - beta1^t and 1 - beta2^t for update t = `step`, counted from 1, in the type of `step`: float64 or wider.

    Kingma and Ba 2015, algorithm 1. (1, 1) if the optimizer has no such terms.
    """
    if not isinstance(optimizer, AdamW | Lamb):
        return 1.0, 1.0
    return 1.0 - optimizer.beta1**step, 1.0 - optimizer.beta2**step


def is_layerwise(optimizer: Optimizer) -> bool:
    """Whether the rule depends on the norms of whole parameters, not on each element alone."""
    return isinstance(optimizer, Lars | Lamb)


def update(
    optimizer: Optimizer,
    ops: Tensors,
    weight: Tensor,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    rate: Scalar,
    corrections: tuple[Scalar, Scalar] = (1.0, 1.0),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One parameter's update: returns (new weight, new slots) and changes nothing in place.

    `weight`, `gradient` and each of `slots` have one shape and dtype; `rate` and `corrections` are numbers, or tensors
    of one element and that dtype.
    """

    def norms(*kinds: list[Tensor]) -> list[list[Tensor]]:
        return [[ops.norm(tensor) for tensor in tensors] for tensors in kinds]

    shapes = [tuple(weight.shape)]
    (renewed,) = update_all(optimizer, ops, shapes, [weight], [gradient], [slots], rate, corrections, norms)
    return renewed


Norms = Callable[..., "list[list[Tensor]]"]


def update_all(
    optimizer: Optimizer,
    ops: Tensors,
    shapes: list[tuple[int, ...]],
    weights: list[Tensor],
    gradients: list[Tensor],
    slots: list[tuple[Tensor, ...]],
    rate: Scalar,
    corrections: tuple[Scalar, Scalar],
    norms: Norms,
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """The updates of parameters, or of parts of them, as `update` makes one; computed one after the other.

    `shapes` are those of the whole parameters. `norms` takes lists with a tensor for each of them, and returns as many
    lists of Euclidean norms, each over the whole parameter; only rules that are `is_layerwise` call it.
    """
    decays = [decay_of(optimizer, shape) for shape in shapes]
    directed: Iterable[tuple[Tensor, tuple[Tensor, ...]]] = (
        _directed(optimizer, ops, *each, corrections) for each in zip(weights, gradients, slots, decays, strict=True)
    )
    trusts: list[Scalar] = [1.0] * len(weights)
    if is_layerwise(optimizer):
        directed = list(directed)
        sizes, slopes = norms(weights, [direction for direction, _ in directed])
        trusts = [
            1.0 if _spared(optimizer, shape) else _trust(optimizer, ops, size, slope, decay)
            for shape, size, slope, decay in zip(shapes, sizes, slopes, decays, strict=True)
        ]
    for weight, (direction, moments), decay, trust in zip(weights, directed, decays, trusts, strict=True):
        yield _moved(optimizer, weight, direction, moments, rate, decay, trust)


def _directed(
    optimizer: Optimizer,
    ops: Tensors,
    weight: Tensor,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    decay: float,
    corrections: tuple[Scalar, Scalar],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The direction of a step: the gradient, or Adam's with the new slots; LAMB's includes decay."""
    if not isinstance(optimizer, AdamW | Lamb):
        return gradient, slots
    direction, slots = _adam(optimizer, ops, gradient, slots, corrections)
    return (direction + decay * weight if decay and isinstance(optimizer, Lamb) else direction), slots


def _moved(
    optimizer: Optimizer,
    weight: Tensor,
    direction: Tensor,
    slots: tuple[Tensor, ...],
    rate: Scalar,
    decay: float,
    trust: Scalar,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if isinstance(optimizer, Sgd):
        return _sgd(optimizer, weight, direction, slots, rate, decay)
    if isinstance(optimizer, Lars):
        return _lars(optimizer, weight, direction, slots, rate, decay, trust)
    if isinstance(optimizer, AdamW):
        return weight - rate * (direction + decay * weight), slots
    if isinstance(optimizer, Lamb):
        return weight - rate * trust * direction, slots
    raise TypeError(f"{type(optimizer).__name__} has no rule here")


Total = Callable[["list[Tensor]"], "Tensor"]


def clip(gradients: list[Tensor], max_norm: float, ops: Tensors, total: Total) -> list[Tensor]:
    """Scale all gradients by one factor so that their joint Euclidean norm is at most `max_norm`.

    Pascanu et al. 2013, algorithm 1. The gradients have one dtype, and may change in place. `total` gives the sum of
    squares over the whole gradients from the norm of each of these (`Partition.total`).
    """
    norm = ops.sqrt(total([ops.norm(gradient) for gradient in gradients]))
    factor = ops.where(norm > max_norm, max_norm / norm, _one(norm))
    return [ops.scaled(gradient, factor) for gradient in gradients]


def all_finite(tensors: list[Tensor], ops: Tensors, total: Total) -> Tensor:
    """Whether no element of any tensor is infinite or NaN: a condition for `Tensors.when`. `total` as in `clip`."""
    return total([ops.norm(tensor * 0) for tensor in tensors]) == 0  # 0 × inf is NaN


def _spared(optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
    return optimizer.decay == "weights" and len(shape) < 2


def _sgd(
    optimizer: Sgd, weight: Tensor, gradient: Tensor, slots: tuple[Tensor, ...], rate: Scalar, decay: float
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
    weight: Tensor,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    rate: Scalar,
    decay: float,
    local: Scalar,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """You et al. 2017, algorithm 1: the local and the global learning rate are part of the velocity."""
    (velocity,) = slots
    if decay:
        gradient = gradient + decay * weight
    velocity = optimizer.momentum * velocity + rate * local * gradient
    return weight - velocity, (velocity,)


def _adam(
    optimizer: AdamW | Lamb,
    ops: Tensors,
    gradient: Tensor,
    slots: tuple[Tensor, ...],
    corrections: tuple[Scalar, Scalar],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Kingma and Ba 2015, algorithm 1: the direction, bias-corrected. AdamW adds its decay to it (Loshchilov and Hutter
    2019, algorithm 2, line 12, where the rate multiplies both terms, as in PyTorch)."""
    mean, square = slots
    mean = optimizer.beta1 * mean + (1.0 - optimizer.beta1) * gradient
    square = optimizer.beta2 * square + (1.0 - optimizer.beta2) * (gradient * gradient)
    direction = (mean / corrections[0]) / (ops.sqrt(square / corrections[1]) + optimizer.epsilon)
    return direction, (mean, square)


def _trust(optimizer: Optimizer, ops: Tensors, size: Tensor, slope: Tensor, decay: float) -> Tensor:
    """A parameter's own learning rate from its norm `size` and the `slope`, the norm of its direction.

    LARS: You et al. 2017, algorithm 1. LAMB: You et al. 2020, algorithm 2, with the identity as phi, where decay is
    part of the direction. The rate is 1 if a norm is 0, which the papers leave open, and for parameters exempt from
    decay.
    """
    if isinstance(optimizer, Lars):
        return _ratio(ops, optimizer.trust_coefficient * size, slope + decay * size)
    return _ratio(ops, size, slope)


def _ratio(ops: Tensors, above: Tensor, below: Tensor) -> Tensor:
    """The quotient above / below of two norms, or 1 if either is 0."""
    ratio = ops.where(above > 0, above / ops.where(below > 0, below, _one(below)), _one(above))
    return ops.where(below > 0, ratio, _one(above))


def _one(like: Tensor) -> Tensor:
    return like * 0 + 1
