"""What the options of a job may be: numbers from a smallest one up, and texts of a form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hvdkit.errors import Faults


def faults_of(asked: Any, least: Mapping[str, int], forms: Mapping[str, tuple[str, str]]) -> Faults:
    """What is wrong with a job's resources: a line for each fault, with the option that is named as the field.

    `least` has the smallest number of a field, `forms` the regular expression of its text, or of each of its texts,
    and what is expected.
    """
    faults = Faults()
    for field, number in least.items():
        value = getattr(asked, field)
        if value is not None and not number <= value <= 10**6:
            faults.append(f"{_option(field)} {value}: expected {number} or more")
    for field, (pattern, expected) in forms.items():
        given = getattr(asked, field)
        option = _option(field.removesuffix("s") if isinstance(given, tuple) else field)
        for text in given if isinstance(given, tuple) else [given]:
            if text is not None and not re.fullmatch(pattern, text, re.ASCII):
                faults.append(f"{option} {text!r}: expected {expected}")
    if asked.nodes >= 1 and asked.tasks % asked.nodes:
        faults.append(f"-np {asked.tasks}: expected a multiple of --nodes {asked.nodes}, with as many ranks on each")
    return faults


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
