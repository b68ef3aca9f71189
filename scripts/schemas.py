"""Write the JSON Schemas by which editors complete and check recipes and cluster files, and docs/reference/.

`python -m scripts.schemas` writes recipes/recipe.schema.json and hvdkit/simulator/clusters/cluster.schema.json from the
classes that read these files; run it after a change of a key. tests/test_schemas.py compares.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hvdkit.recipe import registry
from hvdkit.recipe.communication import METHODS
from hvdkit.recipe.schema import Recipe
from hvdkit.simulator import cluster
from hvdkit.simulator.cluster import Cluster
from scripts import examples, keys, reference, stub

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS: dict[Path, tuple[type[BaseModel], str]] = {
    ROOT / "recipes" / registry.SCHEMA: (Recipe, "A recipe of hvdkit"),
    ROOT / "hvdkit" / "simulator" / "clusters" / cluster.SCHEMA: (Cluster, "A cluster file of hvdkit"),
}
# A text that stands for a section with its defaults.
SHORT: dict[str, list[str]] = {"compression": list(METHODS), "outer": ["none", "nesterov"]}
OPTIONAL = {"sgd"}  # what a section without the key that chooses its kind is


def schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The schema of a file. Editors know draft 7 best, and nothing of what newer ones have is used."""
    made = model.model_json_schema()
    _clean(made, made["$defs"])
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made, "title": title}


def _clean(part: Any, definitions: dict[str, Any]) -> None:
    """Leave out what pydantic generates of names alone, and add what its validators accept or require."""
    if isinstance(part, list):
        for each in part:
            _clean(each, definitions)
    if not isinstance(part, dict):
        return
    if isinstance(part.get("title"), str):
        del part["title"]
    if isinstance(part.get("description"), str):
        part["description"] = " ".join(inspect.cleandoc(part["description"]).split())
    for name, section in part.get("properties", {}).items():
        _choose(section, SHORT.get(name, []), definitions)
    for each in part.values():
        _clean(each, definitions)


def _choose(section: dict[str, Any], short: list[str], definitions: dict[str, Any]) -> None:
    """Say of a section of several kinds which one is meant, so that a validator names what is wrong in it.

    Of `oneOf` it would only say that none fits. `short` are texts that stand for the section.
    """
    parts = section.get("oneOf") or section.get("anyOf") or []
    kinds = [part["$ref"] for part in parts if "$ref" in part]
    if not kinds:
        _merge(section)
        return
    for word in ("oneOf", "anyOf", "discriminator"):
        section.pop(word, None)
    is_section: dict[str, Any] = {"type": "object"}
    rules: list[dict[str, Any]] = [{"if": is_section, "then": {"$ref": kinds[0]}}]
    if len(kinds) > 1:
        sections = {kind: definitions[kind.rpartition("/")[2]] for kind in kinds}
        key = next(name for name in ("name", "method") if name in sections[kinds[0]]["properties"])
        values = {kind: _values(each["properties"][key]) for kind, each in sections.items()}
        known = [value for each in values.values() for value in each]
        rules = [{"if": is_section, "then": {"properties": {key: {"enum": known}}}}]
        if OPTIONAL.isdisjoint(known):
            rules[0]["then"]["required"] = [key]
        for kind, each in sections.items():
            chosen: dict[str, Any] = {"properties": {key: {"enum": values[kind]}}}
            if OPTIONAL.isdisjoint(values[kind]):
                chosen["required"] = [key]
                each["required"] = [key, *(name for name in each.get("required", []) if name != key)]
            rules.append({"if": is_section | chosen, "then": {"$ref": kind}})
    nothing = [part["type"] for part in parts if part.get("type") == "null"]
    section |= rules.pop(0) | ({"allOf": rules} if rules else {})
    if short:
        section |= {"else": {"enum": [*short, *([None] if nothing else [])]}, "examples": short}  # editors offer these
    else:
        section["type"] = ["object", *nothing]


def _merge(section: dict[str, Any]) -> None:
    """Say of a number that may also be a word or null what it may be, without `anyOf`."""
    parts = section.pop("anyOf", [])
    words = [part["const"] for part in parts if "const" in part]
    for part in parts:
        section |= {key: value for key, value in part.items() if key not in ("type", "const")}
    if parts:
        section["type"] = [part["type"] for part in parts]
    if words:
        section |= {"if": {"type": "string"}, "then": {"enum": words}}


def _values(choice: dict[str, Any]) -> list[str]:
    """The values that a key which chooses a kind can have."""
    return choice.get("enum") or [choice["const"]]


def text(model: type[BaseModel], title: str) -> str:
    """The file's content."""
    return json.dumps(schema(model, title), indent=2, ensure_ascii=False) + "\n"


# What is written, and what it is made by; examples/slurm/ too.
FILES: dict[Path, Callable[[], str]] = {
    **{path: partial(text, *kind) for path, kind in SCHEMAS.items()},
    **reference.PAGES,
    keys.PAGE: keys.page,
    stub.FILE: stub.text,
}


def main() -> None:
    """Write all files."""
    for path, made in ({path: make() for path, make in FILES.items()} | examples.jobs()).items():
        path.write_text(made, encoding="utf-8")
        print(path.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
