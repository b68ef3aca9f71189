"""Every kind of tensor in a model of the user's: trained, sharded, saved, resumed and exported, or refused by name."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit.checkpoint import snapshots
from hvdkit.commands import export
from hvdkit.core.group import Mesh, Topology
from hvdkit.core.state import check_fits, held, held_layout, unheld
from hvdkit.errors import RequestError
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.recipe.communication import TopK
from hvdkit.strategies.reducer import Reducer
from hvdkit.strategies.transports import Ring
from tests import local_adapter
from tests.conftest import KERAS_THOROUGH, ROOT, rest_thorough
from tests.contract import kinds  # as the ranks import it
from tests.launching import framework_job

STAGES = {"pytorch": 3, "tensorflow": 3, "keras": 3, "mxnet": 2}
# framework -> what is wrong -> the key or the tensor that is named, and a word of the fault or the remedy
COMPLEX = "store its real and imaginary parts"
LATE = "model: it makes variables when it is called, such as ", "call it once in model()"
REFUSED = {
    "pytorch": {
        "complex parameter": ("complex64 in weight", COMPLEX),
        "lazy parameter": ("model: weight: it has no shape yet", "call the model once in model()"),
        "without values": ("model: weight: ", "initialize it in model()"),
        "sparse buffer": ("model: odd: ", "keep a dense tensor"),
        "complex outputs": ("model: expected real numbers as its output, got ", "abs()"),
    },
    "tensorflow": {
        "complex parameter": ("complex64 in odd", COMPLEX),
        "float64 parameter": ("precision: fp32 expects", "float64 in odd"),
        "text": ("model: odd: ", "dtype string"),
        "without shape": ("model: odd: expected a variable of a fixed shape", "<unknown>"),
        "made when called": LATE,
        "complex outputs": ("model: expected real numbers as its output, got ", "abs()"),
    },
    "keras": {"made when called": LATE, "integer parameter": ("expected floating parameters to train", "int32 in ")},
    "mxnet": {
        "integer parameter": ("int32 in odd", "use a floating dtype"),
        "sparse parameter": ("model: odd: expected a dense parameter", "row_sparse"),
        "lazy parameter": ("model: expected the shapes of all parameters", "in_units"),
    },
}
# tensors -> the dtype that they are cast from, as said in the first lines of a run
CAST = {
    "pytorch": {"rough, of_bfloat16": "bfloat16", "of_float16": "float16", "fine, of_float64": "float64"},
    "mxnet": {"rough": "float16", "of_float64": "float64"},
}
# what is said after the first epoch: buffers that differ between ranks, of which the means or those of rank 0 are kept
MERGED = {
    "pytorch": [("phase, size", "their means"), ("large", "those of rank 0")],
    "tensorflow": [("phase, size", "their means"), ("large", "those of rank 0")],
    "keras": [("state.size", "their means")],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder with the runs of a framework, from one pair of processes."""

    @cache
    def runs(framework: str) -> Path:
        folder = tmp_path_factory.mktemp(framework)
        asked = (ROOT / "tests" / "contract" / "kinds_rank.py", framework, folder)
        LAUNCHERS["direct"].run(framework_job(framework, folder / "logs", *asked))
        return folder

    return runs


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough("mxnet", "pytorch", "tensorflow", "keras"))
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(framework: str, trained: Any) -> None:
    folder = trained(framework)
    for rank in range(2):
        assert json.loads((folder / f"rank-{rank}.json").read_text())["faults"] == []
    stages = [path.name.removesuffix("-straight") for path in sorted(folder.glob("*-straight"))]
    assert len(stages) == STAGES[framework]
    for stage in stages:
        whole, resumed = (
            snapshots.read(folder / f"{stage}-{how}" / "checkpoints" / "last") for how in ("straight", "stopped")
        )
        assert whole.record.progress.step == resumed.record.progress.step == 8
        assert whole.record.files == resumed.record.files, stage


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_nothing_is_cast_or_merged_in_silence(framework: str, trained: Any) -> None:
    folder = trained(framework) / "optimizer-straight"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [warning for line in lines for warning in line.get("warnings") or []]
    warnings = [line for line in told if line.startswith(("model: ", "buffers: "))]
    casts = CAST.get(framework, {})
    expected = [(f"model: {names}: ", f"cast from {dtype} to float32") for names, dtype in casts.items()]
    expected += [(f"buffers: {names} differ", means) for names, means in MERGED.get(framework, [])]
    for got, parts in zip(warnings, expected, strict=True):
        assert all(part in got for part in parts), warnings
    state = snapshots.read(folder / "checkpoints" / "last").state
    found = {
        name.rpartition("of_")[2]: value for name, value in state.items() if "of_" in name and name[:9] != "optimizer"
    }
    for dtype, values in kinds.constants(tuple(each for each in found if each != "bfloat16")).items():
        wanted = held(values)
        if dtype in casts.values():
            wanted = wanted.astype(np.float32)
        assert found[dtype].dtype == wanted.dtype and np.array_equal(found[dtype], wanted), dtype
    if framework in ("pytorch", "tensorflow"):
        assert state["seen"] == 64 and state["seen"].dtype == np.int64
        assert state["third"] == np.float32(1 / 3) and state["no_rows"].size == 0
        assert state["phase"].dtype == np.complex64 and np.allclose(state["phase"].imag, 2 * state["phase"].real)
        assert state["rough" if framework == "tensorflow" else "of_bfloat16"].flat[0] == np.float32(0.333984375)
    if framework == "pytorch":
        assert state["cumulative.num_batches_tracked"] == 8 and "usual.num_batches_tracked" not in state
        assert "drawn" not in state and np.array_equal(state["first.weight"], state["second.weight"])
        assert "optimizer.exp_avg.frozen.weight" not in state and state["nothing"].shape == (0, 3)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_what_cannot_be_trained_is_refused_by_name(framework: str, trained: Any) -> None:
    told = json.loads((trained(framework) / "rank-0.json").read_text())["refused"]
    assert told.keys() == REFUSED[framework].keys()
    for name, line in told.items():
        assert all(part in line for part in REFUSED[framework][name]) and "\n" not in line, line


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_all_kinds_are_exported(framework: str, trained: Any, tmp_path: Path) -> None:
    last = trained(framework) / "optimizer-straight" / "checkpoints" / "last"
    export.write(export.plan(last, tmp_path / "model.safetensors", False, average=False))
    there, kept = load_file(tmp_path / "model.safetensors"), load_file(last / snapshots.MODEL)
    plain = {name.replace("_orig_mod.", ""): value for name, value in kept.items()}
    assert there.keys() == plain.keys() and (framework != "pytorch" or "head.weight" in there)
    assert all(value.tobytes() == plain[name].tobytes() for name, value in there.items())


