"""The optimizers' rules, clipping and the check for overflow, written once over `core.tensors.Tensors`.

An adapter uses its framework's own kernel if that computes the same, otherwise `Rule.updates`. The learning rate is
passed at each step and, except in LARS, is not part of any slot, so a change of the rate takes effect at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from hvdkit.recipe.schema import AdamW, Lamb, Lars, Optimizer, Sgd

if TYPE_CHECKING:  # the command line counts slots and starts without NumPy
    from hvdkit.core.tensors import Scalar, Tensor, Tensors

    Slots = tuple[Tensor, ...]
    SumOfSquares = Callable[[list[Tensor]], Tensor]

    class Norms(Protocol):
        """`Partition.norms`."""

        def __call__(self, *kinds: list[Tensor]) -> list[list[Tensor]]: ...


class Rule:
    """The update of a parameter by an optimizer's `settings`: a direction, the parameter's own rate, and a move.

    A new optimizer is a subclass, and an entry of `_RULES`. `slots` names what is kept for each parameter, zero at
    first. `counts_steps` says whether the rule depends on the number of updates, and `is_layerwise` whether on the
    norms of whole parameters, not on each element alone.
    """

    settings: Optimizer
    slots: tuple[str, ...]
    counts_steps = is_layerwise = False

    def __init__(self, settings: Optimizer, ops: Tensors) -> None:
        self.settings, self._ops = settings, ops

    def updates(
        self,
        shapes: list[tuple[int, ...]],
        weights: list[Tensor],
        gradients: list[Tensor],
        slots: list[Slots],
        rate: Scalar,
        corrections: tuple[Scalar, Scalar],
        norms: Norms,
    ) -> Iterator[tuple[Tensor, Slots]]:
        """The new weight and slots of each parameter, or part of one, one after the other; nothing changes in place.

        `shapes` are those of the whole parameters. A weight, its gradient and its slots have one shape and dtype;
        `rate` and `corrections` are numbers, or tensors of one element and that dtype. `norms` takes lists with a
        tensor for each weight, and returns as many lists of Euclidean norms, each over the whole parameter.
        """
        decays = [decay_of(self.settings, shape) for shape in shapes]
        parts = zip(weights, gradients, slots, decays, strict=True)
        directed: Iterable[tuple[Tensor, Slots]] = (self._direction(*part, corrections) for part in parts)
        trusts: list[Scalar] = [1.0] * len(weights)
        if self.is_layerwise:
            directed = list(directed)
            sizes, slopes = norms(weights, [direction for direction, _ in directed])
            trusts = [
                1.0 if _spared(self.settings, shape) else self._trust(size, slope, decay)
                for shape, size, slope, decay in zip(shapes, sizes, slopes, decays, strict=True)
            ]
        for weight, (direction, moments), decay, trust in zip(weights, directed, decays, trusts, strict=True):
            yield self._moved(weight, direction, moments, rate, decay, trust)

    def bias_corrections(self, step: Scalar) -> tuple[Scalar, Scalar]:
        """1 - beta1^t and 1 - beta2^t for update t = `step`, counted from 1, in the type of `step`: float64 or wider.

        Kingma and Ba 2015, algorithm 1. (1, 1) if the optimizer has no such terms.
        """
        return 1.0, 1.0

    def _direction(
        self, weight: Tensor, gradient: Tensor, slots: Slots, decay: float, corrections: tuple[Scalar, Scalar]
    ) -> tuple[Tensor, Slots]:
        """The direction before decoupled decay and the trust ratio, and the slots, already new if they need neither."""
        return gradient, slots

    def _trust(self, size: Tensor, slope: Tensor, decay: float) -> Tensor:
        """A parameter's own learning rate from its norm `size` and the `slope`, the norm of its direction.

        It is 1 if a norm is 0, which the papers leave open. `updates` does not ask for parameters exempt from decay.
        """
        above, below = self._compared(size, slope, decay)
        where, one = self._ops.where, _one(below)
        return where(below > 0, where(above > 0, above / where(below > 0, below, one), _one(above)), _one(above))

    def _compared(self, size: Tensor, slope: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        """The two norms whose quotient is a parameter's own learning rate."""
        return size, slope

    def _moved(
        self, weight: Tensor, direction: Tensor, slots: Slots, rate: Scalar, decay: float, trust: Scalar
    ) -> tuple[Tensor, Slots]:
        """The new weight and slots, from what `_direction` returned, the rate, the decay and the trust ratio."""
        raise NotImplementedError


class _SgdRule(Rule):
    """Sutskever et al. 2013, section 2, in PyTorch's form: the learning rate is not part of the velocity.

    Decoupled decay is SGDW's (Loshchilov and Hutter 2019, algorithm 1), times the rate as in PyTorch's AdamW.
    """

    settings: Sgd
    slots = ("momentum",)

    def _moved(
        self, weight: Tensor, direction: Tensor, slots: Slots, rate: Scalar, decay: float, trust: Scalar
    ) -> tuple[Tensor, Slots]:
        start, gradient, (velocity,) = weight, direction, slots
        if decay and self.settings.decoupled:
            start = weight - rate * (decay * weight)
        elif decay:
            gradient = gradient + decay * weight
        velocity = self.settings.momentum * velocity + gradient
        direction = gradient + self.settings.momentum * velocity if self.settings.nesterov else velocity
        return start - rate * direction, (velocity,)


