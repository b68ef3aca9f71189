"""`hvdkit report` on a real comparison's files (tests/data/comparison), opened in a headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium
from conftest import Hvdkit, run

from hvdkit import config, paths
from hvdkit.report import gather, page, reproduce
from hvdkit.report.rounds import Group, grouped, interval, ratio
from hvdkit.results import Comparison

REAL = Path(__file__).parent / "data" / "comparison"
NAMES = ["pytorch", "tensorflow", "keras", "mxnet"]
CHARTS = ["speed", "scaling", "efficiency", "steps", "memory", "learning-1", "learning-2", "parity", "parity-steps"]
# What a chart has drawn: its own bounding box, and how many shapes of a series' colour have an extent.
DRAWN = """[...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector('.drawing svg').getBoundingClientRect();
  const inside = box => box.width + box.height > 2 && box.left >= svg.left - 2 && box.right <= svg.right + 2
    && box.top >= svg.top - 2 && box.bottom <= svg.bottom + 2;
  const series = [...figure.querySelectorAll('.drawing [style*="--series-"]')].filter(shape => {
    const style = getComputedStyle(shape);
    return !shape.closest('defs') && (style.fill !== 'none' || style.stroke !== 'none');
  });
  return {id: figure.id, width: svg.width, height: svg.height, alt: figure.querySelector('[role=img]').ariaLabel,
    caption: figure.querySelector('figcaption').textContent.trim(),
    rows: figure.querySelectorAll('details tbody tr').length,
    colours: new Set(series.filter(shape => inside(shape.getBoundingClientRect()))
      .map(shape => getComputedStyle(shape)[shape.style.fill.includes('var') ? 'fill' : 'stroke'])).size};
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A copy of the comparison."""
    return Path(shutil.copytree(REAL, tmp_path / "comparison"))


@pytest.fixture
def reported(real: Path) -> Path:
    """The page of the comparison."""
    return page.write(real)[0]


def change(folder: Path, revise: Callable[[dict[str, Any]], None]) -> None:
    """Change compare.json."""
    document = json.loads((folder / "compare.json").read_text())
    revise(document)
    (folder / "compare.json").write_text(json.dumps(document))


def several_rounds(document: dict[str, Any]) -> None:
    """Five rounds of each run with a rival beside those of two ranks, made up from the real ones."""
    runs, ratios = [], []
    for result in document["runs"]:
        for rival, factor in [(None, 1.0), *([("other", 0.8)] if result["np"] == 2 else [])]:
            for round_ in range(1, 6):
                speed = result["images_per_second"] * factor * (1 + 0.01 * (round_ - 3))
                steps = [result["step_ms_p50"] * (1 + 0.002 * place) for place in range(50)]
                more = {"step_ms": steps, "step_ms_p99": steps[-1], "startup_s": 10.0, "cpu_s_per_image": 0.004}
                one = {"rival": rival, "round": round_, "images_per_second": speed, "load": 0.02, "noisy": round_ == 5}
                runs.append(result | one | more | {"tuning": {"cycle_time_ms": 5, "why": "most images/s of three"}})
        if result["np"] == 2:
            figures = {"median": 1.25, "low": 1.2, "high": 1.3, "rounds": 5, "confidence": 0.9375, "verdict": "faster"}
            ratios.append({"framework": result["framework"], "np": 2, "against": "other"} | figures)
    now = {"median": 0.9, "low": 0.88, "high": 0.92, "rounds": 5, "old_rounds": 3, "margin": 0.05}
    rows = [now | {"framework": "keras", "np": 2, "rival": "other", "verdict": "worse"}]
    document |= {"runs": runs, "ratios": ratios, "rounds": 5, "baseline": rows}


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


def test_the_page_opens_without_errors_or_network_and_every_chart_is_drawn(browser: Browser, reported: Path) -> None:
    opened = browser.open(reported)
    assert opened.faults() == []
    assert opened.requests() == []
    charts = opened.run(DRAWN)
    assert [chart["id"] for chart in charts] == [f"chart-{name}" for name in CHARTS]
    for chart in charts:
        assert chart["width"] > 300 and chart["height"] > 100, chart
        assert chart["colours"] == len(NAMES), f"a colour for each framework: {chart}"
        assert len(chart["alt"]) > 30 and chart["caption"] and chart["rows"] >= len(NAMES), chart
    assert opened.run("document.querySelectorAll('[id]').length == new Set([...document.querySelectorAll('[id]')]"
                      ".map(each => each.id)).size"), "ids are there once"  # fmt: skip
    text = opened.run("document.body.innerText")
    comparison = Comparison.model_validate_json((REAL / "compare.json").read_bytes())
    for result in comparison.runs:
        assert f"{result.images_per_second:,.1f}" in text and f"{result.peak_rss_mib:,.0f}" in text
        assert f"{result.framework_version}, Horovod {result.horovod_version}" in text
    assert comparison.machine.processor in text
    assert "One run each" in text and "None was measured" in text, "what is missing is said"


def test_these_checks_see_what_they_look_for(browser: Browser, reported: Path) -> None:
    good = reported.read_text()
    policy = re.search(r"<meta http-equiv.*?>", good)
    assert policy
    reported.write_text(good.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png"><script>hit = 1</script>'))
    forbidden = browser.open(reported)
    assert len(forbidden.faults()) >= 2 and forbidden.run("typeof hit") == "undefined", "the page's policy holds"
    loud = "<main><img src='http://127.0.0.1:9/x.png'><script>console.error('loud')</script>"
    reported.write_text(good.replace(policy[0], "").replace("<main>", loud))
    opened = browser.open(reported)
    assert opened.requests() == ["http://127.0.0.1:9/x.png"] and "loud" in str(opened.faults())
    reported.write_text(re.sub(r'(<div class="drawing".*?<svg[^>]*>).*?</svg>', r"\1</svg>", good, flags=re.DOTALL))
    assert {chart["colours"] for chart in browser.open(reported).run(DRAWN)} == {0}


def test_light_and_dark_differ_and_both_can_be_read(browser: Browser, reported: Path, tmp_path: Path) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        opened = browser.open(reported, scheme=scheme)
        opened.picture(tmp_path / f"{scheme}.png")
        style = "getComputedStyle(document.querySelector('{}')).{}"
        queries = [("body", "backgroundColor"), ("body", "color"), (".note", "color"), ("figure text", "fill")]
        found = [opened.run(style.format(*query)) for query in queries]
        bar = opened.run("getComputedStyle(document.querySelector('#chart-speed [style*=\"--series-0\"]')).fill")
        ground, *texts = found
        assert all(contrast(ground, text) >= 4.5 for text in texts), (scheme, found)
        assert contrast(ground, bar) >= 3
        colours[scheme] = [*found, bar]
    assert all(light != dark for light, dark in zip(colours["light"], colours["dark"], strict=True))
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()


def contrast(one: str, other: str) -> float:
    """Of two CSS colours, by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("rounds", [False, True])
def test_nothing_is_wider_than_a_phone(browser: Browser, real: Path, rounds: bool) -> None:
    if rounds:
        change(real, several_rounds)
    opened = browser.open(page.write(real)[0], width=390, height=844)
    opened.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert opened.run("document.documentElement.scrollWidth") == 390
    outside = """[...document.querySelectorAll('.drawing text, h1, h2, p, li, code')].map(each => [each.textContent,
        each.getBoundingClientRect()]).filter(([_, box]) => box.left < 0 || box.right > 390).map(([text, _]) => text)"""
    assert opened.run(outside) == []
    assert opened.run("Math.min(...[...document.querySelectorAll('.drawing text')].map(text => "
                      "parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, "
                      "text.getScreenCTM().b)))") >= 9  # fmt: skip
    assert opened.faults() == []


def test_tables_are_sorted_by_mouse_and_keyboard(browser: Browser, reported: Path) -> None:
    opened = browser.open(reported)
    opened.run("window.table = document.querySelector('table'); window.column = name => [...table.querySelectorAll("
               "'th')].findIndex(each => each.textContent === name)")  # fmt: skip
    read = "[...table.tBodies[0].rows].map(row => row.cells[column('images/s')].textContent)"
    assert opened.run("[...table.querySelectorAll('th')].every(each => each.querySelector('button'))")
    as_given = [float(text) for text in opened.run(read)]
    assert as_given != sorted(as_given)
    opened.run("table.querySelectorAll('th')[column('images/s')].firstElementChild.click()")
    assert [float(text) for text in opened.run(read)] == sorted(as_given)
    state = "table.querySelectorAll('th')[column('images/s')].getAttribute('aria-sort')"
    assert opened.run(state) == "ascending"
    opened.run("table.querySelectorAll('th')[column('images/s')].firstElementChild.focus()")
    opened.press("Enter")
    assert [float(text) for text in opened.run(read)] == sorted(as_given, reverse=True)
    assert opened.run(state) == "descending"
    opened.run("table.querySelectorAll('th')[column('framework')].firstElementChild.click()")
    names = opened.run("[...table.tBodies[0].rows].map(row => row.cells[0].textContent)")
    assert names == sorted(names) and opened.run(state) is None


def test_values_are_told_to_pointer_and_keyboard(browser: Browser, reported: Path) -> None:
    opened = browser.open(reported)
    opened.run("window.told = document.getElementById('told'); window.chart = document.querySelector("
               "'#chart-speed .drawing'); chart.scrollIntoView(); chart.focus()")  # fmt: skip
    assert opened.run("told.hidden")
    opened.press("ArrowRight")
    result = Comparison.model_validate_json((REAL / "compare.json").read_bytes()).runs[0]
    expected = f"{result.framework}, 1 rank: {result.images_per_second:.1f} images/s, n = 1"
    assert opened.run("told.textContent") == expected and not opened.run("told.hidden")
    opened.press("Escape")
    assert opened.run("told.hidden")
    # the end of the first bar, where the browser has drawn it
    box = opened.run("(box => [box.right, (box.top + box.bottom) / 2])(chart.querySelector('[style*=\"--series-0\"]')"
                     ".getBoundingClientRect())")  # fmt: skip
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] - 1, y=box[1])
    assert opened.run("told.textContent") == expected and not opened.run("told.hidden")
    assert opened.faults() == []


