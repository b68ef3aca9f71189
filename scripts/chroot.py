"""Run commands inside a folder that holds a whole Debian, with the network and package sources of this machine.

All mounts are made in a mount namespace of their own, which ends with its last process, however that ends: none can
outlive the program, and none is seen outside of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# What Debian's image has in its environment.
DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Where a tree keeps what it has from this machine: certificates, the cache of downloads and compiled wheels.
HOST = Path("/run/host")
_ISOLATED = "HVDKIT_IMAGE_CHECK_ISOLATED"
_PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")
# What of apt's settings is about reaching its sources.
_APT = re.compile(r"^Acquire::(?:https?|ftp|Check-\S+|Retries|ForceIPv\d)\b")


def isolate() -> None:
    """Go on in own mount and process namespaces: starts this program anew in them, once, and ends as that ends."""
    if os.environ.pop(_ISOLATED, None):
        return
    os.environ[_ISOLATED] = "1"
    wrapped = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    os.execvp("unshare", [*wrapped, sys.executable, *sys.argv])


@dataclass(frozen=True)
class User:
    """An entry of a tree's /etc/passwd."""

    uid: int
    gid: int
    home: str


def user(tree: Path, name: str) -> User:
    """Look `name` up in the tree. Raises KeyError where it is not there."""
    for line in (tree / "etc" / "passwd").read_text().splitlines():
        found, _, uid, gid, _, home, _ = line.split(":")
        if found == name:
            return User(int(uid), int(gid), home)
    raise KeyError(f"{tree}: no user {name!r}")


class Machine:
    """How this machine reaches packages: pip's and apt's settings, name servers, local folders that pip is told of."""

    def __init__(self, cache: Path) -> None:
        """`cache` is kept for the trees' downloads and wheels."""
        self.cache = cache
        self.environment: dict[str, str] = {}
        self._folders: list[Path] = []
        self._files: dict[Path, Path] = {}
        for name, value in _pip_settings().items():
            self.environment[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(map(self._local, value.split()))
        for name in _PASSED_ON:
            if name in os.environ:
                self.environment[name] = self._local(os.environ[name])
        self._apt = "".join(f"{line}\n" for line in _apt_settings(self._local))

    def _local(self, word: str) -> str:
        """A word of a setting as it is inside a tree; what it names on this disk will be there."""
        path = Path(word.removeprefix("file://"))
        if not path.is_absolute():
            return word
        if path.is_dir():
            # An index links to files beside itself.
            self._folders.append(path.parent if word.startswith("file://") and path.parent != Path("/") else path)
        elif path.is_file():
            inside = self._files.setdefault(path, HOST / f"{len(self._files)}-{path.name}")
            return word.replace(str(path), str(inside))
        return word

    def furnish(self, tree: Path) -> None:
        """Put the settings and files of this machine into a tree."""
        _inside(tree, HOST).mkdir(parents=True, exist_ok=True)
        for source, inside in self._files.items():
            shutil.copyfile(source, _inside(tree, inside))
        for name in ("resolv.conf", "hosts"):
            shutil.copyfile(Path("/etc") / name, tree / "etc" / name)
        (tree / "etc" / "apt" / "apt.conf.d" / "99host").write_text(self._apt)

    @contextmanager
    def mounted(self, tree: Path) -> Iterator[None]:
        """The tree with /proc, /sys, /dev, the cache and pip's local folders in it."""
        targets = []

        def mount(target: Path, *options: str) -> None:
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", *options, target], check=True)
            targets.append(target)

        try:
            mount(tree / "proc", "-t", "proc", "proc")
            mount(tree / "sys", "--rbind", "/sys")
            mount(tree / "dev", "--rbind", "/dev")
            mount(_inside(tree, HOST / "cache"), "--bind", str(self.cache))
            for folder in dict.fromkeys(self._folders):
                mount(_inside(tree, folder), "-o", "bind,ro", str(folder))
            yield
        finally:
            for target in reversed(targets):
                subprocess.run(["umount", "--recursive", "--lazy", target], check=False)

    def start(
        self,
        tree: Path,
        command: str,
        *,
        user_name: str,
        environment: dict[str, str],
        workdir: str,
        log: IO[bytes],
        enter: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start `/bin/sh -c command` inside a mounted tree; `enter` is a command's prefix, such as nsenter's."""
        who = user(tree, user_name)
        variables = {"HOME": who.home} | self.environment | environment
        if user_name == "root":
            # For pip and for hvdkit; the final image's user must do without.
            variables["XDG_CACHE_HOME"] = str(HOST / "cache")
        words = [*enter, "chroot", f"--userspec={who.uid}:{who.gid}", "--groups=", str(tree), "/bin/sh", "-c"]
        words += ['cd "$1" && exec /bin/sh -c "$2"', "sh", workdir, command]
        return subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def remove(tree: Path) -> None:
    """Remove a tree. Raises RuntimeError, with nothing removed, where anything is mounted in it."""
    inside = f"{tree.resolve()}/"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # The kernel writes a space as \040.
        point = line.split()[4].encode().decode("unicode_escape")
        if f"{point}/".startswith(inside):
            raise RuntimeError(f"{point} is mounted; `umount -R {point}` first, nothing was removed")
    if tree.exists():
        shutil.rmtree(tree)


def _inside(tree: Path, path: Path) -> Path:
    return tree / path.relative_to("/")


def _pip_settings() -> dict[str, str]:
    """pip's settings, the strongest of each name: its environment variables over its files."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    order = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        scope, _, name = key.rpartition(".")
        if order.get(scope, -1) >= found.get(name, (0, ""))[0]:
            found[name] = (order[scope], value.strip("'\"").replace("\\n", " "))
    return {name: value for name, (_, value) in found.items()}


def _apt_settings(local: Callable[[str], str]) -> list[str]:
    """apt's settings about reaching its sources, as lines of its configuration."""
    try:
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    lines = []
    for line in dump.splitlines():
        if _APT.match(line) and not line.endswith('"";'):
            name, _, value = line.partition(" ")
            lines.append(f'{name} "{local(value.rstrip(";").strip(chr(34)))}";')
    return lines
