"""What is wrong with a YAML document, a line for each fault that pydantic finds in it."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hvdkit.errors import nearest
from hvdkit.recipe.data import by_value
from hvdkit.recipe.yaml_files import brief

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
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
        key, section, kinds = _place(fault, root)
        if fault["type"] == "union_tag_invalid":
            key = [*key, _choice(kinds)]
        for union, bounds in _AUTO_OR_NUMBER.items():
            if key[: len(union)] == list(union) and fault["type"] != "extra_forbidden":
                key = list(union)
                fault = fault | {"type": union[-1], "msg": f"expected 'auto' or a whole number from {bounds}"}
        # a key with a line break in it must not break the message's line
        name = ".".join(part if part.isprintable() and len(part) <= 60 else brief(part) for part in key) or whole
        # more faults are not printed, and looking for similar names takes time
        why = _reason(fault, key, section, kinds) if number <= MOST_FAULTS else fault["type"]
        lines[f"{name}: {why}"] = None
    return list(lines)


def _place(fault: Any, root: type[BaseModel]) -> tuple[list[str], type[BaseModel], list[type[BaseModel]]]:
    """The key of a fault, the section that it is in, and the union members that are still possible."""
    key: list[str] = []
    section = root
    kinds: list[type[BaseModel]] = []
    for part in map(str, fault["loc"]):
        if kinds:  # pydantic includes the chosen kind of data or optimizer in the location as if it were a key
            section, kinds = by_value(_choice(kinds), kinds)[part], []
            continue
        key.append(part)
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        alternatives: Any = get_args(annotation) or [annotation]
        inner = [each for each in alternatives if hasattr(each, "model_fields")]
        section, kinds = (inner[0], []) if len(inner) == 1 else (section, inner)
    return key, section, kinds


def _choice(kinds: list[type[BaseModel]]) -> str:
    """The key that chooses one of these kinds of section."""
    return next(key for key in ("name", "method") if key in kinds[0].model_fields)


def _reason(fault: Any, key: list[str], section: type[BaseModel], kinds: list[type[BaseModel]]) -> str:
    kind, received = fault["type"], brief(fault.get("input"))
    if kind == "extra_forbidden":
        known = sorted(section.model_fields)
        return f"unknown key{nearest(key[-1], known) or '; known keys: ' + ', '.join(known)}"
    if kind == "union_tag_not_found":
        choice = _choice(kinds)
        expected = ", ".join(map(repr, by_value(choice, kinds)))
        return f"required key {key[0]}.{choice} is missing; expected one of {expected}"
    if kind in ("model_type", "model_attributes_type"):
        return f"expected keys with values (a mapping), got {received}"
    if kind == "union_tag_invalid":
        return f"expected {fault['ctx']['expected_tags']}, got {brief(fault['ctx']['tag'])}"
    if kind == "string_pattern_mismatch" and fault["ctx"]["pattern"] == NAME:
        return f"expected letters, digits, '.', '_' or '-', at most 100, the first a letter or digit; got {received}"
    if kind == "missing":
        return "required key is missing"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    return f"{fault['msg'].replace('Input should be', 'expected', 1)}, got {received}"
