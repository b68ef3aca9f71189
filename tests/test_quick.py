"""What the quick commands leave out: modules that they have no use for, second drawings, waiting for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from hvdkit.recipe import yaml_files
from hvdkit.report import gantt, page
from hvdkit.results import profile as profiles
from hvdkit.runtimes import doctor, environment
from hvdkit.simulator import calibration, predict
from hvdkit.simulator.settings import Settings
from tests import hygiene, simulating
from tests.comparisons import change, several_rounds

pytestmark = pytest.mark.check

# Run a command within the interpreter; then its exit status, and what is loaded.
NAMED = """
import sys
from hvdkit.__main__ import main
status = 0
try:
    main()
except SystemExit as end:
    status = end.code or 0
print(status, *sys.modules, file=sys.stderr)
"""
PARTS = ("app", "generated", "terminal")
PLOTS = {"matplotlib", "jinja2"}


def loaded(*arguments: object) -> tuple[int, set[str]]:
    """A command's exit status, and the modules that it has loaded when it ends."""
    command = [sys.executable, "-c", NAMED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=hygiene.patience(60))
    assert done.returncode == 0, done.stderr
    status, *modules = done.stderr.splitlines()[-1].split()
    return int(status), set(modules)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_loads_what_it_is_drawn_by_and_no_more(arguments: list[str]) -> None:
    status, modules = loaded(*arguments)
    assert status == (0 if arguments else 2)
    heavy = {"numpy", "pydantic", "yaml", "multiprocessing", "asyncio", *PLOTS}
    assert heavy.isdisjoint(modules)
    own = {name for name in modules if name.startswith("hvdkit.")}
    commands = {f"hvdkit.cli.{part}" for part in PARTS}
    ground = {f"hvdkit.{part}" for part in ("__main__", "defaults", "errors", "files", "cli", "commands")}
    assert commands <= own <= ground | commands | {"hvdkit.cli.wrong_words"}


def test_help_of_a_command_loads_that_command_and_no_plotting_library() -> None:
    status, modules = loaded("compare", "--help")
    assert status == 0 and PLOTS.isdisjoint(modules)
    assert "hvdkit.commands.compare" in modules and "hvdkit.commands.advise" not in modules


def test_a_prediction_is_made_and_drawn_without_templates_and_advice(tmp_path: Path) -> None:
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    status, modules = loaded(
        "predict", tmp_path / "profile.json", "--cluster", "p100-roce25", "-n", 64, "--out", tmp_path / "out"
    )
    assert status == 0 and {"jinja2", "hvdkit.simulator.advise"}.isdisjoint(modules)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "predict.json", "predict.csv", "predict.png", "predict-trace.json",
    }  # fmt: skip
    with Image.open(tmp_path / "out" / "predict.png") as picture:
        assert picture.width == 1100 and picture.height > 200


def test_a_step_is_drawn_to_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of a colour have the length, in ms, of the share of the step that this kind of task takes."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    cluster = simulating.cluster(mbit_per_s=1000.0)
    schedule = predict.schedule(calibration.calibrate(simulating.profile()), cluster, 8, Settings())
    gantt.picture(schedule, "a step", tmp_path / "p.png")
    _, begin, end, spans = gantt.window(schedule)
    (axes,) = figures[0].axes
    drawn: Counter[str] = Counter()
    for bars in axes.collections:
        widths = [float(path.vertices[:, 0].max() - path.vertices[:, 0].min()) for path in bars.get_paths()]
        drawn[to_hex(bars.get_facecolor()[0])] += sum(widths)
    assert axes.get_xlim() == pytest.approx((0, 1e3 * (end - begin)))
    for kind in ("forward", "backward", "communication", "update"):
        mine = [s for s in spans if s.task.kind == kind]
        wanted = 1e3 * sum(min(s.end, end) - max(s.start, begin) for s in mine)
        slack = len(mine) * 1e3 * (end - begin) / 1000  # a pixel for each task
        assert wanted > slack / 5 and abs(drawn[gantt._COLOURS[kind]] - wanted) <= slack, kind


