"""The Dockerfile and the compose file, read and not built: what a build would stumble over after minutes.

`make image-check` builds and runs them, with an engine.
"""

from __future__ import annotations

import configparser
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from hvdkit.cli.app import app
from hvdkit.runtimes.pins import RUNTIMES
from tests.conftest import ROOT, run

pytestmark = pytest.mark.check


def instructions() -> list[tuple[str, str]]:
    """Name and text of each instruction of the Dockerfile, continued lines joined."""
    parser = DockerfileParser(fileobj=io.BytesIO((ROOT / "Dockerfile").read_bytes()))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


def commands() -> list[list[str]]:
    """The words after `hvdkit` of each command in both files, with the defaults of variables."""
    lines = [text for name, text in instructions() if name == "RUN"]
    found = [shlex.split(part) for line in lines for part in re.split(r"&&|\|\||;", line)]
    found += [json.loads(text) for name, text in instructions() if name == "CMD"]
    found += [
        service["command"] for service in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    ]
    return [[re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in words[1:]] for words in found if words[0] == "hvdkit"]


def test_each_runtime_has_a_target_and_every_base_is_pinned() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = dict(text.split()[::2][::-1] for name, text in instructions() if name == "FROM")
    assert {*RUNTIMES, "driver"} <= stages.keys()
    for key, form in {"DEBIAN": r"debian:\d+\.\d+-slim", "CUDA": r"\d+\.\d+\.\d+", "UBUNTU": r"\d+\.\d+"}.items():
        assert re.search(rf"^ARG {key}={form}$", text, re.MULTILINE), key
    assert all(base in stages or base.startswith("${") for base in stages.values()), stages


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_is_one_that_hvdkit_takes(words: list[str]) -> None:
    """Parsed and not run."""
    if words in (["--help"], ["--version"]):
        return
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("hvdkit", words)


def test_what_is_copied_is_there_and_reaches_docker() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for name, text in instructions():
        if name == "COPY" and not text.startswith("--from="):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source.partition('/')[0]}" in ignored, source


def test_all_that_is_installed_has_an_exact_version() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = {Requirement(line).name.lower() for line in setup["options"]["install_requires"].splitlines() if line}
    exact = {line.partition("==")[0].lower() for line in (ROOT / "docker" / "constraints.txt").read_text().splitlines()}
    assert needed - exact <= {"pip"}, "it is the environment's own, and does not stay in the image"
    assert all("--constraint" in text for name, text in instructions() if name == "RUN" and "pip install" in text)


def test_scripts_are_executable_and_read_by_the_shell() -> None:
    scripts = sorted((ROOT / "docker").glob("*.sh"))
    assert scripts and all(script.stat().st_mode & 0o111 for script in scripts)
    assert [run(["sh", "-n", str(script)], 60).stderr for script in scripts] == [""] * len(scripts)


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (None, "needs a Docker engine, and there is no docker on PATH: apt-get install docker.io docker-compose"),
        ("echo 'Cannot connect' >&2; exit 1", "needs a running Docker engine (Cannot connect): start one"),
        ("[ $1 = version ] && echo 28.2.2", "needs BuildKit, and {client} has no buildx: install docker-buildx"),
        ("[ $1 = version ] && echo 20.10.24", "needs Docker Compose: apt-get install docker-compose"),
    ],
)
def test_image_check_says_what_to_install(tmp_path: Path, client: str | None, said: str) -> None:
    docker = tmp_path / "docker"
    if client:
        docker.write_text(f"#!/bin/sh\n{client}\n")
        docker.chmod(0o755)
    done = image_check(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"image-check {said.format(client=docker)}")
    assert len(done.stderr.splitlines()) == 1
    done = image_check(tmp_path, "--compose", "mxnet")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), "make cluster-check goes on"
    assert said.format(client=docker) in done.stderr
    assert sorted(tmp_path.iterdir()) == ([docker] if client else []) + [tmp_path / "tools"]


@pytest.mark.parametrize(("trains", "status"), [("2", 0), ("1", 1)])
def test_with_an_engine_two_containers_train(tmp_path: Path, trains: str, status: int) -> None:
    """And no more than that; the second training is one that has to fail, with status 2."""
    docker, asked = tmp_path / "docker", tmp_path / "asked"
    docker.write_text(f"""\
#!/bin/sh
[ "$1" = version ] && echo 28.2.2
echo "$TARGET/$FRAMEWORK $*" >>{asked}
case "$FRAMEWORK $*" in *caffe*" up "*) exit {trains};; esac
""")
    docker.chmod(0o755)
    done = image_check(tmp_path, "--compose", "mxnet")
    assert done.returncode == status, done.stderr
    did = [line for line in asked.read_text().splitlines() if "version" not in line]
    begins = ["/ build --target mxnet", "mxnet/mxnet compose", "mxnet/mxnet compose", "mxnet/caffe compose"]
    assert [line.startswith(begin) for line, begin in zip(did, begins, strict=False)] == [True] * 4, did
    assert [line.split()[-1] for line in did[1:]] == ["node1", "--volumes"] * 2, did


def image_check(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run docker/check.sh where only `path` has programs, beside those that it needs itself."""
    (tools := path / "tools").mkdir(exist_ok=True)
    for tool in ("dirname", "grep", "printenv", "sed", "sh", "tail"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(str(shutil.which(tool)))
    return subprocess.run(
        [ROOT / "docker" / "check.sh", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": f"{path}:{tools}", "HOME": str(path)},
    )


def test_slim_keeps_what_runs(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    kept = ["torch/bin/torch_shm_manager", "torch/testing/__init__.py", "numpy/__pycache__/a.pyc", "pipeline/a.py"]
    gone = ["pip/a.py", "pip-26.dist-info/RECORD", "torch/bin/protoc", "torch/include/a.h", "scipy/stats/tests/a.py"]
    for name in kept + gone:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    assert run([str(ROOT / "docker" / "slim.sh"), str(tmp_path)], 60).returncode == 0
    assert sorted(str(one.relative_to(packages)) for one in packages.rglob("*") if one.is_file()) == sorted(kept)
