"""The Dockerfile and the compose file, read and not built: what `make image-check` and Docker would stumble over.

`faults` collects what is wrong with a folder that holds both; the tests give it the checkout, and copies that were
spoiled in one place each, so that every rule is seen to bite.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "scripts"))
import dockerfile
from dockerfile import Stage

from hvdkit.cli.app import app
from hvdkit.runtimes.pins import RUNTIMES

TARGETS = [*RUNTIMES, "driver"]
COMPILERS = {"g++", "gcc", "make", "build-essential"}
CUDA = {
    "pytorch": "nvidia/cuda:13.0.",
    "tensorflow": "nvidia/cuda:12.",
    "mxnet": "nvidia/cuda:11.7.",
}


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell line, as words."""
    return [shlex.split(part) for part in re.split(r"&&|\|\||;", text) if part.strip()]


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


def apt_packages(stage: Stage) -> set[str]:
    """What the stage installs by apt."""
    installs = [
        words
        for one in stage.instructions
        if one.name == "RUN"
        for words in commands(one.text)
        if words[:2] == ["apt-get", "install"]
    ]
    return {word for words in installs for word in words[2:] if not word.startswith("-")}


def stage_faults(stage: Stage, stages: dict[str, Stage], folder: Path) -> list[str]:
    """What is wrong with one stage, whatever it is for."""
    told = []
    if stage.base not in stages and not re.fullmatch(r"debian:12\.\d+-slim|nvidia/cuda:\d+\.\d+\.\d+-.+", stage.base):
        told.append(f"{stage.name}: base {stage.base} is not pinned")
    for one in stage.instructions:
        if one.name == "COPY":
            copy = dockerfile.copied(one.text)
            if copy.stage and copy.stage not in list(stages)[: list(stages).index(stage.name)]:
                told.append(f"{stage.name}: COPY from {copy.stage}, which is no stage before it")
            told += [
                f"{stage.name}: COPY {source}, which is not there or ignored"
                for source in copy.sources
                if not copy.stage and not (sent_to_docker(folder, source) and (folder / source).exists())
            ]
        if one.name == "RUN" and "apt-get install" in one.text:
            wanted = ("apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
            told += [f"{stage.name}: an apt step without {part}" for part in wanted if part not in one.text]
        if one.name in ("RUN", "CMD"):
            lines = [dockerfile.command(one.text)] if one.name == "CMD" else commands(one.text)
            for words in lines:
                if words[0] == "hvdkit":
                    device = {"DEVICE": "gpu" if any("-gpu-" in need.name for need in stages.values()) else "cpu"}
                    fault = cli_fault([dockerfile.replace(word, device) for word in words[1:]])
                    told += [f"{stage.name}: {fault}"] if fault else []
                elif words[0].endswith("pip") and "install" in words and "--constraint" not in words:
                    told.append(f"{stage.name}: pip without exact versions")
    return told


def target_faults(name: str, stages: dict[str, Stage]) -> list[str]:
    """What is wrong with a stage as an image that people run."""
    if name not in stages:
        return [f"no target {name}"]
    stage, told = stages[name], []
    if stage.last("USER") in (None, "root", "0"):
        told.append(f"{name}: ends as root")
    if stage.last("CMD") is None:
        told.append(f"{name}: no CMD")
    if found := apt_packages(stage) & COMPILERS:
        told.append(f"{name}: holds {', '.join(found)}")
    if name in RUNTIMES:
        steps = [one.text for need in dockerfile.needed(stages, name) for one in need.instructions if one.name == "RUN"]
        if not any(f"hvdkit runtime build {name} --${{DEVICE}}" in step for step in steps):
            told.append(f"{name}: is not made by hvdkit runtime build")
        as_user = stage.instructions[[one.name for one in stage.instructions].index("USER") :] if not told else []
        if not any(one.name == "RUN" and "hvdkit doctor" in one.text for one in as_user):
            told.append(f"{name}: no hvdkit doctor as the image's user")
        told += [
            f"{name}: no {package}"
            for package in ("openssh-server", "openmpi-bin")
            if package not in apt_packages(stage)
        ]
        if not any("/etc/ssh/ssh_host_*" in one.text for one in stage.instructions):
            told.append(f"{name}: keeps the host keys that openssh-server makes")
        build = stages.get(f"{name}-build")
        if build is None or not any(one.text.startswith("HOROVOD_BUILD_ARCH_FLAGS=") for one in build.instructions):
            told.append(f"{name}: Horovod is compiled for the building machine alone")
    return told


def sent_to_docker(folder: Path, source: str) -> bool:
    """Whether .dockerignore, of the form 'nothing but', lets `source` through."""
    lines = [line for line in (folder / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    return lines[0] == "*" and f"!{source.rstrip('/').split('/')[0]}" in lines


def compose_faults(folder: Path, stages: dict[str, Stage]) -> list[str]:
    """What is wrong with the compose file."""
    # Variables as compose replaces them where nothing is set: by what stands behind `:-`.
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (folder / "docker-compose.yml").read_text())
    document, told = yaml.safe_load(text), []
    nodes = sorted(name for name in document["services"] if name.startswith("node"))
    if len(nodes) != 2:
        told.append(f"compose: {len(nodes)} nodes")
    for name, service in document["services"].items():
        target = stages.get(service["build"]["target"])
        if target is None:
            told.append(f"compose: {name} is of target {service['build']['target']}, which is not there")
            continue
        if not {volume.split(":")[0] for volume in service["volumes"]} <= set(document["volumes"]):
            told.append(f"compose: {name} has a volume that is not declared")
        told += [
            f"compose: {name} waits for {other}, which is not there"
            for other in service.get("depends_on", {})
            if other not in document["services"]
        ]
        words = service["command"]
        if words[0] == "hvdkit":
            fault = cli_fault(words[1:])
            told += [f"compose: {fault}"] if fault else []
            hosts = next((word.partition("=")[2] for word in words if word.startswith("--hosts=")), "")
            if sorted(host.split(":")[0] for host in hosts.split(",")) != nodes:
                told.append(f"compose: --hosts={hosts} is not {', '.join(nodes)}")
        else:
            brought = [dockerfile.copied(one.text) for one in target.instructions if one.name == "COPY"]
            inside = {copy.target + Path(source).name for copy in brought for source in copy.sources}
            if words[0] not in inside:
                told.append(f"compose: {name} runs {words[0]}, which the image has not")
    return told


def faults(folder: Path) -> list[str]:
    """All that is wrong with the Dockerfile and docker-compose.yml in `folder`."""
    told = []
    for device in ("cpu", "gpu"):
        stages = dockerfile.read(folder / "Dockerfile", {"DEVICE": device})
        for stage in stages.values():
            told += stage_faults(stage, stages, folder)
        for name in TARGETS:
            told += target_faults(name, stages)
        for name, image in CUDA.items() if device == "gpu" and stages.keys() >= CUDA.keys() else ():
            bases = [stage.base for stage in dockerfile.needed(stages, name) if stage.base not in stages]
            flavours = {base.split("-ubuntu")[0].rsplit("-", 1)[1] for base in bases if base.startswith(image)}
            if flavours != {"devel", "runtime"}:
                told.append(f"{name}: for GPUs from {bases}")
    if not (folder / "docker" / "node.sh").stat().st_mode & 0o111:
        told.append("docker/node.sh is not executable")
    return list(dict.fromkeys(told + compose_faults(folder, dockerfile.read(folder / "Dockerfile"))))


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
        ("Dockerfile", "debian:12.14-slim", "debian:latest", "is not pinned"),
        ("Dockerfile", "AS mxnet\n", "AS mxnett\n", "no target mxnet"),
        ("Dockerfile", "USER hvdkit", "USER root", "ends as root"),
        ("Dockerfile", "hvdkit recipes list", "hvdkit recipe list", "no such command"),
        ("Dockerfile", 'CMD ["hvdkit", "doctor"]', 'CMD ["hvdkit", "doctor", "--gpu"]', "gpu"),
        ("Dockerfile", "runtime build mxnet", "runtime build --fast mxnet", "fast"),
        ("Dockerfile", "RUN hvdkit doctor", "RUN true", "no hvdkit doctor"),
        ("Dockerfile", "openssh-client openssh-server python3 ", "g++ openssh-server python3 ", "holds g++"),
        ("Dockerfile", " /etc/ssh/ssh_host_*", "", "keeps the host keys"),
        ("Dockerfile", "COPY recipes recipes", "COPY receipts recipes", "COPY receipts"),
        ("Dockerfile", "--from=pytorch-build", "--from=pytorch-builder", "is no stage before it"),
        ("Dockerfile", "--constraint /wheels/constraints.txt ", "", "without exact versions"),
        ("Dockerfile", "MXNET_CUDA=11.7.1-cudnn8", "MXNET_CUDA=12.9.1", "mxnet: for GPUs from"),
        ("Dockerfile", "ARG HOROVOD_BUILD_ARCH_FLAGS", "ARG ARCH_FLAGS", "for the building machine alone"),
        (".dockerignore", "!recipes", "", "COPY recipes"),
        ("docker-compose.yml", "${TARGET:-pytorch}", "${TARGET:-torch}", "of target torch"),
        ("docker-compose.yml", "node1:1,node2:1", "node1:1,node3:1", "is not node1, node2"),
        ("docker-compose.yml", "- --launcher=", "- --launch=", "launch"),
        ("docker-compose.yml", "node.sh", "nodes.sh", "which the image has not"),
    ],
)
def test_what_is_spoiled_is_found(copy: Path, file: str, old: str, new: str, fault: str) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    told = faults(copy)
    assert any(fault in one for one in told), told