def test_a_missing_browser_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"^needs Chromium .*: sudo apt-get install chromium$"):
        Browser(tmp_path)


HOSTILE = [
    "<script>hit=1</script>",
    "\"><img src=x onerror='hit=1'>",
    "</script><script>hit=1</script>",
    "$\\frac{1}{0}$ %s {{ 7*7 }} ]]>--><svg onload=hit=1>",
    "very-long-" * 300,
    "a|b\n# no heading\n@everyone `code` ~~~\n```",
    "\x00\x1b[31m\u202ereversed",
]


@pytest.mark.parametrize("shift", [0, 4])
def test_hostile_names_stay_text(shift: int, browser: Browser, tmp_path: Path) -> None:
    """Every text that a report shows is one of them, each framework another, so that all are in all kinds of places."""
    names = (HOSTILE + HOSTILE)[shift:]
    real = Path(shutil.copytree(REAL, tmp_path / names[0][:20].replace("/", "_")))

    def spoil(document: dict[str, Any]) -> None:
        several_rounds(document)
        ill = {name: name + names[place] for place, name in enumerate(NAMES)}
        for result in document["runs"]:
            for place, key in enumerate(("recipe", "framework_version", "launcher", "model")):
                result[key] = names[place]
            result["framework"] = ill[result["framework"]]
            result["tuning"] = {names[1]: names[2]}
            result["rival"] = names[3] if result["rival"] else None
        document["machine"]["processor"] = names[0]
        for each in document["ratios"]:
            each |= {"framework": ill[each["framework"]], "against": names[3]}
        frameworks = document["parity"]["frameworks"]
        document["parity"]["frameworks"] = {ill[name]: value for name, value in frameworks.items()}
        document["parity"]["reference"] = names[1]

    change(real, spoil)
    line = (real / "runs" / "keras-np2" / "metrics.jsonl").read_text()
    shutil.rmtree(real / "runs")
    for number, result in enumerate(json.loads((real / "compare.json").read_text())["runs"]):
        (real / "runs" / str(number)).mkdir(parents=True)
        (real / "runs" / str(number) / "result.json").write_text(json.dumps(result))
        (real / "runs" / str(number) / "metrics.jsonl").write_text(line)
    opened = browser.open(page.write(real)[0], width=390)
    assert opened.faults() == [] and opened.requests() == []
    assert opened.run("typeof hit") == "undefined"
    assert opened.run("[document.scripts.length, document.images.length, document.querySelectorAll('h1').length, "
                      "document.documentElement.scrollWidth]") == [1, 0, 1, 390]  # fmt: skip
    assert opened.run("document.querySelectorAll('figure').length") == len(CHARTS) + 3, "CPU, start and ratios"
    markdown = (real / "report.md").read_text()
    code = re.compile(r"^(`{3,})\n.*?\n\1$", re.MULTILINE | re.DOTALL)
    outside = code.sub("", markdown)
    assert not re.search(r"<(?!/?(details|summary)>)|^#(?!# )|@|(?<!\\)`", outside, re.MULTILINE)
    header = next(line for line in outside.splitlines() if line.startswith("| framework"))
    rows = [line for line in outside.splitlines() if re.match(r"\| (pytorch|keras)", line)]
    cells = re.compile(r"(?<!\\)\|")
    assert rows and len(cells.findall(rows[0])) == len(cells.findall(header))


