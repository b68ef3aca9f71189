"""Plain words of YAML: by the core schema of YAML 1.2, and as they are written where a text is expected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdkit.errors import RequestError
from hvdkit.recipe import schema, yaml_files
from hvdkit.recipe.schema import Recipe
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.settings import Settings
from tests.inside import call

pytestmark = pytest.mark.check

GOOD = "name: a\nmodel: {name: resnet20}\ndata: {name: digits}\noptimizer: {learning_rate: 0.1}\n"
# yaml.org/spec/1.2.2, section 10.3.2
CORE: list[tuple[str, Any]] = [
    ("null", None), ("Null", None), ("NULL", None), ("~", None), ("", None),
    ("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False), ("FALSE", False),
    ("0", 0), ("010", 10), ("08", 8), ("-010", -10), ("+12", 12), ("0o17", 15), ("0x1F", 31), ("0xff", 255),
    ("1e3", 1000.0), ("1.", 1.0), (".5", 0.5), ("+.5", 0.5), ("-0.0", 0.0), ("12e03", 12000.0), ("-2E+05", -200000.0),
    ("08.5", 8.5), (".inf", math.inf), ("-.Inf", -math.inf), ("+.INF", math.inf),
]  # fmt: skip
# What YAML 1.1 reads as numbers, booleans, dates, a merge or a default; and what resembles a number.
TEXTS = [
    "yes", "No", "on", "OFF", "y", "n", "tRUE", "nULL", "1_000", "0b11", "0o8", "0x", "-0x1F", "1:30", "190:20:30.15",
    "2024-01-01", "2024-01-01T10:00:00Z", "=", ".", "+", "1e", ".e3", "inf", "nan", "-.nan", "\u0663",
]  # fmt: skip


@pytest.mark.parametrize(("word", "value"), CORE)
def test_a_word_is_read_by_the_core_schema(word: str, value: Any) -> None:
    found = yaml_files.parse(f"a: {word}", "here")["a"]
    assert found == value and type(found) is type(value)


def test_all_other_words_are_texts() -> None:
    assert yaml_files.parse(f"[{', '.join(TEXTS)}]", "here") == TEXTS
    assert all(math.isnan(value) for value in yaml_files.parse("[.nan, .NaN, .NAN]", "here"))


@pytest.mark.parametrize("word", [word for word, value in CORE if value is not None] + TEXTS + ["null", "~", "<<", "a"])
def test_what_is_written_is_read_alike_by_both_versions(word: str) -> None:
    """`yaml.safe_load` is a reader of YAML 1.1; `y` and `n`, which it takes for texts, are booleans there."""
    document = {"text": word, "options": {word: [word, 10, 1e-5, True, None]}}
    text = yaml_files.dump(document)
    assert yaml_files.parse(text, "here") == yaml.safe_load(text) == document
    if word in ("y", "n", "1e3", "08", "0o17"):
        assert f"text: '{word}'" in text


def test_the_keys_that_hold_texts_are_found_by_their_types() -> None:
    assert yaml_files.text_keys(Recipe) >= {
        "name", "model.weights", "model.script", "data.path", "data.tokens", "data.module",
    }  # fmt: skip
    assert not yaml_files.text_keys(Recipe) & {"device", "seed", "compression", "model.options", "data.size"}
    assert {"name", "currency", "device.name", "levels.name"} <= yaml_files.text_keys(Cluster)
    assert not {"link", "seed"} & yaml_files.text_keys(Settings)


@pytest.mark.parametrize("word", ["010", "1e3", "true", "2024-01-01"])
def test_where_a_text_is_expected_the_word_is_it(word: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    overrides = ["model.name=resnet8", f"model.weights={word}", f"data={{name: cifar10, path: {word}}}"]
    recipe = schema.load(path, overrides)
    assert (recipe.model.weights, recipe.data) == (word, schema.Cifar10(name="cifar10", path=word))
    path.write_text(f"name: a\nmodel: &m {{name: resnet20, weights: {word}}}\ndata: {{name: cifar10, path: {word}}}\n"
                    f"optimizer: {{learning_rate: 0.1}}\n")  # fmt: skip
    recipe = schema.load(path)
    assert recipe.model.weights == word
    path.write_text(schema.dump(recipe))
    assert schema.load(path) == recipe and yaml.safe_load(path.read_text())["model"]["weights"] == word


def test_null_is_null_everywhere(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    with pytest.raises(RequestError, match="name: expected a text, got nothing"):
        schema.load(tmp_path / "recipe.yaml", ["name=null"])


@pytest.mark.parametrize("word", ["a: b", "*x", "a #b", "-", "@home"])
def test_a_text_is_taken_as_it_is_typed(word: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    assert schema.load(tmp_path / "recipe.yaml", [f"model.weights={word}"]).model.weights == word
    assert schema.load(tmp_path / "recipe.yaml", [f"model.weights='{word}'"]).model.weights == word
    assert schema.load(tmp_path / "recipe.yaml", ["model.weights=~"]).model.weights is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("steps=1:30", "steps: expected a whole number, got '1:30'"),
        ("steps=1_000", "steps: expected a whole number, got '1_000'"),
        ("threads=1_6", "expected 'auto' or a whole number from 1 to 4096, got '1_6'"),
        ("tensorboard=yes", "tensorboard: expected true or false, got 'yes'"),
        ("seed=2024-01-01", "seed: expected a whole number, got '2024-01-01'"),
        ("loss={<<: {label_smoothing: 0.1}}", "YAML 1.2 merges no mappings by <<; write the keys out"),
    ],
)
def test_words_of_yaml_1_1_are_refused_for_what_they_were(change: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    with pytest.raises(RequestError) as refused:
        schema.load(tmp_path / "recipe.yaml", [change])
    (line,) = str(refused.value).splitlines()
    assert told in line


def test_an_array_has_the_numbers_that_seq_shows(tmp_path: Path) -> None:
    """`seq -w 8 10` prints 08, 09 and 10."""
    done = call(tmp_path, "submit", "resnet20-digits", "--array", "seed=008,009,010", "--out", "run")
    assert done.returncode == 0, done.stderr
    seeds = [schema.load(tmp_path / f"run-{task}.yaml").seed for task in range(3)]
    assert seeds == [8, 9, 10] and "seed=10" in (tmp_path / "run.sbatch").read_text()
    done = call(tmp_path, "submit", "resnet20-digits", "--array", "name=008,009,010", "--out", "named")
    assert done.returncode == 0, done.stderr
    assert [schema.load(tmp_path / f"named-{task}.yaml").name for task in range(3)] == ["008", "009", "010"]
