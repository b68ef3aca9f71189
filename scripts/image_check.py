"""`make image-check`: run the Dockerfile's own steps in a fresh Debian tree, for machines without Docker.

    .venv/bin/python scripts/image_check.py [driver pytorch tensorflow mxnet]

Takes the CPU targets' stages from the Dockerfile and runs them in order, each in a folder made by debootstrap and
entered by chroot, with ARG, ENV, WORKDIR, USER and COPY as in Docker. Then the image's own CMD and a short training on
two ranks, by the image's user, and over docker-compose.yml's two nodes. Needs root and debootstrap. What is done is
kept in `~/.cache/hvdkit/image-check`: an interrupted check goes on with the stage it was in, a stage with a changed
step is made anew.

Unlike in Docker, root's steps find a cache of earlier downloads and compiled wheels, and pip and apt are set as they
are on this machine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chroot
import dockerfile
import two_nodes
from dockerfile import Stage

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"driver": [], "mxnet": ["mxnet"], "pytorch": ["pytorch"], "tensorflow": ["tensorflow", "keras"]}
SHORT = "data='{name: synthetic, height: 32, width: 32, train_images: 16}' batch_size=4 epochs=1 device=cpu"
RELEASE = "bookworm"


class StepFailed(Exception):
    """A step that ended with a status other than 0; the text says which, and where its output is."""


class Check:
    """The stages' trees in one folder, and what was done in each."""

    def __init__(self, work: Path, mirror: str) -> None:
        """`mirror` is where debootstrap takes Debian from."""
        self.work, self._mirror = work, mirror
        (work / "logs").mkdir(parents=True, exist_ok=True)
        (work / "cache").mkdir(exist_ok=True)
        self.machine = chroot.Machine(work / "cache")
        self.stages = dockerfile.read(ROOT / "Dockerfile")
        self._keys: dict[str, str] = {}
        self._settings: dict[str, dict[str, str]] = {}

    def target(self, name: str) -> None:
        """Build the target and try what was built. Raises StepFailed."""
        for stage in dockerfile.needed(self.stages, name):
            self._build(stage)
        stage = self.stages[name]
        commands = [" ".join(dockerfile.command(stage.last("CMD") or "[]"))]
        for framework in TARGETS[name]:
            run = f"runs/image-check-{framework}"
            commands.append(
                f"hvdkit train resnet20-digits --framework {framework} -np 2 --out {run} --overwrite {SHORT}"
                f' && test -f {run}/result.json && test "$(id -u)" != 0'
            )
        for command in commands:
            self._run(stage, f"as {stage.last('USER')}: {command}", command)
        for framework in TARGETS[name][:1]:
            self._two_nodes(stage, framework)

    def _tree(self, stage: str) -> Path:
        return self.work / "trees" / stage

    def _build(self, stage: Stage) -> None:
        """Bring the stage's tree to its end; what was done in it and has not changed stays."""
        record = self.work / "trees" / f"{stage.name}.json"
        key = self._base_key(stage)
        plan = []
        for instruction in stage.instructions:
            key = _digest(key, str(instruction), self._content(instruction))
            plan.append(key)
        try:
            done: list[str] = json.loads(record.read_text())
        except (OSError, ValueError):
            done = []
        base_key = _digest(self._base_key(stage))
        if done[:1] != [base_key] or done[1:] != plan[: len(done) - 1] or not self._tree(stage.name).is_dir():
            record.unlink(missing_ok=True)
            chroot.remove(self._tree(stage.name))
            self._copy_base(stage)
            done = [base_key]
            record.write_text(json.dumps(done))
        self._settings[stage.name] = dict(
            self._settings.get(stage.base, {"USER": "root", "WORKDIR": "/", "PATH": chroot.DEBIAN_PATH})
        )
        for number, instruction in enumerate(stage.instructions):
            again = number < len(done) - 1
            if not again:
                # A step that is cut off leaves the tree in no known state: without its record the stage begins anew.
                record.unlink(missing_ok=True)
            self._act(stage, instruction, again)
            if not again:
                done.append(plan[number])
                record.write_text(json.dumps(done))
        self._keys[stage.name] = key

    def _base_key(self, stage: Stage) -> str:
        if stage.base in self.stages:
            return self._keys[stage.base]
        if not stage.base.startswith("debian:12."):
            raise StepFailed(f"FROM {stage.base}: this check makes Debian 12 trees only")
        return stage.base

    def _content(self, instruction: dockerfile.Instruction) -> str:
        """What a COPY brings, as a digest."""
        if instruction.name != "COPY":
            return ""
        copy = dockerfile.copied(instruction.text)
        if copy.stage:
            return self._keys[copy.stage]
        files = [path for source in copy.sources for path in _files(ROOT / source)]
        return _digest(
            *(
                f"{path.relative_to(ROOT)}:{path.stat().st_mode}:{hashlib.sha256(path.read_bytes()).hexdigest()}"
                for path in files
            )
        )

    def _copy_base(self, stage: Stage) -> None:
        source = self._tree(stage.base) if stage.base in self.stages else self._debian()
        self._tree(stage.name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", source, self._tree(stage.name)], check=True)
        self.machine.furnish(self._tree(stage.name))

    def _debian(self) -> Path:
        """A fresh Debian, made once."""
        base, making = self.work / "base", self.work / "base-making"
        if not base.is_dir():
            _say(f"debootstrap {RELEASE} (about a minute)")
            chroot.remove(making)
            with (self.work / "logs" / "debootstrap.log").open("wb") as log:
                command: list[str | Path] = ["debootstrap", "--variant=minbase", RELEASE, making, self._mirror]
                if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode:
                    raise StepFailed(f"debootstrap failed; its output: {log.name}")
            # As Debian's own image has them.
            security = self._mirror.rstrip("/") + "-security"
            (making / "etc" / "apt" / "sources.list").write_text(
                f"deb {self._mirror} {RELEASE} main\ndeb {self._mirror} {RELEASE}-updates main\n"
                f"deb {security} {RELEASE}-security main\n"
            )
            making.rename(base)
        return base

    def _act(self, stage: Stage, instruction: dockerfile.Instruction, again: bool) -> None:
        """One instruction; `again` where the tree has it already and only the settings are to follow."""
        settings, name, text = self._settings[stage.name], instruction.name, instruction.text
        if name in ("USER", "WORKDIR"):
            settings[name] = dockerfile.replace(text, settings)
            if name == "WORKDIR" and not again:
                folder = self._tree(stage.name) / text.lstrip("/")
                folder.mkdir(parents=True, exist_ok=True)
        elif name in ("ARG", "ENV"):
            key, value = dockerfile.argument(text)
            if "=" in text:
                settings[key] = dockerfile.replace(value, settings)
        elif name == "COPY" and not again:
            self._copy(stage, dockerfile.copied(text))
        elif name == "RUN" and not again:
            self._run(stage, str(instruction), text)

    def _copy(self, stage: Stage, copy: dockerfile.Copy) -> None:
        _say(f"{stage.name}: COPY {' '.join(copy.sources)}")
        source_root = self._tree(copy.stage) if copy.stage else ROOT
        tree = self._tree(stage.name)
        target = (
            tree / copy.target.lstrip("/")
            if copy.target.startswith("/")
            else (tree / self._settings[stage.name]["WORKDIR"].lstrip("/") / copy.target)
        )
        for word in copy.sources:
            source = source_root / word.lstrip("/")
            # As Docker has it: a folder's content goes into the target, a file into it where it ends in a slash.
            into = target / source.name if source.is_file() and copy.target.endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(source, into, symlinks=True, dirs_exist_ok=True, ignore=None if copy.stage else ignore)
            else:
                shutil.copy2(source, into)

    def _run(self, stage: Stage, shown: str, command: str) -> None:
        with self._entered(stage, shown) as start:
            _succeed(start(command, []).wait())

    def _two_nodes(self, stage: Stage, framework: str) -> None:
        """What docker-compose.yml does, with this target and framework."""
        commands = two_nodes.services(ROOT / "docker-compose.yml", {"TARGET": stage.name, "FRAMEWORK": framework})
        with self._entered(stage, f"two nodes: {commands['node1']}") as start:
            _succeed(two_nodes.train(start, commands, self._tree(stage.name), SHORT))

    @contextmanager
    def _entered(self, stage: Stage, shown: str) -> Iterator[two_nodes.Start]:
        """The stage's tree, mounted; yields what starts a command in it, as ENV, WORKDIR and USER say by now.

        Raises StepFailed, with the end of the output, where the body raises it.
        """
        shown, settings = " ".join(shown.split()), self._settings[stage.name]
        _say(f"{stage.name}: {shown if len(shown) <= 130 else shown[:127] + '...'}")
        tree, started = self._tree(stage.name), time.monotonic()
        environment = {key: value for key, value in settings.items() if key not in ("USER", "WORKDIR")}
        path = self.work / "logs" / f"{stage.name}.log"
        with path.open("ab") as log, self.machine.mounted(tree):
            log.write(f"\n--- {shown}\n".encode())
            log.flush()
            begins = log.tell()

            def start(command: str, enter: list[str]) -> subprocess.Popen[bytes]:
                user, workdir = settings["USER"], settings["WORKDIR"]
                return self.machine.start(
                    tree, command, user_name=user, environment=environment, workdir=workdir, log=log, enter=enter
                )

            try:
                yield start
            except StepFailed as error:
                print(path.read_bytes()[begins:].decode(errors="replace")[-3000:], file=sys.stderr)
                raise StepFailed(f"{stage.name}: {error} of: {shown}\nthe whole output: {path}") from None
        _say(f"{stage.name}: done in {time.monotonic() - started:.0f} s")


def _succeed(status: int) -> None:
    if status:
        raise StepFailed(f"exit status {status}")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [one for one in sorted(path.rglob("*")) if one.is_file() and one.suffix != ".pyc"]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Check the targets that are named; exit status 1 where a step fails, 2 where the check cannot be made here."""
    parser = argparse.ArgumentParser(description="Run the Dockerfile's CPU targets in a fresh Debian tree.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} [default: all]")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", help="where Debian comes from")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.targets if name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]!r}: expected one of {', '.join(TARGETS)}")
    if os.geteuid() != 0:
        parser.error("needs root, to enter the trees by chroot: sudo make image-check")
    for tool in ("debootstrap", "unshare", "ip"):
        if shutil.which(tool) is None:
            parser.error(f"needs {tool}: apt-get install debootstrap util-linux iproute2")
    chroot.isolate()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    work = base / "hvdkit" / "image-check"
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"another check is at work in {work}")
        try:
            check = Check(work, arguments.mirror)
            for name in arguments.targets or TARGETS:
                check.target(name)
                _say(f"{name}: good")
        except (StepFailed, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; the next check goes on from the stage it was in", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
