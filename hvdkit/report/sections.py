"""What a page shows, which the templates lay out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import hvdkit
from hvdkit.report.canvas import Chart
from hvdkit.report.findings import Headline
from hvdkit.report.reproduce import CommandLine
from hvdkit.report.tabular import Table


@dataclass(frozen=True)
class Section:
    """A section. `text` are its paragraphs; if there are no charts and no tables, they say why."""

    key: str
    title: str
    text: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the templates show. `accuracies` says why accuracies differ, `parity_link` leads to docs/parity.md,
    `methods` are paragraphs for a paper.
    """

    title: str
    about: str
    findings: list[Headline]
    results: Table
    accuracies: str = ""
    parity_link: str = ""
    notes: list[str] = field(default_factory=list)
    sections: list[Section]
    machine: Table
    methods: list[str] = field(default_factory=list)
    commands: list[CommandLine]
    own_command: str
    written: str = field(default_factory=lambda: time.strftime("%-d %B %Y"))
    version: str = hvdkit.__version__
