"""The bytes that core counts are those that go over the wire: held against the interface's own counters."""

from __future__ import annotations

import json
import os
import sys

import pytest

from hvdkit.recipe.communication import METHODS
from tests.conftest import ROOT, run


@pytest.mark.timeout(90)
def test_counted_bytes_are_those_of_the_interface() -> None:
    namespace = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    program = [*namespace, sys.executable, str(ROOT / "tests" / "hosts" / "wire_bytes.py"), "mxnet"]
    done = run(program, timeout=80, env={**os.environ, "HOROVOD_SHARED_MEMORY": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, _, _ in told} == {*METHODS, "central"}
    for name, counted, measured in told:
        # what the wire adds: TCP's headers and acknowledgements, and Horovod's words about what is ready
        assert 0.999 * counted < measured < 1.05 * counted, (name, counted, measured)
