"""Keys of a recipe file that belong to a choice which an override changes, such as momentum with another optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from hvdkit.recipe.communication import METHODS
from hvdkit.recipe.data import AnyData, by_value
from hvdkit.recipe.optimizer import AdamW, Lamb, Lars, Sgd

# By section and choosing key: for each choice the keys that others do not all have, with their types.
_KEYS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    where: {value: {key: field.annotation for key, field in kind.model_fields.items()} for value, kind in kinds.items()}
    for where, kinds in {
        ("optimizer", "name"): by_value("name", (Sgd, AdamW, Lars, Lamb)),
        ("data", "name"): by_value("name", get_args(AnyData)),
        ("compression", "method"): METHODS,
    }.items()
} | {
    ("schedule", "decay"): {
        "constant": {}, "cosine": {}, "step": {"milestones": list, "gamma": float}, "polynomial": {"power": float},
    },
    ("schedule", "scale"): {"linear": {"base_batch_size": int}, "none": {}},
}  # fmt: skip
# To begin with. AdamW divides a gradient by its size, so a rate for SGD is too large for it: ResNet-20 got to 45 % of
# the digits in two epochs with 0.05, to 91 % with 0.001.
_ADAMW_RATE = 0.001
_DEFAULTS = {("optimizer", "name"): "sgd", ("schedule", "decay"): "cosine", ("schedule", "scale"): "linear"}


def leave_out(document: dict[str, Any], before: dict[str, Any], given: Collection[str]) -> list[str]:
    """Remove from the sections of `document` the keys that the new choice lacks or has with other values.

    `before` is the document without the overrides, `given` are the overridden keys, which stay and may be faults.
    Returns a line for each choice.
    """
    lines = []
    for (section, choice), keys in _KEYS.items():
        now, then = document.get(section), before.get(section)
        if f"{section}.{choice}" not in given or not isinstance(now, dict) or not isinstance(then, dict):
            continue
        new, old = now.get(choice), then.get(choice, _DEFAULTS.get((section, choice)))
        if not isinstance(new, str) or not isinstance(old, str) or not {new, old} <= keys.keys():
            continue
        differ = {key for key, kind in keys[old].items() if keys[new].get(key) != kind} - {choice}
        left = [key for key in then if key in differ and f"{section}.{key}" not in given]
        for key in left:
            del now[key]
        if left:
            lines.append(f"{section}.{choice}={new}: left out of the recipe: {', '.join(left)} (of {section} {old})")
        rate = now.get("learning_rate")
        changed = new == "adamw" != old and f"{section}.learning_rate" not in given
        if changed and isinstance(rate, int | float) and rate >= 10 * _ADAMW_RATE:
            usual = f"learning_rate is still the recipe's {rate} for {old}; for {new} begin with"
            lines.append(f"optimizer.name={new}: {usual} optimizer.learning_rate={_ADAMW_RATE}")
    return lines
