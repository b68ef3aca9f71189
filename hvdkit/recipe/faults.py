"""What is wrong with a YAML document, a line for each fault that pydantic finds in it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError

from hvdkit.recipe.data import NAME, by_value
from hvdkit.recipe.hints import choice_of, fitting, sections, similar, unknown_key
from hvdkit.recipe.yaml_files import brief

# What is expected, by the kind of pydantic's error.
_TYPES = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "expected a whole number"),
    "float_type": "expected a number",
    "string_type": "expected a text",
    "bool_type": "expected true or false",
    "list_type": "expected a list, such as [1, 2]",
    "dict_type": "expected keys with values, such as {a: 1}",
}
MOST_FAULTS = 50  # listed one by one; the rest are counted


def explain(error: ValidationError, root: type[BaseModel], document: str) -> list[str]:
    """A line for each fault of a document that should be a `root`: its key, what was expected, what was received.

    `whole` stands for the whole document where a key is named.
    """
    lines: dict[str, None] = {}  # each once, in order
    for number, fault in enumerate(error.errors(include_url=False)):
        if fault["type"] == "together":
            lines |= dict.fromkeys(fault["msg"].splitlines())
            continue
        key, section, kinds, siblings = _place(fault, root)
        if fault["type"] == "union_tag_invalid":
            key = [*key, choice_of(kinds)]
        # a key with a line break in it must not break the message's line
        shown = (name if name and name.isprintable() and len(name) <= 60 else brief(name) for name in key)
        name = ".".join(shown) if key else document
        if number > MOST_FAULTS:  # no more are printed, and looking for similar names takes time
            why = fault["type"]
        elif fault["type"] == "extra_forbidden":
            why = unknown_key(key, section, siblings, root)
        else:
            why = _reason(fault, key, kinds, root)
        lines[f"{name}: {why}"] = None
    return list(lines)


_Kinds = list[type[BaseModel]]


def _place(fault: Any, root: type[BaseModel]) -> tuple[list[str], type[BaseModel], _Kinds, _Kinds]:
    """The key of a fault, the section that it is in, the union members that are still possible, and the section's."""
    key: list[str] = []
    siblings: _Kinds = []
    section = root
    kinds: _Kinds = []
    for step in map(str, fault["loc"]):
        if kinds:  # pydantic includes the chosen kind of data or optimizer in the location as if it were a key
            section, kinds, siblings = by_value(choice_of(kinds), kinds)[step], [], kinds
            continue
        key.append(step)
        inner = sections(section.model_fields[step].annotation) if step in section.model_fields else []
        section, kinds = (inner[0], []) if len(inner) == 1 else (section, inner)
    return key, section, kinds, siblings


def _reason(fault: Any, key: list[str], kinds: _Kinds, root: type[BaseModel]) -> str:
    kind, value = fault["type"], fault.get("input")
    received = brief(value)
    if kind == "union_tag_not_found":
        choice = choice_of(kinds)
        expected = ", ".join(map(repr, by_value(choice, kinds)))
        return f"required key {key[0]}.{choice} is missing; expected one of {expected}"
    if kind in ("model_type", "model_attributes_type"):
        other = fitting(key[0], value, root) if len(key) == 1 and isinstance(value, str) else None
        if other is None and kinds and isinstance(value, str) and value in by_value(choice_of(kinds), kinds):
            other = f"{'.'.join([*key, choice_of(kinds)])}={value}"
        return f"expected keys with values (a mapping), got {received}{f'; did you mean {other}?' if other else ''}"
    if kind == "union_tag_invalid":
        tag, known = fault["ctx"]["tag"], by_value(key[-1], kinds)
        return f"expected {fault['ctx']['expected_tags']}, got {brief(tag)}{similar(tag, known)}"
    if kind == "literal_error":
        values = re.findall("'([^']*)'", fault["ctx"]["expected"])
        return f"expected {fault['ctx']['expected']}, got {received}{similar(value, values)}"
    if kind == "string_pattern_mismatch" and fault["ctx"]["pattern"] == NAME:
        return f"expected letters, digits, '.', '_' or '-', at most 100, the first a letter or digit; got {received}"
    if kind == "missing":
        return "required key is missing"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    expected = _TYPES.get(kind) or fault["msg"].replace("Input should be", "expected", 1)
    several = "; give each change as a word of its own" if isinstance(value, str) and "=" in value else ""
    return f"{expected}, got {received}{several}"
