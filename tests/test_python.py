"""hvdkit's commands as functions: `hvdkit.train(...)` and the others."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulating
from conftest import ROOT

import hvdkit
from hvdkit import api
from hvdkit.cli import app, predict
from hvdkit.recipe import schema
from hvdkit.results import profile as profiles
from hvdkit.results.compare import read_comparison
from hvdkit.results.json_files import Result
from hvdkit.results.parity import read_parity
from hvdkit.results.train import read_result
from hvdkit.simulator import cluster as clusters

RECIPE = "resnet20-digits"
COMMANDS = ("train", "evaluate", "export", "compare", "parity", "profile")
COMPARISON = ROOT / "tests" / "data" / "comparison"


@pytest.mark.check
def test_importing_hvdkit_loads_nothing_until_a_function_is_used() -> None:
    code = "import sys, hvdkit; print(*(name for name in sys.modules if name.startswith('hvdkit')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["hvdkit"]


@pytest.mark.check
@pytest.mark.parametrize("name", [*COMMANDS, "predict", "advise"])
def test_a_function_has_the_options_of_its_command_and_their_defaults(name: str) -> None:
    command = getattr(predict if name in ("predict", "advise") else app, name)
    theirs = {
        "settings" if key == "set_" else key: None if each.default is each.empty else each.default
        for key, each in inspect.signature(command).parameters.items()
    }
    mine = {
        key: None if each.default is each.empty else each.default
        for key, each in inspect.signature(getattr(hvdkit, name)).parameters.items()
    }
    assert mine == theirs


@pytest.mark.check
def test_type_checkers_see_what_there_is() -> None:
    stub = ast.parse((ROOT / "hvdkit" / "__init__.pyi").read_text())
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    assert named == set(hvdkit._LAZY) and {*named, "report"} <= set(dir(hvdkit))  # type: ignore[attr-defined]
    assert all(callable(getattr(hvdkit, name)) for name in named)
    with pytest.raises(AttributeError, match="module 'hvdkit' has no attribute 'trian'"):
        hvdkit.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.check
def test_settings_are_a_dictionary_or_words_and_the_recipe_may_be_its_content() -> None:
    given = {"epochs": np.int64(2), "optimizer.learning_rate": 1e-5, "model.weights": Path("é.safetensors")}
    assert api._texts("overrides", given) == [
        "epochs=2", "optimizer.learning_rate=1e-05", 'model.weights="é.safetensors"'
    ]  # fmt: skip
    found = api._loaded(RECIPE, given)
    assert found == api._loaded(RECIPE, ["epochs=2", "optimizer.learning_rate=1e-5", "model.weights=é.safetensors"])
    content = found.model_dump()
    assert api._loaded(content, {"seed": 7}) == found.model_copy(update={"seed": 7}) and content["seed"] == 1
    with pytest.raises(hvdkit.RequestError, match=r"^overrides: epochs: expected a number, text, list .*got set"):
        api._loaded(RECIPE, {"epochs": {2}})
    with pytest.raises(hvdkit.RequestError, match=r"^recipe: data: expected .*"):
        api._loaded({**content, "data": 3}, None)


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("train", {"recipe": "resnet21"}, "unknown recipe 'resnet21'"),
        ("train", {"recipe": RECIPE, "np": "two"}, "np: expected a whole number, got 'two'"),
        ("train", {"recipe": RECIPE, "framework": "torch"}, "unknown framework 'torch'"),
        ("train", {"recipe": RECIPE, "resume": True}, "--resume: expected --out"),
        ("train", {"recipe": RECIPE, "hosts": ["a:1", "b:x"], "np": 2}, "b:x"),
        ("evaluate", {"checkpoint": "nowhere"}, "nowhere"),
        ("export", {"checkpoint": "nowhere", "out": "model.zip"}, r"model\.zip: expected a file that ends in"),
        ("compare", {"recipe": RECIPE, "np": [1, 1]}, "-np 1: given 2 times"),
        ("compare", {"recipe": RECIPE, "framework": ["pytorch", "cafe"]}, "unknown framework 'cafe'"),
        ("parity", {"recipe": RECIPE, "steps": 0}, "--steps 0: expected 1 or more"),
        ("profile", {"recipe": RECIPE, "steps": 0}, "--steps 0"),
        ("predict", {"profile": "nowhere.json", "cluster": "nowhere.yaml", "ranks": 8}, r"nowhere\.yaml"),
        ("advise", {"subject": "nowhere.json", "np": 2}, "-np: expected a recipe with it"),
        ("report", {"folder": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_a_wrong_request_is_an_error_and_nothing_is_written(
    name: str, arguments: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hvdkit.RequestError, match=told):
        getattr(hvdkit, name)(**arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.check
def test_results_know_their_folder_and_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = read_comparison(COMPARISON / "compare.json")
    frame = comparison.to_pandas()
    assert list(frame["framework"]) == [run.framework for run in comparison.runs]
    assert list(frame["images_per_second"]) == [run.images_per_second for run in comparison.runs]
    run = read_result(COMPARISON / "runs" / "keras-np1" / "result.json")
    assert run.folder == COMPARISON / "runs" / "keras-np1"
    frame = run.to_pandas()
    ends = frame[frame["ends_epoch"]]
    assert list(ends["step"]) == [44, 88, 132] and ends["val_accuracy"].iloc[-1] == run.val_accuracy
    assert run == type(run).model_validate(run.model_dump()), "wherever it lies"
    with pytest.raises(hvdkit.RequestError, match="TrainResult: expected a result that was read or written"):
        run.model_validate(run.model_dump()).to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hvdkit.RequestError, match=r"expected pandas; install it with `pip install 'hvdkit\[pandas\]'`"):
        run.to_pandas()


@pytest.mark.check
def test_a_profile_is_predicted_and_advised_of_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = api._loaded(RECIPE, None).model_dump()
    profiles.save(simulating.profile().model_copy(update={"settings": settings}), tmp_path / "profile.json")
    clusters.save(simulating.cluster(mbit_per_s=10.0, hosts=64), tmp_path / "slow.yaml")
    profile = profiles.load(tmp_path / "profile.json")
    parts = profile.to_pandas().set_index("part")
    assert parts["mean"].drop("step").sum() == pytest.approx(parts["mean"]["step"]) and parts["share"]["step"] == 1
    one = hvdkit.predict(profile, cluster="slow.yaml", ranks=[2, 4], settings={"batch_size": 64})
    assert one.settings == {"batch_size": 64} and list(one.to_pandas()["ranks"]) == [2, 4]
    assert (one.folder / "predict.json").read_text() == one.model_dump_json(indent=2) + "\n"
    two = hvdkit.predict("profile.json", cluster="slow.yaml", ranks=4, settings=["batch_size=64"])
    assert two.folder != one.folder, "two in one second"
    assert two.points == one.points[1:]
    advice = hvdkit.advise(profile, cluster="slow.yaml", ranks=4, price=2, apply="new.yaml")
    assert list(advice.to_pandas()["what"]) == [each.what for each in advice.suggestions]
    assert schema.load(tmp_path / "new.yaml").model.name == "resnet20"


@pytest.mark.check
def test_every_result_is_a_table() -> None:
    proof = read_parity(ROOT / "benchmarks" / "parity" / "resnet20-digits" / "parity.json")
    assert list(proof.to_pandas()["framework"]) == list(proof.frameworks)
    kinds = Result.__subclasses__()
    assert len(kinds) == 7 and all("rows" in vars(kind) for kind in kinds), kinds
