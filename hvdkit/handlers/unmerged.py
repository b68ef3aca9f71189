"""What a run that is stopped between two checkpoints needs besides its state, to continue with the same bits.

A checkpoint has one model, so ranks merge their running statistics, read losses and draw anew for it. A run that is not
stopped does nothing of that there. So this checkpoint also has what each rank had before: `own.RANK.NAME`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.core.group import Mesh
from hvdkit.core.pieces import set_from
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.state import unheld
from hvdkit.core.step_plan import Progress
from hvdkit.core.strategy import PREFIX
from hvdkit.handlers.merging import differing

if TYPE_CHECKING:
    from collections.abc import Sequence


_OWN = f"{PREFIX}own."
_BUFFER, _AVERAGE, _DRAWN = "buffer.", "average.", "drawn."
_SUMS = ("line_loss", "line_steps", "epoch_loss", "epoch_steps")


def unmerged(
    session: Session, mesh: Mesh, progress: Progress, losses: Sequence[float], counts: Sequence[float]
) -> dict[str, np.ndarray]:
    """What all ranks have before they merge, by name; collective. `losses` and `counts` are not in `progress` yet."""
    own = {
        "losses": np.array(losses, np.float64),
        "counts": np.array(counts, np.float64),
        "axes": _axes(mesh),
        "sums": np.array([getattr(progress, name) for name in _SUMS], np.float64),
        **{f"{_DRAWN}{name}": state for name, state in _drawn(session.adapter).items()},
    }
    if mesh.data.size > 1:
        buffers = session.buffers()
        names = differing(session, mesh.data, buffers)[0] if buffers else []
        own |= {f"{_BUFFER}{name}": buffers[name] for name in names}
        if average := session.update.weight_average:
            own |= {f"{_AVERAGE}{name}": session.array(tensor) for name, tensor in average.statistics.items()}
    everyone = session.adapter.allgather_object(own, mesh.world, name="unmerged")
    return {f"{_OWN}{rank}.{name}": array for rank, arrays in enumerate(everyone) for name, array in arrays.items()}


def restore(
    session: Session, mesh: Mesh, progress: Progress, state: Mapping[str, np.ndarray]
) -> tuple[list[float], list[float]]:
    """Load this rank's part of `unmerged` from a checkpoint's state; returns its `losses` and `counts`.

    Nothing is loaded from a checkpoint without it, or of ranks in another number or along other axes.
    """
    ranks = {name.removeprefix(_OWN).partition(".")[0] for name in state if name.startswith(_OWN)}
    if len(ranks) != mesh.world.size:
        return [], []
    prefix = f"{_OWN}{mesh.topology.rank}."
    own = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
    if "axes" in own and not np.array_equal(own["axes"], _axes(mesh)):
        return [], []
    session.load_buffers(_named(own, _BUFFER))
    if average := session.update.weight_average:
        for name, array in _named(own, _AVERAGE).items():
            tensor = average.statistics[name]
            set_from(session.adapter, tensor, unheld(name, array, session.adapter.dtype(tensor)))
    for name, value in zip(_SUMS, own["sums"].tolist(), strict=True):
        setattr(progress, name, type(getattr(progress, name))(value))
    _draw_on(session.adapter, _named(own, _DRAWN))
    return own["losses"].tolist(), own["counts"].tolist()


def _axes(mesh: Mesh) -> np.ndarray:
    return np.array([mesh.data.size, mesh.pipeline.size, mesh.tensor.size], np.int64)


def _named(own: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in own.items() if name.startswith(prefix)}


def _drawn(adapter: Adapter) -> dict[str, np.ndarray]:
    """The states of Python's, NumPy's and, where it tells it, the framework's random numbers."""
    _, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": np.array(words, np.int64),
        "python.gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.append(np.asarray(keys, np.int64), place),
        "numpy.gauss": np.array([has_gauss, cached], np.float64),
        **adapter.random_states(),
    }


def _draw_on(adapter: Adapter, states: Mapping[str, np.ndarray]) -> None:
    gauss = states["python.gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, place = states["numpy"].tolist()
    has_gauss, cached = states["numpy.gauss"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), place, int(has_gauss), cached))
    adapter.load_random_states(states)
