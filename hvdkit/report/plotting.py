"""Matplotlib, loaded when the first picture is drawn, with its own defaults and without a window system.

The user's settings are ignored: the backend in MPLBACKEND, which may be unknown or belong to a notebook, and the
matplotlibrc in the current folder, in MATPLOTLIBRC or in the home folder.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CYCLE = "cycler('color', ['#0072b2', '#e69f00', '#cc79a7', '#56b4e9', '#d55e00', '#8c8c8c'])"


@contextmanager
def settings(own: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Apply Matplotlib's defaults and `own` inside the context."""
    _load()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(own or {})  # type: ignore[arg-type]
        # about fonts, layouts and ranges, which users of a command cannot change
        warnings.simplefilter("ignore")
        yield


@contextmanager
def picture(path: Path, width: float, height: float, layout: Any = None, more: Sequence[Path] = ()) -> Iterator[Figure]:
    """An empty figure, sized in inches, written to `path` at the end of the context, and to `more`.

    Files are PNG, or SVG by their names. Raises RunError.
    """
    # a name with $ in it is a name; no colour-blind reader has to tell red from green
    with settings({"text.parse_math": False, "axes.prop_cycle": _CYCLE}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout=layout)
        yield figure
        for target in (path, *more):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="svg" if target.suffix == ".svg" else "png", dpi=110)
            write_atomic(target, drawn.getvalue())


def logarithmic(axes: Axes, *names: str) -> None:
    """Scale the axes `names`, x or y, by logarithms.

    Ticks are such as 1e-12. Matplotlib's own are formulas, which `picture` would show as their source.
    """
    from matplotlib.ticker import LogFormatter

    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter())


@functools.cache
def _load() -> None:
    """Import Matplotlib once, so that it reads its own matplotlibrc.

    It reads the first one that it finds, beginning with the current folder, and hangs if that is a FIFO. So it is
    imported in the folder of its own one.
    """
    spec = find_spec("matplotlib")
    assert spec is not None and spec.submodule_search_locations
    backend = os.environ.pop("MPLBACKEND", None)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(Path(spec.submodule_search_locations[0]) / "mpl-data")
        import matplotlib  # noqa: F401
    finally:
        os.fchdir(here)
        os.close(here)
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