def _refusing(row: dict[str, str]) -> set[str]:
    return {framework for framework, cell in row.items() if "refused" in cell}


@pytest.mark.check
def test_the_table_of_kinds_says_what_is_refused_and_what_is_warned_of() -> None:
    page = (ROOT / "docs" / "reference" / "own-model.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.partition("## Kinds of tensors")[2].splitlines() if line[:2] == "| "]
    table = {row[0].strip(): dict(zip(("pytorch", "tensorflow", "mxnet"), row[1:], strict=True)) for row in rows}
    late = {framework for framework, told in REFUSED.items() if {"lazy parameter", "made when called"} & told.keys()}
    assert {"keras", *_refusing(table["lazy parameters"])} == late
    odd = {framework for framework, told in REFUSED.items() if "complex parameter" in told}
    assert _refusing(table["complex parameters"]) == odd
    cast = table["floating tensors in another dtype than that of `precision`"]
    assert {framework for framework, cell in cast.items() if "with a warning" in cell} == CAST.keys()
    assert "refused" in cast["tensorflow"] and "float64 parameter" in REFUSED["tensorflow"]


@pytest.mark.check
def test_the_state_holds_every_dtype_and_gives_it_back() -> None:
    for dtype, values in kinds.constants((*kinds.WHOLE, *kinds.COMPLEX, "float16", "float32", "float64")).items():
        kept = held(values)
        assert (str(kept.dtype), kept.shape) == held_layout(dtype, values.shape)
        back = unheld("a", kept, dtype)
        assert back.dtype == dtype and back.tobytes() == values.tobytes()
    assert unheld("a", np.ones(2, np.float64), "float32").dtype == np.float32, "a checkpoint of another precision"
    assert unheld("a", np.array([3.0, 1.0], np.float32), "int64").tolist() == [3, 1], "as older versions saved it"
    for given, dtype in [
        (np.array([1j], np.complex64), "float32"),
        (np.array([0.5]), "int64"),
        (np.array([2]), "bool"),
    ]:
        with pytest.raises(RequestError, match=f"tensor a: expected {dtype}, got {given.dtype} with values that it ca"):
            unheld("a", np.asarray(given), dtype)


@pytest.mark.check
def test_a_checkpoint_of_an_older_version_has_no_counts_of_batches() -> None:
    weight, shapes = np.ones(3, np.float32), {"norm.weight": (3,), "norm.num_batches_tracked": ()}
    check_fits(shapes, {"norm.weight": weight})
    with pytest.raises(RequestError, match=re.escape("tensor norm.weight is missing")):
        check_fits(shapes, {})


@pytest.mark.check
def test_the_state_of_compression_has_parameters_without_elements() -> None:
    local: Any = local_adapter.adapter
    reducer = Reducer(Ring(local, Mesh(Topology())), TopK(ratio=0.5))
    shapes = {"bias": (4,), "nothing": (0, 3)}
    reducer.packed(np.arange(4.0), shapes)
    saved = reducer.state()
    assert {saved[name].shape for name in saved if name.endswith(".nothing")} == {(1, 0, 3)}
    reducer.load_state(saved)
    assert np.isfinite(reducer.packed(np.arange(4.0), shapes)).all()
