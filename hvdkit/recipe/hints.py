"""What a user may have meant by a key, an option or a word that does not exist."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from hvdkit.errors import nearest
from hvdkit.recipe import habits
from hvdkit.recipe.data import by_value
from hvdkit.recipe.yaml_files import brief
from hvdkit.runtimes.pins import FRAMEWORKS

# What a recipe does not say of a model of the user's own.
_OF_A_SCRIPT = {"best", "metrics", "samples", "unit"}


def sections(annotation: Any) -> list[Any]:
    """The sections, pydantic models, that a key of this type can hold."""
    return [kind for kind in get_args(annotation) or [annotation] if hasattr(kind, "model_fields")]


def _keys(root: type[BaseModel]) -> Iterator[str]:
    """All keys of a document, those of sections with a dot."""
    for name, field in root.model_fields.items():
        yield name
        for section in sections(field.annotation):
            yield from (f"{name}.{inner}" for inner in section.model_fields)


def meant(given: str, root: type[BaseModel]) -> str | None:
    """The key that `given` names in full, by its last part or as other tools do, then perhaps with its value.

    None if there is not just one.
    """
    keys = dict.fromkeys(_keys(root))
    if given in keys:
        return given
    other = habits.KEYS.get(given)
    if other and other.partition("=")[0] in keys:
        return other
    ends = [key for key in keys if key.rpartition(".")[2] == given]
    return ends[0] if len(ends) == 1 else None


def typed(given: str, value: Any, root: type[BaseModel]) -> tuple[str, bool] | None:
    """What to type for another tool's setting `given`, and whether that is a key of the recipe; None if unknown."""
    name, text = given.lower().replace("-", "_"), _text(value)
    if (choice := fitting(name, text, root)) is not None:
        return choice, True
    if (key := meant(name, root)) is not None:
        if "=" in key:
            return key, True
        if key in root.model_fields and sections(root.model_fields[key].annotation):
            return f"{key}={text if text.startswith('{') else '{…}'}", True
        return f"{key}={translated(text) or text or 'true'}", True
    option = habits.OPTIONS.get(name) if "model" in root.model_fields else None  # other documents have no options
    return (option.replace("{}", text or "…"), False) if option else None


def translated(value: Any) -> str | None:
    """What other tools' `value` is called here; None if it is not known."""
    return habits.VALUES.get(_text(value).lower())


def fitting(key: str, value: Any, root: type[BaseModel]) -> str | None:
    """`key.choice=value` for a section of which `value` is a choice, such as model.name=resnet8; None for others."""
    for section in sections(root.model_fields[key].annotation) if key in root.model_fields else []:
        for choice in {"name", "method", "decay"} & section.model_fields.keys():
            known = get_args(section.model_fields[choice].annotation)
            for text in (_text(value), translated(value)):
                if text in known:
                    return f"{key}.{choice}={text}"
    return None


def unknown_key(
    path: Sequence[str], section: type[BaseModel], kinds: Sequence[Any], root: type[BaseModel], value: Any = None
) -> str:
    """What is wrong with an unknown key of `section`; `kinds` are those of which it is one, if there are several."""
    leaf = path[-1]
    others = [kind for kind in kinds if leaf in kind.model_fields]
    if others:
        choice = choice_of(others)
        values = [f"{path[0]}.{choice}={value}" for value in by_value(choice, others)]
        return f"unknown key; it needs {' or '.join(values[:3])}"
    other = meant(leaf, root) if leaf != "name" else None  # many sections have a name
    if other and other.split(".") != list(path):
        return f"unknown key; did you mean {other if '=' in other else repr(other)}?"
    if leaf in _OF_A_SCRIPT:
        return "unknown key; the class in your script has it (docs/own-model.md)"
    option = typed(leaf, value, root) if len(path) == 1 and not isinstance(value, dict | list) else None
    if option:
        return f"unknown key; expected the option {option[0]}"
    known = sorted(section.model_fields)
    return f"unknown key{nearest(leaf, known) or '; known keys: ' + ', '.join(known)}"


def choice_of(kinds: Sequence[Any]) -> str:
    """The key that chooses one of these kinds of section."""
    return next(key for key in ("name", "method") if key in kinds[0].model_fields)


