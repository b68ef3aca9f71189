"""Documents from the templates beside this file: the page, and what is written in Markdown."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from hvdkit.report.tabular import markdown

TEMPLATES = Path(__file__).parent / "templates"


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
