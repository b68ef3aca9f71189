"""What a user may have meant by a key or an option that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from hvdkit.errors import nearest
from hvdkit.recipe.data import by_value

# Names that other tools have for a recipe's keys.
_ELSEWHERE = {
    "lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "workers": "data.workers", "arch": "model.name",
    "bs": "batch_size", "batch": "batch_size", "data": "data.path", "dataset": "data.name", "amp": "precision",
    "max_steps": "steps", "num_epochs": "epochs",
}  # fmt: skip


# What a recipe does not say of a model of the user's own.
_OF_A_SCRIPT = {"best", "metrics", "samples", "unit"}


def sections(annotation: Any) -> list[Any]:
    """The sections, pydantic models, that a key of this type can hold."""
    return [each for each in get_args(annotation) or [annotation] if hasattr(each, "model_fields")]


def _keys(root: type[BaseModel]) -> Iterator[str]:
    """All keys of a document, those of sections with a dot."""
    for name, field in root.model_fields.items():
        yield name
        for section in sections(field.annotation):
            yield from (f"{name}.{inner}" for inner in section.model_fields)


def meant(given: str, root: type[BaseModel]) -> str | None:
    """The key that `given` names in full, by its last part or by another tool's name; None if there is not just one."""
    keys = dict.fromkeys(_keys(root))
    if given in keys and "." in given:
        return given
    other = _ELSEWHERE.get(given)
    if other in keys:
        return other
    if given in keys:
        return given
    ends = [key for key in keys if key.rpartition(".")[2] == given]
    return ends[0] if len(ends) == 1 else None


def unknown_key(path: Sequence[str], section: type[BaseModel], kinds: Sequence[Any], root: type[BaseModel]) -> str:
    """What is wrong with an unknown key of `section`; `kinds` are those of which it is one, if there are several."""
    leaf = path[-1]
    others = [kind for kind in kinds if leaf in kind.model_fields]
    if others:
        choice = choice_of(others)
        values = [f"{path[0]}.{choice}={value}" for value in by_value(choice, others)]
        return f"unknown key; it needs {' or '.join(values[:3])}"
    other = meant(leaf, root)
    if other and other.split(".") != list(path):
        return f"unknown key; did you mean {other!r}?"
    if leaf in _OF_A_SCRIPT:
        return "unknown key; the class in your script has it (docs/own-model.md)"
    known = sorted(section.model_fields)
    return f"unknown key{nearest(leaf, known) or '; known keys: ' + ', '.join(known)}"


def choice_of(kinds: Sequence[Any]) -> str:
    """The key that chooses one of these kinds of section."""
    return next(key for key in ("name", "method") if key in kinds[0].model_fields)


def as_overrides(words: Sequence[str], options: Collection[str], root: type[BaseModel]) -> str | None:
    """The message for a command line that gives keys of a recipe as options; None if it gives none.

    `options` are those that the command has, `root` is the recipe's class.
    """
    names, wanted = [], []
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        key = meant(name[2:].replace("-", "_"), root) if name.startswith("--") and name not in options else None
        if key is None:
            continue
        behind = words[number + 1] if number + 1 < len(words) and not equals else value
        names.append(name)
        wanted.append(f"{key}={'true' if not behind or behind.startswith('--') else behind}")
    if not names:
        return None
    return f"{', '.join(names)}: keys of the recipe are given as key=value, without dashes; expected {' '.join(wanted)}"
