"""For adapters of a framework that loads more than a rank needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Iterator[None]:
    """Imports meanwhile find the package as if it were not installed.

    Keras, which TensorFlow brings along, imports scikit-learn where it finds it, for wrappers that no training needs:
    loading TensorFlow 2.21 took 4.4 s of a core with it and 3.2 s without (medians of 5). Whoever asks for it later
    has it; whoever has loaded it, or the framework, before keeps what they have.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # Python's own sign for a module that is not to be found
    try:
        yield
    finally:
        del sys.modules[package]
