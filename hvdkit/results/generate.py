"""The schema of `generate.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdkit.results.json_files import Record, Result, read


class Generation(Record, Result):
    """`generate.json`: the `tokens` with which a checkpoint's model, `trained_by` one framework and run by
    `framework`, continues, each the most probable one. `averaged` says whether its
    weights are averaged ones. `prompt` and `text` are what was given and what the tokens say;
    the file has only the tokens."""

    framework: str
    framework_version: str
    hvdkit_version: str
    model: str
    trained_by: str
    step: int
    averaged: bool = False
    tokens: list[int]
    prompt: str = ""
    text: str = ""

    def records(self) -> list[dict[str, Any]]:
        """One row."""
        return [self.model_dump(exclude={"tokens"})]


def read_generation(path: Path) -> Generation:
    """Read a `generate.json`. Raises RequestError if it is missing or damaged."""
    return read(Generation, path, "what `hvdkit generate` has written")
