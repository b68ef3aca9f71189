"""`hvdkit diff`: what differs between two runs, which are whole ones on the null adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdkit as package
from hvdkit.checkpoint import snapshots
from hvdkit.core.session import Session
from hvdkit.recipe import schema
from hvdkit.results.diff import Diff
from tests.conftest import Hvdkit
from tests.resuming import local_recipe, local_run

pytestmark = pytest.mark.check


def made(folder: Path, **changes: Any) -> Path:
    recipe = local_recipe(**{"epochs": 1, "log_every": 1} | changes)
    assert local_run(folder, recipe) is not None
    (folder / "config.yaml").write_text(schema.dump(recipe))
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; to be read only."""
    return made(tmp_path_factory.mktemp("diff") / "first")


def test_two_runs_of_one_recipe_are_the_same(kept: Path, tmp_path: Path, inside: Hvdkit) -> None:
    done = inside("diff", kept, made(tmp_path / "second"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "settings: the same" in done.stdout and "initial weights: the same" in done.stdout
    assert "loss: the same at all 15 logged steps" in done.stdout
    assert "weights: the same to the last bit at step 12, 15" in done.stdout, done.stdout


def test_a_key_that_differs_is_named_with_what_follows_from_it(kept: Path, tmp_path: Path, inside: Hvdkit) -> None:
    other = made(tmp_path / "second", optimizer={"name": "adamw", "learning_rate": 0.011})
    done = inside("diff", kept, other, "--out", "out")
    assert done.returncode == 1
    assert "  optimizer.learning_rate: 0.01 → 0.011" in done.stdout
    assert "loss: the same at step 1, loss differs first at step 2: " in done.stdout, done.stdout
    found = Diff.read(tmp_path / "out" / "diff.json")
    assert [each.key for each in found.settings] == ["optimizer.learning_rate"]
    (first, *_), (second, *_) = (
        [snapshots.read(folder / "checkpoints" / "step-00000015").state] for folder in (kept, other)
    )
    for tensor in found.checkpoints[-1].differing:
        apart = np.linalg.norm(second[tensor.name] - first[tensor.name]) / np.linalg.norm(first[tensor.name])
        assert tensor.relative_error == pytest.approx(apart, rel=1e-4) and tensor.largest
    names = {tensor.name for tensor in found.checkpoints[-1].differing}
    assert {name for name in first if not np.array_equal(first[name], second[name])} == names
    assert len(found.records()) == sum(len(each.differing) for each in found.checkpoints)


def test_noise_of_which_nothing_is_recorded(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Hvdkit
) -> None:
    """The images of step 6 and later ones are other ones, and every fourth step is logged."""
    sound, steps = Session.train_step, 0

    def train_step(session: Any, batches: Any) -> Any:
        nonlocal steps
        steps += 1
        for batch in batches if steps >= 6 else ():
            batch.inputs[:] += 0.5
        return sound(session, batches)

    first = made(tmp_path / "first", log_every=4)
    monkeypatch.setattr(Session, "train_step", train_step)
    done = inside("diff", first, made(tmp_path / "second", log_every=4))
    assert done.returncode == 1
    assert "loss: the same at step 4, loss differs first at step 8: " in done.stdout, done.stdout
    assert "docs/troubleshooting.md#two-runs-differ" in done.stdout
    assert "with log_every=1 both runs show the first of the steps 5 to 8" in done.stdout


def test_a_run_that_failed_is_compared_as_far_as_it_came(kept: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(kept, tmp_path / "broken", symlinks=True))
    (broken / "result.json").unlink()
    shutil.rmtree(broken / "checkpoints" / "step-00000015")
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    lines[5] = json.dumps(json.loads(lines[5]) | {"loss": 7.0})
    (broken / "metrics.jsonl").write_text("\n".join(lines[:9]) + '\n{"step": 1')
    found: Diff = package.diff(kept, broken)
    assert not found.same and found.steps == 9 and found.final_weights is None
    assert found.loss is not None and (found.loss.step, found.loss.after, found.loss.second) == (6, 5, 7.0)
    assert [each.step for each in found.checkpoints] == [12]
    with pytest.raises(package.RequestError, match="expected a result that was read or written"):
        found.folder  # noqa: B018


def test_what_is_no_run_is_refused_at_once(kept: Path, tmp_path: Path, inside: Hvdkit) -> None:
    done = inside("diff", "nowhere", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("expected the folder of an `hvdkit train`") == 2
    damaged = Path(shutil.copytree(kept, tmp_path / "damaged", symlinks=True))
    path = damaged / "checkpoints" / "step-00000012" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = inside("diff", kept, damaged)
    assert done.returncode == 2 and "model.safetensors" in done.stderr and "Traceback" not in done.stderr
