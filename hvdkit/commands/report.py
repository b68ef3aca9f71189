"""`hvdkit report`: the page of a comparison or a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from hvdkit.commands.request import Argument, Option, Request


class ReportRequest(Request):
    """Write report.html and report.md about the results in `folder`, into `out` or there; returns their paths."""

    folder: Annotated[Path, Argument("the output folder of `hvdkit compare` or `hvdkit train`", metavar="RUN")]
    out: Annotated[Path | None, Option("where to write it", metavar="FOLDER", shown="RUN", positional=True)] = None


def run(request: ReportRequest) -> tuple[Path, Path]:
    """Write the page. Raises RequestError for a folder without results, or with damaged ones."""
    from hvdkit.report import page

    return page.write(request.folder, request.out)


def lines(request: ReportRequest, result: tuple[Path, Path]) -> Iterator[str]:
    """What is written."""
    for path in result:
        yield f"written to {path}"
