"""Numbers about training: exact sums and means over ranks, and the times of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.data.batches import Batch, Split, evaluation_batches
from hvdkit.tasks.task import Metrics, Sums


def reduce_sums(adapter: Adapter, group: Group, **sums: float) -> dict[str, float]:
    """The sums over a group, in float64; collective. All of its ranks pass the same names.

    The average over unequal shards is (sum of sums) / (sum of counts), so ranks reduce sums and counts, never
    averages.
    """
    vector = adapter.from_numpy(np.array(list(sums.values()), np.float64))
    (total,) = adapter.allreduce([vector], group, op="sum", name="metrics." + ".".join(sums))
    return dict(zip(sums, adapter.to_numpy(total).tolist(), strict=True))


def add_rows(adapter: Adapter, group: Group, names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """The sum of each column over the rows of a group, by name; collective. Ranks may have unequal numbers of rows.

    They are added exactly and rounded once (Shewchuk 1997, by `math.fsum`), so that the sums have the same bits
    however the rows are divided among ranks.
    """
    mine = np.array([[0.0] * len(names), *rows], np.float64)  # a row at least: not all frameworks gather nothing
    everyone = adapter.to_numpy(adapter.allgather(adapter.from_numpy(mine), group, "metrics." + ".".join(names)))
    columns = everyone.T.tolist()
    return {name: _sum(column) for name, column in zip(names, columns, strict=True)}


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # of infinities, or beyond float64
        return sum(values)


def evaluate(
    adapter: Adapter,
    session: Session,
    metrics_of: Metrics,
    split: Split,
    batch_size: int,
    group: Group,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The means of the metrics over a group of ranks that divide the samples, each counted once; empty if the split is.

    Collective, with the same result on all ranks.
    """
    return metrics_of.means(*summed(adapter, session, metrics_of, split, batch_size, group, on_batch))


def summed(
    adapter: Adapter,
    session: Session,
    metrics_of: Metrics,
    split: Split,
    batch_size: int,
    group: Group,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[Sums, int]:
    """By metric the sum over the split's samples, with its count, and the number of samples; collective.

    They have the same bits on any number of ranks (`batches.evaluation_batches`, `add_rows`). A session with a
    loss of the user's own adds that as `loss`, unless a metric has the name.
    """
    adds_loss = session.custom_loss is not None and "loss" not in metrics_of.names
    names = [*metrics_of.names, *(["loss"] if adds_loss else [])]
    rows: list[list[float]] = []  # of each batch: sums and counts in the order of the names, and samples
    batches = evaluation_batches(split, batch_size, group.index, group.size)
    for batch, valid in session.strategy.evaluated(batches):
        on_batch()
        if metrics_of.sums is None:
            pairs = [_losses(session, batch, valid, metrics_of.ignored)]
        elif valid:
            outputs, targets = session.predict(batch.inputs)[:valid], batch.targets[:valid]
            pairs = metrics_of.of_batch(outputs, targets)
            if adds_loss:
                value, count = session.loss_of(outputs, targets)
                pairs.append((value * valid, valid) if count is None else (value, count))
        else:
            session.predict(batch.inputs)
            continue
        rows.append([*(value for pair in pairs for value in pair), valid])
    columns = [column for name in names for column in (name, f"{name}.count")]
    totals = add_rows(adapter, group, [*columns, "samples"], rows)
    return {name: (totals[name], totals[f"{name}.count"]) for name in names}, round(totals["samples"])


def _losses(session: Session, batch: Batch, valid: int, ignored: int | None) -> tuple[float, float]:
    """The sum of a batch's cross-entropies and its count: of samples, or with an `ignored` label of targets."""
    if ignored is None:
        losses = session.losses(batch)[:valid]
        if not valid:  # a rank whose samples have run out computes beside the others
            return 0.0, 0.0
        return float(losses.reshape(valid, -1).mean(axis=1).sum(dtype=np.float64)), valid
    counts = batch.targets != ignored
    losses = session.losses(Batch(batch.inputs, np.where(counts, batch.targets, 0)))[:valid]
    return float(losses[counts[:valid]].sum(dtype=np.float64)), float(counts[:valid].sum())
