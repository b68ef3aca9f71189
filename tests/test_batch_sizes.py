"""`hvdkit profile --batch-sizes`: compute that is not proportional to the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulating
from conftest import Hvdkit
from pydantic import ValidationError

from hvdkit.results.profile import Profile
from hvdkit.simulator import predict as predicting
from hvdkit.simulator.settings import read


def profile(*batches: tuple[int, float]) -> Profile:
    """A profile at batch size 32 whose forward and backward take 60 ms."""
    document = simulating.profile(np=1).model_dump(mode="json")
    return Profile.model_validate(document | {"batches": [{"batch_size": b, "compute_ms": ms} for b, ms in batches]})


def test_measured_batch_sizes_are_interpolated_and_go_on_along_the_last_two() -> None:
    measured = profile((8, 30.0), (16, 40.0), (32, 60.0))
    fixed = 5.0  # update, input and gaps of `simulating.profile`

    def found(batch: int) -> predicting.Point:
        return predicting.predict(measured, simulating.cluster(), [1], read([f"batch_size={batch}"])).points[0]

    for batch, ms in ((8, 30), (12, 35), (16, 40), (32, 60), (64, 100), (4, 25)):
        assert found(batch).step_ms == pytest.approx(ms + fixed), batch
    inside, outside = found(16), found(64)
    assert inside.high_ms / inside.low_ms < outside.high_ms / outside.low_ms
    assert not any("batch size" in told for told in inside.warnings)
    assert any("batch size 64 was not measured" in told for told in outside.warnings)
    # one batch size is far less sure
    one = predicting.predict(profile(), simulating.cluster(), [1], read(["batch_size=8"])).points[0]
    assert one.high_ms / one.low_ms > 1.5 * found(8).high_ms / found(8).low_ms


def test_batches_that_cannot_be_are_refused() -> None:
    for batches in (((16, 1.0), (8, 2.0), (32, 3.0)), ((8, 1.0), (16, 2.0)), ((8, 50.0), (32, 10.0)), ((32, -1.0),)):
        with pytest.raises(ValidationError, match="batches"):
            profile(*batches)


@pytest.mark.parametrize("given", ["8", "8,8", "8,x", "0,8", "8,,16"])
def test_a_wrong_list_is_one_line(inside: Hvdkit, given: str, tmp_path: Path) -> None:
    done = inside("profile", "resnet20-digits", "--batch-sizes", given, "--out", "o")
    assert done.returncode == 2
    assert "--batch-sizes" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()
