"""The schema of `generate.json`."""

from __future__ import annotations

from typing import Any

from hvdkit.results.json_files import Record, Result


class Generation(Record, Result, file="generate.json", of="what `hvdkit generate` has written"):
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
