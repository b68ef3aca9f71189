"""`hvdkit report` on runs and profiles of models that are divided over ranks, and the mesh in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdkit import tasks
from hvdkit.profiling import assemble, pipeline
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.report import mesh, page
from hvdkit.results import profile
from hvdkit.worker import stages
from tests import profiled
from tests.browser import chromium
from tests.comparisons import REAL
from tests.conftest import ROOT
from tests.test_report import DRAWN

FOLDER = Path("profile")


def divided(*axes: str) -> Recipe:
    return schema.load(ROOT / "recipes" / "gpt-tiny.yaml", ["batch_size=8", *axes])


def mesh_of(recipe: Recipe, hosts: list[str]) -> mesh.DrawnMesh:
    planned = stages.planned(tasks.choose(recipe).architecture(), recipe.parallel, hosts)
    return mesh.DrawnMesh.of(planned, recipe.parallel.tensor, shares_memory=True)


@pytest.mark.check
def test_who_talks_to_whom_over_what() -> None:
    """Eight ranks on two hosts: stages between hosts, parts and copies within them."""
    grid = mesh_of(divided("parallel.pipeline=2", "parallel.tensor=2"), ["h1"] * 4 + ["h2"] * 4)
    told = dict(mesh.lines(grid))
    assert told["mesh"] == "2 (data) × 2 (pipeline) × 2 (tensor)"
    assert told["stage 1"].startswith("transformer.h.2–3, ") and "6 on h2, 7 on h2" in told["stage 1"]
    assert told["along pipeline"].startswith("ranks 0–4, 1–5, 2–6, 3–7 through sockets: ")
    assert told["along data"].startswith("ranks 0–2, 1–3, 4–6, 5–7 through memory: ")
    assert told["along tensor"].startswith("ranks 0–1, 2–3, 4–5, 6–7 through memory: ")
    assert len(grid.talks()) == 12
    whole = dict(mesh.lines(mesh_of(divided("parallel.tensor=2"), ["h1", "h2"])))
    assert whole.keys() == {"mesh", "stage 0", "along tensor"} and "through sockets" in whole["along tensor"]
    four = dict(mesh.lines(mesh_of(divided("parallel.pipeline=4"), ["h1", "h1", "h2", "h2"])))
    assert four["along pipeline"].startswith("ranks 0–1, 2–3 through memory; ranks 1–2 through sockets: ")
    assert four["both ends"].startswith("ranks 0–3 through sockets: gradients"), "of the table of tokens"
    chunks = divided("parallel.pipeline=4", "parallel.schedule=interleaved", "parallel.chunks=2", "model.layers=8")
    ring = dict(mesh.lines(mesh_of(chunks, ["h1"] * 4)))
    assert ring["along pipeline"].startswith("ranks 0–1, 1–2, 2–3, 0–3 through memory: ") and "both ends" not in ring
    assert mesh.blocks(["h.0", "h.1", "h.4", "stem"]) == "h.0–1, h.4, stem"


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    """A run's result, as if its model had been divided in two stages."""
    document = json.loads((REAL / "compare.json").read_text())
    result = next(each for each in document["runs"] if each["np"] == 2)
    state = {"parameters": 8, "gradients": 8, "optimizer": 8}
    shares = [
        {"blocks": [f"layer{rank + 1}.0"], "parameters": 2, "ranks": [rank], "hosts": ["here"]} for rank in (0, 1)
    ]
    result["stages"] = [stage | {"busy_ms": 20.5, "state_bytes": state, "peak_rss_mib": [345.4]} for stage in shares]
    result |= {"bubble": 0.25, "shared_memory_ranks": 2}
    (tmp_path / "result.json").write_text(json.dumps(result))
    return tmp_path


@pytest.fixture
def a_profile(tmp_path: Path) -> Path:
    """The files of a profile of three stages."""
    recipe, folder = divided("parallel.pipeline=3", "parallel.microbatches=4"), tmp_path / FOLDER
    folder.mkdir()
    found = assemble.gather(profiled.pipelined(3, 4, 3, 6), [], recipe)
    pipeline.measured(found, recipe).written(folder)
    profiled.write(folder)
    digits = schema.load(ROOT / "recipes" / "resnet20-digits.yaml")
    profile.save(assemble.profile(assemble.read(folder, digits), digits), folder / "profile.json")
    return folder


@pytest.mark.long
def test_pages_draw_the_mesh_and_the_step(a_run: Path, a_profile: Path, tmp_path: Path) -> None:
    pages = [page.write(folder)[0] for folder in (a_run, a_profile)]
    (tmp_path / "browser").mkdir()
    with chromium(tmp_path / "browser") as browser:
        for path, charts in zip(pages, (["mesh"], ["pipeline", "mesh"]), strict=True):
            opened = browser.open(path)
            assert opened.faults() == [] and opened.requests() == []
            drawn = {chart["id"]: chart for chart in opened.run(DRAWN)}
            for name in charts:
                chart = drawn[f"chart-{name}"]
                assert chart["colours"] >= (4 if name == "pipeline" else 1) and chart["rows"] >= 1, chart
            text = opened.run("document.body.innerText")
            if path == pages[0]:
                assert "Bubble: 25 % of a step" in text and "layer2.0" in text and text.count("345") == 4
            else:
                assert "bubble 40 %, the mean of 3 steps" in text and "with passes of one length 33 %" in text
