"""The JSON Schemas for editors: they are of the classes that read the files, and accept what these accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import jsonschema
import pytest
import yaml

from hvdkit.errors import RequestError
from hvdkit.recipe import schema, yaml_files
from hvdkit.results import profile as profiles
from hvdkit.simulator import cluster
from scripts import keys, schemas
from tests import simulating
from tests.conftest import ROOT, Hvdkit

pytestmark = pytest.mark.check

RECIPE, CLUSTER = (schemas.schema(*kind) for kind in schemas.SCHEMAS.values())
RECIPES = [*(ROOT / "recipes").glob("*.yaml"), ROOT / "examples" / "regression.yaml"]
CLUSTERS = [*(ROOT / "hvdkit" / "simulator" / "clusters").glob("*.yaml")]
BASE = {
    "name": "a", "model": {"name": "resnet8"}, "data": {"name": "digits"}, "optimizer": {"learning_rate": 0.1},
}  # fmt: skip


def faults(document: Any, of: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(of).iter_errors(document)]


def named_schema(path: Path) -> Path:
    """The schema that a file names in its first line."""
    name = path.read_text().splitlines()[0].removeprefix(yaml_files.SCHEMA_LINE)
    url = urlparse(name)
    return Path(unquote(url.path)) if url.scheme == "file" else path.parent / name


@pytest.mark.parametrize("path", schemas.FILES, ids=lambda path: path.name)
def test_the_files_are_up_to_date(path: Path) -> None:
    assert path.read_text() == schemas.FILES[path](), "run `python -m scripts.schemas`"


def test_the_cluster_files_of_the_page_are_whole_ones(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "cluster-files.md").read_text(), re.M | re.S)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(block)
        made = cluster.load(tmp_path / f"{number}.yaml")
        assert faults(yaml_files.parse(block, "page"), CLUSTER) == [] and made.largest


def test_the_page_of_keys_is_complete() -> None:
    """Each number of a file has a unit, and all keys but those that some files lack have an example."""
    plain = {"schema_version", "rank"}  # numbers without a unit
    for model, examples in ((keys.Cluster, keys._clusters()), (keys.Profile, keys._profiles())):
        for _, kind, values in keys.sections(model, list(examples)):
            assert values, kind
            for key, field in kind.model_fields.items():
                number = re.search(r"\b(int|float)\b", str(field.annotation))
                assert keys.unit(kind, key, field) or not number or key in plain, (kind, key)
                assert field.description, (kind, key)


@pytest.mark.parametrize("of", [RECIPE, CLUSTER], ids=["recipe", "cluster"])
def test_every_key_has_a_description_and_every_optional_one_its_default(of: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(of)
    for name, section in {"": of, **of["$defs"]}.items():
        for key, value in section.get("properties", {}).items():
            assert "const" in value or value.get("description"), f"{name}.{key}"
            # an empty list or mapping is the default of what pydantic makes for each file
            has_default = "default" in value or value.get("type") in ("array", "object")
            assert key in section.get("required", []) or has_default, f"{name}.{key}"


@pytest.mark.parametrize("path", [*RECIPES, *CLUSTERS], ids=lambda path: path.name)
def test_shipped_files_name_their_schema_and_follow_it(path: Path) -> None:
    found = named_schema(path).resolve()
    assert found == list(schemas.SCHEMAS)[path in CLUSTERS]
    assert not faults(yaml_files.load(path, ""), (RECIPE, CLUSTER)[path in CLUSTERS])


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "data" / "comparison" / "runs").glob("*/config.yaml")))
def test_resolved_recipes_follow_it(path: Path) -> None:
    assert not faults(yaml.safe_load(schema.dump(schema.load(path))), RECIPE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compression": "topk"},
        {"compression": {"method": "int8", "bucket_mib": 1}},
        {"optimizer": {"name": "lamb", "learning_rate": 1e-3, "beta1": 0.8}},
        {"optimizer": {"learning_rate": 0.1, "momentum": 0.8}},
        {"sync": {"every": 8, "outer": "nesterov"}},
        {"sync": {"every": 8, "outer": {"momentum": 0.5}}},
        {"checkpoint": None, "elastic": {"max_np": 4}, "threads": 3},
        {"compression": {"method": "topk"}, "sync": {"every": 8, "outer": None}, "steps": None},
        {"model": {"name": "own", "script": "mine.py"}, "data": {"name": "own"}},
        {"data": {"name": "imagefolder", "path": "/images", "workers": "auto"}},
    ],
    ids=str,
)
def test_what_a_recipe_may_say_it_accepts(changes: dict[str, Any]) -> None:
    document = BASE | changes
    schema.revise(dict(document), "recipe")
    assert not faults(document, RECIPE)


@pytest.mark.parametrize(
    ("changes", "place", "told"),
    [
        ({"epoch": 3}, "", "'epoch' was unexpected"),
        ({"epochs": 0}, "epochs", "0 is less than the minimum of 1"),
        ({"model": {"name": "own"}}, "model", "'script' is a required property"),
        ({"model": {"name": "resnet8", "clases": 3}}, "model", "'clases' was unexpected"),
        ({"optimizer": {"name": "adamw", "learning_rate": 0.1, "momentun": 0.9}}, "optimizer", "'momentun' was unexpe"),
        ({"optimizer": {"learning_rate": 0.1, "beta1": 0.8}}, "optimizer", "'beta1' was unexpected"),
        ({"optimizer": {"name": "adamw", "learning_rate": "fast"}}, "optimizer.learning_rate", "'fast' is not of type"),
        ({"optimizer": {"name": "adam", "learning_rate": 0.1}}, "optimizer.name", "'adam' is not one of ['sgd', 'ad"),
        ({"data": {"name": "imagefolder", "path": "/x", "size": 3}}, "data.size", "3 is less than the minimum of 8"),
        ({"data": {"name": "imagefolder", "path": "/x", "size": "big"}}, "data.size", "'big' is not one of ['auto']"),
        ({"data": {"name": "digits", "path": "/x"}}, "data", "'path' was unexpected"),
        ({"data": {"name": "imagefolder"}}, "data", "'path' is a required property"),
        ({"data": {}}, "data", "'name' is a required property"),
        ({"compression": "zip"}, "compression", "'zip' is not one of ['none', "),
        ({"compression": {"ratio": 0.1}}, "compression", "'method' is a required property"),
        ({"sync": {"every": 8, "outer": {"momentum": 3}}}, "sync.outer.momentum", "3 is greater than or equal to"),
        ({"threads": "many"}, "threads", "'many' is not one of ['auto']"),
    ],
    ids=str,
)
def test_what_a_recipe_may_not_say_it_refuses_by_its_key(changes: dict[str, Any], place: str, told: str) -> None:
    """One fault, at its place: not that a section fits none of its kinds."""
    (error,) = jsonschema.Draft7Validator(RECIPE).iter_errors(BASE | changes)
    assert ".".join(map(str, error.absolute_path)) == place and told in error.message
    with pytest.raises(RequestError):
        schema.revise(dict(BASE | changes), "recipe")


def test_copies_and_written_files_name_a_schema_that_is_there(inside: Hvdkit, tmp_path: Path) -> None:
    recipes, clusters = schemas.SCHEMAS
    assert "resnet20-digits: ResNet-20 on the 1,797 handwritten digits that" in inside("recipes", "list").stdout
    assert inside("recipes", "copy", "resnet20-digits", "a folder").returncode == 0
    copied = tmp_path / "a folder" / "resnet20-digits.yaml"
    assert named_schema(copied) == recipes and schema.load(copied) == schema.load(recipes.parent / copied.name)
    assert inside("recipes", "copy", "keras", "a folder").returncode == 0
    script = (tmp_path / "a folder" / "keras" / "resnet.py").read_bytes()
    assert script == (recipes.parent / "keras" / "resnet.py").read_bytes()
    cluster.save(simulating.cluster(), tmp_path / "cluster.yaml")
    assert named_schema(tmp_path / "cluster.yaml") == clusters
    assert not faults(yaml_files.load(tmp_path / "cluster.yaml", ""), CLUSTER)
    assert cluster.load(tmp_path / "cluster.yaml") == simulating.cluster()
    changed = simulating.profile().model_copy(update={"settings": schema.load(copied).model_dump(mode="json")})
    profiles.save(changed, tmp_path / "profile.json")
    done = inside("advise", "profile.json", "--cluster", "starved-100mbit", "-n", 4, "--apply", "new.yaml")
    assert done.returncode == 0, done.stderr
    assert named_schema(tmp_path / "new.yaml") == recipes
    assert not faults(yaml_files.load(tmp_path / "new.yaml", ""), RECIPE)