@pytest.mark.parametrize("name", ["two\nlines", "$x^2$", "\x1b[31m", "网络", "a" * 10_000, "\ud800"])
def test_whatever_a_profile_is_called_is_drawn(name: str, tmp_path: Path) -> None:
    made = simulating.cluster().model_copy(update={"name": name})
    schedule = predict.schedule(calibration.calibrate(simulating.profile()), made, 8, Settings())
    gantt.picture(schedule, f"{name}, 8 ranks", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_each_figure_is_laid_out_and_drawn_once(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(real, several_rounds)
    laid_out: Counter[int] = Counter()
    drawn: Counter[int] = Counter()
    kept: list[Any] = []  # so that no two of them have the same id
    execute, draw = ConstrainedLayoutEngine.execute, Axes.draw

    def counted_execute(self: ConstrainedLayoutEngine, figure: Any) -> None:
        kept.append(figure)
        laid_out[id(figure)] += 1
        execute(self, figure)

    def counted_draw(self: Axes, renderer: Any) -> None:
        kept.append(self)
        drawn[id(self)] += 1
        draw(self, renderer)

    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", counted_execute)
    monkeypatch.setattr(Axes, "draw", counted_draw)
    text = page.write(real)[0].read_text()
    assert len(laid_out) == text.count("<figure id=") == 8
    assert set(laid_out.values()) == set(drawn.values()) == {1} and len(drawn) > len(laid_out)


def test_a_recipe_that_runs_share_is_parsed_once(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: Counter[str] = Counter()
    load = yaml_files.yaml.load

    def counted(text: str, Loader: Any) -> Any:
        parsed[text] += 1
        return load(text, Loader=Loader)

    monkeypatch.setattr(yaml_files.yaml, "load", counted)
    yaml_files._parsed.cache_clear()
    page.write(real)
    assert len(list(real.glob("runs/*/config.yaml"))) == 8
    assert parsed and set(parsed.values()) == {1}


def test_what_is_parsed_once_is_not_shared() -> None:
    first = yaml_files.parse("a: {b: [1]}", "here")
    first["a"]["b"].append(2)
    assert yaml_files.parse("a: {b: [1]}", "here") == {"a": {"b": [1]}}


def test_the_same_results_give_the_same_page(real: Path) -> None:
    made = page.write(real, real / "a")[0].read_text().replace(f"{real}/a", "OUT")
    assert made == page.write(real, real / "b")[0].read_text().replace(f"{real}/b", "OUT")


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (2, 2), (3, 3), (64, 3)])
def test_the_doctor_looks_into_as_many_runtimes_at_once_as_there_are_cores(
    cores: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None may end before as many have begun."""
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    lock, full, now, peak = threading.Lock(), threading.Event(), [0], [0]

    def look(name: str) -> doctor.Finding:
        with lock:
            now[0] += 1
            peak[0] = max(peak[0], now[0])
            if now[0] == most:
                full.set()
        assert full.wait(hygiene.patience(60)), f"{name} waits for others to be looked into beside it"
        time.sleep(0.1)  # for one more than there should be
        with lock:
            now[0] -= 1
        return doctor.Finding(name, "ready")

    monkeypatch.setattr(doctor, "_look_into", look)
    assert [found.name for found in doctor.examine().findings] == ["pytorch", "tensorflow", "mxnet"]
    assert peak[0] == most


def test_a_probe_imports_without_looking_for_garbage(tmp_path: Path) -> None:
    (tmp_path / "framework.py").write_text("import gc\n__version__ = str(gc.isenabled())\n")
    (tmp_path / "binding.py").write_text("def gloo_built(): return True\n")
    command = [sys.executable, str(environment._PROBE), "framework", "binding", "json"]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=hygiene.patience(60), env=os.environ | {"PYTHONPATH": tmp_path}
    )
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["versions"]["framework"] == "False" and found["controllers"] == ["gloo"]
