"""Files of weights that others write: dtypes, prefixes, shards, libraries' names; and what is refused by its name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit.checkpoint import snapshots, weights
from hvdkit.checkpoint.weights import Weights
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core.step_plan import Progress
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import GptModel
from hvdkit.tasks import gpt, resnet
from tests.conftest import Hvdkit, rest_thorough
from tests.test_checkpoint import whole

pytestmark = pytest.mark.check

State = dict[str, np.ndarray]
TABLE = resnet.architecture("resnet8", 10)
TINY = gpt.architecture(GptModel(name="gpt", layers=2, heads=2, width=8, context=4, vocabulary=5))


def drawn(table: resnet.ResNet | gpt.GPT = TABLE) -> State:
    """Values that a bfloat16 holds exactly."""
    random = np.random.default_rng(3)
    state = table.initial_state(1)
    return {name: (random.integers(-128, 128, value.shape) / 64).astype(np.float32) for name, value in state.items()}


Tensor = tuple[str, tuple[int, ...], bytes]  # dtype in safetensors' words, shape, content


def stored(value: np.ndarray, kind: str = "F32") -> Tensor:
    if kind == "BF16":
        return kind, value.shape, (value.view(np.uint32) >> 16).astype("u2").tobytes()
    dtypes = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I8": "i1", "BOOL": "?"}
    bare = {"F8_E4M3": 1, "C64": 8}
    return kind, value.shape, value.astype(dtypes[kind]).tobytes() if kind in dtypes else bytes(value.size * bare[kind])


def write(path: Path, state: Mapping[str, np.ndarray], kind: str = "F32", **more: Tensor) -> Path:
    """Write a safetensors file byte by byte: the length of the header, the header, and the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, (dtype, shape, data) in ({name: stored(value, kind) for name, value in state.items()} | more).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def read(path: Path, table: Any = TABLE, new_head: bool = False) -> Weights:
    shapes = {name: value.shape for name, value in table.initial_state(1).items()}
    return weights.read_fitting(path, shapes, new_head, table)


def refused(path: Path, table: Any = TABLE, new_head: bool = False) -> str:
    with pytest.raises(RequestError) as caught:
        read(path, table, new_head)
    assert all(line.startswith("model.weights: ") for line in str(caught.value).splitlines()[:1])
    return str(caught.value)


