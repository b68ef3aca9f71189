"""The optimizers once more, one parameter at a time, written from their papers and from nothing of hvdkit's.

What the papers leave open is decided as the recipe's documentation says: decay times the learning rate in AdamW and
decoupled SGD, a trust ratio of 1 where a norm is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Slots = dict[str, np.ndarray]
# (weight, gradient, slots, rate, t from 1, settings) -> (weight, slots)
Rule = Callable[[np.ndarray, np.ndarray, Slots, float, int, Any], tuple[np.ndarray, Slots]]


def decays(weight: np.ndarray, o: Any) -> bool:
    return o.decay == "all" or weight.ndim > 1


def sgd(w: np.ndarray, g: np.ndarray, slots: Slots, rate: float, t: int, o: Any) -> tuple[np.ndarray, Slots]:
    """Sutskever et al. 2013 with the rate drawn out of the velocity; Nesterov's form as in its section 2."""
    wd = o.weight_decay if decays(w, o) else 0.0
    pulled = w * (1 - rate * wd) if o.decoupled else w
    g = g if o.decoupled else g + wd * w
    v = o.momentum * slots["momentum"] + g
    return pulled - rate * (g + o.momentum * v if o.nesterov else v), {"momentum": v}


def adamw(w: np.ndarray, g: np.ndarray, slots: Slots, rate: float, t: int, o: Any) -> tuple[np.ndarray, Slots]:
    """Loshchilov and Hutter 2019, algorithm 2."""
    wd = o.weight_decay if decays(w, o) else 0.0
    m = o.beta1 * slots["exp_avg"] + (1 - o.beta1) * g
    v = o.beta2 * slots["exp_avg_sq"] + (1 - o.beta2) * g**2
    m_hat, v_hat = m / (1 - o.beta1**t), v / (1 - o.beta2**t)
    return w - rate * (m_hat / (np.sqrt(v_hat) + o.epsilon) + wd * w), {"exp_avg": m, "exp_avg_sq": v}


def lars(w: np.ndarray, g: np.ndarray, slots: Slots, rate: float, t: int, o: Any) -> tuple[np.ndarray, Slots]:
    """You, Gitman and Ginsburg 2017, algorithm 1."""
    wd = o.weight_decay if decays(w, o) else 0.0
    local = 1.0
    if decays(w, o) and np.linalg.norm(w) > 0 and np.linalg.norm(g) > 0:
        local = o.trust_coefficient * np.linalg.norm(w) / (np.linalg.norm(g) + wd * np.linalg.norm(w))
    v = o.momentum * slots["momentum"] + rate * local * (g + wd * w)
    return w - v, {"momentum": v}


def lamb(w: np.ndarray, g: np.ndarray, slots: Slots, rate: float, t: int, o: Any) -> tuple[np.ndarray, Slots]:
    """You et al. 2020, algorithm 2, phi the identity."""
    wd = o.weight_decay if decays(w, o) else 0.0
    m = o.beta1 * slots["exp_avg"] + (1 - o.beta1) * g
    v = o.beta2 * slots["exp_avg_sq"] + (1 - o.beta2) * g**2
    r = (m / (1 - o.beta1**t)) / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon)
    u = r + wd * w
    trust = 1.0
    if decays(w, o) and np.linalg.norm(w) > 0 and np.linalg.norm(u) > 0:
        trust = float(np.linalg.norm(w) / np.linalg.norm(u))
    return w - rate * trust * u, {"exp_avg": m, "exp_avg_sq": v}


RULES: dict[str, Rule] = {"sgd": sgd, "adamw": adamw, "lars": lars, "lamb": lamb}


def clipped(gradients: dict[str, np.ndarray], max_norm: float) -> dict[str, np.ndarray]:
    """Pascanu, Mikolov and Bengio 2013, algorithm 1."""
    total = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
    return {name: gradient * min(1.0, max_norm / total) for name, gradient in gradients.items()}
