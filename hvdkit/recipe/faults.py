"""What is wrong with a YAML document, a line for each fault that pydantic finds in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from hvdkit.errors import nearest
from hvdkit.recipe.data import NAME, by_value
from hvdkit.recipe.hints import choice_of, sections, unknown_key
from hvdkit.recipe.yaml_files import brief

MOST_FAULTS = 50  # listed one by one; the rest are counted
# Keys that are 'auto' or a number, for which pydantic reports a fault for each alternative; with their bounds.
_AUTO_OR_NUMBER = {
    ("threads",): "1 to 4096",
    ("data", "workers"): "0 to 256",
    ("data", "size"): "8 to 4096",
    ("data", "resize"): "8 to 8192",
    ("model", "classes"): "2 to 1000000",
}


def explain(error: ValidationError, root: type[BaseModel], whole: str) -> list[str]:
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
        for union, bounds in _AUTO_OR_NUMBER.items():
            if key[: len(union)] == list(union) and fault["type"] != "extra_forbidden":
                key = list(union)
                fault = fault | {"type": union[-1], "msg": f"expected 'auto' or a whole number from {bounds}"}
        # a key with a line break in it must not break the message's line
        name = ".".join(part if part.isprintable() and len(part) <= 60 else brief(part) for part in key) or whole
        # more faults are not printed, and looking for similar names takes time
        why = fault["type"]
        if number <= MOST_FAULTS:
            unknown = why == "extra_forbidden"
            why = unknown_key(key, section, siblings, root) if unknown else _reason(fault, key, kinds)
        lines[f"{name}: {why}"] = None
    return list(lines)


_Kinds = list[type[BaseModel]]


def _place(fault: Any, root: type[BaseModel]) -> tuple[list[str], type[BaseModel], _Kinds, _Kinds]:
    """The key of a fault, the section that it is in, the union members that are still possible, and the section's."""
    key: list[str] = []
    siblings: _Kinds = []
    section = root
    kinds: _Kinds = []
    for part in map(str, fault["loc"]):
        if kinds:  # pydantic includes the chosen kind of data or optimizer in the location as if it were a key
            section, kinds, siblings = by_value(choice_of(kinds), kinds)[part], [], kinds
            continue
        key.append(part)
        inner = sections(section.model_fields[part].annotation) if part in section.model_fields else []
        section, kinds = (inner[0], []) if len(inner) == 1 else (section, inner)
    return key, section, kinds, siblings


def _reason(fault: Any, key: list[str], kinds: _Kinds) -> str:
    kind, received = fault["type"], brief(fault.get("input"))
    if kind == "union_tag_not_found":
        choice = choice_of(kinds)
        expected = ", ".join(map(repr, by_value(choice, kinds)))
        return f"required key {key[0]}.{choice} is missing; expected one of {expected}"
    if kind in ("model_type", "model_attributes_type"):
        given = fault.get("input")
        meant = [choice_of(kinds)] if kinds and isinstance(given, str) else []
        hint = [f"; did you mean {'.'.join([*key, name])}={given}?" for name in meant if given in by_value(name, kinds)]
        return f"expected keys with values (a mapping), got {received}{''.join(hint)}"
    if kind == "union_tag_invalid":
        tag = fault["ctx"]["tag"]
        return f"expected {fault['ctx']['expected_tags']}, got {brief(tag)}{nearest(tag, by_value(key[-1], kinds))}"
    if kind == "string_pattern_mismatch" and fault["ctx"]["pattern"] == NAME:
        return f"expected letters, digits, '.', '_' or '-', at most 100, the first a letter or digit; got {received}"
    if kind == "missing":
        return "required key is missing"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    return f"{fault['msg'].replace('Input should be', 'expected', 1)}, got {received}"
