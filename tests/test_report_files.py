"""What `hvdkit report` reads, finds, writes and refuses; its page is opened in test_report.py."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdkit import paths
from hvdkit.recipe import schema
from hvdkit.report import canvas, collect, page, reproduce, tables
from hvdkit.report.rounds import RunGroup, grouped, interval, ratio
from tests.comparisons import change, several_rounds
from tests.conftest import Hvdkit, run

pytestmark = pytest.mark.check


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts have their points and tables, and no picture, which test_report.py and test_quick.py look at."""
    monkeypatch.setattr(canvas, "_inline", lambda figure, key: "<svg></svg>")


def test_the_command_writes_a_page_and_markdown_beside_the_results(hvdkit: Hvdkit, real: Path) -> None:
    before = {path: path.read_bytes() for path in real.rglob("*") if path.is_file()}
    done = hvdkit("report", "comparison")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"written to comparison/report.{kind}" for kind in ("html", "md")]
    assert {path.name for path in real.iterdir()} == {"compare.json", "runs", "report.html", "report.md"}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert 50_000 < (real / "report.html").stat().st_size < 5_000_000
    paths.check_free(real, overwrite=True)  # it is hvdkit's own, so that the next comparison may replace it
    again = hvdkit("report", "comparison", "--out", "elsewhere/new")
    assert again.returncode == 0 and (real.parent / "elsewhere" / "new" / "report.html").is_file()
    assert "hvdkit report comparison --out elsewhere/new" in (real.parent / "elsewhere/new/report.md").read_text()


def test_the_methods_can_be_pasted_into_a_paper(real: Path) -> None:
    def said() -> str:
        made = page.make(collect.read(real), "")
        assert all(page.as_markdown(made).count(text) == 1 for text in made.methods)
        return "\n".join(made.methods)

    assert "ran once, so speeds have no interval" in said() and "resamples" not in said()
    change(real, several_rounds)
    document, text = json.loads((real / "compare.json").read_text()), said()
    for result in document["runs"]:
        assert f"{result['framework_version']}, Horovod {result['horovod_version']}" in text
    runs, noisy = len(document["runs"]), sum(result["noisy"] for result in document["runs"])
    assert "in each of 5 rounds" in text and "confidence is at most 94 %" in text, text
    assert f"In {noisy} of {runs} runs" in text and noisy
    assert document["machine"]["processor"] in text and f"{document['parity']['steps']} steps from the same" in text
    change(real, lambda document: document.update(parity=None))
    assert said().endswith("Whether all did the same work was not checked.")


def test_a_tie_is_an_interval_that_holds_one(real: Path) -> None:
    def level(document: dict[str, Any]) -> None:
        several_rounds(document)
        for result in document["runs"]:
            wobble = {"keras": -1, "tensorflow": 1}.get(result["framework"], 0) * (-1) ** result["round"]
            result["images_per_second"] = 300 + 5 * wobble if wobble else 100 + result["round"]

    change(real, level)

    def fastest() -> str:
        return next(each.text for each in page.make(collect.read(real), "").findings if each.kind == "answer")

    assert fastest().startswith(("A tie of tensorflow and keras", "A tie of keras and tensorflow"))

    def lead(document: dict[str, Any]) -> None:
        for result in document["runs"]:
            if result["framework"] == "mxnet":
                result["images_per_second"] = 500.0

    change(real, lead)
    assert fastest().startswith("mxnet: 500.0")


def test_the_page_says_when_it_was_measured(real: Path) -> None:
    def told() -> str:
        return next(row[1].text for row in page.make(collect.read(real), "").machine.rows if row[0].text == "measured")

    assert told() == "not recorded"  # these runs are of an earlier version

    def dated(document: dict[str, Any]) -> None:
        for minute, result in enumerate(document["runs"]):
            result["ended_at"] = f"2026-11-21T23:{55 + minute}:00Z" if minute < 5 else "2026-11-22T00:10:30Z"

    change(real, dated)
    assert told() == "21 November 2026, 23:55 to 22 November 2026, 00:10 UTC"


