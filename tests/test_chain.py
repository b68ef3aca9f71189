"""`hvdkit advise RECIPE`: a recipe is profiled and advised on, what is measured serves again, advice is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdkit.recipe import schema
from hvdkit.results import profile as profiles
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.advise import Advice
from tests import simulating
from tests.conftest import ROOT, Hvdkit

RECIPE = ROOT / "recipes" / "resnet20-digits.yaml"
QUICK = ("model.name=resnet8", "batch_size=4", "warmup_steps=2", "threads=1", "checkpoint={every_epochs: 1}")


@pytest.mark.usefixtures("warm")
def test_a_recipe_is_profiled_advised_on_and_trained_as_advised(hvdkit: Hvdkit, tmp_path: Path) -> None:
    clusters.save(simulating.cluster(mbit_per_s=10.0, hosts=64), tmp_path / "slow.yaml")
    asked = ("advise", RECIPE, *QUICK, "-np", 2, "--steps", 8, "--out", "out")
    done = hvdkit(*asked)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    profile = profiles.load(out / "profile.json")
    assert (profile.framework, profile.np, profile.batch_size) == ("pytorch", 2, 4)
    advice = Advice.model_validate_json((out / "advise.json").read_text())
    assert (advice.today.ranks, advice.today.batch_size) == (2, 4)
    own = clusters.load(out / "cluster.yaml")
    assert own.measured[0].ranks == 2
    assert profile.shared_memory_ranks == 2 and [level.kind for level in own.levels] == ["memory"]
    assert advice.cluster == own.name

    written = (out / "profile.json").stat().st_mtime_ns
    again = hvdkit(*asked, "--resume", "--cluster", "slow.yaml", "-n", 4, "--new-recipe", "new.yaml")
    assert again.returncode == 0, again.stderr
    assert (out / "profile.json").stat().st_mtime_ns == written, "what was measured serves again"
    advice = Advice.model_validate_json((out / "advise.json").read_text())
    assert (advice.cluster, advice.today.ranks) == ("made-up", 4)
    chosen = schema.load(tmp_path / "new.yaml")
    given = schema.load(RECIPE, list(QUICK))
    assert chosen != given
    assert chosen.checkpoint == given.checkpoint, "a profile leaves it aside, the recipe keeps it"

    sockets = {"HOROVOD_SHARED_MEMORY": "0"}
    trained = hvdkit("train", "new.yaml", "-np", 2, "steps=6", "warmup_steps=2", "--out", "run", **sockets)
    assert trained.returncode == 0, trained.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["sync"] == (chosen.sync and chosen.sync.model_dump())
    assert result["compression"] == str(chosen.compression)
    assert result["shared_memory_ranks"] == 0

    other = hvdkit("advise", RECIPE, *QUICK, "seed=7", "-np", 2, "--resume", "--out", "out")
    assert (other.returncode, "has another recipe" in other.stderr) == (2, True)


@pytest.mark.check
def test_no_sure_gain_leaves_the_advice_and_no_recipe(hvdkit: Hvdkit, tmp_path: Path) -> None:
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    clusters.save(simulating.cluster(mbit_per_s=1e6), tmp_path / "fast.yaml")
    done = hvdkit("advise", "profile.json", "--cluster", "fast.yaml", "--new-recipe", "new.yaml", "--out", "out")
    assert done.returncode == 1
    assert "no key of the recipe brings a sure gain" in done.stderr
    assert (tmp_path / "out" / "advise.json").exists()
    assert not (tmp_path / "new.yaml").exists()