def same(found: Weights, state: State, table: Any = TABLE) -> bool:
    now = found.onto(table.initial_state(1))
    return now.keys() == state.keys() and all(
        now[name].dtype == np.float32 and now[name].tobytes() == state[name].tobytes() for name in state
    )


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_floating_dtypes_are_widened_exactly(kind: str, tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.safetensors", drawn(), kind))
    assert same(found, drawn()) and not found.notes


def test_all_values_of_bfloat16_and_float16_are_kept(tmp_path: Path) -> None:
    """Among them infinities, subnormal numbers, and all NaNs of bfloat16."""
    shape = TABLE.parameter_shapes()["layer3.0.conv2.weight"]
    bits = np.resize(np.arange(2**16, dtype=np.uint16), shape)
    name = "layer3.0.conv2.weight"
    for kind, wanted in (("BF16", (bits.astype(np.uint32) << 16).view(np.float32)), ("F16", bits.view(np.float16))):
        path = write(tmp_path / "a.safetensors", drawn(), **{name: (kind, shape, bits.tobytes())})
        found = read(path).onto(TABLE.initial_state(1))[name]
        np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_float64_is_rounded_with_a_line_and_kept_where_weights_are_float64(tmp_path: Path) -> None:
    state = {name: value + 1e-12 for name, value in drawn().items()}
    path = write(tmp_path / "a.safetensors", state, "F64")
    found = read(path)
    assert found.notes == [f"model.weights: {path}: {len(state)} tensors are float64 and are rounded to float32"]
    double = replace(TABLE, dtype="float64")
    assert not read(path, double).notes
    now = read(path, double).onto(double.initial_state(1))
    assert all((now[name] == state[name].astype(np.float64)).all() for name in state)


@pytest.mark.parametrize("kind", ["F8_E4M3", "I8", "C64", "BOOL"])
def test_other_dtypes_of_a_tensor_of_the_model_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    one = {"layer2.0.conv1.weight": stored(drawn()["layer2.0.conv1.weight"], kind)}
    told = refused(write(tmp_path / "a.safetensors", drawn(), **one))
    assert f"tensor layer2.0.conv1.weight is stored as {kind}; expected float32" in told


PREFIXES = ["module.", "model.", "_orig_mod.", "backbone.", "net.", "resnet.", "model.module.", "_orig_mod.module.",
            "module._orig_mod.", "student.encoder."]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_of_all_names_is_removed_and_said(prefix: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {f"{prefix}{name}": value for name, value in drawn().items()})
    found = read(path)
    assert same(found, drawn()) and all("removed from the names of its tensors" in line for line in found.notes)
    assert {word for line in found.notes for word in re.findall(r"'([^']*)'", line)} <= {"_orig_mod", prefix} | {
        prefix.replace("_orig_mod.", "")
    }
    model = write(tmp_path / "b.safetensors", {f"{prefix}{name}": value for name, value in drawn(TINY).items()})
    bare = {f"{prefix}{name.removeprefix('transformer.')}": value for name, value in drawn(TINY).items()}
    for each in (model, write(tmp_path / "c.safetensors", bare)):
        assert same(read(each, TINY), drawn(TINY), TINY)


def test_wrappers_within_names_are_removed(tmp_path: Path) -> None:
    """Of torch.compile, FSDP and recomputation around single blocks."""
    path = write(tmp_path / "a.safetensors", {
        re.sub(r"^(layer\d)\.0", r"_fsdp_wrapped_module.\1.0._checkpoint_wrapped_module._orig_mod", name): value
        for name, value in drawn().items()
    })  # fmt: skip
    found = read(path)
    assert same(found, drawn())
    assert found.notes == [
        f"model.weights: {path}: '_orig_mod' and '_fsdp_wrapped_module' and '_checkpoint_wrapped_module' is removed "
        "from the names of its tensors"
    ]


def test_what_lies_outside_the_prefix_is_left_out_and_said(tmp_path: Path) -> None:
    """As in a checkpoint of Lightning: metrics and a loss lie beside the model."""
    more = {"criterion.weight": stored(np.ones(3)), "model.bn1.num_batches_tracked": stored(np.ones(()), "I64")}
    path = write(tmp_path / "a.safetensors", {f"model.{name}": value for name, value in drawn().items()}, **more)
    found = read(path)
    assert same(found, drawn())
    assert found.notes[1:] == [f"model.weights: {path}: tensors without 'model.' are left out: criterion.weight"]
    inside = write(tmp_path / "b.safetensors", {f"model.{name}": value for name, value in drawn().items()},
                   **{"model.extra.weight": stored(np.ones(3))})  # fmt: skip
    assert "tensor extra.weight is unknown to this model" in refused(inside)


@pytest.mark.parametrize("prefixes", [("student.", "teacher."), ("", "ema.")])
def test_a_model_that_is_there_twice_is_refused(prefixes: tuple[str, str], tmp_path: Path) -> None:
    both = {f"{prefix}{name}": value for prefix in prefixes for name, value in drawn().items()}
    told = refused(write(tmp_path / "a.safetensors", both))
    assert "the model's tensors are there more than once" in told and repr(prefixes[1]) in told


def test_the_state_of_an_optimizer_is_left_out(tmp_path: Path) -> None:
    more = {f"optimizer.momentum.{name}": stored(value) for name, value in drawn().items() if "running" not in name}
    found = read(write(tmp_path / "a.safetensors", drawn(), **more))
    assert same(found, drawn()) and found.notes[0].endswith("the state of the optimizer is left out")


def sharded(folder: Path, state: State, count: int = 3) -> None:
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = list(state)
    for number, file in enumerate(files):
        write(folder / file, {name: state[name] for name in names[number::count]}, "BF16")
    where = {name: files[number % count] for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json", "model-00002-of-00003.safetensors"])
def test_shards_are_read_together(given: str, tmp_path: Path) -> None:
    sharded(tmp_path, {f"module.{name}": value for name, value in drawn().items()})
    assert same(read(tmp_path / given), drawn())
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    assert f"{tmp_path}/model-00003-of-00003.safetensors: no such file; it is a shard" in refused(tmp_path / given)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '"' + "[" * 9])
def test_an_index_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "no index of shards; expected a JSON file with a weight_map" in refused(tmp_path)


