"""docker-compose.yml's two nodes as network namespaces of this machine, in one tree: ssh, then horovodrun over both.

The tree serves as both containers and as the volumes that they share. Each node has a network, a host name and an
address of its own. They end with the check's processes; nothing of them stays.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

# Starts a command of the image on a node, given as the prefix that enters the node.
Start = Callable[[str, list[str]], subprocess.Popen[bytes]]
NODES = ("node1", "node2")
_SSHD_STARTS_S = 20


def services(compose: Path, variables: dict[str, str]) -> dict[str, str]:
    """Each service's command as a shell line, with `variables` and compose's own defaults put in."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), compose.read_text())
    return {name: " ".join(service["command"]) for name, service in yaml.safe_load(text)["services"].items()}


def train(start: Start, commands: dict[str, str], tree: Path, overrides: str) -> int:
    """Start node2, wait for its sshd, run node1's command with `overrides`; the exit status."""
    with _nodes(tree) as enter:
        sshd = start(commands["node2"], enter["node2"])
        try:
            until = time.monotonic() + _SSHD_STARTS_S
            while start("ssh node2 true", enter["node1"]).wait():
                if time.monotonic() > until or sshd.poll() is not None:
                    return 1
                time.sleep(0.5)
            return start(f"{commands['node1']} {overrides}", enter["node1"]).wait()
        finally:
            sshd.terminate()
            sshd.wait()


@contextmanager
def _nodes(tree: Path) -> Iterator[dict[str, list[str]]]:
    """Both nodes, joined by a cable; yields for each the command's prefix that enters it."""
    hosts = tree / "etc" / "hosts"
    before = hosts.read_text()
    hold = 'hostname "$0" && echo && exec sleep infinity'
    holders = [
        subprocess.Popen(["unshare", "--net", "--uts", "/bin/sh", "-c", hold, node], stdout=subprocess.PIPE)
        for node in NODES
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            holder.stdout.readline()  # it is in its namespaces from here on
        one, two = (str(holder.pid) for holder in holders)
        # Horovod looks for an interface of one name on all nodes, as containers have it.
        cable = ["ip", "link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", two]
        subprocess.run(cable, check=True)
        enter, lines = {}, ["127.0.0.1 localhost"]
        for number, (node, holder) in enumerate(zip(NODES, holders, strict=True), start=1):
            space = f"/proc/{holder.pid}/ns"
            enter[node] = ["nsenter", f"--net={space}/net", f"--uts={space}/uts"]
            lines.append(f"10.77.0.{number} {node}")
            for words in (
                ["link", "set", "lo", "up"],
                ["addr", "add", f"10.77.0.{number}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
            ):
                subprocess.run([*enter[node], "ip", *words], check=True)
        hosts.write_text("\n".join(lines) + "\n")
        yield enter
    finally:
        hosts.write_text(before)
        for holder in holders:
            os.kill(holder.pid, 9)
            holder.wait()