class _LarsRule(Rule):
    """You et al. 2017, algorithm 1: the local and the global learning rate are part of the velocity."""

    settings: Lars
    slots = ("momentum",)
    is_layerwise = True

    def _compared(self, size: Tensor, slope: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        return self.settings.trust_coefficient * size, slope + decay * size

    def _moved(
        self, weight: Tensor, direction: Tensor, slots: Slots, rate: Scalar, decay: float, trust: Scalar
    ) -> tuple[Tensor, Slots]:
        (velocity,) = slots
        gradient = direction + decay * weight if decay else direction
        velocity = self.settings.momentum * velocity + rate * trust * gradient
        return weight - velocity, (velocity,)


class _AdamWRule(Rule):
    """Kingma and Ba 2015, algorithm 1, with the decay of Loshchilov and Hutter 2019 (algorithm 2, line 12, where the
    rate multiplies both terms, as in PyTorch)."""

    settings: AdamW | Lamb
    slots = "exp_avg", "exp_avg_sq"
    counts_steps = True

    def bias_corrections(self, step: Scalar) -> tuple[Scalar, Scalar]:
        return 1.0 - self.settings.beta1**step, 1.0 - self.settings.beta2**step

    def _direction(
        self, weight: Tensor, gradient: Tensor, slots: Slots, decay: float, corrections: tuple[Scalar, Scalar]
    ) -> tuple[Tensor, Slots]:
        settings, (mean, square) = self.settings, slots
        mean = settings.beta1 * mean + (1.0 - settings.beta1) * gradient
        square = settings.beta2 * square + (1.0 - settings.beta2) * (gradient * gradient)
        direction = (mean / corrections[0]) / (self._ops.sqrt(square / corrections[1]) + settings.epsilon)
        return direction, (mean, square)

    def _moved(
        self, weight: Tensor, direction: Tensor, slots: Slots, rate: Scalar, decay: float, trust: Scalar
    ) -> tuple[Tensor, Slots]:
        return weight - rate * (direction + decay * weight), slots


class _LambRule(_AdamWRule):
    """You et al. 2020, algorithm 2, with the identity as phi: decay is part of the direction."""

    is_layerwise = True

    def _direction(
        self, weight: Tensor, gradient: Tensor, slots: Slots, decay: float, corrections: tuple[Scalar, Scalar]
    ) -> tuple[Tensor, Slots]:
        direction, slots = super()._direction(weight, gradient, slots, decay, corrections)
        return (direction + decay * weight if decay else direction), slots

    def _moved(
        self, weight: Tensor, direction: Tensor, slots: Slots, rate: Scalar, decay: float, trust: Scalar
    ) -> tuple[Tensor, Slots]:
        return weight - rate * trust * direction, slots


_RULES: dict[type[Optimizer], type[Rule]] = {Sgd: _SgdRule, Lars: _LarsRule, AdamW: _AdamWRule, Lamb: _LambRule}


def rule_of(optimizer: Optimizer) -> type[Rule]:
    """The rule of an optimizer of these settings. Raises TypeError if it has none."""
    if type(optimizer) not in _RULES:
        raise TypeError(f"{type(optimizer).__name__} has no rule here")
    return _RULES[type(optimizer)]


def decay_of(optimizer: Optimizer, shape: tuple[int, ...]) -> float:
    """The weight decay of a parameter of this shape; 0 for vectors (biases, batch norm) with `decay: weights`."""
    return 0.0 if _spared(optimizer, shape) else optimizer.weight_decay


def _spared(optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
    return optimizer.decay == "weights" and len(shape) < 2


def clip(gradients: list[Tensor], max_norm: float, ops: Tensors, sum_of_squares: SumOfSquares) -> list[Tensor]:
    """Scale all gradients by one factor so that their joint Euclidean norm is at most `max_norm`.

    Pascanu et al. 2013, algorithm 1. The gradients have one dtype, and may change in place. `sum_of_squares` gives that
    over the whole gradients from the norm of each of these (`Partition.sum_of_squares`).
    """
    norm = ops.sqrt(sum_of_squares([ops.norm(gradient) for gradient in gradients]))
    factor = ops.where(norm > max_norm, max_norm / norm, _one(norm))
    return [ops.scaled(gradient, factor) for gradient in gradients]


def all_finite(tensors: list[Tensor], ops: Tensors, sum_of_squares: SumOfSquares) -> Tensor:
    """Whether no element is infinite or NaN: a condition for `Tensors.when`. `sum_of_squares` is as in `clip`."""
    return sum_of_squares([ops.norm(tensor * 0) for tensor in tensors]) == 0  # 0 × inf is NaN


def _one(like: Tensor) -> Tensor:
    return like * 0 + 1
