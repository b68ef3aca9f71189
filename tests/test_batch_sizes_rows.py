"""What `make validate` makes of profiles at three batch sizes, one of which is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_batch_sizes import LAYERS, at

from benchmarks import batch_sizes, batch_sizes_rows
from hvdkit.profiling import batch_curves

pytestmark = pytest.mark.check


def run(batch: int, slower: float = 1.0) -> list[float]:
    """Half of the layers take 1 ms at any batch size, the others 1 ms for each 8 samples."""
    return [slower * (batch / 8 if i % 2 else 1.0) for i in range(LAYERS)]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as the benchmark leaves it, of a machine whose layers are affine; the second round takes 1 % longer."""
    rounds = []
    for slower in (1.0, 1.01):
        sizes = [at(batch, run(batch, slower), run(batch, slower)) for batch in batch_sizes.SIZES]
        rounds.append(batch_curves.combined(sizes[-1], sizes[:-1]).model_dump(mode="json"))
    shortened = [batch_sizes._shortened(one, number) for number, one in enumerate(rounds)]
    assert "settings" not in shortened[1]
    (tmp_path / "batch-sizes.json").write_text(json.dumps({"profiles": {"pytorch": shortened}}))
    monkeypatch.setattr(batch_sizes_rows, "HERE", tmp_path)
    batch_sizes_rows.profiles.cache_clear()
    yield
    batch_sizes_rows.profiles.cache_clear()


@pytest.mark.usefixtures("measured")
def test_layers_that_are_affine_are_predicted_and_others_are_not_by_the_steps_curve() -> None:
    rows = list(batch_sizes_rows.rows())
    assert len(rows) == 4  # two sizes in two rounds
    for row in rows:
        assert row.low is not None and row.high is not None and row.low < row.measured < row.high
        assert row.linear is not None and abs(row.linear - row.measured) > abs(row.predicted - row.measured)
    middle, smallest = sorted(batch_sizes_rows.layers(), key=lambda one: -one["held"])
    assert middle["curves"] == pytest.approx(0, abs=1e-9) and middle["ready_curves"] == pytest.approx(0, abs=1e-9)
    assert smallest["curves"] < smallest["whole"] and middle["whole"] > 10
    assert middle["again"] == pytest.approx(1.0, rel=0.02)


def test_nothing_is_made_of_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sizes_rows, "HERE", tmp_path)
    batch_sizes_rows.profiles.cache_clear()
    assert list(batch_sizes_rows.rows()) == [] and batch_sizes_rows.layers() == []
    batch_sizes_rows.profiles.cache_clear()
