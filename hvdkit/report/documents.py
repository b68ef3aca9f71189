"""Documents from the templates beside this file: pages and what they show, and what is written in Markdown."""

from __future__ import annotations

import html
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hvdkit
from hvdkit.report.tabular import Table, markdown

if TYPE_CHECKING:
    from hvdkit.report.canvas import Chart
    from hvdkit.report.findings import Headline
    from hvdkit.report.reproduce import CommandLine

TEMPLATES = Path(__file__).parent / "templates"


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
    """What the templates show. `accuracies` says why accuracies differ, `parity_link` leads to docs/parity.md."""

    title: str
    about: str
    findings: list[Headline]
    results: Table
    accuracies: str = ""
    parity_link: str = ""
    notes: list[str] = field(default_factory=list)
    sections: list[Section]
    machine: Table
    commands: list[CommandLine]
    own_command: str
    written: str = field(default_factory=lambda: time.strftime("%-d %B %Y"))
    version: str = hvdkit.__version__


def render(name: str, **values: Any) -> str:
    """The template of that name with these values. Jinja is loaded when the first one is rendered."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": _escaped, "fenced": _fenced, "table": markdown, "one_line": _one_line}
    return environment.get_template(name).render(**values)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Text escaped for Markdown: GitHub shows no markup, no mention and no line break."""
    line = html.escape(_one_line(text), quote=False).replace("@", "&#64;")
    return re.sub(r"([\\`*\[\]|~#])", r"\\\1", line)


def _fenced(text: str) -> str:
    """A code block with any content."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
