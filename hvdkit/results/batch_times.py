"""Times by batch size, a part of `profile.json`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from hvdkit.results.json_files import StrictRecord

_FALL = 0.8  # of a time, by which a larger batch may be measured faster

Time = Annotated[float, Field(ge=0, le=1e9)]  # milliseconds


class BatchFit(StrictRecord):
    """A time by batch size: `fixed_ms` + `per_sample_ms` × samples of a batch, by least squares, neither negative."""

    fixed_ms: Time = Field(description="the part that does not depend on the batch size")
    per_sample_ms: Time = Field(description="what each sample of a batch adds")
    residual_percent: Time = Field(description="root mean square of what the fit leaves, of the mean time")


class BatchTime(StrictRecord):
    """One batch size: the means of a rank's step without update, and the medians within one batch."""

    batch_size: int = Field(ge=1, le=2**40, description="samples of a rank in a batch")
    compute_ms: float = Field(gt=0, le=1e9, description="forward and backward, the mean of a step")
    backward_ms: Time | None = Field(None, description="backward, the mean of a step; null: not separated")
    layer_forward_ms: list[Time] = Field([], description="forward of each of `layers`; empty: the framework has none")
    tensor_ready_ms: list[Time] = Field(
        [], description="when backward finishes each of `tensors`, from its start; empty in older files"
    )


def faults(batches: Sequence[BatchTime], own: int, layers: int, tensors: int) -> str | None:
    """What is wrong with the batch sizes of a profile of batch size `own`; None if nothing is."""
    sizes, times = [batch.batch_size for batch in batches], [batch.compute_ms for batch in batches]
    if sizes != sorted(set(sizes)) or (sizes and own not in sizes):
        return f"batches: expected batch sizes that rise, {own} among them, got {sizes}"
    if any(after < before * _FALL for before, after in itertools.pairwise(times)):
        return f"batches: expected compute_ms that rise with the batch size, got {times}: measure again"
    for each in batches:
        where = f"batches: batch size {each.batch_size}"
        for key, known, count in (
            ("layer_forward_ms", each.layer_forward_ms, layers),
            ("tensor_ready_ms", each.tensor_ready_ms, tensors),
        ):
            if len(known) not in (0, count):
                return f"{where}: {key}: expected {count} times, got {len(known)}"
        if any(after < before for before, after in itertools.pairwise(each.tensor_ready_ms)):
            return f"{where}: tensor_ready_ms: expected times that do not fall"
    for key in ("layer_forward_ms", "tensor_ready_ms"):
        if len({bool(getattr(batch, key)) for batch in batches}) > 1:
            return f"batches: {key}: expected it at each batch size or at none"
    return None
