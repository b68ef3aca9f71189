"""Tensor parallelism: ranks with parts of a GPT compute what one process with the whole model computes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.launch.launchers import LAUNCHERS
from tests.conftest import ROOT, Hvdkit
from tests.launching import framework_job
from tests.resuming import kill_ranks, under_way

FRAMEWORKS = tuple(name for name, own in CAPABILITIES.items() if "tensor" in own)
# TensorFlow compiles for two minutes.
TENSORFLOW_THOROUGH = [
    pytest.param(name, marks=pytest.mark.thorough) if name == "tensorflow" else name for name in FRAMEWORKS
]
LARGEST_ERROR = 1e-10


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of four ranks found."""

    @cache
    def found(framework: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(framework)
        asked = (ROOT / "tests" / "tensor" / "rank.py", framework, folder / "report.json")
        LAUNCHERS["direct"].run(framework_job(framework, folder / "logs", *asked, np=4))
        return json.loads((folder / "report.json").read_text())

    return found


def far(found: dict[str, float], limit: float = LARGEST_ERROR) -> dict[str, float]:
    """The tensors with a larger error."""
    return {name: error for name, error in found.items() if not error <= limit}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("framework", TENSORFLOW_THOROUGH)
def test_parts_compute_what_the_whole_model_computes(framework: str, size: int, report: Any) -> None:
    """Each gradient and weight in 20 forced steps; weights after four free ones; evaluation; state.

    On a mesh of two data ranks × two parts, and on one of four parts.
    """
    ranks = [rank[str(size)] for rank in report(framework)]
    for rank in ranks:
        assert len(rank["gradients"]) == 29 and len(rank["weights"]) > 100
        assert not far(rank["gradients"]) and not far(rank["weights"]) and not far(rank["evaluation"])
        assert not far(rank["free"], 1e-9)
        assert rank["loaded"] and rank["broadcast"]
    assert len({rank["digest"] for rank in ranks}) == 1


FAULTS = {
    # what is seen wrong first, and what is right still
    "no sum after the rows": ("transformer.ln_f.bias", ""),
    "a sum too many": ("transformer.h.1.mlp.c_proj.weight", "transformer.ln_f.bias"),
    "no sum of gradients": ("transformer.h.1.ln_1.weight", "transformer.h.1.attn.c_attn.weight"),
    "bias of each rank": ("transformer.ln_f.bias", ""),
    "vocabulary": ("transformer.wte.weight", ""),
    "norm": ("after transformer.h.1.ln_1.weight", "transformer.h.1.ln_1.weight"),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", TENSORFLOW_THOROUGH)
def test_each_planted_fault_is_seen(framework: str, report: Any) -> None:
    for rank in report(framework):
        assert not far(rank["planted"]["no fault"])
        found = rank["planted"]
        planted = FAULTS if framework == "pytorch" else {"a sum too many"}
        assert found.keys() == {"no fault", *planted}
        for fault in planted:
            wrong, right = FAULTS[fault]
            seen = far(found[fault])
            assert wrong in seen and right not in seen, (fault, seen)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", TENSORFLOW_THOROUGH)
def test_an_overflow_in_one_part_skips_the_update_of_all(framework: str, report: Any) -> None:
    changed = [rank["overflow"] for rank in report(framework)]
    if "fp16" in CAPABILITIES[framework]:
        assert changed == [["optimizer.loss_scale"]] * 4
    else:
        assert changed == [None] * 4


SMALL = ("model={name: gpt, layers: 2, heads: 2, width: 16, context: 16, vocabulary: 256}", "batch_size=4")
RUN = ("train", "gpt-tiny", "--out", "run", "precision=fp64", "threads=1", "data.validation=0.01", "check_ranks=2")


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint's tensors."""
    return {
        name: own for file in ("model", "optimizer") for name, own in load_file(folder / f"{file}.safetensors").items()
    }


def header(path: Path) -> bytes:
    """The part of a safetensors file that says where each tensor is."""
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "framework", [FRAMEWORKS[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in FRAMEWORKS[1:])]
)
def test_a_run_continues_in_other_parts(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Three steps in two parts, two alone, one in two parts again: as six alone; and checkpoints are written alike."""
    parts, command = (
        ("-np", 2, "parallel.tensor=2"),
        (*RUN, "--framework", framework, "checkpoint.every_steps=3", *SMALL),
    )
    done = [hvdkit(*command, *parts, "steps=3")]
    first = tmp_path / "run" / "checkpoints" / "step-00000003"
    early = tensors(first), header(first / "model.safetensors"), header(first / "optimizer.safetensors")
    done += [hvdkit(*command, "--resume", "steps=5"), hvdkit(*command, *parts, "--resume", "steps=6")]
    last = tensors(tmp_path / "run" / "checkpoints" / "last")
    results = [json.loads((tmp_path / "run" / "result.json").read_text())]
    done += [hvdkit(*command, "--overwrite", "steps=6")]
    results += [json.loads((tmp_path / "run" / "result.json").read_text())]
    assert not any(each.returncode for each in done), [each.stderr for each in done]
    assert early[1:] == (header(first / "model.safetensors"), header(first / "optimizer.safetensors"))
    for got, folder in ((early[0], first), (last, first.parent / "last")):
        wanted = tensors(folder)
        errors = {n: float(np.linalg.norm(got[n] - wanted[n]) / (np.linalg.norm(wanted[n]) or 1.0)) for n in wanted}
        # A key's bias has no gradient but rounding, which AdamW makes as large as any.
        assert got.keys() == wanted.keys() and not far({n: e for n, e in errors.items() if "c_attn.bias" not in n})
    assert results[0]["initial_state_sha256"] == results[1]["initial_state_sha256"]
    assert results[0]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=1e-10)
    assert [result["np"] for result in results] == [2, 1]
    parameters = [result["state_bytes"]["parameters"] for result in results]
    assert parameters[0] < 0.6 * parameters[1] and results[0]["parameters"] == results[1]["parameters"]


@pytest.mark.usefixtures("warm")
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    options = ("--framework", "pytorch", "-np", 2, "parallel.tensor=2", "checkpoint.every_steps=1", "threads=1", *SMALL)
    with under_way(tmp_path / "run", "gpt-tiny", *options) as process:
        kill_ranks(tmp_path / "run", "pytorch", "gpt", rank=1)
        assert process.stderr and process.wait(60) == 1
        told = process.stderr.read()
        assert "rank 1 on localhost (data 0, pipeline 0, tensor 1) was killed by SIGKILL" in told
