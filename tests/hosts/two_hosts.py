"""Two hosts of two ranks each on one machine, as network namespaces; exits with the first bad status of a rank.

    unshare -nm [-Ur where not root] PYTHON tests/hosts/two_hosts.py RUNTIME_PYTHON SCRIPT

As on a fresh Debian, each host's name resolves to a loopback address; only the interface named to Horovod leads to the
other host.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from hvdkit.launch import launchers
from hvdkit.launch.hosts import Host
from hvdkit.launch.slots import fill
from hvdkit.rendezvous import SECRET

HOSTS = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}
INTERFACE = "link0"
SLOTS = 2
RENDEZVOUS = str(Path(launchers.__file__).with_name("rendezvous.py"))


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def make_hosts() -> None:
    """Namespaces alpha and beta with a cable between them; all of it vanishes with this process's own namespaces."""
    call("mount", "-t", "tmpfs", "tmpfs", "/run")  # where `ip netns` keeps its names
    hosts_file = Path("/run/hosts")  # on that file system, with which it goes
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.1.1 {name}\n" for name in HOSTS))
    call("mount", "--bind", str(hosts_file), "/etc/hosts")
    for name in HOSTS:
        call("ip", "netns", "add", name)
    call("ip", "link", "add", INTERFACE, "netns", "alpha", "type", "veth", "peer", "name", INTERFACE, "netns", "beta")
    for name, address in HOSTS.items():
        call("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            call("ip", "-n", name, "link", "set", interface, "up")


def on(host: str, *command: str, **options: object) -> subprocess.Popen[str]:
    """Start a command on a host, under the host's name."""
    named = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', host, *command]
    return subprocess.Popen(["ip", "netns", "exec", host, *named], text=True, **options)


def main(python: str, script: str) -> int:
    make_hosts()
    os.environ[SECRET] = secrets.token_hex(32)
    slots = fill([Host(name, SLOTS) for name in HOSTS], SLOTS * len(HOSTS))
    shown = ",".join(f"{name}:{SLOTS}" for name in HOSTS)
    server = on(
        "alpha", python, RENDEZVOUS, HOSTS["alpha"], shown, str(len(slots)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout
    port = server.stdout.readline().strip()
    ranks = []
    for slot in slots:
        numbers = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        environment = os.environ | {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in numbers}
        environment |= {
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": HOSTS["alpha"],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_GLOO_IFACE": INTERFACE,
            "OMP_NUM_THREADS": "1",
            # While a rank waits for the others, Horovod asks all of them each cycle: on a loaded machine cycles of 1 ms
            # would be a part of the bytes that are measured.
            "HOROVOD_CYCLE_TIME": "20",
        }
        ranks.append(on(slot.hostname, python, script, env=environment))
    statuses = [rank.wait() for rank in ranks]
    server.kill()
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