def test_rounds_have_intervals_and_ties_are_told(browser: Browser, real: Path) -> None:
    change(real, several_rounds)
    opened = browser.open(page.write(real)[0])
    assert opened.faults() == []
    assert [chart["id"] for chart in opened.run(DRAWN)][:2] == ["chart-speed", "chart-ratios"]
    text = opened.run("document.body.innerText")
    groups = grouped(gather.read(real).runs)
    assert [len(group.runs) for group in groups] == [5] * 12
    for group in groups:
        assert group.speed.low is not None and group.speed.low < group.speed.middle < group.speed.high  # type: ignore[operator]
        assert group.speed.text() in text
    assert "other: 1.25 to 1.25; faster: 4 of 4." in text and "94 % sure" in text
    assert "Worse: keras-other at 2 ranks" in text and "0.880" in text
    assert "8 of 60 runs" not in text and "12 of 60 runs" in text, "noisy ones are counted"
    assert "most images/s of three" in text
    assert "One run each" not in text


def test_a_tie_is_an_interval_that_holds_one(real: Path) -> None:
    def level(document: dict[str, Any]) -> None:
        several_rounds(document)
        for result in document["runs"]:
            wobble = {"keras": -1, "tensorflow": 1}.get(result["framework"], 0) * (-1) ** result["round"]
            result["images_per_second"] = 300 + 5 * wobble if wobble else 100 + result["round"]

    change(real, level)
    found = page.make(gather.read(real), "")
    assert found.findings[0].text.startswith("A tie of tensorflow and keras") or found.findings[0].text.startswith(
        "A tie of keras and tensorflow"
    )

    def lead(document: dict[str, Any]) -> None:
        for result in document["runs"]:
            if result["framework"] == "mxnet":
                result["images_per_second"] = 500.0

    change(real, lead)
    assert page.make(gather.read(real), "").findings[0].text.startswith("mxnet: 500.0")


