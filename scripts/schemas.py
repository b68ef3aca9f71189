"""Write the JSON Schemas by which editors complete and check recipes and cluster files.

`python scripts/schemas.py` writes recipes/recipe.schema.json and hvdkit/simulator/clusters/cluster.schema.json from the
classes that read these files; run it after a change of a key. tests/test_schemas.py compares.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hvdkit.recipe import registry
from hvdkit.recipe.communication import METHODS
from hvdkit.recipe.schema import Recipe
from hvdkit.simulator import cluster
from hvdkit.simulator.cluster import Cluster

ROOT = Path(__file__).resolve().parent.parent
FILES: dict[Path, tuple[type[BaseModel], str]] = {
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
    if kinds := part.pop("discriminator", None):
        for value, place in kinds["mapping"].items():
            kind, key = definitions[place.rpartition("/")[2]], kinds["propertyName"]
            if value not in OPTIONAL and key not in kind.get("required", []):
                kind["required"] = [key, *kind.get("required", [])]
    for name, short in SHORT.items():
        if name in part.get("properties", {}):
            section = part["properties"][name]
            union = "oneOf" if "oneOf" in section else "anyOf"
            section[union].append({"enum": short})
    for each in part.values():
        _clean(each, definitions)


def text(model: type[BaseModel], title: str) -> str:
    """The file's content."""
    return json.dumps(schema(model, title), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write both files."""
    for path, (model, title) in FILES.items():
        path.write_text(text(model, title), encoding="utf-8")
        print(path.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
