"""`hvdkit profile --from`: a profile that follows from a published figure, without a framework."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvdkit
from hvdkit.profiling import published
from hvdkit.results import profile as profiles
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.settings import Settings
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

FIGURE = ("--images-per-second", 2470, "--batch-size", 256, "--device", "a100")


def test_one_rank_is_the_figure_and_all_parameters_are_sent() -> None:
    found = published.profile("resnet50", 2470, 256, "a100")
    assert (found.device, found.processor, found.batch_size) == ("cuda", "a100", 256)
    assert sum(tensor.bytes for tensor in found.tensors) == 4 * 25_557_032
    assert sum(layer.forward_ms or 0 for layer in found.layers) == pytest.approx(found.step.forward_ms.mean)  # type: ignore[union-attr]
    # the last gradient, of the first layer, is ready at the end of backward, which is two thirds of the step
    assert found.tensors[-1].layer in ("conv1", "bn1")
    assert found.tensors[-1].ready_ms == pytest.approx(2 / 3 * 256 / 2.470)
    one, many = predicting.predict(found, clusters.load(Path("a100-nvlink-ib")), [1, 64], Settings()).points
    assert one.images_per_second == pytest.approx(2470, rel=1e-6)
    assert 0.5 * 64 * 2470 < many.images_per_second < 64 * 2470
    half = calibrate(published.profile("resnet50", 2470, 256, "a100", precision="fp16"))
    assert half.mixed and not calibrate(found).mixed
    # nothing was measured: at least a tenth of doubt
    assert calibrate(found).error_percent >= 10


def test_the_command_and_the_function_write_the_same(inside: Hvdkit, tmp_path: Path) -> None:
    done = inside("profile", "--from", "resnet50", *FIGURE, "--out", "made")
    assert done.returncode == 0, done.stderr
    assert "not measured" in done.stdout
    made = hvdkit.published_profile(
        "resnet50", images_per_second=2470, batch_size=256, device="a100", out=tmp_path / "b"
    )
    assert profiles.load(tmp_path / "made" / "profile.json") == profiles.load(made.folder / "profile.json")
    done = inside("predict", "made/profile.json", "--cluster", "a100-nvlink-ib", "-n", 8, "--out", "found")
    assert "2,470 images/s on one a100 at batch size 256" in done.stdout
