"""Makes a model's batch norms synchronized ones, whose statistics are of all ranks (`batch_statistics.py`)."""

from __future__ import annotations

import re

from hvdkit.core.batch_statistics import BatchStatistics
from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter, Model
from hvdkit.core.tensors import Tensor
from hvdkit.errors import RequestError

# Names of other packages' layers that claim to synchronize, such as SyncBatchNorm, NaiveSyncBatchNorm, InPlaceABNSync.
_CLAIMS = re.compile(r"(?<!A)[Ss]ync.*([Nn]orm|BN)|([Nn]orm|BN).*Sync")


def synchronize(adapter: Adapter, model: Model, group: Group, every: bool = True) -> list[str]:
    """Have a model's batch norms use the batches of a whole group in training; returns the names of these layers.

    Without `every`, and on one rank, only those whose class says so, such as `torch.nn.SyncBatchNorm`; on one rank they
    then compute what local ones do, to the bit. Call it before `Session`.
    Raises RequestError naming a layer that cannot be synchronized.
    """

    def total(vector: Tensor, name: str) -> Tensor:
        return adapter.allreduce([vector], group, "sum", name)[0]

    def statistics(layer: str) -> BatchStatistics | None:
        return BatchStatistics(adapter, total, layer) if group.size > 1 else None

    return adapter.synchronize_batch_norms(model, statistics, every and group.size > 1)


def claims(layer: object) -> bool:
    """Whether the name of a layer's class, or of one that it derives from, says that it synchronizes batch norm."""
    return any(_CLAIMS.search(kind.__name__) for kind in type(layer).__mro__)


def refusal(layer: str, kind: type, why: str, remedy: str) -> RequestError:
    """The error for a layer that cannot be synchronized."""
    return RequestError(f"model: {layer} ({kind.__name__}): {why}; {remedy}")
