"""The edits of Horovod's source, which edits.yaml lists for all runtimes or for one.

`apply` refuses to go on where a text is not found as often as expected, so that an edit that no longer fits is never
skipped in silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

import yaml

from hvdkit.errors import RunError
from hvdkit.runtimes.pins import RUNTIMES


@dataclass(frozen=True)
class Edit:
    """Replace `anchor`, found exactly `count` times, by `replacement` in `file` (relative to the source's root)."""

    file: str
    anchor: str
    replacement: str
    reason: str
    count: int = 1


def _read() -> dict[str, tuple[Edit, ...]]:
    groups = yaml.safe_load(Path(__file__).with_name("edits.yaml").read_text(encoding="utf-8"))
    return {
        name: tuple(
            Edit(**edit, reason=group["reason"])
            for group in groups
            if group.get("runtime", name) == name
            for edit in group["edits"]
        )
        for name in RUNTIMES
    }


# The edits of each runtime, in order.
EDITS = _read()


def apply(source: Path, edits: Iterable[Edit]) -> None:
    """Apply `edits` to the unpacked sdist in `source`, in order.

    Raises RunError, before the file is changed, where an edit's file is missing or its anchor is not there
    exactly as often as expected.
    """
    for edit in edits:
        path = source / edit.file
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"{path}: cannot be read ({error.strerror}), so an edit does not fit this Horovod: {edit.reason}"
            ) from error
        found = text.count(edit.anchor)
        if found != edit.count:
            raise RunError(
                f"{path}: {edit.anchor.strip()!r} found {found} times, expected {edit.count}; "
                f"an edit does not fit this Horovod: {edit.reason}"
            )
        path.write_text(text.replace(edit.anchor, edit.replacement), encoding="utf-8")


def fingerprint(edits: Iterable[Edit]) -> str:
    """SHA-256, in hex, of the edits' whole content: another edit, another wheel."""
    return hashlib.sha256(json.dumps([astuple(edit) for edit in edits]).encode()).hexdigest()
