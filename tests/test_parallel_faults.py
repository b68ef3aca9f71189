"""A rank that has a part of a model and dies, stalls, gets no memory, raises or sends another shape is named with its
place, and none is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import hygiene
from tests.cluster import starving
from tests.conftest import FRAMEWORKS, ROOT, run
from tests.divided import SMALL
from tests.launching import MARK, nothing_left

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

COMMAND = ROOT / "tests" / "faults" / "command.py"
# The mesh, the rank that ends or hangs, its place there, and where in a step it does so.
MESHES = {
    "stages": (2, "parallel.pipeline=2", 1, "data 0, pipeline 1, tensor 0", "stage"),
    "parts": (2, "parallel.tensor=2", 1, "data 0, pipeline 0, tensor 1", "part"),
    "both": (4, "parallel={pipeline: 2, tensor: 2}", 2, "data 0, pipeline 1, tensor 0", "stage"),
}
# What is said of it.
FAULTS = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSTOP": r"hangs .*: no progress for \d+ s, frozen by a signal \(SIGSTOP",
    "starve": "failed.*; use a smaller batch_size",
    "raise": "failed.*: ValueError: the seventh",
    "shape": "failed.*(16, 15|16 and 15)",
}
USUAL = [
    ("pytorch", "stages", "raise", 1),
    ("pytorch", "stages", "shape", 1),
    ("pytorch", "stages", "SIGSTOP", 2),
    ("mxnet", "parts", "starve", 1),
    ("mxnet", "parts", "shape", 1),
]
ALL = [*product(FRAMEWORKS, ("parts", "stages"), FAULTS, (1, 2)), *product(("pytorch",), ("both",), FAULTS, (1, 2))]


def train(framework: str, mesh: str, fault: str, hosts: int, folder: Path, **environment: str) -> Any:
    """A run that ends by the fault."""
    np, axes, rank, _, where = MESHES[mesh]
    compiled = where == "part" and framework in ("tensorflow", "keras")
    step = 0 if compiled else 2  # the code of a compiled step runs in the first alone
    where = "train" if (framework, fault) == ("mxnet", "starve") else where  # an operator's error has another text
    environment |= {"PLANTED": f"{rank} {where} {step} {fault}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, COMMAND, "train", "gpt-tiny", "--framework", framework, "-np", np, axes, *SMALL]
    command += ["--out", folder / "out", "checkpoint=null", "threads=1", "tune=none", "data.validation=0.01"]
    command += ["--stall-timeout", 10] if fault == "SIGSTOP" else []
    words = [str(word) for word in command]
    if hosts == 1:
        return run(words, 150, cwd=folder, env=os.environ | environment)
    with starving.network(hosts, 1000.0) as network:
        own = {"env": os.environ | {"PATH": hosts_path()} | environment}
        return network.run([*words, "-H", network.hosts_option(np // hosts)], cwd=folder, text=True,
                           stderr=subprocess.PIPE, timeout=hygiene.patience(150), **own)  # fmt: skip


def hosts_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@pytest.mark.parametrize(
    ("framework", "mesh", "fault", "hosts"),
    [*USUAL, *(pytest.param(*case, marks=pytest.mark.thorough) for case in ALL if case not in USUAL)],
)
def test_it_is_named_with_its_place(
    framework: str, mesh: str, fault: str, hosts: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if fault != "SIGSTOP" and hosts == 1:
        request.getfixturevalue("warm")
    rank, place = MESHES[mesh][2:4]
    mark = uuid.uuid4().hex
    with nothing_left(mark):
        done = train(framework, mesh, fault, hosts, tmp_path, **{MARK: mark})
    named = next((line for line in done.stderr.splitlines() if re.match(r"rank \d+ on ", line)), "")
    host = "localhost" if hosts == 1 else "h2"
    assert done.returncode == 1, done.stderr
    if (framework, fault, mesh) == ("pytorch", "shape", "parts"):  # the others see what has come, and who got it
        assert all(f"({other})" in named for other in (place, place.replace("tensor 1", "tensor 0"))), done.stderr
        assert re.match(rf"rank .* {FAULTS[fault]}.*, in a collective with rank", named), done.stderr
    elif (framework, fault) == ("mxnet", "shape"):  # one of both says it first
        assert f"({place})" in named and re.match(rf"rank .* {FAULTS[fault]}", named), done.stderr
    else:
        assert re.match(rf"rank {rank} on {host} \({place}\) {FAULTS[fault]}", named), done.stderr
