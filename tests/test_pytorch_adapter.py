"""Parts of PyTorch's adapter in one process of its Python: blocks, their memory, joined gradients, a tied table."""

from __future__ import annotations

import os

from hvdkit.runtimes.store import find
from tests.conftest import ROOT, run


def test_parts_of_the_adapter_do_what_they_say() -> None:
    command = [str(find("pytorch").python), str(ROOT / "tests" / "pytorch_adapter.py")]
    done = run(command, 120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
