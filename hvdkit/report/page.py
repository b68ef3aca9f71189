"""`hvdkit report`: makes a page of a folder of results, in one file, and Markdown for pull requests."""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import urllib.parse
from contextlib import suppress
from pathlib import Path

from hvdkit import paths
from hvdkit.errors import RequestError
from hvdkit.files import closed_to_writes, write_atomic
from hvdkit.report import collect, profile_page, reproduce, stages
from hvdkit.report.canvas import Chart, ranks
from hvdkit.report.charts import Charts
from hvdkit.report.collect import CollectedRuns, Run
from hvdkit.report.documents import TEMPLATES, render
from hvdkit.report.findings import above_one, findings, legend, why_accuracies_differ
from hvdkit.report.methods import methods
from hvdkit.report.parity import deviations, parity_table, reference
from hvdkit.report.rounds import RunGroup, grouped, own_metrics
from hvdkit.report.sections import Page, Section
from hvdkit.report.tables import baseline_table, groups_table, machine_table, runs_table, tuning_table

_OF_A_RUN = ("learning", "steps", "course")  # charts
_OF_A_COMPARISON = ("learning", "steps", "extra", "scaling", "memory", "speed", "ratios")


def write(folder: Path, out: Path | None = None) -> tuple[Path, Path]:
    """Write report.html and report.md about `folder`, of runs or a profile, into `out`, by default `folder`; returns
    their paths.

    Raises RequestError if the folder has no results, or damaged ones, or if `out` cannot be written.
    """
    of_profile = False
    with suppress(OSError):  # `collect` tells of a folder that must not be read
        of_profile = (folder / profile_page.FILE).is_file() and not (folder / "result.json").exists()
    given = None if of_profile else collect.read(folder)
    target = out or folder
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out {target}: cannot be made ({error.strerror}); name another folder") from None
    if reason := closed_to_writes(target):
        raise RequestError(f"{target}: cannot be written ({reason}); name another folder with --out")
    own_command = shlex.join(["hvdkit", "report", str(folder), *(["--out", str(out)] if out else [])])
    page = profile_page.make(folder, own_command) if given is None else make(given, own_command, target)
    write_atomic(target / "report.html", as_html(page).encode(errors="replace"))  # a path need not be UTF-8
    write_atomic(target / "report.md", as_markdown(page).encode(errors="replace"))
    return target / "report.html", target / "report.md"


def make(given: CollectedRuns, own_command: str, target: Path = Path()) -> Page:
    """The page about the results of a folder, to be written into `target`."""
    groups = grouped(given.runs)
    first = given.runs[0].result
    frameworks = list(dict.fromkeys(group.framework for group in groups))
    who = f"{first.framework}, {ranks(first.np)}" if given.comparison is None else _listed(frameworks)
    commands = [reproduce.locate(group.runs[0], given.folder) for group in groups]
    return Page(
        title=f"{first.recipe}: {who}",
        about=f"{first.model}, {first.parameters:,} parameters; {first.batch} per rank and step, "
        f"{_length(given.runs)}, {first.precision}, {first.optimizer}, seed {first.seed}",
        findings=findings(given, groups),
        results=groups_table(groups, given.comparison),
        accuracies=why_accuracies_differ(given, groups),
        parity_link=_link(paths.recipes().parent / "docs" / "parity.md", target),
        notes=_notes(given, groups),
        sections=_sections(given, groups),
        machine=machine_table(given),
        methods=methods(given, groups, _length(given.runs)),
        commands=[*filter(None, [reproduce.of_all(given)]), *commands],
        own_command=own_command,
    )


def _length(runs: list[Run]) -> str:
    """How long the runs trained: in steps if the recipe limits them, else in epochs."""
    if runs[0].recipe is not None and runs[0].recipe.steps is not None:
        low, high = (limit(run.result.steps for run in runs) for limit in (min, max))
        return f"{high:,} step{'' if high == 1 else 's'}" if low == high else f"{low:,} to {high:,} steps"
    epochs = runs[0].result.epochs
    return f"{epochs:,} epoch{'' if epochs == 1 else 's'}"


