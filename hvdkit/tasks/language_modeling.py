"""Language modelling: a GPT predicts each token of a text from those before it, by softmax cross-entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvdkit.recipe.schema import GptModel, Recipe, SyntheticText, Text
from hvdkit.tasks import gpt
from hvdkit.tasks.task import Metrics, Task

if TYPE_CHECKING:
    from hvdkit.data import Shard
    from hvdkit.data.counts import Counts
    from hvdkit.data.dataset import Dataset


def metrics(bytes_per_token: float | None, ignored: int | None = None) -> Metrics:
    """Cross-entropy in nats per token, and what follows from it; `bytes_per_token` is that of the validation text.

    With an `ignored` label there are no bits per byte, as tokens that do not count have bytes too.
    """

    def derived(means: dict[str, float]) -> dict[str, float]:
        loss = means["loss"]
        values = {"perplexity": math.exp(min(loss, 700.0))}
        return values | (
            {"bits_per_byte": loss / math.log(2) / bytes_per_token} if bytes_per_token and ignored is None else {}
        )

    return Metrics(("loss",), None, derived, ignored)


class LanguageModeling(Task):
    """The task of recipes whose model is a GPT. Samples are windows of `context` tokens (context,), targets the tokens
    that follow each of them (context,)."""

    unit = "tokens"
    best = "-loss"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.model, GptModel) and isinstance(recipe.data, Text | SyntheticText)
        self._data = recipe.data
        self._table = gpt.architecture(recipe.model)
        self.units = self._table.context
        self._ignored = recipe.loss.ignored_label
        self.metrics = metrics(1.0 if isinstance(recipe.data, Text) else None, self._ignored)  # until the text is open
        self.flop = self._table.training_flop()

    def count(self) -> Counts:
        """The windows of the recipe's text. Raises RequestError as `open_data` does."""
        from hvdkit.data import text

        return text.count(self._data, self._table.context, self._table.vocabulary)

    def open_data(self, shard: Shard) -> Dataset:
        """The recipe's text. Raises RequestError if the vocabulary is too small, or files are missing or wrong."""
        from hvdkit.data import text

        table = self._table
        opened, bytes_per_token = text.open_text(self._data, table.context, table.vocabulary, self.recipe.seed)
        self.metrics = metrics(bytes_per_token, self._ignored)
        return opened

    def architecture(self, shape: tuple[int, ...] | None = None) -> gpt.GPT:
        """The recipe's GPT."""
        return self._table


TASK = LanguageModeling
