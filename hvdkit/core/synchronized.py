"""Synchronized batch norm: statistics of the batches of all ranks, and their gradients, the same in every framework.

With n_r, μ_r and σ²_r of each rank's values (biased), N = Σ n_r (Chan et al. 1983, section 2, for many groups):

    μ = Σ n_r μ_r / N        σ² = Σ n_r (σ²_r + μ_r²) / N - μ²

Sums over ranks are in float64, where the difference loses nothing that float32 values have. A layer in float64 first
gets μ, and then the sums around it. With g = Σ dy / N and h = Σ dy x̂ / N over all ranks, the gradient of a layer's
input is γ / √(σ² + ε) × (dy - g - x̂ h) (Ioffe and Szegedy 2015, section 3). Gradients of γ and β remain the rank's own,
as those of all other parameters; the strategy averages them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hvdkit.core.group import Group
from hvdkit.core.tensors import Tensor
from hvdkit.errors import RequestError

Adapter = Any  # core.seam.Adapter, which imports this module


# Names of other packages' layers that claim to synchronize, such as SyncBatchNorm, NaiveSyncBatchNorm, InPlaceABNSync.
_CLAIMS = re.compile(r"(?<!A)[Ss]ync.*([Nn]orm|BN)|([Nn]orm|BN).*Sync")


class BatchStatistics:
    """The statistics of one layer over the `group` of ranks that read other data.

    Collectives have the layer's name, so that ranks need not have made equally many layers before.
    """

    def __init__(self, adapter: Adapter, layer: str, group: Group) -> None:
        self.layer = layer
        self._adapter, self._group = adapter, group

    def moments(self, count: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The number of values a channel, mean and biased variance over all ranks, from this rank's.

        Counts are (1,) or (channels,), the others (channels,). Counts are float64, the others float32 or float64 as the
        layer is. Collective.
        """
        adapter, dtype = self._adapter, self._adapter.dtype(mean)
        mean, variance = adapter.cast(mean, "float64"), adapter.cast(variance, "float64")
        around: Any = 0.0
        if dtype == "float64":
            total, values = self._sums("mean", count, count * mean)
            around = values / total
        near = mean - around
        total, values, squares = self._sums("moments", count, count * near, count * (variance + near * near))
        off = values / total
        spread = squares / total - off * off
        spread = (spread + abs(spread)) * 0.5  # rounding leaves less than 0 of equal values
        return total, adapter.cast(off + around, dtype), adapter.cast(spread, dtype)

    def gradients(self, count: Tensor, *sums: Tensor) -> list[Tensor]:
        """Sums over the rank's values, of which each is (channels,), as means over all ranks' `count`. Collective."""
        adapter, dtype = self._adapter, self._adapter.dtype(sums[0])
        totals = self._sums("gradients", *(adapter.cast(each, "float64") for each in sums))
        return [adapter.cast(total / count, dtype) for total in totals]

    def used_again(self, number: int) -> BatchStatistics:
        """The statistics of a layer's later use in the same forward pass, whose collectives may be at the same time."""
        return BatchStatistics(self._adapter, f"{self.layer}.{number}", self._group)

    def _sums(self, what: str, *tensors: Tensor) -> list[Tensor]:
        ops, name = self._adapter.tensors, f"batch_norm.{self.layer}.{what}"
        shapes = [tuple(int(size) for size in tensor.shape) for tensor in tensors]
        (total,) = self._adapter.allreduce([ops.join(tensors)], self._group, "sum", name)
        return list(ops.part(total, shapes))


StatisticsOf = Callable[[str], BatchStatistics | None]  # of a layer, by its name; None: the layer remains local


def synchronize(adapter: Adapter, model: Any, group: Group, every: bool = True) -> list[str]:
    """Have a model's batch norms use the batches of a whole group in training; returns the names of these layers.

    Without `every`, and on one rank, only those whose class says so, such as `torch.nn.SyncBatchNorm`; on one rank they
    then compute what local ones do, to the bit. Call it before `Session`.
    Raises RequestError naming a layer that cannot be synchronized.
    """

    def statistics(layer: str) -> BatchStatistics | None:
        return BatchStatistics(adapter, layer, group) if group.size > 1 else None

    names: list[str] = adapter.synchronize_batch_norms(model, statistics, every and group.size > 1)
    return names


def claims(layer: Any) -> bool:
    """Whether the name of a layer's class, or of one that it derives from, says that it synchronizes batch norm."""
    return any(_CLAIMS.search(kind.__name__) for kind in type(layer).__mro__)


def refusal(layer: str, kind: type, why: str, remedy: str) -> RequestError:
    """The error for a layer that cannot be synchronized."""
    return RequestError(f"model: {layer} ({kind.__name__}): {why}; {remedy}")
