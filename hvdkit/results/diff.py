"""The schema of `diff.json`."""

from __future__ import annotations

from typing import Any

from hvdkit.results.json_files import Count, Figures, Record, Result


class Difference(Record):
    """A `key` and its value in each run, None where a run does not have it."""

    key: str
    first: Any
    second: Any


class LossDifference(Figures):
    """The first logged `step` whose loss differs; `after` is the last one before it that is the same, 0 for none.

    `key` is loss or, at the end of an epoch, a metric of the validation.
    """

    step: Count
    after: Count
    key: str
    first: float | None
    second: float | None


class TensorDifference(Figures):
    """`relative_error` is ‖second − first‖ / ‖first‖, `largest` the largest |second − first|.

    Both are None for a tensor that one run does not have, that has another shape there, or that is not finite.
    """

    name: str
    relative_error: float | None
    largest: float | None


class CheckpointDifference(Record):
    """A checkpoint that both runs have: the tensors that differ (parameters, running statistics, optimizer's slots)."""

    step: Count
    tensors: int
    differing: list[TensorDifference]


class Diff(Record, Result, file="diff.json", of="what `hvdkit diff` has written"):
    """`diff.json`: what differs between the `runs`, two folders of `hvdkit train`.

    `settings` are the recipes' keys, `circumstances` versions, ranks, launcher and tuning as far as both runs have
    recorded them. `initial_weights` and `final_weights` say whether both runs have the same, None where one has not
    recorded them, as a run that failed. `steps` counts the logged steps that both have. `checkpoints` are those of the
    same step, in ascending order.
    """

    runs: tuple[str, str]
    settings: list[Difference]
    circumstances: list[Difference]
    initial_weights: bool | None
    final_weights: bool | None
    steps: Count
    loss: LossDifference | None
    checkpoints: list[CheckpointDifference]

    @property
    def same(self) -> bool:
        """Whether everything that was compared of the training is the same, to the last bit."""
        weights = self.final_weights is not False and not any(pair.differing for pair in self.checkpoints)
        return weights and self.loss is None

    def records(self) -> list[dict[str, Any]]:
        """A row for each tensor that differs in a checkpoint."""
        return [{"step": pair.step, **tensor.model_dump()} for pair in self.checkpoints for tensor in pair.differing]
