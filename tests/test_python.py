"""hvdkit's commands as functions: `hvdkit.train(...)` and the others."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import hvdkit
from hvdkit.commands.fields import texts
from hvdkit.commands.loading import loaded
from hvdkit.commands.memory import MemoryRequest
from hvdkit.recipe import schema
from hvdkit.results import profile as profiles
from hvdkit.results.compare import read_comparison
from hvdkit.results.debug import DebugLog
from hvdkit.results.diff import Diff
from hvdkit.results.json_files import Result
from hvdkit.results.parity import read_parity
from hvdkit.results.train import read_result
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.sweep import Sweep
from tests import hygiene, simulating
from tests.conftest import ROOT, committed_parity, run

pytestmark = pytest.mark.long

RECIPE = "resnet20-digits"
COMPARISON = ROOT / "tests" / "data" / "comparison"


def load(recipe: Any, overrides: Any) -> schema.Recipe:
    return loaded(MemoryRequest.of({"recipe": recipe, "overrides": overrides}))


@pytest.mark.check
def test_importing_hvdkit_loads_nothing_until_a_function_is_used() -> None:
    code = "import sys, hvdkit; print(*(name for name in sys.modules if name.startswith('hvdkit')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=hygiene.patience(60)
    )
    assert done.stdout.split() == ["hvdkit"]


@pytest.mark.check
def test_type_checkers_see_what_there_is() -> None:
    stub = ast.parse((ROOT / "hvdkit" / "__init__.pyi").read_text())
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    named |= {node.name for node in stub.body if isinstance(node, ast.FunctionDef)} - {"_function"}
    assert named == {*hvdkit._LAZY, *hvdkit._COMMANDS} <= set(dir(hvdkit))  # type: ignore[attr-defined]
    assert all(callable(getattr(hvdkit, name)) for name in named)
    with pytest.raises(AttributeError, match="module 'hvdkit' has no attribute 'trian'"):
        hvdkit.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.check
def test_settings_are_a_dictionary_or_words_and_the_recipe_may_be_its_content() -> None:
    given = {"epochs": np.int64(2), "optimizer.learning_rate": 1e-5, "model.weights": Path("é.safetensors")}
    assert texts("overrides", given) == [
        "epochs=2", "optimizer.learning_rate=1e-05", 'model.weights="é.safetensors"'
    ]  # fmt: skip
    found = load(RECIPE, given)
    assert found == load(RECIPE, ["epochs=2", "optimizer.learning_rate=1e-5", "model.weights=é.safetensors"])
    content = found.model_dump()
    assert load(content, {"seed": 7}) == found.model_copy(update={"seed": 7}) and content["seed"] == 1
    with pytest.raises(hvdkit.RequestError, match=r"^overrides: epochs: expected a number, text, list .*got set"):
        load(RECIPE, {"epochs": {2}})
    with pytest.raises(hvdkit.RequestError, match=r"^recipe: data: expected .*"):
        load({**content, "data": 3}, None)


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("train", {"recipe": "resnet21"}, "unknown recipe 'resnet21'"),
        ("train", {"recipe": RECIPE, "np": "two"}, "np: expected a whole number, got 'two'"),
        (
            "train",
            {"recipe": RECIPE, "np": True, "overwrite": 1},
            "overwrite: expected True or False, got 1\nnp: .*, got True",
        ),
        ("train", {"recipe": 3}, "recipe: expected a recipe's name, file or content, got 3"),
        ("compare", {"recipe": RECIPE, "parity": False}, "parity: expected a path, got False"),
        ("compare", {"recipe": RECIPE, "np": [1, "2"]}, "np: expected a whole number, or a list of them, got"),
        ("compare", {"recipe": RECIPE, "rival": ["plain", 2]}, "rival: expected a text, or a list of texts, got"),
        (
            "predict_images",
            {"checkpoint": "nowhere", "images": "a.png", "framework": ["mxnet"]},
            "framework: expected a text",
        ),
        ("predict_images", {"checkpoint": "nowhere", "images": ["a.png"]}, "nowhere"),
        ("bench", {"collective": "allsum"}, "allsum: expected allreduce"),
        ("bench", {"collective": "allreduce", "seconds": "2"}, "seconds: expected a number, got '2'"),
        ("predict", {"profile": 3, "cluster": "x.yaml", "ranks": 8}, "profile: expected a profile, or its file, got 3"),
        ("dry_run", {"function": print}, "dry_run: expected hvdkit's train, compare, parity or profile"),
        ("train", {"recipe": RECIPE, "hosts": ["a:1", "b:x"], "np": 2}, "b:x"),
        ("compare", {"recipe": RECIPE, "np": [1, 1]}, "-np 1: given 2 times"),
        ("compare", {"recipe": RECIPE, "framework": ["pytorch", "cafe"]}, "unknown framework 'cafe'"),
        ("report", {"folder": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_a_wrong_request_is_an_error_and_nothing_is_written(
    name: str, arguments: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hvdkit.RequestError, match=told):
        hvdkit.dry_run(*arguments.values()) if name == "dry_run" else getattr(hvdkit, name)(**arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.check
def test_a_key_of_the_recipe_as_an_argument_has_its_remedy_in_a_note() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'") as told:
        hvdkit.train(RECIPE, epochs=2)  # type: ignore[call-arg]
    assert told.value.__notes__ == ['keys of the recipe are given in a dictionary, such as overrides={"epochs": 2}']


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
    with pytest.raises(hvdkit.RequestError, match="expected pandas; install it with `pip install pandas`"):
        run.to_pandas()


@pytest.mark.check
def test_a_profile_is_predicted_and_advised_of_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(RECIPE, None).model_dump()
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
def test_every_result_is_a_table(tmp_path: Path) -> None:
    proof = read_parity(committed_parity(tmp_path))
    assert list(proof.to_pandas()["framework"]) == list(proof.frameworks)
    kinds = Result.__subclasses__()
    assert {Sweep, Diff, DebugLog, type(proof)} <= set(kinds) and len(kinds) >= 12, kinds
    assert all("records" in vars(kind) for kind in kinds), kinds


def snippets() -> str:
    """All Python of the page, one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S))


