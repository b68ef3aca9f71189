"""The schema of `generate.json`."""

from __future__ import annotations

from typing import Any

from hvdkit.results.json_files import OfCheckpoint, Result


class Generation(OfCheckpoint, Result, file="generate.json", of="what `hvdkit generate` has written"):
    """`generate.json`: the `tokens` with which a checkpoint's model continues, each the most probable one.

    `prompt` and `text` are what was given and what the tokens say; the file has only the tokens.
    """

    tokens: list[int]
    prompt: str = ""
    text: str = ""

    def records(self) -> list[dict[str, Any]]:
        """One row."""
        return [self.model_dump(exclude={"tokens"})]
