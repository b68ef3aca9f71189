"""Hosts with slow links between them, on one machine: network namespaces, a switch, a rate limit on each link.

`hvdkit hosts` runs a command there (docs/slow-network.md). From Python:

    with Network(4, 100.0) as network:
        network.run([...])

To hvdkit it is a Slurm allocation, so the launcher is `slurm` where none is named; srun is of the folder bin here. This
file is a program too, which holds the namespaces: it imports the standard library only.

A host is a network namespace with one link, eth0, to a switch (a bridge). Each link is limited in both directions by
tbf, whose burst is at most two packets: a larger one lets small messages cross for free after a pause. Packets are the
wire's own, of 1500 bytes: no offload makes larger ones. Ranks on one host use its loopback, which is not limited.
TCP is Reno with Linux's own buffers, so that a figure does not depend on how the machine is set. Launcher and agents
speak over a network of their own, control, so that only ranks use the links.

All of it lives inside a private network and mount namespace of one process, which ends with the program that made it,
killed or not, and with it all that runs there: nothing has to be removed, and two networks at once are apart. Without
root this is done in a user namespace, where the kernel allows one. Needs iproute2 and util-linux.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

MTU, FRAME_BYTES = 1500, 1514  # of a packet, without and with Ethernet's header, which tbf counts too
BURST_BYTES = 2 * MTU
QUEUE_S = 0.1  # what a port of the switch holds, by the link's rate
MOST_HOSTS, MOST_SLOTS = 200, 64
SLOWEST, FASTEST = 0.1, 40_000.0  # Mbit/s
GRACE_S = 10.0  # for what still runs when the network goes; hvdkit ends its ranks within it
_NETNS = Path("/run/netns")
_BIN = Path(__file__).resolve().with_name("bin")
# linux/ethtool.h, linux/sockios.h
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}
# Inside a namespace: no chatter of IPv6, and a congestion control that every machine has. A namespace may take what the
# machine's own setting or Reno is; no other without the whole machine's consent.
_SETTLE = """\
for name in all default; do
    file=/proc/sys/net/ipv6/conf/$name/disable_ipv6
    [ ! -e $file ] || echo 1 >$file || exit