def test_few_rounds_say_how_sure_they_are_and_are_paired_by_their_number(real: Path) -> None:
    def three(document: dict[str, Any]) -> None:
        several_rounds(document)
        document["runs"] = [result for result in document["runs"] if result["round"] <= 3]

    change(real, three)
    answer, caution, *others = page.make(collect.read(real), "").findings
    assert (caution.kind, caution.lead) == ("caution", "Only 3 rounds: treat close results as ties")
    assert "at most 75 %" in caution.text and "--rounds 6" in caution.text
    assert any(each.text.endswith("; 3 rounds, 75 % confidence.") for each in [answer, *others])
    alone, pair = grouped(collect.read(real).runs)[0], grouped(collect.read(real).runs)[4]
    shifted = RunGroup(pair.framework, pair.np, None, pair.runs[1:])
    expected = [run.result.images_per_second for run in pair.runs[1:]]
    assert ratio(shifted, alone).n == 2
    assert ratio(shifted, alone).middle == pytest.approx(
        sum(mine / other.result.images_per_second for mine, other in zip(expected, alone.runs[1:], strict=True)) / 2
    )


def test_the_answer_comes_first_with_its_caution_and_missing_rivals_are_a_note(real: Path) -> None:
    made = page.make(collect.read(real), "")
    answer, caution, *_ = made.findings
    assert answer.kind == "answer" and answer.lead.endswith("at 2 ranks, by one run each")
    assert caution.kind == "caution" and "do not choose by these speeds" in caution.lead
    assert "Rivals" not in str(made.findings) and any(note.startswith("Only hvdkit was") for note in made.notes)
    change(real, several_rounds)
    made = page.make(collect.read(real), "")
    assert all(each.kind != "caution" for each in made.findings), "five rounds make intervals of 94 %"
    assert [each.kind for each in made.findings[:3]] == ["answer", "good", "bad"]
    assert not any(note.startswith("Only hvdkit") for note in made.notes)

    def once(document: dict[str, Any]) -> None:
        for each in document["ratios"]:
            each |= {"rounds": 1, "confidence": 0.0, "low": each["median"], "high": each["median"]}

    change(real, once)
    made = page.make(collect.read(real), "")
    (against,) = (each.text for each in made.findings if "the rival" in each.lead)
    (chart,) = (chart for section in made.sections for chart in section.charts if chart.key == "ratios")
    assert " 0 %" not in against and not any(word in against for word in ("faster", "slower", "tie"))
    assert all([cell.text for cell in row[4:6] + row[7:]] == ["–"] * 4 for row in chart.table.rows), "no interval"


def test_an_efficiency_above_one_is_noted_with_what_is_known_of_the_reason(real: Path) -> None:
    def faster(document: dict[str, Any], **changes: object) -> None:
        for result in document["runs"]:
            if result["framework"] == "mxnet" and not result["rival"]:
                result["images_per_second"] = 110.0 * result["np"] if result["np"] > 1 else 100.0
                result |= changes if result["np"] > 1 else {}

    def noted() -> str:
        (note,) = (each for each in page.make(collect.read(real), "").notes if "an efficiency of" in each)
        return note

    change(real, lambda document: [result.setdefault("rival") for result in document["runs"]])
    change(real, faster)
    assert noted().startswith("mxnet has an efficiency of 110.0 % at 2 ranks. With one run each")
    scaling = next(each for each in page.make(collect.read(real), "").findings if each.lead == "Scaling")
    assert "mxnet 110 %" in scaling.text and scaling.text.endswith("see the notes below the results.")
    change(real, lambda document: faster(document, threads=2, noisy=True))
    assert "each of the 2 ranks 2" in noted() and "1 of the 2 runs that it is computed from were noisy" in noted()
    change(real, several_rounds)
    change(real, faster)
    assert "from 5 rounds, is above 100 %; the results do not show why" in noted()


def test_a_short_run_has_no_curve_and_says_so(real: Path) -> None:
    folder = real / "runs" / "mxnet-np2"
    first = next(line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"ends_epoch":true' in line)
    (folder / "metrics.jsonl").write_text(first + "\n")
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("steps: null", "steps: 8"))
    document = json.loads((folder / "result.json").read_text()) | {"steps": 8, "measured_steps": 1}
    (folder / "result.json").write_text(json.dumps(document))
    made = page.make(collect.read(folder), "")
    assert ", 8 steps, " in made.about
    assert [(each.key, each.charts, each.text) for each in made.sections if each.key in ("throughput", "learning")] == [
        (key, [], [f"No curve{end}: fewer than two points were logged (log_every=1 logs each step)."])
        for key, end in (("throughput", ""), ("learning", "s"))
    ]
    (steps,) = (each for each in made.sections if each.key == "steps")
    assert (steps.charts, steps.text) == ([], ["No distribution: fewer than two steps were measured."])
    assert made.findings[1].text.startswith("Images/s was measured over 1 step only")
    assert made.results.columns[:3] == ["framework", "ranks", "images/s"] and "parity" not in made.results.columns
    assert "`" not in page.as_html(made).partition("<script>")[0]


