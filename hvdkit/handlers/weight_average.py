"""The averaged weights (`core/averaged_weights.py`) at the end of an epoch: they are added to, and evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import numpy as np

from hvdkit.core.group import Group, Mesh
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.state import COUNT, is_statistic
from hvdkit.data.dataset import Batch
from hvdkit.errors import RunError

_SAME = 1e-3  # by which a batch norm's share of a batch may differ between channels: rounding


class EpochAverage(Handler):
    """Adds the weights at the end of an epoch to the average, and evaluates it by `measure`."""

    def __init__(self, run: Loop, measure: Callable[[Loop], dict[str, float]]) -> None:
        assert run.session.update.weight_average
        self._session, self._mesh, self._average = run.session, run.mesh, run.session.update.weight_average
        self._measure, self._first = measure, self._average.settings.from_epoch

    def on_epoch_end(self, run: Loop) -> None:
        """Add the weights of a complete epoch from `from_epoch` on. Nothing is evaluated before the average begins."""
        session, average, progress = self._session, self._average, run.progress
        complete = not run.plan.group_sizes(progress.samples)  # false if the epoch has ended early
        adds = self._first is not None and complete and run.epoch + 1 >= self._first
        if adds:
            session.add_to_average()
        if not average.started:
            return
        session.strategy.settle_weight_average()
        self.settle()
        with session.averaged():
            if adds:
                groups = run.plan.groups(run.dataset.train, run.mesh.shard, run.epoch)
                report = partial(run.phase, "average of the weights")
                renew_statistics(session, run.mesh, chain.from_iterable(groups), report)
                seed = run.recipe.seed + run.step + 2_654_435_761 * run.mesh.stream
                session.adapter.seed(seed % 2**32)  # training draws on, whatever the pass has drawn
            progress.average_validation = self._measure(run)

    def settle(self) -> None:
        """Make averaged statistics equal on all ranks, of which each has averaged its own; collective."""
        session, average = self._session, self._average
        if self._first is None and average.statistics and self._mesh.data.size > 1:
            means = session.adapter.allreduce(
                list(average.statistics.values()), self._mesh.data, name="average_statistics"
            )
            for tensor, mean in zip(average.statistics.values(), means, strict=True):
                session.adapter.assign(tensor, mean)


def renew_statistics(session: Session, mesh: Mesh, batches: Iterable[Batch], report: Callable[[], None]) -> None:
    """Set batch norms' running statistics to the mean over the batches of all ranks, by the weights as they are.

    Collective. In training a batch norm sets a running statistic r to (1 − m) r + m b, with b of the batch. Before each
    batch r is set to 0, so that it is m b after it. The first batch is computed once more from r = 1, which gives m.
    Other buffers stay as they are.

    Raises RunError if the model does not set r so.
    """
    adapter, before = session.adapter, session.buffers()
    names = [name for name in before if is_statistic(name)]
    if not names:
        return

    counts = {name: np.zeros_like(before[name]) for name in before if name.endswith(COUNT)}  # m may depend on them

    def after(batch: Batch, start: float) -> dict[str, np.ndarray]:
        session.load_buffers(before | counts | {name: np.full_like(before[name], start) for name in names})
        session.trainable.observe(*session.trainable.inputs(batch))
        now = session.buffers()
        return {name: now[name].astype(np.float64) for name in names}

    sums, shares, count = {name: np.zeros(before[name].shape) for name in names}, dict[str, float | None](), 0
    for batch in batches:
        report()
        if not count:
            adapter.seed(0)
        from_0 = after(batch, 0.0)
        if not count:
            adapter.seed(0)  # the same masks of dropout again, so that b is the same
            from_1 = after(batch, 1.0)
            shares = {name: _share(from_0[name], from_1[name]) for name in names}
            _check_repeated(adapter, mesh.data, [name for name, share in shares.items() if share is None])
        count += 1
        sums = {name: total + from_0[name] for name, total in sums.items()}
    means = {
        name: total / (count * share) if (share := shares[name]) else before[name].astype(np.float64)
        for name, total in sums.items()
    }
    joined = np.concatenate([means[name].reshape(-1) for name in names])
    if mesh.data.size > 1:
        (mean,) = adapter.allreduce([adapter.from_numpy(joined)], mesh.data, name="renewed_statistics")
        joined = adapter.to_numpy(mean)
    parts = np.split(joined, np.cumsum([before[name].size for name in names])[:-1])
    renewed = {name: part.reshape(before[name].shape) for name, part in zip(names, parts, strict=True)}
    session.load_buffers(before | {name: array.astype(before[name].dtype) for name, array in renewed.items()})


def _share(from_0: np.ndarray, from_1: np.ndarray) -> float | None:
    """The share m of a batch in a running statistic; 0 for one that training leaves as it is; None if it is not one."""
    kept = from_1 - from_0
    share = 1 - float(np.median(kept))
    off = float(np.abs(kept - np.median(kept)).max()) / max(1.0, float(np.abs(from_0).max()))
    if not off <= _SAME or not -_SAME < share < 1 + _SAME:
        return None
    return share if share > 1e-6 else 0.0


def _check_repeated(adapter: Adapter, group: Group, names: list[str]) -> None:
    """Raise RunError, on all ranks, if on any rank the same batch has given statistics of these names other values."""
    everyone = adapter.allgather_object(names, group, name="repeated_statistics")
    if name := next((name for of_rank in everyone for name in of_rank), None):
        raise RunError(
            f"average_weights.from_epoch: {name} cannot be computed for the averaged weights, as the same batch gives "
            "other values each time; expected no random layer before this batch norm, or give average_weights.decay"
        )
