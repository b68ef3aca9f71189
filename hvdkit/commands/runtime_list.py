"""`hvdkit runtime list`."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.commands.request import Request
from hvdkit.runtimes import store
from hvdkit.runtimes.store import Runtime


class RuntimeListRequest(Request):
    """List the runtimes."""


def run(request: RuntimeListRequest) -> list[Runtime]:
    """All complete runtimes."""
    return store.installed()


def lines(request: RuntimeListRequest, result: list[Runtime]) -> Iterator[str]:
    """A line for each."""
    for runtime in result:
        yield f"{runtime.name}: {runtime.describe()}"
    if not result:
        yield "no runtime is built yet; run `hvdkit runtime build`"