def test_unequal_accuracies_beside_a_passed_parity_are_explained(real: Path) -> None:
    def counted(document: dict[str, Any]) -> None:
        document["runs"][0]["val_samples"] = 360

    change(real, counted)
    made = page.make(collect.read(real), "", real)
    assert "although parity passed" in made.accuracies and "in fp32" in made.accuracies
    assert "One of the 360 held-out images is 0.28 percentage points." in made.accuracies
    assert (real / made.parity_link).resolve() == paths.recipes().parent / "docs" / "parity.md"

    def equal(document: dict[str, Any]) -> None:
        for result in document["runs"]:
            result["val_accuracy"] = 0.9917

    change(real, equal)
    assert page.make(collect.read(real), "").accuracies == ""
    change(real, lambda document: (document["runs"][0].update(val_accuracy=0.5), document.update(parity=None)))
    assert page.make(collect.read(real), "").accuracies == "", "without parity there is nothing to explain"


def test_the_version_of_horovod_is_that_of_runs_that_have_it(real: Path) -> None:
    change(real, several_rounds)
    change(real, lambda document: document["runs"][-1].update(horovod_version=None))  # a baseline's, the last run
    (row,) = (row for row in tables.machine_table(collect.read(real)).rows if row[0].text == "mxnet")
    assert row[1].text == "1.9.1, Horovod 0.28.1"


def test_what_an_elastic_run_has_outlived_is_told(real: Path) -> None:
    lost = {"why": "lost", "step": 20, "np_before": 2, "np": 1, "seconds": 3.25}
    change(real, lambda document: document["runs"][1].update(recoveries=[lost]))
    assert any("a rank was lost before step 20" in note for note in page.make(collect.read(real), "").notes)


