"""The page of a profile: where the time of a step goes, and of a pipeline what each rank does when."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdkit.report import mesh, pipeline
from hvdkit.report.canvas import ranks
from hvdkit.report.findings import Headline
from hvdkit.report.profile import parts_table, sentences
from hvdkit.report.reproduce import CommandLine
from hvdkit.report.sections import Page, Section
from hvdkit.report.tabular import Cell, Table
from hvdkit.results import profile as profiles
from hvdkit.results.pipeline import PipelineStep

FILE = "profile.json"


def make(folder: Path, own_command: str) -> Page:
    """The page about the folder of a profile. Raises RequestError if a file of it is damaged."""
    profile = profiles.load(folder / FILE)
    sections, told = [], [Headline("plain", "Where the time goes", " ".join(sentences(profile)))]
    if (folder / PipelineStep.FILE).exists():
        step = PipelineStep.read(folder / PipelineStep.FILE)
        told.append(Headline("plain", "The pipeline", " ".join(pipeline.sentences(step))))
        whole = mesh.DrawnMesh.of(step.of_stages, step.tensor, step.shares_memory)
        sections.append(Section("pipeline", "The pipeline", [], [*pipeline.chart(step), *mesh.chart(whole)]))
    words = ["hvdkit", "profile", str(folder / "config.yaml"), "--framework", profile.framework, "-np", str(profile.np)]
    machine = {
        "processor": f"{profile.processor}, {profile.threads} thread(s) a rank",
        profile.framework: f"{profile.framework_version}, Horovod {profile.horovod_version or 'none'}",
        "launcher": f"{profile.launcher}, {profile.hosts} host(s)",
    }
    return Page(
        title=f"{profile.recipe}: a profile of {profile.framework}, {ranks(profile.np)}",
        about=f"{profile.model}; batch {profile.batch_size}, {profile.precision}, {profile.measured_steps} steps",
        findings=told,
        results=parts_table(profile),
        sections=sections,
        machine=Table("machine", ["item", "value"], [[Cell(key), Cell(value)] for key, value in machine.items()]),
        commands=[CommandLine("the profile", shlex.join(words))],
        own_command=own_command,
    )
