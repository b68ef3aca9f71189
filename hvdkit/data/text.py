"""Text as samples: windows of tokens, each with the tokens that follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.data.counts import Counts
from hvdkit.data.dataset import ArraySplit, Batch, Dataset, PoolSplit
from hvdkit.data.tokens import open_tokens
from hvdkit.errors import RequestError
from hvdkit.recipe.data import SyntheticText, Text

_POOL = 64  # windows of random tokens


@dataclass(frozen=True)
class WindowSplit:
    """Consecutive windows of `context` tokens; the targets are the tokens one further on.

    `tokens` (n,) is an array or a memory map. What is too short for a window at the end is left out.
    """

    tokens: np.ndarray
    context: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def batch(self, indices: np.ndarray) -> Batch:
        """The windows at `indices` (n,): inputs and targets (n, context), int64."""
        positions = np.asarray(indices)[:, None] * self.context + np.arange(self.context + 1)
        windows = self.tokens[positions].astype(np.int64)
        return Batch(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))


def open_text(data: Text | SyntheticText, context: int, vocabulary: int, seed: int) -> tuple[Dataset, float | None]:
    """The recipe's windows, and the bytes of a token of the validation part, None for random tokens.

    Raises RequestError as `open_tokens` does, and if the text has more different tokens than `vocabulary`.
    """
    if isinstance(data, SyntheticText):
        random = np.random.default_rng([seed, 1])
        count = min(_POOL, max(data.train_windows, data.val_windows))
        drawn = random.integers(0, vocabulary, (count, context + 1), dtype=np.int64)
        pool = ArraySplit(np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:]))
        train, val = (PoolSplit(pool, length) for length in (data.train_windows, data.val_windows))
        return Dataset(train, val, (context,), vocabulary), None
    tokens = open_tokens(data)
    if tokens.vocabulary > vocabulary:
        raise RequestError(
            f"model.vocabulary: expected at least {tokens.vocabulary}, the different tokens of data.tokens "
            f"{data.tokens}, got {vocabulary}"
        )
    splits = [WindowSplit(half, context) for half in (tokens.train, tokens.val)]
    if not len(splits[0]):
        raise RequestError(
            f"data: expected more than model.context tokens for training, {context}, got {len(tokens.train)}; give "
            "a longer text or a smaller context"
        )
    bytes_per_token = tokens.val_bytes / len(tokens.val) if len(tokens.val) else None
    note = (
        f"text: {len(tokens.train):,} tokens to train on, {len(tokens.val):,} for validation; SHA-256 {tokens.digest}"
    )
    dataset = Dataset(
        splits[0], splits[1], (context,), tokens.vocabulary, note=note, left_out=tokens.left_out,
        text_sha256=tokens.digest,
    )  # fmt: skip
    return dataset, bytes_per_token


def count(data: Text | SyntheticText, context: int, vocabulary: int) -> Counts:
    """How many windows there are. Raises RequestError as `open_text` does."""
    if isinstance(data, SyntheticText):
        return Counts(data.train_windows, data.val_windows, (context,), vocabulary)
    opened, _ = open_text(data, context, vocabulary, 0)
    return Counts(len(opened.train), len(opened.val), (context,), opened.classes, opened.left_out)