def test_the_users_own_settings_for_pictures_change_nothing(hvdkit: Hvdkit, real: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nfigure.facecolor: red\nlines.linewidth: 9\n")
    odd = real.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe5\x90\x8d"))
    assert hvdkit("report", odd, "--out", "plain").returncode == 0
    done = hvdkit("report", odd, "--out", "plain2", MPLCONFIGDIR=str(tmp_path))
    assert done.returncode == 0 and done.stderr == ""
    one, other = ((tmp_path / name / "report.html").read_text() for name in ("plain", "plain2"))
    assert one == other.replace("plain2", "plain")


def test_an_interval_is_the_bootstrap_of_the_median() -> None:
    alone = interval((3.0,))
    assert (alone.middle, alone.low, alone.high, alone.n, alone.text()) == (3.0, None, None, 1, "3.0")
    found = interval((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (found.middle, found.low, found.high, found.n) == (3.0, 1.0, 100.0, 5)
    assert interval((2.0,) * 7).text(2) == "2.00 (2.00–2.00)"


def test_the_commands_give_the_same_recipe_again(real: Path, tmp_path: Path) -> None:
    found = collect.read(real)
    for each in found.runs:
        words = shlex.split(reproduce.locate(each, real).text)
        name = f"{each.result.framework}-np{each.result.np}"
        assert words[:9] == [
            "hvdkit", "train", "resnet20-digits", "--framework", each.result.framework, "-np", str(each.result.np),
            "--out", f"{real}-again-{name}",
        ]  # fmt: skip
        assert schema.load(paths.recipes() / "resnet20-digits.yaml", words[9:]) == each.recipe
    own = tmp_path / "own name's.yaml"
    base = paths.recipes() / "resnet20-digits.yaml"
    overrides = ["data={name: synthetic, height: 48}", "optimizer={name: lamb, learning_rate: 1.0e-3}", "checkpoint={}"]
    for recipe in (schema.load(base, overrides), schema.load(base, [*overrides, "name=own"])):
        own.write_text(schema.dump(recipe))
        words = shlex.split(reproduce.locate(collect.Run(found.runs[0].result, [], 0, own, recipe), tmp_path).text)
        place = own if recipe.name == "own" else base
        assert words[2] == (str(own) if recipe.name == "own" else recipe.name)
        assert words[7:9] == ["--out", f"{tmp_path}-again"] and schema.load(place, words[9:]) == recipe
    everything = reproduce.of_all(found)
    assert everything and everything.text == (
        "hvdkit compare resnet20-digits --framework pytorch --framework tensorflow --framework keras --framework mxnet "
        f"-np 1 -np 2 --out {real}-again epochs=3 threads=1"
    )


def test_markdown_has_the_table_and_what_was_found(real: Path) -> None:
    change(real, several_rounds)
    page.write(real)
    markdown = (real / "report.md").read_text()
    for group in grouped(collect.read(real).runs):
        assert f"| {group.label} | {group.np} | 5 | {group.speed.text()} | " in markdown
    assert "- **Parity:** Passed" in markdown and "**Noisy:**" in markdown
    assert "\n\n\n" not in markdown and len(markdown) < 20_000


def test_metrics_of_a_task_of_ones_own_are_columns_and_curves(real: Path) -> None:
    place = real / "runs" / "pytorch-np2"
    own = {"val_accuracy": None, "val_loss": 0.25, "validation": {"mae": 0.125, "loss": 0.25}, "unit": "patients"}
    result = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(json.dumps(result | own))
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    changed = [line | own if line["ends_epoch"] else line for line in lines]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    made = page.make(collect.read(place), "")
    row = dict(zip(made.results.columns, [cell.text for cell in made.results.rows[0]], strict=True))
    assert (row["mae"], row["validation loss"]) == ("0.1250", "0.2500") and "accuracy" not in row
    assert "validation mae 0.1250, validation loss 0.2500" in made.findings[0].text
    (learning,) = [section for section in made.sections if section.key == "learning"]
    assert learning.title == "Loss and metrics" and learning.charts[0].table.columns[-1] == "mae"
    assert "0.1250" in str(learning.charts[0].table)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "the folder is empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "no such folder": shutil.rmtree,
    "is a file": lambda folder: (shutil.rmtree(folder), folder.touch()),
    "neither compare.json nor result.json": lambda folder: (
        (folder / "compare.json").rename(folder / "other.json") and shutil.rmtree(folder / "runs")
    ),
    "that has not ended": lambda folder: (folder / "compare.json").unlink(),
    "not the compare.json of `hvdkit compare`: file: Invalid JSON": lambda folder: os.truncate(
        folder / "compare.json", 1000
    ),
    "file: Input should be an object": lambda folder: (folder / "compare.json").write_text("[]"),
    "it has no runs": lambda folder: change(folder, lambda document: document.update(runs=[])),
    "mxnet-np1/result.json: not the result of a training run": lambda folder: os.truncate(
        folder / "runs" / "mxnet-np1" / "result.json", 10
    ),
    "cannot be read (Permission denied)": lambda folder: folder.chmod(0),
    "cannot be written (Permission denied)": lambda folder: folder.chmod(0o500),
    "compare.json: cannot be read (Is a directory)": lambda folder: (
        (folder / "compare.json").unlink(),
        (folder / "compare.json").mkdir(),
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_bad_input_is_one_clear_line(message: str, inside: Hvdkit, real: Path) -> None:
    DAMAGE[message](real)
    if "denied" in message.lower():
        # root may read and write everything, unless these capabilities are taken away
        plain = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        done = run([*plain, sys.executable, "-m", "hvdkit", "report", "comparison"], 60, cwd=real.parent)
    else:
        done = inside("report", "comparison")
    if real.is_dir():
        real.chmod(0o700)
        assert not list(real.glob("report.*"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1 and done.stdout == ""


@pytest.mark.parametrize("key", ["step", "total_steps", "epoch"])
def test_counts_that_no_run_has_are_left_out(key: str, real: Path) -> None:
    run_folder = next((real / "runs").iterdir())
    metrics = run_folder / "metrics.jsonl"
    line = json.loads(metrics.read_text().splitlines()[0])
    with metrics.open("a") as file:
        for value in (-1, 10**19, 10**400):  # of which none can be drawn
            file.write(json.dumps(line | {key: value}) + "\n")
    assert sum(each.unread for each in collect.read(real).runs) == 3