def test_folders(tmp_path: Path) -> None:
    assert f"{tmp_path}: no weights are in this folder" in refused(tmp_path)
    write(tmp_path / "one.safetensors", drawn())
    assert same(read(tmp_path), drawn())
    write(tmp_path / "two.safetensors", drawn())
    assert "expected one file of weights, found one.safetensors, two.safetensors; name one" in refused(tmp_path)
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", schema.Checkpointing(), "accuracy")
    record = snapshots.CheckpointRecord(
        progress=Progress(step=3), np=1, framework="", framework_version="", hvdkit_version="", recipe={}
    )
    checkpoints.write(*whole(record, drawn()))
    checkpoints.wait()
    assert same(read(run), drawn()) and same(read(run / "checkpoints" / "last"), drawn())
    model = run / "checkpoints" / "last" / snapshots.MODEL
    model.write_bytes(model.read_bytes()[:-1] + b"X")
    assert "last/model.safetensors: damaged" in refused(run)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("")
    assert "this run has kept no checkpoint" in refused(tmp_path / "empty")


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin"])
@pytest.mark.parametrize("beginning", [b"PK\x03\x04", b"\x80\x02}q\x00"])
def test_pickles_are_refused_with_lines_that_convert_them(suffix: str, beginning: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"it's{suffix}"
    path.write_bytes(beginning + bytes(300))
    first, *lines = refused(path).splitlines()
    assert "a file of torch.save, which can run any code when it is read; expected a safetensors file" in first
    assert len(lines) == 2 and json.dumps(str(path)) in lines[0] and '"it\'s.safetensors"' in lines[1]
    compile("\n".join(lines), "lines", "exec")
    path.rename(tmp_path / f"pytorch_model{suffix}")
    assert "a file of torch.save" in refused(tmp_path)


HEAD_ONLY = "only the last layer does not fit: model.new_head=true draws it anew"


def test_the_hint_of_a_new_head_is_given_where_the_head_alone_does_not_fit(tmp_path: Path) -> None:
    other = drawn(resnet.architecture("resnet8", 7))
    path = write(tmp_path / "a.safetensors", other)
    told = refused(path)
    assert told.endswith(f"{HEAD_ONLY}, model.classes=7 keeps it") and "fc.weight: expected shape (10, 64)" in told
    assert read(path, new_head=True).tensors.keys() == drawn().keys() - {"fc.weight", "fc.bias"}
    body = {f"backbone.{name}": value for name, value in other.items() if not name.startswith("fc.")}
    path = write(tmp_path / "b.safetensors", body)
    assert refused(path).endswith(HEAD_ONLY) and "tensor fc.weight is missing" in refused(path)
    fresh = read(path, new_head=True).onto(TABLE.initial_state(1))
    assert (fresh["fc.weight"] == TABLE.initial_state(1)["fc.weight"]).all()
    sequence = {"fc.1.weight": stored(np.ones((3, 64))), "fc.1.bias": stored(np.ones(3))}  # a head of the user's
    without = {name: value for name, value in drawn().items() if not name.startswith("fc.")}
    path = write(tmp_path / "c.safetensors", without, **sequence)
    assert refused(path).endswith(HEAD_ONLY) and read(path, new_head=True).tensors.keys() == without.keys()
    for wrong in ({**drawn(), "conv1.weight": np.ones((16, 1, 3, 3), np.float32)}, {"a": np.ones(3, np.float32)}):
        assert "new_head=true" not in refused(write(tmp_path / "d.safetensors", wrong))


def test_another_resnet_is_named(tmp_path: Path) -> None:
    other = {f"module.{name}": value for name, value in drawn(resnet.architecture("resnet20", 7)).items()}
    told = refused(write(tmp_path / "a.safetensors", other), new_head=True)
    assert told.endswith("expected a resnet8, as the recipe's model, got a resnet20")


def test_only_the_header_is_read_before_ranks_start(tmp_path: Path) -> None:
    """A file of 8 GB, without blocks on the disk, takes no memory."""
    elements = 2**31
    header = {"a.weight": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}
    text = json.dumps(header).encode()
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 4 * elements)
    code = """
import resource, sys
from pathlib import Path
from hvdkit.checkpoint import tensor_files
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
print(tensor_files.read(Path(sys.argv[1])).tensors["a.weight"].size)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.safetensors"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == str(elements), done.stderr


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough("mxnet", "pytorch", "tensorflow", "keras"))
def test_training_starts_from_shards_of_bfloat16(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Weights after a step of almost no length are the file's; one line says what was removed."""
    sharded(tmp_path / "hub", {f"module.{name}": abs(value) for name, value in drawn().items()})
    done = hvdkit(
        "train", "resnet20-digits", "--framework", framework, "-np", 2, "--out", "run", "model.name=resnet8",
        f"model.weights={tmp_path / 'hub'}", "steps=1", "optimizer.learning_rate=1e-12", "threads=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("model.weights")]
    assert lines == [f"model.weights: {tmp_path / 'hub'}: 'module.' is removed from the names of its tensors"]
    now = read(tmp_path / "run").onto(TABLE.initial_state(1))
    for name in TABLE.parameter_shapes():
        np.testing.assert_allclose(now[name], abs(drawn()[name]), atol=1e-6, err_msg=name)