@pytest.mark.usefixtures("warm")
def test_the_snippets_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(snippets())
    done = run([sys.executable, "page.py"], 300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimizer.momentum: expected less than 1, got 2" in done.stdout
    assert "pytorch, 2 ranks: step 22/44, " in done.stderr, "progress without a terminal"
    assert (tmp_path / "runs" / "resnet8.safetensors").exists()
    assert len(list(tmp_path.glob("runs/*-compare-*/report.html"))) == 1


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotebookClient]:
    """A notebook's kernel, and the examples' notebook to execute in an empty folder."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    (tmp_path / "work").mkdir()
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "work")}}
    limits = {"timeout": int(hygiene.patience(300)), "startup_timeout": int(hygiene.patience(60))}
    client = NotebookClient(notebook, resources=resources, **limits)
    with client.setup_kernel():
        yield client


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
def test_the_notebook_runs(kernel: NotebookClient, tmp_path: Path) -> None:
    for place, cell in enumerate(kernel.nb.cells):
        kernel.execute_cell(cell, place)
    outputs = [output for cell in kernel.nb.cells for output in cell.get("outputs", ())]
    said = [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]
    assert not [each for each in said if not each.get("text", "").startswith("noisy:")]
    bars, *_ = (output["data"] for output in outputs if output["output_type"] == "display_data")
    assert re.match(r"pytorch, 2 ranks .*66/66.* images/s, loss", bars["text/plain"]), "as at the end"
    assert "<pre" in bars["text/html"]
    tables = [output["data"]["text/html"] for output in outputs if output["output_type"] == "execute_result"
              and "text/html" in output["data"]]  # fmt: skip
    names = ("largest_batch", "chosen", "val_accuracy", "waiting", "efficiency")
    assert len(tables) == len(names) and all(map(str.__contains__, tables, names))
    assert (tmp_path / "work" / "runs" / "digits" / "report.html").exists()


def test_interrupting_a_cell_ends_all_ranks(kernel: NotebookClient, tmp_path: Path) -> None:
    changes = '{"epochs": 1000, "log_every": 1, "model.name": "resnet8"}'
    long = f'import hvdkit\nhvdkit.train("resnet20-digits", {changes}, np=2, out="long")'
    kernel.nb.cells = [nbformat.v4.new_code_cell(source) for source in (long, "print(6 * 7)")]
    metrics = tmp_path / "work" / "long" / "metrics.jsonl"

    def interrupt() -> None:
        deadline = time.monotonic() + hygiene.patience(60)
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        asyncio.run(kernel.km.interrupt_kernel())

    with ThreadPoolExecutor() as pool:
        pool.submit(interrupt)
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            kernel.execute_cell(kernel.nb.cells[0], 0)
    ends = json.loads((metrics.parent / "logs" / "exits.json").read_text())
    assert len(ends) == 2 and not [end for end in ends if Path("/proc", str(end["pid"])).exists()]
    kernel.execute_cell(kernel.nb.cells[1], 1)
    assert kernel.nb.cells[1]["outputs"][0]["text"] == "42\n", "the kernel goes on"


WITHIN = """
import asyncio, signal, hvdkit

async def main():
    changes = {"steps": 4, "model.name": "resnet8", "checkpoint": None}
    before = signal.getsignal(signal.SIGINT)
    apart, _ = await asyncio.gather(
        asyncio.to_thread(hvdkit.train, "resnet20-digits", changes, framework="mxnet", np=2), asyncio.sleep(0.1)
    )
    here = hvdkit.train("resnet20-digits", changes, framework="mxnet", np=2)
    assert signal.getsignal(signal.SIGINT) is before
    print(apart.steps, here.steps, apart.final_weights_sha256 == here.final_weights_sha256)

asyncio.run(main())
"""


@pytest.mark.usefixtures("warm")
def test_training_in_another_thread_and_inside_a_loop(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", WITHIN], 120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "4 4 True\n"), done.stderr