def test_an_instruction_that_the_reader_does_not_know_is_not_passed_over(copy: Path) -> None:
    for line in ("ADD x /x", "RUN --mount=type=cache,target=/x true", "SHELL ['bash']"):
        (copy / "Dockerfile").write_text(f"FROM debian:12.14-slim AS one\n{line}\n")
        with pytest.raises(ValueError, match=re.escape(line.split()[0])):
            dockerfile.read(copy / "Dockerfile")


def test_every_debian_package_exists() -> None:
    stages = dockerfile.read(ROOT / "Dockerfile")
    wanted = set().union(*map(apt_packages, stages.values()))
    assert {"g++", "openssh-server", "python3.11"} <= wanted
    apt_cache = shutil.which("apt-cache")
    if not apt_cache or not run([apt_cache, "policy", "libopenmpi-dev"], 60).stdout:
        pytest.skip("this machine has no lists of Debian's packages; `make image-check` installs them")
    known = run([apt_cache, "pkgnames"], 60).stdout.split()
    assert wanted <= set(known)


def test_a_tree_with_a_mount_in_it_is_not_removed(tmp_path: Path) -> None:
    """In a mount namespace of its own, where an ordinary user may mount too."""
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    (tree / "point").mkdir(parents=True)
    kept.mkdir()
    (kept / "file").touch()
    removal = "import sys, chroot, pathlib; chroot.remove(pathlib.Path(sys.argv[1]))"
    script = 'mount --bind "$1" "$2/point" && exec "$3" -c "$4" "$2"'
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", script, "sh"]
    done = subprocess.run(
        [*unshare, str(kept), str(tree), sys.executable, removal],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "scripts"), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    assert done.returncode == 1
    assert "is mounted" in done.stderr
    assert (kept / "file").exists()
    assert tree.is_dir()
