"""Validation loss of the small GPT on two ranks, three seeds a framework, beside n-gram models of the same text.

    .venv/bin/python -m benchmarks.gpt_loss

Runs that are done are kept in `runs/gpt-loss` and not run again; `--fresh` starts anew. Writes gpt_loss.json and
gpt_loss.md beside itself. Exit status 1 if a limit is missed. The losses do not depend on the machine's load; the
seconds are those of the run that others disturbed least.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.data.tokens import open_tokens
from hvdkit.recipe import registry, schema

RECIPE, SEEDS, RANKS = "gpt-tiny", 3, 2
SPREAD, SECONDS = 0.02, 240.0  # bits per byte between frameworks, and how long training may take
GRAMS = range(1, 6)
PATIENCE_S = 7200.0  # the machine may be busy


def main() -> int:
    """The command line; returns the exit status."""
    args = harness.parser(__doc__, rounds=SEEDS, keep="gpt-loss", frameworks=True).parse_args()
    frameworks = args.framework or harness.FRAMEWORKS
    rounds = harness.rounds(harness.kept(args), ["seeds"], frameworks, args.rounds, run)["seeds"]
    found = {name: summary([one[name] for one in rounds]) for name in frameworks}
    medians = [one["bits_per_byte"]["median"] for one in found.values()]
    models, spread = grams(), max(medians) - min(medians)
    outcome = {
        "recipe": RECIPE,
        "ranks": RANKS,
        "seeds": args.rounds,
        "frameworks": found,
        "spread": spread,
        "n_grams": models,
        "missed": [
            *(f"{name}: {one['bits_per_byte']['median']:.3f} bits per byte, no better than a 4-gram model"
              for name, one in found.items() if one["bits_per_byte"]["median"] >= models["4"]),
            *(f"{name}: {one['seconds']:.0f} s" for name, one in found.items() if one["seconds"] > SECONDS),
            *([f"frameworks differ by {spread:.3f}"] if spread > SPREAD else []),
        ],
    }  # fmt: skip
    written.publish("gpt_loss", outcome, args.out)
    return int(bool(outcome["missed"]))


def run(_: str, number: int, framework: str, folder: Path) -> dict[str, Any]:
    """Training with a seed."""
    result = harness.train(framework, RANKS, RECIPE, [f"seed={number + 1}"], folder, timeout_s=PATIENCE_S)
    return result | {"step_ms": []}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the seeds of a framework come to."""
    calm = min(runs, key=lambda one: one["load"] if one["load"] is not None else 1.0)
    same = ("framework_version", "horovod_version", "epochs", "steps", "parameters", "text_sha256", "load")
    return {
        **{key: calm[key] for key in same},
        "bits_per_byte": harness.median_and_range([one["validation"]["bits_per_byte"] for one in runs])
        | {"seeds": [one["validation"]["bits_per_byte"] for one in runs]},
        "seconds": calm["startup_s"] + calm["train_s"],
    }


def bits_per_byte(train: bytes, val: bytes, n: int) -> float:
    """The cross-entropy of `val` in bits, under the n-gram model of `train`.

    It predicts a byte from the n - 1 before it, by the counts of the training part, interpolated with shorter contexts
    as Witten and Bell do (1991, method C).
    """
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


def grams() -> dict[str, float]:
    """Bits per byte of n-gram models on the recipe's validation part, by n."""
    data = schema.load(registry.locate(Path(RECIPE))).data
    assert isinstance(data, schema.Text)
    tokens = open_tokens(data)
    return {str(n): bits_per_byte(tokens.train.tobytes(), tokens.val.tobytes(), n) for n in GRAMS}


if __name__ == "__main__":
    harness.exit_with(main)
