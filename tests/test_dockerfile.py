"""The Dockerfile and the compose file, read and not built: what a build would stumble over after minutes.

`make image-check` builds and runs them, with an engine. `faults` collects what is wrong with a folder that holds both;
the tests give it the checkout, and copies that were spoiled in one place each, so that every rule is seen to bite.
"""

from __future__ import annotations

import configparser
import io
import json
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from hvdkit.cli.app import app
from hvdkit.runtimes.pins import RUNTIMES
from tests.conftest import ROOT, run

pytestmark = pytest.mark.check

TARGETS = [*RUNTIMES, "driver"]
# Words of RUN that only BuildKit knows; the classic builder builds CPU targets too.
BUILDKIT_ONLY = ("--mount", "--network", "--security", "<<")


def instructions(folder: Path) -> list[tuple[str, str]]:
    """Name and text of each instruction, continued lines joined."""
    parser = DockerfileParser(fileobj=io.BytesIO((folder / "Dockerfile").read_bytes()))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


def replaced(text: str, **values: str) -> str:
    """`text` with `${NAME}`, `${NAME:-word}` and `${NAME:+word}` replaced, the innermost first."""
    while found := re.search(r"\$\{(\w+)(?::([-+])([^{}]*))?\}", text):
        value = values.get(found[1], "")
        word = {"-": value or found[3], "+": found[3] if value else "", None: value}[found[2]]
        text = text[: found.start()] + word + text[found.end() :]
    return text


def bases(folder: Path, **given: str) -> dict[str, str]:
    """The base of each stage, an image or another stage, where these build arguments are given."""
    values, stages = dict(given), {}
    for name, text in instructions(folder):
        if name == "ARG" and not stages:
            key, _, default = text.partition("=")
            values.setdefault(key, replaced(default, **values))
        elif name == "FROM":
            base, _, stage = text.partition(" AS ")
            stages[stage] = replaced(base, **values)
    return stages


def images(folder: Path, **given: str) -> set[str]:
    """Every base that is no stage: what the classic builder asks for."""
    found = bases(folder, **given)
    return set(found.values()) - set(found)


@cache
def cli() -> Any:
    """hvdkit's commands."""
    return typer.main.get_command(app)


def cli_fault(words: list[str]) -> str | None:
    """What the command line says against `hvdkit WORDS`, parsed and not run."""
    command, rest = cli(), list(words)
    if rest in (["--help"], ["--version"]):
        return None
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return f"hvdkit {' '.join(words)}: no such command"
        command = command.commands[rest.pop(0)]
    try:
        command.make_context("hvdkit", rest)
    except Exception as error:
        return f"hvdkit {' '.join(words)}: {error}"
    return None


