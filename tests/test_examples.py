"""The examples for own networks: on two real ranks, short, and they learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import FRAMEWORKS, ROOT

from hvdkit.launch import LAUNCHERS
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.runtimes.store import find

ACCURACY = 0.9  # of 360 digits after ten epochs; a small network that has learned nothing has 0.1
EPOCH = re.compile(r"^epoch (\d+): accuracy ([\d.]+), loss ([\d.]+)$", re.MULTILINE)


def example(framework: str) -> Path:
    return ROOT / "examples" / f"own_model_{framework}.py"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_own_network_learns_on_two_ranks(framework: str, tmp_path: Path) -> None:
    runtime = find(framework)
    job = Job(
        python=runtime.python,
        arguments=[str(example(framework))],
        np=2,
        hosts=[Host("localhost", 2)],
        environment=runtime.environment | {"OMP_NUM_THREADS": "1"},
        log_dir=tmp_path,
    )
    LAUNCHERS["direct"](job)
    epochs = EPOCH.findall(job.log(0).read_text())
    assert len(epochs) == 10
    assert float(epochs[-1][1]) > ACCURACY
    assert float(epochs[-1][2]) < float(epochs[0][2])
    assert not EPOCH.search(job.log(1).read_text())  # the root alone prints


@pytest.mark.check
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_examples_are_short_and_know_no_recipe(framework: str) -> None:
    source = example(framework).read_text()
    assert len(source.splitlines()) <= 40
    assert "recipe" not in source.lower()
    assert "resnet" not in source.lower()


@pytest.mark.check
def test_the_page_shows_the_pytorch_example_as_it_is() -> None:
    page = (ROOT / "docs" / "own-model.md").read_text()
    assert f"```python\n{example('pytorch').read_text()}```" in page