def test_few_rounds_say_how_sure_they_are_and_are_paired_by_their_number(real: Path) -> None:
    def three(document: dict[str, Any]) -> None:
        several_rounds(document)
        document["runs"] = [result for result in document["runs"] if result["round"] <= 3]

    change(real, three)
    first = page.make(gather.read(real), "").findings[0]
    assert first.text.endswith("; 3 rounds, 75 % sure.")
    alone, pair = grouped(gather.read(real).runs)[0], grouped(gather.read(real).runs)[4]
    shifted = Group(pair.framework, pair.np, None, pair.runs[1:])
    expected = [run.result.images_per_second for run in pair.runs[1:]]
    assert ratio(shifted, alone).n == 2
    assert ratio(shifted, alone).middle == pytest.approx(
        sum(mine / other.result.images_per_second for mine, other in zip(expected, alone.runs[1:], strict=True)) / 2
    )


def test_what_an_elastic_run_has_outlived_is_told(real: Path) -> None:
    lost = {"why": "lost", "step": 20, "np_before": 2, "np": 1, "seconds": 3.25}
    change(real, lambda document: document["runs"][1].update(recoveries=[lost]))
    assert any("a rank was lost before step 20" in note for note in page.make(gather.read(real), "").notes)


def test_the_users_own_settings_for_pictures_change_nothing(hvdkit: Hvdkit, real: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nfigure.facecolor: red\nlines.linewidth: 9\n")
    odd = real.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe5\x90\x8d"))
    assert hvdkit("report", odd, "--out", "plain").returncode == 0
    done = hvdkit("report", odd, "--out", "plain2", MPLCONFIGDIR=str(tmp_path))
    assert done.returncode == 0 and done.stderr == ""
    one, other = ((tmp_path / name / "report.html").read_text() for name in ("plain", "plain2"))
    assert one == other.replace("plain2", "plain")


def test_an_interval_is_the_bootstrap_of_the_median() -> None:
    alone = interval([3.0])
    assert (alone.middle, alone.low, alone.high, alone.n, alone.text()) == (3.0, None, None, 1, "3.0")
    found = interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.middle, found.low, found.high, found.n) == (3.0, 1.0, 100.0, 5)
    assert interval([2.0] * 7).text(2) == "2.00 (2.00–2.00)"


