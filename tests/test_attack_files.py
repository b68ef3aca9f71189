"""Files that are damaged, endless, no files at all, or another command's: each is refused in a line, at once."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdkit import paths
from hvdkit.commands import advise, predict
from hvdkit.commands.advise import AdviseRequest
from hvdkit.errors import RequestError
from hvdkit.files import open_lock, open_regular, read_bounded
from hvdkit.recipe import schema
from hvdkit.report import collect, page, tabular
from hvdkit.results import profile as profiles
from hvdkit.results.train import MetricLine
from tests import hygiene
from tests.attacks import HVDKIT, attack, refused, sound
from tests.comparisons import change
from tests.conftest import ROOT, Hvdkit
from tests.simulating import profile

pytestmark = pytest.mark.check

BIG = 10**400  # 401 digits, beyond any float


def test_a_pipe_is_read_to_its_end_and_one_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="nothing came through it"):
        read_bounded(fifo, patience_s=0.05)
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"x" * 300_000))
    writer.start()
    assert read_bounded(fifo, patience_s=hygiene.patience(30)) == b"x" * 300_000
    writer.join()
    with pytest.raises(OSError, match="more than"):
        read_bounded(Path("/proc/self/maps"), most=10)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(ROOT / "setup.cfg")
    for place in (fifo, Path("/dev/zero"), Path("/dev/full")):
        for reads in (open_regular, open_lock) if place == fifo else (open_regular, read_bounded):
            with pytest.raises(OSError, match="not a file"):
                reads(place)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        for reads in (open_regular, read_bounded):
            with pytest.raises(OSError):
                reads(tmp_path / "socket")
    before = (ROOT / "setup.cfg").read_bytes()
    with pytest.raises(OSError):
        open_lock(link)  # whoever can write there must not have another file emptied
    assert (ROOT / "setup.cfg").read_bytes() == before


def test_a_recipe_that_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    refused(attack(tmp_path, f"{HVDKIT} train recipe.yaml"), "recipe.yaml: cannot be read (it is a pipe", "5 s")
    recipe = ROOT / "recipes" / "resnet20-digits.yaml"
    piped = attack(tmp_path, f"{HVDKIT} train <(cat {recipe}) --framework nowhere")
    refused(piped, "unknown framework 'nowhere'")  # the recipe itself was read


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_lock_file_that_is_none(kind: str, tmp_path: Path) -> None:
    folder, precious = tmp_path / "out", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("keep")
    lock = folder / ".lock"
    {"fifo": lambda: os.mkfifo(lock), "link": lambda: lock.symlink_to(precious), "folder": lock.mkdir}[kind]()
    with pytest.raises(RequestError, match="cannot be written"), paths.claimed(folder, overwrite=True):
        raise AssertionError
    assert precious.read_text() == "keep"


def _runs(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: [run.update(values) for run in document["runs"]]


def _marks(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["parity"]["marks"].update(values)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a choice without why": (_runs(tuning={"a": {"value": 1}}), "tuning: a: expected the key why"),
    "sync without every": (_runs(sync={"start": 1}), "sync: expected the key every"),
    "sync with 401 digits": (_runs(sync={"every": BIG}), "sync: expected a number of at most"),
    "a count of 401 digits": (_runs(parameters=BIG), "parameters: expected a number of at most"),
    "a rate of 401 digits": (_runs(images_per_second=BIG), "images_per_second: Input should be a finite number"),
    "rates whose sum is beyond": (_runs(images_per_second=1e308), "images_per_second: expected a number of at most"),
    "a time without end": (_runs(step_ms=[float("inf")]), "step_ms.0: Input should be a finite number"),
    "a rate that is none": (_runs(images_per_second=float("nan")), "images_per_second: Input should be a finite"),
    "a text for a number": (_runs(np="two"), "runs.0.np: Input should be a valid integer"),
    "no ranks": (_runs(np=0), "np: expected a number above 0, got 0"),
    "fewer than no epochs": (_runs(epochs=-1), "epochs: expected a number above 0, got -1"),
    "a key with a line break": (_runs(**{"line\nbreak": 1}), "Extra inputs are not permitted"),
    "an unknown mark": (_marks(foo=1.0), "parity.marks: expected logits_f64"),
    "a mark that is gone": (lambda document: document["parity"]["marks"].pop("step_f64"), "parity.marks: expected"),
    "parity of nobody": (lambda document: document["parity"].update(frameworks={}), "parity.frameworks"),
    "too many numbers of ranks": (
        lambda document: document.update(runs=[document["runs"][0] | {"np": np} for np in range(1, 34)]),
        "expected at most 32 numbers of ranks",
    ),
    "too many kinds": (
        lambda document: document.update(runs=[document["runs"][0] | {"framework": f"f{i}"} for i in range(201)]),
        "expected at most 200 kinds of runs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_comparison_is_refused_by_its_key(damage: str, real: Path) -> None:
    spoil, told = DAMAGE[damage]
    change(real, spoil)
    with pytest.raises(RequestError) as refusal:
        collect.read(real)
    assert told in str(refusal.value) and len(str(refusal.value).splitlines()) == 1


# Odd figures, and a text of the page that shows them.
ODD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "huge": (
        _runs(images_per_second=1e299, step_ms_p50=1e299, step_ms_p90=1e299, step_ms=[1e299] * 9),
        "Efficiency at 2 ranks: pytorch 50 %",
    ),
    "tiny": (
        _runs(images_per_second=5e-324, step_ms_p50=5e-324, step_ms_p90=0, step_ms=[5e-324] * 9, peak_rss_mib=0),
        "| pytorch | 2 | 1 | 0.0 | 50.0 % | 0.0 | 0.0 |",
    ),
    "negative": (_runs(step_ms_p50=-5, step_ms_p90=-7, step_ms=[-1.0, -2.0], peak_rss_mib=-9), "| -5.0 | -7.0 |"),
    "a reference without error": (
        lambda document: [
            each.update(reference_logits_f32=0.0) for each in document["parity"]["frameworks"].values()
        ],
        "| logits in float32 | 3 or 50 × 0.0e+00 | 5.0e-07 | 5.6e-07 |",  # no ratio to it
    ),
    "clocks with and without a zone": (
        lambda document: [
            run.update(ended_at=f"2026-11-21T23:0{number}:00{'Z' * (number % 2)}")
            for number, run in enumerate(document["runs"])
        ],
        "| measured | 21 November 2026, 23:00 to 23:07 UTC |",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_figures_make_a_page_that_shows_them(kind: str, real: Path) -> None:
    spoil, shown = ODD[kind]
    change(real, spoil)
    made = page.make(collect.read(real), "")
    text = page.as_markdown(made)
    assert shown in text and not re.search(r"\b(nan|inf)\b", text)
    assert "<svg" in page.as_html(made)


def _lengthened(real: Path, count: int, ends: bool) -> Path:
    place = real / "runs" / "pytorch-np1" / "metrics.jsonl"
    line = MetricLine(
        step=1, total_steps=count, epoch=0, ends_epoch=ends, loss=1.0, learning_rate=0.1, images_per_second=9.0,
        val_accuracy=0.5 if ends else None,
    )  # fmt: skip
    texts = (line.model_copy(update={"step": step}).model_dump_json() for step in range(1, count + 1))
    place.write_text("\n".join(texts) + "\nno line\n")
    return place.parent


@pytest.mark.parametrize("ends", [False, True])
def test_a_report_of_many_lines_reads_each_once_and_draws_no_more_than_of_few(
    ends: bool, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted, not timed: lines that are parsed, what is drawn, cells that are looked at."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # else a second process draws some charts, uncounted
    counts: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapped)

    counted(collect.MetricLine, "model_validate_json")
    counted(tabular.Table, "figures")
    work = {}
    for count in (3_000, 30_000):
        counts.clear()
        run = _lengthened(real, count, ends)
        found = collect.read(run).runs[0]
        assert found.unread == 1 and found.lines[0].step == 1 and found.lines[-1].step == count
        made = page.make(collect.read(run), "")
        size = len(page.as_html(made))
        assert counts["model_validate_json"] == 2 * (count + 1)
        work[count] = counts["figures"], size
        rows = [len(chart.table.rows) for section in made.sections for chart in section.charts]
        assert max(rows) <= 402
    (tables, small), (same_tables, large) = work.values()
    assert tables == same_tables and large < 1.5 * small


def test_a_metrics_file_without_end_is_left_out(real: Path) -> None:
    for kind in ("device", "fifo", "one line"):
        place = real / "runs" / "pytorch-np1" / "metrics.jsonl"
        place.unlink()
        if kind == "device":
            place.symlink_to("/dev/zero")
        elif kind == "fifo":
            os.mkfifo(place)
        else:
            place.write_bytes(b"[" * 10_000_000)
        found = collect.read(place.parent)
        assert found.runs[0].lines == [] and (found.runs[0].unread > 0) == (kind == "one line")


def test_a_recipe_with_thousands_of_faults_tells_the_first_and_counts_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(f"k{number}: {number}" for number in range(5_000)))
    with pytest.raises(RequestError) as refusal:
        schema.load(path)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 51 and "more faults" in lines[-1] and "k0: unknown key" in lines[0] + lines[4]


def test_a_profile_from_elsewhere_decides_nothing_but_what_it_measured(inside: Hvdkit, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profiles.save(profile(), path)
    document = json.loads(path.read_text())
    document["settings"] = {"epochs": BIG, "data": {"train_images": BIG}}
    document["recipe"] = "../../../a\0b"
    path.write_text(json.dumps(document))
    found = predict.read(path)
    place = paths.default_out(found.recipe, "predict")
    assert place.parent == Path("runs") and place.name.startswith("a-b-predict-")
    plan = predict.question(Path("p100-roce25"), [8], [], None).of(predict.read(path))
    money = advise.money(plan, AdviseRequest(subject=path, price=1.0))
    assert (money.samples, money.epochs) == (None, None)
    done = inside("advise", "profile.json", "--cluster", "p100-roce25", "-n", 8)
    assert done.returncode == 0, done.stderr
    sound(done)
    assert [each.name for each in tmp_path.iterdir() if each.name != "profile.json"] == ["runs"]
