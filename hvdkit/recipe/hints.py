"""What a user may have meant by a key, an option or a value that does not exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, get_args

from pydantic import BaseModel

from hvdkit.errors import nearest
from hvdkit.recipe.data import by_value

# What other tools call a key or a value, in small letters and with `_` for `-`; other names are compared with hvdkit's.
_KEYS = {
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "bs": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "recompute",
    "dataset": "data.name",
    "arch": "model.name",
    "amp": "precision=fp16",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
}
_VALUES = {"cuda": "gpu", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def sections(annotation: Any) -> list[Any]:
    """The sections, pydantic models, that a key of this type can hold."""
    return [kind for kind in get_args(annotation) or [annotation] if hasattr(kind, "model_fields")]


def _keys(root: type[BaseModel]) -> list[str]:
    """All keys of a document, those of sections with a dot."""
    inner = {name: sections(field.annotation) for name, field in root.model_fields.items()}
    keys = ((name, *(f"{name}.{key}" for kind in inner[name] for key in kind.model_fields)) for name in inner)
    return list(dict.fromkeys(chain(*keys)))


def meant(given: str, root: type[BaseModel]) -> str | None:
    """The key that `given` names in full, by its last part or as other tools do, then perhaps with its value.

    None if there is not just one.
    """
    known = _keys(root)
    if given in known:
        return given
    other = _KEYS.get(given, "")
    if other.partition("=")[0] in known:
        return other
    ends = [key for key in known if key.rpartition(".")[2] == given]
    return ends[0] if len(ends) == 1 else None


def typed(given: str, value: Any, root: type[BaseModel]) -> str | None:
    """What to type for a setting `given` without its place: `key=value`, or None if it is unknown."""
    name, text = given.lower().replace("-", "_"), _text(value)
    if choice := fitting(name, text, root):
        return choice
    if key := meant(name, root):
        if "=" in key:
            return key
        section = key in root.model_fields and sections(root.model_fields[key].annotation)
        return f"{key}={'{…}' if section and text[:1] != '{' else _VALUES.get(text.lower(), text) or 'true'}"
    return None


def similar(value: Any, known: Collection[str]) -> str:
    """`; did you mean 'x'?` for a value that other tools have, or that resembles one of those `known`."""
    other = _VALUES.get(_text(value).lower())
    return f"; did you mean {other!r}?" if other in known else nearest(value, known) if isinstance(value, str) else ""


def fitting(key: str, value: Any, root: type[BaseModel]) -> str | None:
    """`key.choice=value` for a section of which `value` is a choice, such as model.name=resnet8; None for others."""
    for section in sections(root.model_fields[key].annotation) if key in root.model_fields else []:
        for choice in {"name", "method"} & section.model_fields.keys():
            if value in get_args(section.model_fields[choice].annotation):
                return f"{key}.{choice}={value}"
    return None


def unknown_key(path: Sequence[str], section: type[BaseModel], kinds: Sequence[Any], root: type[BaseModel]) -> str:
    """What is wrong with an unknown key of `section`; `kinds` are those of which it is one, if there are several."""
    leaf = path[-1]
    if others := [kind for kind in kinds if leaf in kind.model_fields]:
        choice = choice_of(others)
        values = [f"{path[0]}.{choice}={value}" for value in by_value(choice, others)]
        return f"unknown key; it needs {' or '.join(values[:3])}"
    other = meant(leaf, root) if leaf != "name" else None  # many sections have a name
    if other and other.split(".") != list(path):
        return f"unknown key; did you mean {other if '=' in other else repr(other)}?"
    known = sorted(section.model_fields)
    return f"unknown key{nearest(leaf, known) or '; known keys: ' + ', '.join(known)}"


def choice_of(kinds: Sequence[Any]) -> str:
    """The key that chooses one of these kinds of section."""
    return next(key for key in ("name", "method") if key in kinds[0].model_fields)


def as_overrides(words: Sequence[str], options: Collection[str], root: type[BaseModel]) -> str | None:
    """The message for a command line with options that the command does not have; None if nothing is known of them.

    `options` are those that the command has, `root` is the recipe's class.
    """
    changes: dict[str, str] = {}
    lines: list[str] = []
    unknown: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--?[A-Za-z][\w.-]*", name) or name in options:
            continue
        value = value if equals or following[:1] == "-" or "=" in following else following
        change = typed(name.lstrip("-"), value or None, root)
        if change:
            changes[name] = change
        else:
            near = nearest(name, options) or nearest(name.lstrip("-").replace("-", "_"), _keys(root))
            (lines if near else unknown).append(f"{name}: no such option{near}")
    if changes:
        how = "keys of the recipe are given as key=value, without dashes"
        lines.insert(0, f"{', '.join(changes)}: {how}; expected {' '.join(changes.values())}")
    return "\n".join([*lines, *unknown]) if lines else None


def _text(value: Any) -> str:
    """A value as it is typed."""
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value).strip()
    return text if text.isprintable() and len(text) <= 200 else "…"
