"""`make image-check`: build the CPU targets of the Dockerfile with Docker, and run what is in them.

    .venv/bin/python scripts/image_check.py [--compose] [driver pytorch tensorflow mxnet]

Each target is built by BuildKit. In a container, as the image's user, its own CMD runs and a short training on two
ranks; a look inside finds no compiler, no private key and no cache. docker-compose.yml then trains one epoch of the
digits over two containers with each framework, and its exit status is that of the run. The classic builder builds the
command line's target. Layers stay with the engine, so a second check does only what has changed; `docker system prune`
frees the disk. With --compose, which `make cluster-check` takes, only the training over two containers is done.

The environment names pip's sources (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL), proxies (http_proxy …) and the client, where
it is not the first `docker` on PATH (DOCKER).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"driver": [], "mxnet": ["mxnet"], "pytorch": ["pytorch"], "tensorflow": ["tensorflow", "keras"]}
SHORT = "data='{name: synthetic, height: 32, width: 32, train_images: 16}' batch_size=4 epochs=1 device=cpu"
PROJECT = ("--project-name", "hvdkit-image-check")
# What a build takes from the environment, where it is there.
PASSED_ON = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "http_proxy", "https_proxy", "no_proxy")
# Prints what an image should not hold; root sees all of it.
LOOK = r"""
for tool in cc c++ gcc g++ cpp ld as make cmake; do command -v $tool; done
find /usr/lib/gcc /usr/libexec/gcc -type f -name 'cc1*' -print 2>/dev/null
grep -rlI -e '-BEGIN [A-Z ]*PRIVATE KEY' /etc /home /root /tmp /usr/local /var
find /root/.cache /home/*/.cache /tmp /var/cache/apt /var/lib/apt/lists /var/tmp -type f -print
find /usr/local/lib/hvdkit -name pip -type d -print
"""
INSTALLED = "from importlib.metadata import distributions as all; print(*{one.name for one in all()}, sep='\\n')"


class Failed(Exception):
    """A step that did not do what it should; the text says which, and where its output is."""


class Docker:
    """The engine's client, and the log of all that it says."""

    def __init__(self, client: str, compose: list[str], log: Path) -> None:
        """`compose` is the command of Docker Compose."""
        self._client, self._compose, self._log = client, compose, log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def step(self, shown: str, words: list[str], *, expected: int = 0, **variables: str) -> str:
        """Run `docker WORDS`; returns its output. Raises Failed where its exit status is not `expected`."""
        return self._run(shown, [self._client, *words], expected, variables)

    def compose(self, shown: str, words: list[str], *, expected: int = 0, **variables: str) -> str:
        """Run Docker Compose in the checkout, likewise."""
        return self._run(shown, [*self._compose, "--ansi", "never", *PROJECT, *words], expected, variables)

    def _run(self, shown: str, command: list[str], expected: int, variables: Mapping[str, str]) -> str:
        started = time.monotonic()
        print(shown, end=" … ", flush=True)
        with self._log.open("ab+") as log:
            log.write(f"\n--- {shown}: {' '.join(command)}\n".encode())
            log.flush()
            begins = log.seek(0, os.SEEK_END)
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).returncode
            log.seek(begins)
            output = log.read().decode(errors="replace")
        if status != expected:
            print(f"\n{output[-3000:]}", file=sys.stderr)
            raise Failed(f"{shown}: exit status {status}, expected {expected}; the whole output: {self._log}")
        print(f"{time.monotonic() - started:.0f} s", flush=True)
        return output


def build(docker: Docker, target: str, options: list[str], *, classic: bool = False) -> str:
    """Build a target; returns its tag. Raises Failed."""
    tag = f"hvdkit:{target}" + ("-classic" if classic else "")
    words = ["build", "--target", target, "--tag", tag, *options]
    for name in PASSED_ON:
        words += ["--build-arg", name] if name in os.environ else []
    shown = f"{target}: docker build" + (" with the classic builder" if classic else "")
    docker.step(shown, [*words, str(ROOT)], DOCKER_BUILDKIT="0" if classic else "1")
    return tag


def try_out(docker: Docker, target: str, tag: str) -> None:
    """Run the image's CMD and trainings as its user, and look what it holds. Raises Failed."""
    size, user, command = json.loads(
        docker.step(
            f"{target}: docker image inspect",
            ["image", "inspect", "--format", "[{{.Size}}, {{json .Config.User}}, {{json .Config.Cmd}}]", tag],
        ).splitlines()[-1]
    )
    if user in ("", "root", "0"):
        raise Failed(f"{target}: runs as {user or 'root'}")
    docker.step(f"{target}: {' '.join(command)}", ["run", "--rm", tag])
    for framework in TARGETS[target]:
        train = f"hvdkit train resnet20-digits --framework {framework} -np 2 --out runs/check {SHORT}"
        words = ["run", "--rm", tag, "sh", "-c", f'{train} && test -s runs/check/result.json && test "$(id -u)" != 0']
        docker.step(f"{target}: {framework} trains on two ranks as {user}", words)
    found = docker.step(
        f"{target}: looking for compilers, keys and caches",
        ["run", "--rm", "--user", "root", tag, "sh", "-c", f"{LOOK}\ntrue"],
    )
    if left := [line for line in found.splitlines() if line.startswith("/")]:
        raise Failed(f"{target}: holds {', '.join(left[:10])}")
    unpinned = packages(docker, target, tag) - pinned() - {"hvdkit"}
    if unpinned:
        raise Failed(f"{target}: docker/constraints.txt has no version of {', '.join(sorted(unpinned))}")
    print(f"{target}: {size / 1e6:.0f} MB", flush=True)


def packages(docker: Docker, target: str, tag: str) -> set[str]:
    """The command line's packages in the image, without the frameworks', by their canonical names."""
    python = "/usr/local/lib/hvdkit/bin/python"
    output = docker.step(f"{target}: its packages", ["run", "--rm", tag, python, "-c", INSTALLED])
    return {canonicalize_name(line) for line in output.split()}


def pinned() -> set[str]:
    """The packages of docker/constraints.txt, likewise."""
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def compose(docker: Docker, target: str) -> None:
    """Train with each framework of the target over docker-compose.yml's two containers. Raises Failed."""
    up = ["up", "--no-build", "--exit-code-from", "node1"]
    requests = [(framework, 0) for framework in TARGETS[target]]
    # One that no command line knows: the exit status of `up` is the run's.
    requests += [("caffe", 2)] if requests else []
    for framework, status in requests:
        variables = {"TARGET": target, "FRAMEWORK": framework, "EPOCHS": "1"}
        try:
            shown = f"{target}: compose, --framework={framework}, exit status {status}"
            output = docker.compose(shown, up, expected=status, **variables)
        finally:
            docker.compose(f"{target}: compose down", ["down", "--volumes"], **variables)
        if lines := re.findall(r"^node1\S*\s+\|\s*(.*accuracy.*)$", output, re.MULTILINE):
            print(f"  {lines[-1].strip()}", flush=True)


def ready() -> tuple[str, list[str]]:
    """The client and Compose. Raises ValueError, in one line, with what to install where they cannot be used."""
    install = "apt-get install docker.io docker-compose (Debian), or https://docs.docker.com/engine/install"
    client = shutil.which(os.environ.get("DOCKER", "docker"))
    if client is None:
        raise ValueError(f"needs a Docker engine, and there is no docker on PATH: {install}")
    asked = subprocess.run([client, "version", "--format", "{{.Client.Version}}"], capture_output=True, text=True)
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        raise ValueError(f"needs a running Docker engine ({said}): start one, `systemctl start docker`, or {install}")
    bundled = int(asked.stdout.split(".")[0]) < 23  # from then on BuildKit's client is a plugin
    if not bundled and subprocess.run([client, "buildx", "version"], capture_output=True).returncode:
        raise ValueError(
            f"needs BuildKit, and {client} has no buildx: install docker-buildx, or name another client in DOCKER"
        )
    if subprocess.run([client, "compose", "version"], capture_output=True).returncode == 0:
        return client, [client, "compose"]
    if found := shutil.which("docker-compose"):
        return client, [found]
    raise ValueError("needs Docker Compose: apt-get install docker-compose (Debian), or docker-compose-plugin")


def main() -> int:
    """Check the targets that are named; exit status 1 where one is not good, 2 where the check cannot be made here."""
    parser = argparse.ArgumentParser(prog="image-check", description="Build the Dockerfile's targets and run them.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} [default: all]")
    parser.add_argument(
        "--compose",
        action="store_true",
        help="build, and train over two containers, no more; where this machine cannot, say what it lacks (status 0)",
    )
    parser.add_argument("--network", help="the network of builds, as in docker build [default: the engine's]")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as in docker build")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.targets if name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]!r}: expected one of {', '.join(TARGETS)}")
    try:
        client, composing = ready()
    except ValueError as error:
        left_out = "training over two containers is left out: it " if arguments.compose else "image-check "
        print(f"{left_out}{error}", file=sys.stderr)
        return 0 if arguments.compose else 2
    options = [word for value in arguments.build_arg for word in ("--build-arg", value)]
    options += ["--network", arguments.network] if arguments.network else []
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # containers end with this program
    docker = Docker(client, composing, cache / "hvdkit" / "image-check.log")
    try:
        for name in arguments.targets or TARGETS:
            tag = build(docker, name, options)
            if arguments.compose:
                compose(docker, name)
                continue
            try_out(docker, name, tag)
            compose(docker, name)
            if name == "driver":
                # It asks for every base above the target: the GPU ones are not among them.
                tag = build(docker, name, options, classic=True)
                docker.step(
                    f"{name}: hvdkit --version, as the classic builder made it",
                    ["run", "--rm", tag, "hvdkit", "--version"],
                )
                docker.step(f"{name}: the classic builder's image removed", ["image", "rm", tag])
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the layers that are built stay with the engine", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