def _notes(given: CollectedRuns, groups: list[RunGroup]) -> list[str]:
    """The notes below the results: how to read them."""
    results = [run.result for run in given.runs]
    notes = [legend(groups, given.comparison), *(above_one(groups) if given.comparison else [])]
    if given.comparison and not any(result.rival for result in results):
        notes.append(
            "Only hvdkit was measured. --rival ddp, for example, measures PyTorch's DistributedDataParallel too."
        )
    if corrupt := sum(result.corrupt_images for result in results):
        notes.append(f"{corrupt} corrupt image(s) were replaced by others; the runs' logs name them.")
    if any(result.native_pipeline for result in results):
        notes.append("Batches came from the user's own pipeline: frameworks may have trained on different ones.")
    for result in results:
        notes += [f"{result.framework}, {ranks(result.np)}: {said}." for said in result.communication_notes or []]
        for recovery in result.recoveries:
            why = "a rank was lost" if recovery.why == "lost" else "hosts came or went"
            notes.append(
                f"{result.framework}, {ranks(result.np)}: {why} before step {recovery.step}; it continued with "
                f"{recovery.np} of {recovery.np_before} after {recovery.seconds:.1f} s."
            )
    if (gone := [run for run in given.runs if not run.lines]) and given.comparison:
        notes.append(f"{len(gone)} run(s) have no metrics.jsonl that can be read, so no curves.")
    if unread := sum(run.unread for run in given.runs):
        notes.append(f"{unread} line(s) of metrics.jsonl could not be read and are left out.")
    return notes


def _sections(given: CollectedRuns, groups: list[RunGroup]) -> list[Section]:
    """All sections, in order. A single run has no scaling, no parity and no list of runs."""
    charts_of, comparison = Charts(given, groups), given.comparison
    names = _OF_A_RUN if comparison is None else _OF_A_COMPARISON
    drawn: dict[str, list[Chart]] = {name: list(getattr(charts_of, name)()) for name in names}
    unread = "the metrics.jsonl is missing or cannot be read"
    if any(run.lines for run in given.runs):
        unread = "fewer than two points were logged (log_every=1 logs each step)"
    text = [] if drawn["learning"] else [f"No curves: {unread}."]
    rated = any(run.result.val_accuracy is not None for run in given.runs)
    title = "Loss and accuracy" if rated or not own_metrics(given.runs) else "Loss and metrics"
    learning = Section("learning", title, text, drawn["learning"])
    table = tuning_table(given)
    text = [] if table.rows else ["Nothing was tuned: every setting is the recipe's."]
    tuning = Section("tuning", "Tuning", text, [], [table] if table.rows else [])
    if comparison is None:
        course = drawn["course"]
        text = [] if course else [f"No curve: {unread}."]
        throughput = Section("throughput", "Throughput", text, course)
        text = [] if drawn["steps"] else ["No distribution: fewer than two steps were measured."]
        steps = Section("steps", "Step times", text, drawn["steps"])
        return [throughput, steps, *stages.section(given.runs[0]), learning, tuning]

    text = ["Bars: the median over the rounds; dots: the rounds; lines: the median's interval."]
    if all(len(group.runs) == 1 for group in groups):
        text = ["One run each, so the bars have no intervals."]
    if not drawn["scaling"]:
        nps = {group.np for group in groups}
        why = f"all runs had {ranks(*nps)}" if len(nps) == 1 else "no run had one rank, or was on one host"
        text.append(f"There is no scaling efficiency: {why}.")
    charts = [*drawn["speed"], *drawn["ratios"], *drawn["scaling"]]
    throughput = Section("throughput", "Throughput and scaling", text, charts)
    charts = [*drawn["steps"], *drawn["memory"], *drawn["extra"]]
    sections = [throughput, Section("steps", "Step times and memory", [], charts), learning]

    parity, tables, unit = comparison.parity, [], groups[0].first.unit
    text = ["Not checked (--no-parity), so it is not known whether all did the same work. hvdkit parity checks it."]
    if parity is not None:
        text = [
            f"Every framework computes the recipe in float64 from the same weights and {unit} as {reference(parity)}, "
            f"for {parity.steps} steps on {ranks(parity.np)}. The table shows the largest relative errors and their "
            "limits.",
            *deviations(parity),
        ]
        tables = [parity_table(parity, versions=False)]
    sections.append(Section("parity", "Parity", text, [], tables))

    if comparison.baseline is not None:
        margins = ", ".join(dict.fromkeys(f"{100 * row.margin:g} %" for row in comparison.baseline))
        text = [
            f"{unit.capitalize()} per second ÷ those of an earlier comparison. A verdict of worse or better means that "
            f"the whole interval is below or above 1 by more than {margins}."
        ]
        sections.append(
            Section("baseline", "Against the earlier comparison", text, [], [baseline_table(comparison.baseline)])
        )
    return [*sections, tuning, Section("runs", "Every run", [], [], [runs_table(given)])]


def as_html(page: Page) -> str:
    """The page as HTML, with its style, script and charts inside."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    return render("report.html", page=page, script=script, script_sha256=digest, style=style)


def as_markdown(page: Page) -> str:
    """The page as Markdown: findings, results, commands."""
    return render("report.md", page=page)


def _link(document: Path, folder: Path) -> str:
    """A relative link from a page in `folder`; empty if the document is not there, as in an installed package."""
    return urllib.parse.quote(os.path.relpath(document, folder)) if document.is_file() else ""


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
