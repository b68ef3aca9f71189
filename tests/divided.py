"""What the tests of models that are divided over ranks share: what four ranks report, and a run that continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.recipe import registry, schema
from hvdkit.simulator import memory
from tests.conftest import ROOT, Hvdkit
from tests.launching import framework_job

LARGEST_ERROR = 1e-10
SMALL = ("model={name: gpt, layers: 2, heads: 2, width: 16, context: 16, vocabulary: 256}", "batch_size=4")
SETTINGS = ("--out", "run", "precision=fp64", "threads=1", "check_ranks=2")
RUN = ("train", "gpt-tiny", *SETTINGS, "data.validation=0.01", *SMALL)


def reports(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What each of `np` ranks of a framework finds by `rank.py` in that folder of the tests, in some of its cases."""

    @cache
    def found(framework: str, *cases: str, np: int = 4) -> list[dict[str, Any]]:
        place = tmp_path_factory.mktemp(framework)
        asked = (ROOT / "tests" / folder / "rank.py", framework, place / "report.json", *cases)
        LAUNCHERS["direct"].run(framework_job(framework, place / "logs", *asked, np=np))
        return json.loads((place / "report.json").read_text())

    return found


def far(found: dict[str, float], limit: float = LARGEST_ERROR) -> dict[str, float]:
    """The tensors with a larger error."""
    return {name: error for name, error in found.items() if not error <= limit}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint's tensors."""
    return {
        name: own for file in ("model", "optimizer") for name, own in load_file(folder / f"{file}.safetensors").items()
    }


def header(path: Path) -> bytes:
    """The part of a safetensors file that says where each tensor is."""
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


def continues(
    hvdkit: Hvdkit,
    framework: str,
    divided: tuple[str | int, ...],
    tmp_path: Path,
    run: tuple[str, ...] = RUN,
    alone: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Three steps of a divided model, two alone, one divided again: as six alone; checkpoints are written alike.

    Returns the results of the last divided step and of the six alone.
    """
    command = (*run, "--framework", framework, "checkpoint.every_steps=3")
    done = [hvdkit(*command, *divided, "steps=3")]
    first = tmp_path / "run" / "checkpoints" / "step-00000003"
    early = tensors(first), header(first / "model.safetensors"), header(first / "optimizer.safetensors")
    done += [hvdkit(*command, *alone, "--resume", "steps=5"), hvdkit(*command, *divided, "--resume", "steps=6")]
    last = tensors(tmp_path / "run" / "checkpoints" / "last")
    results = [json.loads((tmp_path / "run" / "result.json").read_text())]
    done += [hvdkit(*command, *alone, "--overwrite", "steps=6")]
    results += [json.loads((tmp_path / "run" / "result.json").read_text())]
    assert not any(each.returncode for each in done), [each.stderr for each in done]
    assert early[1:] == (header(first / "model.safetensors"), header(first / "optimizer.safetensors"))
    for got, folder in ((early[0], first), (last, first.parent / "last")):
        wanted = tensors(folder)
        errors = {n: float(np.linalg.norm(got[n] - wanted[n]) / (np.linalg.norm(wanted[n]) or 1.0)) for n in wanted}
        # A key's bias has no gradient but rounding, which AdamW makes as large as any.
        assert got.keys() == wanted.keys()
        assert not far({n: e for n, e in errors.items() if "c_attn.bias" not in n})
    assert results[0]["initial_state_sha256"] == results[1]["initial_state_sha256"]
    if run is RUN:
        check_stages(results[0], framework, [str(each) for each in divided if "=" in str(each)])
    return results


def check_stages(result: dict[str, Any], framework: str, divided: list[str]) -> None:
    """What `result.json` says of stages, whose states are as large as `hvdkit memory` counts."""
    recipe = schema.load(registry.locate(Path("gpt-tiny")), ["precision=fp64", *SMALL, *divided])
    shape, timed = memory.sample_shape(recipe), recipe.parallel.pipeline > 1
    assert len(result["stages"]) == recipe.parallel.pipeline
    assert [rank for stage in result["stages"] for rank in stage["ranks"]] == list(range(result["np"]))
    assert [block for stage in result["stages"] for block in stage["blocks"]] == ["transformer.h.0", "transformer.h.1"]
    ranks = recipe.data_ranks(result["np"])
    for number, stage in enumerate(result["stages"]):
        counted = memory.parts_of_stage(recipe, shape, framework, False, ranks, recipe.sharding, number).model_dump()
        sizes = stage["state_bytes"]
        assert sizes == pytest.approx({name: counted[name] for name in sizes}, rel=0.05)
        assert timed is bool(stage["busy_ms"])
        assert len(stage["peak_rss_mib"]) == len(stage["ranks"]) and min(stage["peak_rss_mib"]) > 100
    assert 0 < result["bubble"] < 1 if timed else result["bubble"] is None
