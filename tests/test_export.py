"""Exported files hold the checkpoint's model: others load them without hvdkit, and get the checkpoint's logits."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.weights import save_weights
from hvdkit.commands import evaluate, export
from hvdkit.launch.placement import Placement
from hvdkit.results.evaluate import read_evaluation
from hvdkit.runtimes.store import find
from hvdkit.tasks import resnet, resnet_onnx
from tests.conftest import ROOT, Hvdkit, rest_thorough, run
from tests.resuming import rewrite_record

pytestmark = pytest.mark.long

NAMES = [f"digit {n}" for n in range(10)]
MEAN, STD = [0.25, 0.5, 0.75], [0.5, 1.0, 0.25]
PREPROCESSING = {"class_names": NAMES, "size": 24, "resize": 28, "mean": MEAN, "std": STD, "channels": 3}
OLD_SCRIPT = "# copied by `hvdkit export` of another version\n"
# Code that finds no hvdkit, run in a process of its own, which then keeps the logits.
WITHOUT_HVDKIT = """
import sys
sys.modules["hvdkit"] = None
with open(sys.argv[1]) as file:
    exec(compile(file.read(), sys.argv[1], "exec"))
import numpy
numpy.save(sys.argv[2], numpy.asarray(logits.detach() if hasattr(logits, "detach") else logits))
"""


def rank(framework: str, *arguments: Path) -> dict[str, Any]:
    """What tests/export_rank.py finds in the framework's runtime; the file of its answer is the third argument."""
    runtime = find(framework)
    command = [str(runtime.python), str(ROOT / "tests" / "export_rank.py"), framework, *map(str, arguments)]
    done = run(command, 120, env=os.environ | runtime.environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(arguments[2].read_text())
    return found


def logits_without_hvdkit(framework: str | None, code: str, folder: Path) -> tuple[np.ndarray, str]:
    """The `logits` of code that runs in that folder, in the framework's runtime or this one; and what it prints."""
    (folder / "example.py").write_text(code)
    python = find(framework).python if framework else sys.executable
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run([str(python), "-c", WITHOUT_HVDKIT, "example.py", "logits.npy"], 120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "logits.npy"), done.stdout


def off(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape and found.dtype == np.float32
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def changed(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other keys in its checkpoint.json; `recipe` has keys of the recipe."""
    shutil.copytree(checkpoint, folder)
    record = json.loads((folder / snapshots.RECORD).read_text())
    rewrite_record(folder / snapshots.RECORD, recipe=record["recipe"] | changes.pop("recipe", {}), **changes)
    return folder


def blocks(language: str) -> list[str]:
    """The code blocks of the page on exporting."""
    page = (ROOT / "docs" / "reference" / "export.md").read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [code for kind, code in found if kind == language]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough("pytorch", "mxnet"))
def test_safetensors_hold_the_checkpoints_model_and_serve_as_weights(
    framework: str, checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    done = hvdkit("export", checkpoint_40, "--out", "net.safetensors")
    assert done.returncode == 0 and "written to net.safetensors" in done.stdout, done.stderr
    got, kept = load_file(tmp_path / "net.safetensors"), load_file(checkpoint_40 / "model.safetensors")
    assert got.keys() == kept.keys() and len(got) > 40
    for name, value in kept.items():
        assert got[name].dtype == value.dtype and np.array_equal(got[name], value), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.safetensors", "resnet.py"]
    done = hvdkit("evaluate", checkpoint_40, "--framework", framework, "--out", "e")
    assert done.returncode == 0, done.stderr
    expected = read_evaluation(tmp_path / "e" / "evaluate.json").correct
    found = rank(framework, tmp_path / "net.safetensors", checkpoint_40, tmp_path / "found.json")
    assert found["correct"] == expected > 60


@pytest.mark.usefixtures("warm")
def test_the_documented_commands_and_examples_give_the_checkpoints_logits(checkpoint_40: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "runs" / "long"
    changed(checkpoint_40, run_folder / "checkpoints" / "step-00000040", preprocessing=PREPROCESSING)
    (run_folder / "checkpoints" / "best").symlink_to("step-00000040")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hvdkit").write_text(f'#!/bin/sh\nexec {sys.executable} -m hvdkit "$@"\n')
    (tmp_path / "bin" / "hvdkit").chmod(0o755)
    [commands] = blocks("")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run(["bash", "-ec", commands], 240, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("runs/long/checkpoints/best: written to digits.") == 3

    pixels = np.random.default_rng(3).integers(0, 256, (28, 28, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "seven.png")
    np.save(tmp_path / "images.npy", ((pixels[None, 2:26, 2:26] / 255 - MEAN) / STD).astype(np.float32))
    there = (tmp_path / "digits.safetensors", checkpoint_40, tmp_path / "found.json", tmp_path / "images.npy")
    expected = np.array(rank("pytorch", *there)["logits"])
    picture, *examples = blocks("python")
    (tmp_path / "digit").mkdir()
    done = run([sys.executable, "-c", picture], 120, cwd=tmp_path / "digit")
    assert done.returncode == 0 and Image.open(tmp_path / "digit" / "seven.png").size == (32, 32), done.stderr
    assert len(examples) == 3
    for framework, code in zip(("pytorch", None, "keras"), examples, strict=True):
        logits, printed = logits_without_hvdkit(framework, code, tmp_path)
        assert off(logits, expected) < 1e-6, framework
        assert printed.splitlines()[-1] == f"digit {expected.argmax()}"


@pytest.fixture(scope="module")
def small_imagenet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, np.ndarray]]:
    """The files of a model with all that models for ImageNet have, but small; and its logits by ONNX Runtime."""
    folder = tmp_path_factory.mktemp("imagenet")
    whole = resnet.architecture("resnet50", 7)
    blocks = tuple(
        resnet._block(name, inputs, middle, stride, bottleneck=True)
        for name, inputs, middle, stride in (("layer1.0", 8, 4, 1), ("layer1.1", 16, 4, 1), ("layer2.0", 16, 8, 2))
    )
    table = replace(whole, name="small", stem=replace(whole.stem, outputs=8), blocks=blocks, features=32)
    state, random = table.initial_state(seed=5), np.random.default_rng(6)
    for name, value in state.items():
        if value.ndim == 1:
            state[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
    save_weights(state, folder / "small.safetensors", {"table": json.dumps(asdict(table))})
    (folder / "small.onnx").write_bytes(resnet_onnx.model(table, state, {}))
    shutil.copy(ROOT / "recipes" / "pytorch" / "resnet.py", folder)
    images = random.standard_normal((3, 3, 61, 46)).astype(np.float32)  # sizes that strides do not divide
    np.save(folder / "images.npy", images)
    [logits] = onnxruntime.InferenceSession(folder / "small.onnx").run(["logits"], {"images": images})
    yield folder, logits


BY_PYTORCH = """import numpy, torch
from resnet import load
logits = load('small.safetensors')(torch.from_numpy(numpy.load('images.npy')))"""
BY_KERAS = """import keras, numpy
images = numpy.load('images.npy').transpose(0, 2, 3, 1)
logits = keras.saving.load_model('small.keras').predict(images, verbose=0)"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "code"), [("pytorch", BY_PYTORCH), ("keras", BY_KERAS)])
def test_models_for_imagenet_are_the_same_as_in_onnx(
    framework: str, code: str, small_imagenet: tuple[Path, np.ndarray]
) -> None:
    folder, expected = small_imagenet
    if framework == "keras":
        runtime, script = find("keras"), ROOT / "recipes" / "keras" / "export.py"
        command = [str(runtime.python), str(script), "unused", "small.safetensors", "small.keras"]
        done = run(command, 120, cwd=folder, env=os.environ | runtime.environment | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
    assert off(logits_without_hvdkit(framework, code, folder)[0], expected) < 1e-6


def test_files_say_what_is_in_them(checkpoint_40: Path, inside: Hvdkit, tmp_path: Path) -> None:
    known = changed(checkpoint_40, tmp_path / "known", preprocessing=PREPROCESSING)
    unnamed = changed(checkpoint_40, tmp_path / "unnamed", preprocessing=PREPROCESSING | {"class_names": []})
    old = changed(checkpoint_40, tmp_path / "old", preprocessing=None)
    other = changed(checkpoint_40, tmp_path / "other", preprocessing=None, recipe={"seed": 99})
    found = {}
    for folder in (known, unnamed, old, other):
        for name in ("net.safetensors", "net.onnx"):
            assert inside("export", folder, "--out", name, "--overwrite").returncode == 0
        with safe_open(tmp_path / "net.safetensors", "np") as file:
            found[folder] = file.metadata()
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
        assert found[folder].items() >= session.get_modelmeta().custom_metadata_map.items()
    about = found[known]
    plain = {"architecture": "resnet8", "classes": "10", "layout": "NCHW", "dtype": "float32", "step": "40"}
    assert about.items() >= (plain | {"size": "24", "channels": "3", "format": "pt"}).items()
    assert [json.loads(about[key]) for key in ("class_names", "mean", "std")] == [NAMES, MEAN, STD]
    assert about["trained_with"].startswith("mxnet 1.9.1, hvdkit ")
    assert len(about["recipe_sha256"]) == 64 and about["hvdkit_version"]
    assert found[unnamed].keys() == about.keys() - {"class_names"}
    assert found[old].keys() == about.keys() - {"class_names", "mean", "std", "size", "resize"}
    assert found[other]["recipe_sha256"] != found[old]["recipe_sha256"] == about["recipe_sha256"]


@pytest.mark.usefixtures("warm")
def test_a_keras_archive_says_what_is_in_it(checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Whatever trained the model, on whatever device and in whatever precision: one process writes it, on a CPU."""
    recipe = {"elastic": {"min_np": 2, "max_np": 4}, "device": "gpu", "precision": "fp16", "tune": "none"}
    folder = changed(checkpoint_40, tmp_path / "known", recipe=recipe, preprocessing=PREPROCESSING)
    done = hvdkit("export", folder, "--out", "net.keras")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["known", "net.keras"]
    with zipfile.ZipFile(tmp_path / "net.keras") as archive:
        about = json.loads(archive.read("hvdkit.json"))
        config = archive.read("config.json").decode()
    assert about["class_names"] == NAMES and about["layout"] == "NHWC"
    assert about["dtype"] == "float32" and "mixed" not in config
    assert not re.search(r'"registered_name": "(?!Functional")|hvdkit|[Ll]ambda', config)
    names = [layer["name"] for layer in json.loads(config)["config"]["layers"]]
    assert len(names) > 20 and not any("." in name for name in names), "Keras on PyTorch takes no dots"


OWN, OTHER = {"model": {"name": "own", "script": "mine.py"}}, {"model": {"name": "resnet32", "classes": 10}}
# files that are there, keys of the checkpoint's recipe, options, what is said
REFUSED: list[tuple[dict[str, str], dict[str, Any], tuple[str, ...], str]] = [
    ({}, {}, ("net.h5",), "net.h5: expected a file that ends in .safetensors, .onnx or .keras"),
    ({"net.safetensors": "mine"}, {}, ("net.safetensors",), "the file exists; add --overwrite"),
    ({"net.keras/file": "mine"}, {}, ("net.keras",), "expected a file, got a folder"),
    ({}, {}, ("nowhere/net.keras",), "nowhere is no folder that can be written"),
    ({}, {}, ("checkpoint/model.safetensors", "--overwrite"), "it lies in the checkpoint"),
    ({"resnet.py": "print('mine')\n"}, {}, ("net.safetensors",), "resnet.py is another file; choose another folder"),
    ({"resnet.py": "print('mine')\n"}, {}, ("net.safetensors", "--overwrite"), "resnet.py is another file; choose"),
    ({"resnet.py": OLD_SCRIPT}, {}, ("net.safetensors",), "resnet.py is of another version; add --overwrite"),
    ({}, OWN, ("net.onnx",), "expected .safetensors, the only file for a model of your"),
    ({}, OWN, ("net.keras",), "expected .safetensors, the only file for a model of your"),
    ({"net.safetensors": "mine"}, OTHER, ("net.safetensors", "--overwrite"), "is missing"),
    ({"net.onnx": "mine"}, OTHER, ("net.onnx", "--overwrite"), "is missing"),
    ({"net.keras": "mine"}, OTHER, ("net.keras", "--overwrite"), "is missing"),
]


@pytest.mark.parametrize(("there", "keys", "options", "said"), REFUSED)
def test_wrong_requests_are_lines_and_change_nothing(
    there: dict[str, str],
    keys: dict[str, Any],
    options: tuple[str, ...],
    said: str,
    checkpoint_40: Path,
    inside: Hvdkit,
    tmp_path: Path,
) -> None:
    checkpoint = changed(checkpoint_40, tmp_path / "checkpoint", recipe=keys)
    for name, text in there.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    done = inside("export", checkpoint, "--out", *options)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert all((tmp_path / name).read_text() == text for name, text in there.items())


def test_what_is_missing_is_named(checkpoint_40: Path, inside: Hvdkit) -> None:
    done = inside("export", "nothing", "--out", "net.keras")
    assert done.returncode == 2 and "nothing: no such folder" in done.stderr
    with mock.patch.dict(sys.modules, {"onnx": None}):
        done = inside("export", checkpoint_40, "--out", "net.onnx")
    assert done.returncode == 2 and "-m pip install onnx`" in done.stderr, done.stderr


def test_hvdkits_own_files_are_replaced(checkpoint_40: Path, inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "resnet.py").write_text(OLD_SCRIPT)
    (tmp_path / "net.safetensors").write_text("mine")
    assert inside("export", checkpoint_40, "--out", "net.safetensors", "--overwrite").returncode == 0
    assert inside("export", checkpoint_40, "--out", "second.safetensors").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.safetensors", "resnet.py", "second.safetensors"]
    own = changed(checkpoint_40, tmp_path / "own", recipe=OWN)
    assert inside("export", own, "--out", "own.safetensors").returncode == 0
    with safe_open(tmp_path / "own.safetensors", "np") as file:
        assert file.metadata()["architecture"] == "own" and "table" not in file.metadata()


def test_an_archive_that_cannot_be_made_leaves_the_old_file(
    checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    (tmp_path / "net.keras").write_text("mine")
    (tmp_path / "keras.py").write_text("raise RuntimeError('no Keras today')\n")
    done = hvdkit("export", checkpoint_40, "--out", "net.keras", "--overwrite", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and "no Keras today" in done.stderr, done.stderr
    assert [path.read_text() for path in tmp_path.glob("*.keras")] == ["mine"]


def test_how_many_ranks_have_trained_does_not_matter(checkpoint_40: Path, tmp_path: Path) -> None:
    """Nor which shares they had: MXNet itself cannot shard parameters."""
    trained = {"elastic": {"min_np": 2, "max_np": 4}, "sharding": "parameters"}
    elastic = changed(checkpoint_40, tmp_path / "elastic", recipe=trained)
    assert export.plan(elastic, tmp_path / "net.keras", overwrite=False).plan
    assert evaluate.plan(elastic, [], "mxnet", Placement()).np == 1