done
echo reno >/proc/sys/net/ipv4/tcp_congestion_control"""


class Unavailable(Exception):
    """This machine cannot make the network; the text says why, in one line."""


class Network:
    """`hosts` namespaces h1, h2, … at a switch, each link limited to `mbit_per_s` in both directions.

    A context manager; `run` and `start` take command lines, in which `-H` may name `hosts_option(slots)`. Without
    `control` there is no other network: what starts ranks there has to use the links too.
    """

    def __init__(self, hosts: int, mbit_per_s: float, control: bool = True) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts: expected 1 to {MOST_HOSTS}, got {hosts}")
        _check_rate(mbit_per_s)
        self.names = [f"h{number}" for number in range(1, hosts + 1)]
        self.mbit_per_s = mbit_per_s
        self.control = control
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Make it. Raises Unavailable."""
        missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool, path=_path()) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)}: not found; install iproute2 and util-linux")
        mapped = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        size = [str(len(self.names)), str(self.mbit_per_s), str(int(self.control))]
        held = [sys.executable, "-I", "-S", __file__, *size]
        self._holder = subprocess.Popen(
            ["unshare", *mapped, "--net", "--mount", *held],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for the command, which needs its network to the end
        )
        assert self._holder.stdout is not None
        lines = []
        for line in self._holder.stdout:
            if line == "ready\n":
                return self
            lines.append(line.strip())
        self.__exit__()
        said = next((line for line in reversed(lines) if line), "it said nothing")
        refused = ("ermi" in said or "unshare" in said) and "failed to execute" not in said
        why = " (root may, or a user where the kernel allows user namespaces)" if refused else ""
        raise Unavailable(f"network namespaces cannot be made here: {said}{why}")

    def __exit__(self, *_: object) -> None:
        """Take it away, and end what still runs in it."""
        if self._holder is not None:
            assert self._holder.stdin is not None and self._holder.stdout is not None
            self._holder.stdin.close()
            self._holder.wait()
            self._holder.stdout.close()
            self._holder = None

    def hosts_option(self, slots: int = 1) -> str:
        """What hvdkit's -H takes, for `slots` ranks on each host."""
        return ",".join(f"{name}:{slots}" for name in self.names)

    def command(self, command: list[str], host: str | None = None) -> list[str]:
        """The command line that runs `command` where all hosts are known or, where one is named, on that host."""
        assert self._holder is not None, "enter the network first"
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        # A mount namespace is entered at its root: stay in the folder instead.
        enter = ["nsenter", f"--target={self._holder.pid}", *user, "--net", "--mount", "--wd=.", "--"]
        return [*enter, *(_inside(host) or self._allocation()), *command]

    def _allocation(self) -> list[str]:
        """A command prefix with which the hosts are a Slurm allocation, whose ranks use the links."""
        slurm = {
            "SLURM_JOB_NODELIST": ",".join(self.names),
            "SLURM_TASKS_PER_NODE": f"{MOST_SLOTS}(x{len(self.names)})",
        }
        here = {"PATH": f"{_BIN}:{_path()}", "HOROVOD_GLOO_IFACE": "eth0", **slurm}
        return ["env", *(f"{name}={value}" for name, value in here.items())]

    def start(self, command: list[str], host: str | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command; `options` are Popen's."""
        return subprocess.Popen(self.command(command, host), **{"env": _environment(), **options})

    def run(self, command: list[str], host: str | None = None, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command to its end; `options` are subprocess.run's."""
        return subprocess.run(self.command(command, host), **{"env": _environment(), **options})

    def set_rate(self, mbit_per_s: float) -> None:
        """Give all links another rate, which holds at once."""
        _check_rate(mbit_per_s)
        limit = _limit(mbit_per_s)
        for name in self.names:
            for end, host in (("eth0", name), (f"to-{name}", None)):
                self.run(["tc", "qdisc", "replace", "dev", end, "root", *limit], host, check=True)
        self.mbit_per_s = mbit_per_s

    def sent_bytes(self) -> dict[str, int]:
        """What each host has sent over its link so far, Ethernet's headers counted."""
        shown = ["ip", "-json", "-stats", "link", "show", "eth0"]
        told = {name: self.run(shown, name, check=True, stdout=subprocess.PIPE).stdout for name in self.names}
        return {name: json.loads(text)[0]["stats64"]["tx"]["bytes"] for name, text in told.items()}


def _check_rate(mbit_per_s: float) -> None:
    if not SLOWEST <= mbit_per_s <= FASTEST:
        raise ValueError(f"mbit_per_s: expected {SLOWEST:g} to {FASTEST:g}, got {mbit_per_s:g}")


def _path() -> str:
    """Where a user's PATH has no sbin, ip and tc are in it all the same."""
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


def _limit(mbit_per_s: float) -> list[str]:
    """tbf's words. Its own latency setting is left out: the queue is what it makes of it, never below ten packets."""
    bit_per_s = round(mbit_per_s * 1e6)
    queue = max(10 * FRAME_BYTES, round(bit_per_s / 8 * QUEUE_S))
    return ["tbf", "rate", f"{bit_per_s}bit", "burst", str(BURST_BYTES), "limit", str(queue)]


def _hold(hosts: int, mbit_per_s: float, control: bool) -> None:
    """Inside the new namespaces: make the hosts, say so, and keep them until standard input closes."""
    # Only this process and those below it see the hosts' names. A user may not write into the system's /run.
    _call(["mount", "-t", "tmpfs", "hosts", str(_NETNS if _NETNS.is_dir() else _NETNS.parent)])
    _NETNS.mkdir(exist_ok=True)
    _batch(["link set lo up", "link add switch type bridge", "link set switch up"])
    _call(["sh", "-c", _SETTLE])
    if control:
        _batch(["link add control type bridge", "addr add 10.78.0.254/24 dev control", "link set control up"])
    for number in range(1, hosts + 1):
        name, port, end = f"h{number}", f"to-h{number}", f"end-{number}"
        _batch([f"netns add {name}", f"link add {port} mtu {MTU} type veth peer name {end} mtu {MTU}"])
        for interface in (port, end):
            _packets_of_the_wire(interface)
        _batch([f"link set {port} master switch up", f"link set {end} netns {name} name eth0"])
        _call([*_inside(name), "sh", "-c", _SETTLE])
        _batch(["link set lo up", f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up"], name)
        for end, host in ((port, None), ("eth0", name)):
            _call([*_inside(host), "tc", "qdisc", "add", "dev", end, "root", *_limit(mbit_per_s)])
        if control:
            _batch([f"link add control-{number} master control up type veth peer name control0 netns {name}"])
            _batch([f"addr add 10.78.0.{number}/24 dev control0", "link set control0 up"], name)
    print("ready", flush=True)
    sys.stdin.read()
    _end_what_runs_here()


def _packets_of_the_wire(interface: str) -> None:
    """Let no offload send or deliver more than one packet at once, as `ethtool -K … tso off gso off gro off` does."""
    _call(["ip", "link", "set", "dev", interface, "gso_max_segs", "1"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS.values():
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def _end_what_runs_here() -> None:
    """End all processes of this mount namespace, which is ours alone: in good order, then by force."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        until = time.monotonic() + patience_s
        signalled: set[int] = set()
        while (left := _others_here()) and time.monotonic() < until:
            for pid in left - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= left
            time.sleep(0.05)


def _others_here() -> set[int]:
    """The other processes of this mount namespace."""
    here, others = Path("/proc/self/ns/mnt").stat().st_ino, set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it is gone, or another user's
                if (entry / "ns" / "mnt").stat().st_ino == here:
                    others.add(int(entry.name))
    return others


def _inside(host: str | None) -> list[str]:
    return ["nsenter", f"--net={_NETNS / host}", "--"] if host else []


def _batch(lines: list[str], host: str | None = None) -> None:
    _call([*_inside(host), "ip", "-batch", "-"], "\n".join(lines) + "\n")


def _call(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {' '.join(done.stdout.split())}")


if __name__ == "__main__":
    _hold(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "1")
