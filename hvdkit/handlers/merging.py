"""What ranks have changed in their buffers by their own samples becomes one model: to evaluate it, and to save it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdkit.core.group import Group
from hvdkit.core.session import Session
from hvdkit.core.state import digest, is_statistic, listed
from hvdkit.core.tensors import Shape
from hvdkit.errors import RunError


def merge_buffers(session: Session, group: Group) -> list[str]:
    """Make the buffers of a group one, so that the ranks evaluate and save the same model; collective.

    Those that differ between ranks, such as running statistics, which come from a rank's own batches, are set to their
    mean, where they are not floating to rank 0's. Buffers that are equal on all ranks keep their bits. Returns a line
    for each kind of change but of statistics, the same on all ranks. Raises RunError, the same on every rank, if ranks
    have given a buffer different shapes.
    """
    adapter, arrays = session.adapter, session.buffers()
    if not arrays:
        return []
    names, everyone = differing(session, group, arrays)
    for name in names:
        shapes = [of_rank[name][1] if name in of_rank else None for of_rank in everyone]
        for rank, shape in zip(group.ranks, shapes, strict=True):
            if shape != shapes[0]:
                raise RunError(
                    f"buffer {name}: expected the same shape on all ranks, got {shapes[0]} on rank {group.root} and "
                    f"{shape} on rank {rank}; give it that shape in model()"
                )
    averaged = [name for name in names if arrays[name].dtype.kind in "fc"]
    rest = [name for name in names if name not in averaged]
    if averaged:
        sent = [adapter.from_numpy(_real(arrays[name])) for name in averaged]
        means = map(adapter.to_numpy, adapter.allreduce(sent, group, name="buffers"))
        session.load_buffers({n: _in(arrays[n].dtype, mean) for n, mean in zip(averaged, means, strict=True)})
    session.load_buffers(dict(session.broadcast_arrays([(name, arrays[name]) for name in rest], group, group.root)))
    return [
        f"buffers: {listed(changed)} differ between ranks, which compute them from their own samples; {what} evaluated "
        "and saved, and go to all ranks"
        for changed, what in (
            ([name for name in averaged if not is_statistic(name)], "their means are"),
            (rest, "those of rank 0 are"),
        )
        if changed
    ]


def differing(
    session: Session, group: Group, arrays: Mapping[str, np.ndarray]
) -> tuple[list[str], list[dict[str, tuple[str, Shape]]]]:
    """The names of the buffers that differ between ranks, and each rank's digests and shapes by name; collective."""
    mine = {name: (digest([(name, array)]), array.shape) for name, array in arrays.items()}
    everyone = session.adapter.allgather_object(mine, group, name="buffers")
    names = sorted({name for of_rank in everyone for name in of_rank})
    return [name for name in names if any(of_rank.get(name) != everyone[0].get(name) for of_rank in everyone)], everyone


def _real(array: np.ndarray) -> np.ndarray:
    """Floating or complex values in a dtype that every framework's Horovod averages."""
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _in(dtype: np.dtype, real: np.ndarray) -> np.ndarray:
    """The inverse of `_real`."""
    return (real[..., 0] + 1j * real[..., 1] if dtype.kind == "c" else real).astype(dtype)
