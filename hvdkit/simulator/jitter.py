"""How much longer the slowest of many ranks computes, where each rank's time varies from step to step."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from hvdkit.simulator.piecewise_linear import Floats

SAMPLES = 64  # of the slowest rank's compute, one from each of as many equal parts of its distribution


@lru_cache(maxsize=1024)
def slowest(ranks: int, every: int, jitter: float, seed: int) -> Floats:
    """Samples of the slowest rank's compute time relative to the mean, shape (SAMPLES,), from the seed.

    Compute is log-normal with the coefficient of variation `jitter`, independent for each rank. The quantile u of the
    largest of n is the quantile u^(1/n) of one, so a million ranks cost no more than two. With Local SGD ranks wait
    after the sum of `every` steps.
    """
    if jitter == 0 or ranks == 1:
        return np.ones(1)
    random = np.random.default_rng(seed)
    levels = (np.arange(SAMPLES) + random.random(SAMPLES)) / SAMPLES
    sigma = math.sqrt(math.log1p(jitter**2 / every))
    normal = NormalDist()
    # for many ranks u^(1/n) rounds to 1, but 1 - u^(1/n) is exact
    above = -np.expm1(np.log(levels) / ranks)
    return np.array([math.exp(-sigma * normal.inv_cdf(value) - sigma**2 / 2) for value in above])