def test_a_failed_parity_is_named(browser: Browser, real: Path) -> None:
    def fail(document: dict[str, Any]) -> None:
        document["parity"]["passed"] = False
        document["parity"]["frameworks"]["mxnet"] |= {
            "passed": False, "missed": ["step_f64"], "step_f64": 1e300, "first_deviation": "step 3, conv1.weight",
            "likely_cause": "another momentum", "step_errors_f64": [1e-14, 1e-14, float("inf"), 0.0, 1e300],
        }  # fmt: skip

    change(real, fail)
    opened = browser.open(page.write(real)[0])
    text = opened.run("document.body.innerText")
    assert "FAILED: mxnet" in text and "another momentum" in text and opened.faults() == []
    assert opened.run("document.querySelectorAll('td.bad').length") == 3
    assert all(chart["colours"] == len(NAMES) for chart in opened.run(DRAWN))


def test_what_is_missing_is_said(browser: Browser, real: Path) -> None:
    shutil.rmtree(real / "runs")
    change(real, lambda document: document.update(parity=None, runs=document["runs"][1::2]))
    opened = browser.open(page.write(real)[0])
    text = opened.run("document.body.innerText")
    assert opened.faults() == []
    assert "Not asked for (--no-parity)" in text and "all was run at 2 ranks" in text
    assert "no run has a metrics.jsonl" in text and "config.yaml is missing" in text
    assert [chart["id"] for chart in opened.run(DRAWN)] == ["chart-speed", "chart-steps", "chart-memory"]


def test_a_single_run_has_a_page_too(browser: Browser, hvdkit: Hvdkit, real: Path) -> None:
    run_folder = real / "runs" / "mxnet-np2"
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 67, "total_st')
    assert hvdkit("report", run_folder).returncode == 0
    opened = browser.open(run_folder / "report.html")
    assert opened.faults() == []
    assert [chart["id"] for chart in opened.run(DRAWN)] == ["chart-course", "chart-steps", "chart-learning-2"]
    text = opened.run("document.body.innerText")
    assert "mxnet, 2 ranks" in text and "not recorded" in text and "1 line(s) of metrics.jsonl could not be" in text


