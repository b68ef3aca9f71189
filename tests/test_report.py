"""`hvdkit report` on a real comparison's files, its page opened in a headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdkit.report import collect, page
from hvdkit.report.rounds import grouped
from hvdkit.results.compare import Comparison
from tests.browser import Browser, chromium
from tests.comparisons import NAMES, REAL, change, several_rounds
from tests.conftest import Hvdkit, rest_thorough
from tests.launching import wait_until

pytestmark = pytest.mark.long

CHARTS = ["speed", "scaling", "efficiency", "steps", "memory", "learning-1", "learning-2"]
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The pages of the comparison with one round and with several, which are to be read only."""
    made = {}
    for rounds in (False, True):
        folder = Path(shutil.copytree(REAL, tmp_path_factory.mktemp("pages") / "comparison"))
        if rounds:
            change(folder, several_rounds)
        made[rounds] = page.write(folder)[0]
    return made


@pytest.fixture
def reported(pages: dict[bool, Path], tmp_path: Path) -> Path:
    """A copy of the page of the comparison."""
    return Path(shutil.copy(pages[False], tmp_path))


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
    assert "One run each" in text and "Only hvdkit was measured" in text, "what is missing is said"
    first = "document.querySelector('.findings li')"
    assert opened.run(f"{first}.className") == "answer"
    across = f"{first}.getBoundingClientRect().width / document.querySelector('main').clientWidth"
    assert opened.run(across) > 0.99, "the loudest"


