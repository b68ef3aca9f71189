"""`hvdkit predict` from the command line, and the files that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import simulating
from conftest import Hvdkit

from hvdkit.profiling import profile as profiles
from hvdkit.simulator import cluster as clusters


@pytest.fixture()
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile and a cluster file in the folder that commands run in."""
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    clusters.save(simulating.cluster(), tmp_path / "cluster.yaml")
    return tmp_path / "profile.json", tmp_path / "cluster.yaml"


def test_a_profile_is_predicted_for_8_ranks_by_the_ring(hvdkit: Hvdkit, files: tuple[Path, Path]) -> None:
    done = hvdkit("predict", "profile.json", "--cluster", "cluster.yaml", "-n", "8", "-n", "1", "--out", "found")
    assert done.returncode == 0, done.stderr
    found = json.loads((files[0].parent / "found" / "predict.json").read_text())
    eight, one = found["points"]
    size = 4 * 272_474
    ring_ms = 2 * 7 * (10e-3 + 8e-3 * size / 8 / 8000)
    assert one["step_ms"] == pytest.approx(65.0)
    assert eight["step_ms"] == pytest.approx(65.0 + ring_ms)
    assert eight["exposed_communication_ms"] == pytest.approx(ring_ms)
    assert eight["images_per_second"] == pytest.approx(8 * 32 / (65.0 + ring_ms) * 1e3)
    assert eight["low_ms"] < eight["step_ms"] < eight["high_ms"]
    assert any("no collective has been measured" in warning for warning in eight["warnings"])