def test_the_commands_give_the_same_recipe_again(real: Path, tmp_path: Path) -> None:
    found = gather.read(real)
    for each in found.runs:
        words = shlex.split(reproduce.of_run(each).text)
        assert words[:7] == [
            "hvdkit", "train", "resnet20-digits", "--framework", each.result.framework, "-np", str(each.result.np),
        ]  # fmt: skip
        assert config.load(paths.recipes() / "resnet20-digits.yaml", words[7:]) == each.recipe
    own = tmp_path / "own name's.yaml"
    base = paths.recipes() / "resnet20-digits.yaml"
    overrides = ["data={name: synthetic, height: 48}", "optimizer={name: lamb, learning_rate: 1.0e-3}", "checkpoint={}"]
    for recipe in (config.load(base, overrides), config.load(base, [*overrides, "name=own"])):
        own.write_text(config.dump(recipe))
        words = shlex.split(reproduce.of_run(gather.Run(found.runs[0].result, [], 0, own, recipe)).text)
        place = own if recipe.name == "own" else base
        assert words[2] == (str(own) if recipe.name == "own" else recipe.name)
        assert config.load(place, words[7:]) == recipe
    everything = reproduce.of_all(found)
    assert everything and everything.text == (
        "hvdkit compare resnet20-digits --framework pytorch --framework tensorflow --framework keras --framework mxnet "
        "-np 1 -np 2 epochs=3 threads=1"
    )


def test_markdown_has_the_table_and_what_was_found(real: Path) -> None:
    change(real, several_rounds)
    page.write(real)
    markdown = (real / "report.md").read_text()
    for group in grouped(gather.read(real).runs):
        assert f"| {group.label} | {group.np} | 5 | {group.speed.text()} | " in markdown
    assert "- **Parity:** Passed" in markdown and "**Noisy:**" in markdown
    assert "\n\n\n" not in markdown and len(markdown) < 20_000


def spoiled(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["runs"][0].update({key: value})


DAMAGE: dict[str, Callable[[Path], object]] = {
    "the folder is empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "no such folder": shutil.rmtree,
    "is a file": lambda folder: (shutil.rmtree(folder), folder.touch()),
    "neither compare.json nor result.json": lambda folder: (
        (folder / "compare.json").rename(folder / "other.json") and shutil.rmtree(folder / "runs")
    ),
    "has not come to its end": lambda folder: (folder / "compare.json").unlink(),
    "not the compare.json of `hvdkit compare`: file: Invalid JSON": lambda folder: os.truncate(
        folder / "compare.json", 1000
    ),
    "file: Input should be an object": lambda folder: (folder / "compare.json").write_text("[]"),
    "it has no runs": lambda folder: change(folder, lambda document: document.update(runs=[])),
    "runs.0.np: Input should be a valid integer": lambda folder: change(folder, spoiled("np", "two")),
    "np: expected a number above 0, got 0": lambda folder: change(folder, spoiled("np", 0)),
    "images_per_second: expected a number above 0, got nan": lambda folder: change(
        folder, spoiled("images_per_second", float("nan"))
    ),
    "Extra inputs are not permitted": lambda folder: change(folder, spoiled("line\nbreak", 1)),
    "mxnet-np1/result.json: not the result of a training run": lambda folder: os.truncate(
        folder / "runs" / "mxnet-np1" / "result.json", 10
    ),
    "cannot be read (Permission denied)": lambda folder: folder.chmod(0),
    "cannot be written (permission denied)": lambda folder: folder.chmod(0o500),
    "compare.json: cannot be read (Is a directory)": lambda folder: (
        (folder / "compare.json").unlink(),
        (folder / "compare.json").mkdir(),
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_bad_input_is_one_clear_line(message: str, real: Path) -> None:
    DAMAGE[message](real)
    # root may read and write everything, unless these capabilities are taken away
    plain = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = run([*plain, sys.executable, "-m", "hvdkit", "report", "comparison"], 60, cwd=real.parent)
    if real.is_dir():
        real.chmod(0o700)
        assert not list(real.glob("report.*"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_an_out_that_cannot_be_is_refused(hvdkit: Hvdkit, real: Path) -> None:
    (real.parent / "file").touch()
    for out in ("file", "file/below"):
        done = hvdkit("report", "comparison", "--out", out)
        assert (
            done.returncode == 2
            and len(done.stderr.splitlines()) == 1
            and f"--out {out}: cannot be made" in done.stderr
        )