def test_these_checks_see_what_they_look_for(browser: Browser, reported: Path) -> None:
    good = reported.read_text()
    policy = re.search(r"<meta http-equiv.*?>", good)
    assert policy
    reported.write_text(good.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png"><script>hit = 1</script>'))
    forbidden = browser.open(reported)
    assert wait_until(lambda: len(forbidden.faults()) >= 2, 60)
    assert forbidden.run("typeof hit") == "undefined", "the page's policy holds"
    loud = "<main><img src='http://127.0.0.1:9/x.png'><script>console.error('loud')</script>"
    reported.write_text(good.replace(policy[0], "").replace("<main>", loud))
    opened = browser.open(reported)
    assert wait_until(lambda: "loud" in str(opened.faults()), 60)
    assert opened.requests() == ["http://127.0.0.1:9/x.png"]
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


# The cells and headings that are not shown in full: cut by their table's box or beyond the screen.
CUT = """[...document.querySelectorAll('td, th')].filter(cell => {
  const box = cell.getBoundingClientRect(), around = cell.closest('.scroll').getBoundingClientRect();
  return box.width && (cell.scrollWidth > cell.clientWidth + 1 || box.left < around.left - 1
    || box.right > Math.min(around.right, innerWidth) + 1);
}).map(cell => cell.textContent)"""


@pytest.mark.parametrize("width", [*rest_thorough(390, 768), 1280])
@pytest.mark.parametrize("rounds", [False, True])
def test_nothing_is_wider_than_the_screen(browser: Browser, pages: dict[bool, Path], rounds: bool, width: int) -> None:
    opened = browser.open(pages[rounds], width=width, height=844)
    opened.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    opened.settle()  # a table in <details> is arranged when they are open
    assert opened.run("document.documentElement.scrollWidth <= innerWidth")
    assert opened.run(CUT) == []
    outside = f"""[...document.querySelectorAll('.drawing text, h1, h2, p, li, code')].map(each => [each.textContent,
        each.getBoundingClientRect()]).filter(([, box]) => box.left < 0 || box.right > {width}).map(([text]) => text)"""
    assert opened.run(outside) == []
    assert opened.run("Math.min(...[...document.querySelectorAll('.drawing text')].map(text => "
                      "parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, "
                      "text.getScreenCTM().b)))") >= 9  # fmt: skip
    assert opened.faults() == []


def test_tables_that_do_not_fit_are_stacked_and_still_sorted(browser: Browser, reported: Path) -> None:
    opened = browser.open(reported, width=390)
    assert opened.run("document.querySelector('.scroll').classList.contains('stacked')")
    assert opened.run("document.querySelector('td.figure').dataset.column") == "ranks"
    assert opened.run("getComputedStyle(document.querySelector('td.figure'), '::before').content") != "none"
    boxes = "[...document.querySelectorAll('.stacked th button')].map(each => each.getBoundingClientRect())"
    visible = f"{boxes}.filter(box => box.width)"
    assert opened.run(f"{visible}.length > 9 && {visible}.every(box => box.height >= 44 && box.right <= innerWidth)")
    opened.run("[...document.querySelectorAll('th button')].find(each => each.textContent === 'images/s').click()")
    read = "[...document.querySelector('table').tBodies[0].rows].map(row => Number(row.cells[3].textContent))"
    assert opened.run(read) == sorted(opened.run(read))
    cell = "[...document.querySelectorAll('.stacked td.figure')].at(-1)"
    opened.run(f"{cell}.innerHTML = '1.2 <span class=whole>(2,345,678.9–3,456,789.0)</span>'")
    assert opened.run(f"{cell}.scrollWidth <= {cell}.clientWidth"), "a long interval stays out of the next cell"
    opened.show(1280, 800, "light")
    opened.settle()
    assert opened.run("document.querySelector('.scroll').className") == "scroll", "it fits again"
    reported.write_text(re.sub(r"<script>.*</script>", "", reported.read_text(), flags=re.DOTALL))
    assert browser.open(reported, width=390).run(CUT) != [], "this check sees what it looks for"


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


HOSTILE = [
    "<script>hit=1</script>",
    "\"><img src=x onerror='hit=1'>",
    "</script><script>hit=1</script>",
    "$\\frac{1}{0}$ %s {{ 7*7 }} ]]>--><svg onload=hit=1>",
    "very-long-" * 300,
    "a|b\n# no heading\n@everyone `code` ~~~\n```",
    "\x00\x1b[31m\u202ereversed",
]


@pytest.mark.parametrize("shift", rest_thorough(0, 4))
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
            result["tuning"] = {names[1]: {"value": names[2], "why": names[0]}}
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


def test_rounds_have_intervals_and_ties_are_told(browser: Browser, pages: dict[bool, Path]) -> None:
    opened = browser.open(pages[True])
    assert opened.faults() == []
    assert [chart["id"] for chart in opened.run(DRAWN)][:2] == ["chart-speed", "chart-ratios"]
    text = opened.run("document.body.innerText")
    groups = grouped(collect.read(pages[True].parent).runs)
    assert [len(group.runs) for group in groups] == [5] * 12
    for group in groups:
        assert group.speed.low is not None and group.speed.low < group.speed.middle < group.speed.high
        assert group.speed.text() in text
    assert "other: 1.25 to 1.25; faster: 4 of 4." in text and "94 % confidence" in text
    assert "Worse: keras-other at 2 ranks" in text and "0.880" in text
    assert "8 of 60 runs" not in text and "12 of 60 runs" in text, "noisy ones are counted"
    assert "most images/s of three" in text
    assert "One run each" not in text


def test_a_failed_parity_is_named(browser: Browser, real: Path) -> None:
    def fail(document: dict[str, Any]) -> None:
        document["parity"]["passed"] = False
        document["parity"]["frameworks"]["mxnet"] |= {
            "passed": False, "missed": ["step_f64"], "step_f64": 1e300, "first_deviation": "step 3, conv1.weight",
            "likely_cause": "another momentum", "step_errors_f64": [1e-14, 1e-14, 1e300, 0.0, 1e300],
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
    assert "Not checked (--no-parity)" in text and "all runs had 2 ranks" in text
    assert "the metrics.jsonl is missing" in text and "config.yaml is missing" in text
    assert [chart["id"] for chart in opened.run(DRAWN)] == ["chart-speed", "chart-steps", "chart-memory"]


def test_a_single_run_has_a_page_too(browser: Browser, hvdkit: Hvdkit, real: Path) -> None:
    run_folder = real / "runs" / "mxnet-np2"
    measured = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    rated = [line | {"communication_mbit_per_s": 90.0 - line["step"]} for line in lines]
    measured.write_text("".join(f"{json.dumps(line)}\n" for line in rated) + '{"step": 67, "total_st')
    result = json.loads((run_folder / "result.json").read_text()) | {"communication_notes": ["links: <b> is slow"]}
    (run_folder / "result.json").write_text(json.dumps(result))
    assert hvdkit("report", run_folder).returncode == 0
    opened = browser.open(run_folder / "report.html")
    assert opened.faults() == []
    drawn = ["chart-course", "chart-communication", "chart-steps", "chart-learning-2"]
    assert [chart["id"] for chart in opened.run(DRAWN)] == drawn
    text = opened.run("document.body.innerText")
    assert "mxnet, 2 ranks: links: <b> is slow." in text
    assert "mxnet, 2 ranks" in text and "not recorded" in text and "1 line(s) of metrics.jsonl could not be" in text
