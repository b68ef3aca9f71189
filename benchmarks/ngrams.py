"""Bits per byte of n-gram models of the text that `recipes/gpt-tiny.yaml` trains on, on its validation part:

    .venv/bin/python -m benchmarks.ngrams [RECIPE.yaml] [key=value …]

An n-gram model predicts a byte from the n - 1 before it, by the counts of the training part, interpolated with shorter
contexts as Witten and Bell do (1991, method C).
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

from hvdkit.data.tokens import open_tokens
from hvdkit.recipe import registry, schema


def bits_per_byte(train: bytes, val: bytes, n: int) -> float:
    """The cross-entropy of `val` under the n-gram model of `train`, in bits."""
    followers: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(n)]
    for place in range(n - 1, len(train)):
        for length in range(n):
            followers[length][train[place - length : place]][train[place]] += 1
    bits = 0.0
    for place in range(n - 1, len(val)):
        probability = 1 / 256
        for length in range(n):
            seen = followers[length].get(val[place - length : place])
            if seen is None:
                break
            probability = (seen[val[place]] + len(seen) * probability) / (seen.total() + len(seen))
        bits -= math.log2(probability)
    return bits / (len(val) - n + 1)


def main(arguments: list[str]) -> None:
    """Print a line for each n from 1 to 5."""
    recipe = schema.load(registry.locate(Path((arguments or ["gpt-tiny"])[0])), arguments[1:])
    assert isinstance(recipe.data, schema.Text) and recipe.data.tokens == "bytes"
    tokens = open_tokens(recipe.data)
    for n in range(1, 6):
        print(
            f"{n}-gram: {bits_per_byte(tokens.train.tobytes(), tokens.val.tobytes(), n):.3f} bits per byte", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
