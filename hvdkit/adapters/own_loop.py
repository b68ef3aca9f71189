"""Helpers for a training loop of the user's own: `hvdkit.scaled`, `shard`, `mean` and `checkpoints`.

They work beside `horovod.torch`, `horovod.tensorflow`, `horovod.keras` and `horovod.mxnet`, after the `init()` of that
module, and need nothing else of hvdkit. Each raises RequestError if no Horovod is initialized.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.data.dataset import converted
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from types import ModuleType


def horovod(caller: str) -> ModuleType:
    """The Horovod module that the program has initialized; `caller` is the helper that needs it."""
    loaded = [sys.modules.get(f"horovod.{framework}") for framework in ("torch", "tensorflow", "mxnet")]
    for module in loaded:
        if module is not None and module.is_initialized():
            return module
    raise RequestError(f"hvdkit.{caller}: expected an initialized Horovod; call hvd.init() before")


def as_array(leaf: Any) -> np.ndarray | None:
    """A tensor of any framework as an array of its own memory; None for other values. bfloat16 becomes float32."""
    if isinstance(leaf, np.ndarray | np.generic) or any(hasattr(leaf, name) for name in ("asnumpy", "detach", "numpy")):
        return np.array(converted("hvdkit", leaf), order="C")
    return None


def scaled(rate: float, step: int | None = None, *, warmup_steps: int = 0) -> float:
    """The learning rate for all ranks: `rate`, that of one rank, times their number (Goyal et al. 2017, section 2.1).

    With a `step`, counted from 0, it rises linearly from `rate` during the first `warmup_steps` (section 2.2).
    """
    factor: int = horovod("scaled").size()
    if step is None or step >= warmup_steps:
        return rate * factor
    return rate + (rate * factor - rate) * step / warmup_steps


class ShardedDataset(Sequence[Any]):
    """Every n-th sample of a data set with `len()` and indices, as the data loaders of PyTorch and Gluon take it."""

    def __init__(self, samples: Any, indices: range) -> None:
        self._samples, self._indices = samples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[self._indices[operator.index(index)]]


def shard(samples: Any, *, even: bool = True) -> Any:
    """This rank's samples: each n-th of n ranks, beginning with the one of its number.

    `samples` is a `tf.data.Dataset`, a NumPy array, or anything with `len()` and indices, such as a data set of PyTorch
    or Gluon; so is what is returned. Where the number of samples is no multiple of the ranks, those of the end are
    left out, which rank 0 says: ranks with unequal numbers of steps would wait for each other. For evaluation, where
    each sample counts and `mean` weighs, `even=False` keeps all. Raises RequestError for data without a length.
    """
    hvd = horovod("shard")
    rank, size = hvd.rank(), hvd.size()
    counted = getattr(samples, "cardinality", None)  # of a tf.data.Dataset
    if counted is None and not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        kind = type(samples).__name__
        raise RequestError(f"hvdkit.shard: expected a tf.data.Dataset, or data with a length and indices, got {kind}")
    total = len(samples) if counted is None else int(counted())
    if even and total < 0:
        raise RequestError(
            "hvdkit.shard: expected a tf.data.Dataset that knows its length, so that all ranks have as many samples; "
            "apply tf.data.experimental.assert_cardinality, or use even=False for evaluation"
        )
    if even and total < size:
        raise RequestError(f"hvdkit.shard: expected at least a sample for each of {size} ranks, got {total}")
    if even and total % size and rank == 0:
        print(f"hvdkit.shard: {total % size} of {total} samples are left out, so that {size} ranks have as many each")
    if counted is not None:
        mine = samples.shard(size, rank)
        return mine.take(total // size) if even else mine
    indices = range(rank, total // size * size if even else total, size)
    if isinstance(samples, np.ndarray):
        return samples[indices.start : indices.stop : indices.step]
    return ShardedDataset(samples, indices)


def mean(metrics: Mapping[str, Any], count: float = 1) -> dict[str, float]:
    """The means of numbers over all ranks, in float64; collective, with the same result on all of them.

    `count` is the weight of this rank: the number of samples that its numbers are means of, 0 for a rank without any.
    Values may be tensors of one element. Raises RequestError on all ranks if they have other names, or no samples.
    """
    hvd = horovod("mean")
    mine = {str(name): _number(name, value) for name, value in metrics.items()}
    ranks: list[tuple[dict[str, float], float]] = hvd.allgather_object((mine, float(count)), name="hvdkit.mean")
    for rank, (values, _) in enumerate(ranks):
        if values.keys() != ranks[0][0].keys():
            names = [", ".join(sorted(part)) or "none" for part in (ranks[0][0], values)]
            raise RequestError(
                f"hvdkit.mean: expected the same names, rank 0 has {names[0]} and rank {rank} {names[1]}"
            )
    total = math.fsum(weight for _, weight in ranks)
    if not total > 0 or any(weight < 0 for _, weight in ranks):
        raise RequestError(f"hvdkit.mean: expected counts of 0 or more, and more than 0 in all; got {total:g} in all")
    counted = [(values, weight) for values, weight in ranks if weight]
    return {name: math.fsum(values[name] * weight for values, weight in counted) / total for name in mine}


def _number(name: str, value: Any) -> float:
    array = as_array(value)
    try:
        return float(value if array is None else array.reshape(()))
    except (TypeError, ValueError):
        kind = type(value).__name__ if array is None else f"a tensor of shape {array.shape}"
        raise RequestError(f"hvdkit.mean: {name}: expected a number, or a tensor of one element, got {kind}") from None