def sent_to_docker(folder: Path, source: str) -> bool:
    """Whether .dockerignore, of the form 'nothing but', lets `source` through."""
    lines = [line for line in (folder / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    return lines[0] == "*" and f"!{source.rstrip('/').split('/')[0]}" in lines


def step_faults(folder: Path) -> list[str]:
    """What is wrong with single instructions of the Dockerfile."""
    found, before = [], set()
    for name, text in instructions(folder):
        if name == "FROM":
            before.add(text.rpartition(" ")[2])
        if name == "COPY":
            words = shlex.split(text)
            if words[0].startswith("--from="):
                stage = words[0].partition("=")[2]
                found += [] if stage in before else [f"COPY from {stage}, which is no stage before it"]
                continue
            found += [
                f"COPY {source}, which is not there or ignored"
                for source in words[:-1]
                if not (sent_to_docker(folder, source) and (folder / source).exists())
            ]
        if name == "RUN":
            found += [f"RUN {word}, which only BuildKit knows" for word in BUILDKIT_ONLY if word in text.split()[0]]
            if "pip install" in text and "--constraint" not in text:
                found.append("pip installs without exact versions")
        if name in ("RUN", "CMD"):
            lines = [json.loads(text)] if name == "CMD" else map(shlex.split, re.split(r"&&|\|\||;", text))
            for words in lines:
                if words[0] == "hvdkit":
                    fault = cli_fault([replaced(word) for word in words[1:]])
                    found += [fault] if fault else []
    return found


def compose_faults(folder: Path) -> list[str]:
    """What is wrong with the compose file."""
    # Variables as compose replaces them where nothing is set: by what stands behind `:-`.
    document, found = yaml.safe_load(replaced((folder / "docker-compose.yml").read_text())), []
    nodes = sorted(document["services"])
    for name, service in document["services"].items():
        if (target := service["build"]["target"]) not in bases(folder):
            found.append(f"compose: {name} is of target {target}, which is not there")
        if not {volume.split(":")[0] for volume in service["volumes"]} <= set(document["volumes"]):
            found.append(f"compose: {name} has a volume that is not declared")
        words = service["command"]
        if words[0] == "hvdkit":
            fault = cli_fault(words[1:])
            found += [f"compose: {fault}"] if fault else []
            hosts = next((word.partition("=")[2] for word in words if word.startswith("--hosts=")), "")
            if sorted(host.split(":")[0] for host in hosts.split(",")) != nodes:
                found.append(f"compose: --hosts={hosts} is not {', '.join(nodes)}")
        elif not (folder / "docker" / Path(words[0]).name).is_file():
            found.append(f"compose: {name} runs {words[0]}, which the image has not")
    return found


def faults(folder: Path) -> list[str]:
    """All that is wrong with the Dockerfile and docker-compose.yml in `folder`."""
    found = [f"no target {name}" for name in TARGETS if name not in bases(folder)]
    for cpu in ({}, {"CUDA": "12.9.1"}):
        found += [
            f"a CPU target asks for {image}"
            for image in images(folder, **cpu)
            if not re.fullmatch(r"debian:12\.\d+-slim", image)
        ]
    setup, constraints = configparser.ConfigParser(), (folder / "docker" / "constraints.txt").read_text()
    setup.read(folder / "setup.cfg")
    needed = {Requirement(line).name.lower() for line in setup["options"]["install_requires"].splitlines() if line}
    exact = {line.partition("==")[0].lower() for line in constraints.splitlines()}
    # pip is the environment's own, and does not stay in the image.
    found += [f"{name} has no exact version" for name in sorted(needed - exact - {"pip"})]
    gpu = {image for image in images(folder, DEVICE="gpu") if not image.startswith("debian:")}
    if sorted(image.split("-")[1] for image in gpu) != ["devel", "runtime"]:
        found.append(f"for GPUs from {sorted(gpu)}")
    found += [f"{image} is not pinned" for image in gpu if not re.search(r":\d+\.\d+\.\d+-\w+-ubuntu\d+\.\d+$", image)]
    for script in sorted((folder / "docker").glob("*.sh")):
        if not script.stat().st_mode & 0o111:
            found.append(f"{script.name} is not executable")
        found += run(["sh", "-n", str(script)], 60).stderr.splitlines()
    return found + step_faults(folder) + compose_faults(folder)


def test_dockerfile_and_compose_file_hold_what_they_promise() -> None:
    assert faults(ROOT) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What `faults` looks at, to be spoiled."""
    for name in ("Dockerfile", "docker-compose.yml", ".dockerignore", "setup.py", "setup.cfg", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).touch()
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    for name in ("hvdkit", "recipes"):
        (tmp_path / name).mkdir()
    assert faults(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("Dockerfile", "debian:12.14-slim", "debian:latest", "asks for debian:latest"),
        ("Dockerfile", "${GPU_DEVEL:-${DEBIAN}}", "${GPU_DEVEL:-nvidia/cuda:13}", "a CPU target asks for nvidia/cuda"),
        ("Dockerfile", "ARG GPU_DEVEL=${DEVICE:+nvidia/cuda", "ARG GPU_DEVEL=${CUDA:+nvidia/cuda", "a CPU target asks"),
        ("Dockerfile", "${CUDA}-runtime", "${CUDA}-devel", "for GPUs from"),
        ("Dockerfile", "ARG CUDA=13.0.3", "ARG CUDA=13", "is not pinned"),
        ("Dockerfile", "AS mxnet\n", "AS mxnett\n", "no target mxnet"),
        ("Dockerfile", "RUN apt-get", "RUN --mount=type=cache,target=/x apt-get", "only BuildKit knows"),
        ("Dockerfile", "hvdkit recipes list", "hvdkit recipe list", "no such command"),
        ("Dockerfile", 'CMD ["hvdkit", "doctor"]', 'CMD ["hvdkit", "doctor", "--gpu"]', "gpu"),
        ("Dockerfile", "runtime build mxnet", "runtime build --fast mxnet", "fast"),
        ("Dockerfile", "--${DEVICE:-cpu}", "--${DEVICE:-xpu}", "--xpu"),
        ("Dockerfile", "COPY recipes recipes", "COPY receipts recipes", "COPY receipts"),
        ("Dockerfile", "--from=pytorch-build", "--from=pytorch-builder", "is no stage before it"),
        ("Dockerfile", "--constraint docker/constraints.txt ", "", "without exact versions"),
        ("docker/constraints.txt", "whatthepatch==", "# ", "whatthepatch has no exact version"),
        ("docker/slim.sh", "fi\n", "", "Syntax error"),
        (".dockerignore", "!recipes", "", "COPY recipes"),
        ("docker-compose.yml", "${TARGET:-pytorch}", "${TARGET:-torch}", "of target torch"),
        ("docker-compose.yml", "node1:1,node2:1", "node1:1,node3:1", "is not node1, node2"),
        ("docker-compose.yml", "- --launcher=", "- --launch=", "launch"),
        ("docker-compose.yml", "node.sh", "nodes.sh", "which the image has not"),
        ("docker-compose.yml", "  runs:\n", "", "not declared"),
    ],
)
def test_what_is_spoiled_is_found(copy: Path, file: str, old: str, new: str, fault: str) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    found = faults(copy)
    assert any(fault in one for one in found), found


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