def as_overrides(words: Sequence[str], options: Collection[str], root: type[BaseModel]) -> str | None:
    """The message for a command line with options that the command does not have; None if nothing is known of them.

    `options` are those that the command has, `root` is the recipe's class.
    """
    keys: dict[str, str] = {}
    lines: list[str] = []
    unknown: list[str] = []
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--?[A-Za-z][\w.-]*", name) or name in options:
            continue
        following = words[number + 1] if number + 1 < len(words) and not equals else value
        following = "" if following[:1] == "-" or "=" in following else following
        override = typed(name.lstrip("-"), following or None, root)
        if override is None:
            near = nearest(name, options) or nearest(name.lstrip("-").replace("-", "_"), _keys(root))
            (lines if near else unknown).append(f"{name}: no such option{near}")
        elif override[1]:
            keys[name] = override[0]
        else:
            lacking = [word for word in override[0].split() if word.startswith("-") and word not in options]
            instead = f"this command has no {lacking[0]}" if lacking else f"expected the option {override[0]}"
            if lacking == ["-np"]:  # a recipe's script
                instead = "horovodrun -np N starts more ranks"
            lines.append(f"{name}: no such option; {instead}")
    if keys:
        how = "keys of the recipe are given as key=value, without dashes"
        lines.insert(0, f"{', '.join(keys)}: {how}; expected {' '.join(keys.values())}")
    return "\n".join([*lines, *unknown]) if lines else None


def joined(texts: Sequence[str], root: type[BaseModel]) -> tuple[list[str], list[str]]:
    """The texts that are `key=value`, and a fault for each that is not: with what may have been meant by it."""
    left, good, faults = list(texts), [], []
    while left:
        text = left.pop(0)
        key, equals, value = text.partition("=")
        if equals and value.count("{") > value.count("}") and any("}" in word for word in left):
            end = next(number for number, word in enumerate(left) if "}" in word) + 1
            quoted = " ".join([text, *left[:end]])
            faults.append(
                f"override {brief(text)}: it has spaces, so quote it for the shell: {shlex.quote(quoted):.200}"
            )
            del left[:end]
            continue
        if equals and key.strip() and value.strip():
            good.append(text)
            continue
        # `epochs 3`, `epochs = 3`, `epochs= 3`, `epochs =3`
        name, rest = (key.lstrip("-"), left[:]) if key else ("", [])
        if name and not equals and rest and rest[0].startswith("="):
            rest[0] = rest[0][1:]
            rest = rest if rest[0] else rest[1:]
        if rest and "=" not in rest[0] and (option := typed(name, rest[0], root)):
            taken = len(left) - len(rest) + 1
            words = brief(" ".join([text, *left[:taken]]))
            faults.append(f"override {words}: a change is one word, key=value; {_expected(option)}")
            del left[:taken]
            continue
        told = "expected a value, or null for none; is a variable of the shell not set?"
        faults.append(f"override {brief(text)}: {told if equals and key.strip() else _of_a_word(text, root)}")
    return good, faults


def _expected(option: tuple[str, bool]) -> str:
    return f"expected {option[0]}" if option[1] else f"expected the option {option[0]}"


def _of_a_word(text: str, root: type[BaseModel]) -> str:
    """What a word without `=` may mean."""
    name, _, value = text.partition(":")
    if value and (option := typed(name, value.strip(), root)):
        return f"expected key=value; {_expected(option)}"
    if text in FRAMEWORKS:
        return f"expected key=value, or the option --framework {text}"
    if text.isdecimal():
        return f"expected key=value, or an option such as -np {text}"
    if Path(text).suffix in (".yaml", ".yml"):
        return "expected key=value; the recipe is the first word, and there is one only"
    if os.path.isdir(text):  # noqa: PTH112 - a word may be no path at all
        return f"expected key=value, such as data.name=imagefolder data.path={shlex.quote(text)}"
    return "expected key=value, such as epochs=2 or optimizer.momentum=0.8"


def _text(value: Any) -> str:
    """A value as it is typed."""
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value).strip()
    return text if text.isprintable() and len(text) <= 200 else "…"
