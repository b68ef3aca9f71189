"""Hosts that are reached by ssh on one machine: an sshd in each of a network's namespaces (`hvdkit hosts`).

    with Sshd(network, folder) as hosts:
        hosts.run(["ssh", "10.77.0.2", "hostname"], stdout=subprocess.PIPE)

Hosts go by their addresses, 10.77.0.1 and so on, and are named h1, h2, … Everything of it lives in `folder` and in the
network's namespaces: no key and no setting of the user's is read or changed. Needs root and Debian's openssh-server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import hygiene

_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Sshd:
    """The daemons on the hosts of `network`; a context manager."""

    def __init__(self, network: Any, folder: Path) -> None:
        self.network, self.folder = network, folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> list[str]:
        """The programs that this machine lacks."""
        return [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path=_PATH) is None]

    def __enter__(self) -> Sshd:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        (self.folder / "config").write_text(
            f"IdentityFile {self.folder}/user\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
        )
        # What starts `ssh` gets this one, with the settings of this folder.
        ssh = self.folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=_PATH)} -F {self.folder}/config "$@"\n')
        ssh.chmod(0o755)
        self.network.run(["mkdir", "-p", "/run/sshd"], check=True)  # sshd wants it, whether it uses it or not
        options = {
            "Port": 22, "HostKey": self.folder / "host", "AuthorizedKeysFile": self.folder / "authorized",
            "PidFile": "none", "StrictModes": "no", "PermitRootLogin": "yes", "PasswordAuthentication": "no",
            "UsePAM": "no", "MaxStartups": 100, "LogLevel": "ERROR",
        }  # fmt: skip
        (self.folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
        sshd = shutil.which("sshd", path=_PATH)
        for name in self.network.names:
            command = self._named(name, [str(sshd), "-D", "-e", "-f", str(self.folder / "sshd_config")])
            with (self.folder / f"{name}.log").open("wb") as log:
                self._daemons.append(self.network.start(command, name, stdout=log, stderr=log, start_new_session=True))
        until = time.monotonic() + hygiene.patience(30)
        for number, name in enumerate(self.network.names, 1):
            while self.run(["ssh", f"10.77.0.{number}", "true"], stderr=subprocess.PIPE).returncode != 0:
                if time.monotonic() > until:
                    raise RuntimeError(f"sshd does not start: {(self.folder / f'{name}.log').read_text()}")
                time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(10)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on the first host."""
        return self.network.run(self._named("h1", command), "h1", **self._with(options))

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the first host."""
        return self.network.start(self._named("h1", command), "h1", **self._with(options))

    def option(self, slots: int) -> str:
        """The hosts, for -H."""
        return ",".join(f"10.77.0.{number}:{slots}" for number in range(1, len(self.network.names) + 1))

    def _with(self, options: dict[str, Any]) -> dict[str, Any]:
        environment = {**os.environ, **options.pop("env", {})}
        path = f"{self.folder}:{environment['PATH']}:/usr/sbin:/sbin"
        return {**options, "env": {**environment, "PATH": path}}

    def _named(self, host: str, command: list[str]) -> list[str]:
        """The command under that host's name."""
        return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *command]
