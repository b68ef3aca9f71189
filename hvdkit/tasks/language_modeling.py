"""Language modelling: a GPT predicts each token of a text from those before it, by softmax cross-entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvdkit.recipe.schema import GPT, Recipe, SyntheticText, Text
from hvdkit.tasks import gpt
from hvdkit.tasks.task import Metrics

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


class LanguageModeling:
    """The task of recipes whose model is a GPT. Samples are windows of `context` tokens (context,), targets the tokens
    that follow each of them (context,)."""

    own = False
    unit = "tokens"
    best = "-loss"

    def __init__(self, recipe: Recipe) -> None:
        assert isinstance(recipe.model, GPT)
        self._recipe, self._model, self.loss = recipe, recipe.model, None
        self._table = gpt.architecture(recipe.model)
        self.units = self._table.context
        self._ignored = recipe.loss.ignored_label
        self.metrics = metrics(1.0 if isinstance(recipe.data, Text) else None, self._ignored)  # until the text is open
        self.flop: int | None = self._table.training_flop()

    def count(self) -> Counts:
        """The windows of the recipe's text. Raises RequestError as `open_data` does."""
        from hvdkit.data import text

        assert isinstance(self._recipe.data, Text | SyntheticText)
        return text.count(self._recipe.data, self._table.context, self._model.classes)

    def open_data(self, shard: Shard) -> Dataset:
        """The recipe's text. Raises RequestError if the vocabulary is too small, or files are missing or wrong."""
        from hvdkit.data import text

        data = self._recipe.data
        assert isinstance(data, Text | SyntheticText)
        opened, bytes_per_token = text.open_text(data, self._table.context, self._model.classes, self._recipe.seed)
        self.metrics = metrics(bytes_per_token, self._ignored)
        return opened

    def architecture(self, shape: tuple[int, ...] | None = None) -> gpt.GPT:
        """The recipe's GPT."""
        return self._table

    def check(self, shape: tuple[int, ...]) -> None:
        """Any batch can be trained on."""


TASK = LanguageModeling
