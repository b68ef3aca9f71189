"""Text is counted in tokens: by predictions, advice, the tables and the report. Images stay images."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hvdkit.profiling import published
from hvdkit.report import csv_files
from hvdkit.report.compare import comparison_markdown, comparison_tables
from hvdkit.report.profile import tables
from hvdkit.results.compare import read_comparison
from hvdkit.results.train import result_lines
from hvdkit.tasks import gpt
from hvdkit.tasks.task import parameter_count
from tests import simulating
from tests.comparisons import REAL, change
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

ADVISE = ("advise", "profile.json", "--cluster", "a100-nvlink-ib")
FIGURE = ("--from", "gpt2", "--tokens-per-second", 100_000, "--batch-size", 8, "--device", "a100")


@pytest.mark.parametrize("name", gpt.NAMES)
def test_a_published_speed_of_each_gpt(name: str) -> None:
    found = published.profile(name, None, 8, "a100", 100_000)
    table = gpt.published(name)
    assert sum(tensor.bytes for tensor in found.tensors) == 4 * parameter_count(table)
    assert found.step.step_ms.mean == pytest.approx(1e3 * 8 * 1024 / 100_000)
    assert (found.unit, found.units_per_sample) == ("tokens", 1024)
    # Forward is a third of PaLM's count, which has the positions' table and the biases too, and two for a multiply-add.
    flop = table.training_flop() / 3
    assert 0.98 * flop < 2 * sum(table.work_by_layer().values()) < flop
    # The output layer's backward comes first, the tables of vectors are ready last.
    assert found.tensors[0].layer == "transformer.ln_f" and found.tensors[0].ready_ms > 0
    assert {tensor.layer for tensor in found.tensors[-2:]} == {"transformer.wte", "transformer.wpe"}


def test_predictions_and_advice_count_tokens(inside: Hvdkit, tmp_path: Path) -> None:
    assert inside("profile", *FIGURE, "--out", "made").returncode == 0
    cluster = ("made/profile.json", "--cluster", "a100-nvlink-ib")
    done = inside("predict", *cluster, "-n", 1, "-n", 64, "--out", "predicted")
    assert "100,000 tokens/s" in done.stdout and "images" not in done.stdout
    (row, _) = csv.DictReader((tmp_path / "predicted" / "predict.csv").open())
    assert row["unit"] == "tokens" and float(row["images_per_second"]) == pytest.approx(100_000, rel=1e-6)
    done = inside("predict", *cluster, "--sweep", "n=8,16", "--out", "swept")
    assert "tokens/s" in done.stdout and "images" not in done.stdout
    # 1,000 steps of 64 ranks
    limits = ("--epoch-tokens", 64 * 8 * 1024 * 1000 + 1023, "--epochs", 2, "--price", 2)
    done = inside("advise", *cluster, "-n", 64, *limits, "--out", "advised")
    assert "× tokens/s" in done.stdout and "images" not in done.stdout
    advice = json.loads((tmp_path / "advised" / "advise.json").read_text())
    today, first = advice["today"], advice["suggestions"][0]
    epoch = first["epoch_s"] * first["images_per_second"]
    assert epoch == pytest.approx(64 * 8 * 1024 * 1000, rel=0.01) and today["unit"] == "tokens"
    assert first["cost_per_million_images"] == pytest.approx(1e6 * first["epoch_cost"] / epoch)
    assert "× tokens/s" in (tmp_path / "advised" / "advise.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("profile", "--from", "gpt2", "--images-per-second", 9, *FIGURE[4:]), "expected --tokens-per-second"),
        (("profile", "--from", "resnet50", *FIGURE[2:]), "expected --images-per-second, and only that, for resnet50"),
        (("profile", "--from", "gpt2", *FIGURE[4:]), "--tokens-per-second or --sequences-per-second: needed too"),
        (("profile", "--from", "gpt2", *FIGURE[2:], "--images-per-second", 9), "and only that"),
        ((*ADVISE, "--epoch-images", 9), "count tokens; expected --epoch-tokens"),
        ((*ADVISE, "--epoch-tokens", 9), "at least one window of 1024 tokens"),
        (
            (*ADVISE, "-n", 8, "--epoch-tokens", 9999),
            "expected at most 9 samples of 1024 tokens, an epoch, over 8 ranks",
        ),
    ],
)
def test_what_does_not_fit_a_text_is_refused(
    arguments: tuple[Any, ...], told: str, inside: Hvdkit, tmp_path: Path
) -> None:
    found = published.profile("gpt2", None, 8, "a100", 100_000)
    (tmp_path / "profile.json").write_text(found.model_dump_json())
    done = inside(*arguments, "--out", "made")
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "made").exists()


def test_a_profile_of_sequences_shows_blocks() -> None:
    *_, blocks = tables(published.profile("gpt2", None, 8, "a100", 100_000))
    layers = ("wte", "wpe", *(f"h.{number}" for number in range(12)), "ln_f")
    assert [str(cell) for cell in blocks.columns[0].cells] == [f"transformer.{layer}" for layer in layers]
    assert [str(cell) for cell in blocks.columns[1].cells][2] == "6"
    assert len(tables(simulating.profile())) == 2


@pytest.fixture
def of_text(tmp_path: Path) -> Path:
    """A comparison of runs on text, made of one on images."""
    folder = shutil.copytree(REAL, tmp_path / "text")

    def revise(document: dict[str, Any]) -> None:
        for result in document["runs"]:
            scores = {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.2345}
            result |= {"unit": "tokens", "units_per_sample": 64, "val_accuracy": None, "validation": scores}
            result |= {"model_flop_per_second": 4.5e9, "cpu_s_per_image": 2e-5, "tokens_per_second": 1.0}

    change(folder, revise)
    return folder


def test_tables_and_reports_are_of_tokens(of_text: Path, inside: Hvdkit) -> None:
    assert inside("report", of_text).returncode == 0
    found = read_comparison(of_text / "compare.json")
    written = [(of_text / name).read_text() for name in ("report.html", "report.md")]
    assert result_lines(found.runs[0]).endswith(", validation perplexity 12.1800, validation bits/byte 1.2345")
    for text in (*written, comparison_markdown(found)):
        assert all(each in text for each in ("tokens/s", "GFLOP/s", "bits/byte", "1.2345", "perplexity")), text
        assert "images" not in text.lower()
    (table,) = comparison_tables(found)[:1]
    assert {"tokens/s", "bits/byte"} < {str(column.header) for column in table.columns}
    row = csv_files.comparison(found)[0]
    assert row["unit"] == "tokens" and row["validation"]["bits_per_byte"]["median"] == 1.2345
    page = (of_text / "report.html").read_text()
    assert "32 × 64 tokens per rank and step" in page and "CPU ms per 1,000 tokens" in page
