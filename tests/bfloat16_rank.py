"""One rank of two that tries every collective of bfloat16: `python bfloat16_rank.py RUNTIME torch|tensorflow`.

What a collective gives is compared, bit for bit, with NumPy's float32 rounded to nearest even. Prints `right COUNT`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

RANKS = 2
SPECIAL = np.array([np.nan, np.inf, -np.inf, 3.3e38, -3.3e38, 1e-40, 0.0, -0.0, 1.0], np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16s, ties to even, as float32s."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.float32(np.nan), nearest.view(np.float32))


def array(rank: int, rows: int = 4) -> np.ndarray:
    """This rank's values: of all sizes, more than fill one of Gloo's buffers' eighths, and some that are special."""
    random = np.random.default_rng([rank, rows])
    values = random.standard_normal((rows, 1013)) * 10.0 ** random.integers(-6, 6, (rows, 1013))
    values[0, : len(SPECIAL)] = SPECIAL
    return rounded(values.astype(np.float32))


def conversions(framework: str) -> tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]]:
    """From float32 to a tensor of bfloat16, and back."""
    module = importlib.import_module(framework)
    torch = framework == "torch"

    def put(values: np.ndarray) -> Any:
        return module.from_numpy(values.copy()).bfloat16() if torch else module.cast(values, "bfloat16")

    def get(tensor: Any) -> np.ndarray:
        assert tensor.dtype == module.bfloat16, tensor.dtype
        return (tensor.float() if torch else module.cast(tensor, "float32")).numpy()

    return put, get


def main(framework: str) -> None:
    put, get = conversions(framework)
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    rank, right = hvd.rank(), 0

    def same(got: Any, wanted: np.ndarray) -> None:
        nonlocal right
        np.testing.assert_array_equal(get(got), wanted)
        right += 1

    every = [array(one) for one in range(RANKS)]
    mine, part = put(every[rank]), slice(2 * rank, 2 * rank + 2)
    with np.errstate(all="ignore"):
        total = rounded(every[0] + every[1])
        same(hvd.allreduce(mine, op=hvd.Sum), total)
        same(hvd.allreduce(mine, op=hvd.Average), rounded(total / 2))
        scaled = rounded(rounded(every[0] * 0.25) + rounded(every[1] * 0.25))
        same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.25, postscale_factor=3.0), rounded(scaled * 3))
        same(hvd.allreduce(mine[1:], op=hvd.Min), np.minimum(*every)[1:])
        same(hvd.allreduce(mine[1:], op=hvd.Max), np.maximum(*every)[1:])
        same(hvd.allreduce(mine, op=hvd.Product), rounded(every[0] * every[1]))
        for one in hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Sum):
            same(one, total[: len(one)])
        same(hvd.reducescatter(mine, op=hvd.Sum), total[part])
        same(hvd.reducescatter(mine, op=hvd.Average), rounded(total[part] / 2))
        for one in hvd.grouped_reducescatter([mine, mine], op=hvd.Sum):
            same(one, total[part])
    same(hvd.allgather(mine[: rank + 1]), np.concatenate([every[0][:1], every[1][:2]]))
    for one in hvd.grouped_allgather([mine, mine]):
        same(one, np.concatenate(every))
    same(hvd.broadcast(mine, 1), every[1])
    same(hvd.alltoall(mine), np.concatenate([one[part] for one in every]))
    received, counts = hvd.alltoall(mine, [1, 3])
    same(received, np.concatenate([one[:1] if rank == 0 else one[1:] for one in every]))
    assert list(counts) == [[1, 1], [3, 3]][rank]
    in_place_and_trained(framework, hvd, put, same)
    print("right", right, flush=True)
    hvd.shutdown()


def in_place_and_trained(framework: str, hvd: Any, put: Any, same: Any) -> None:
    """Variables are broadcast in place, and gradients reduced by what the framework offers for it."""
    ones = np.ones(4, np.float32)
    module = importlib.import_module(framework)
    if framework == "torch":
        weight = module.nn.Parameter(put(ones * hvd.rank()))
        hvd.broadcast_parameters([("weight", weight)], root_rank=1)
        same(weight.data, ones)
        optimizer = hvd.DistributedOptimizer(module.optim.SGD([weight], 1.0), named_parameters=[("weight", weight)])
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        same(weight.data, -0.5 * ones)
        return
    for inplace in (False, True):
        weight = module.Variable(put(ones * hvd.rank()))
        hvd.broadcast_variables([weight], root_rank=1, inplace=inplace)
        same(weight.read_value(), ones)
    with module.GradientTape() as tape:
        loss = module.reduce_sum(weight * module.cast(hvd.rank() + 1, "bfloat16"))
    same(hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0], 1.5 * ones)


if __name__ == "__main__":
    main(sys.argv[2])
