"""What a host has, and how it reaches its neighbour: the part of `hvdkit doctor` that runs on each host.

It is sent to the host as text, since hvdkit may be missing there, and runs under any Python 3.8 or later with the
standard library alone. Each line of standard input is a question (JSON, with `ask`), each line of standard output its
answer. It ends when standard input closes.

`ask` is `facts` (what the host has), `reach` (whether the neighbour answers at its addresses, and how soon) or `link`
(what a link carries: link_probe.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from hvdkit.handshake import Listener, connect
from hvdkit.launch.agent.interfaces import address_of, mask_of, names
from hvdkit.launch.agent.link_probe import measure_link, serve_link

_ANSWER_S = 2.0  # for a connection
_PROGRAM_S = 20.0  # for a program
_NAME_S = 3.0  # for the name service: a resolver asks again after 5 s, and a rank's start should not wait for that
_CONNECTIONS = 5


def main() -> None:
    """Answer questions until standard input closes."""
    for line in sys.stdin:
        question = json.loads(line)
        ask = question.pop("ask")
        if ask == "facts":
            token = question.pop("token")
            answer = {**facts(**question), "port": _listen(token) if token else 0}
        elif ask == "link":
            answer = measure_link(**question)
        else:
            answer = {"ways": [_way(**way) for way in question["ways"]]}
        sys.stdout.write("\n" + json.dumps(answer) + "\n")
        sys.stdout.flush()
    os._exit(0)


def facts(
    host: str,
    neighbour: str,
    pythons: dict[str, str],
    packages: list[str],
    package: str,
    folders: list[str],
    mark: str,
    sharing: str = "",
) -> dict[str, Any]:
    """What the host has; `pythons` are the interpreters of runtimes by name, `package` is hvdkit's folder.

    `resolves` lacks the names that the name service gives no answer to. `sharing` is a program that tries whether
    processes can share memory (hvdkit/runtimes/shared_memory_probe.py); without it, that is not known.
    """
    pool = ThreadPoolExecutor(5)
    resolved = {name: pool.submit(_resolved, name) for name in (host, neighbour)}
    gpus, shared = pool.submit(_gpus), pool.submit(_shared_memory, sharing) if sharing else None
    runtimes = pool.submit(lambda: {name: runtime(python, packages) for name, python in pythons.items()})
    answers = {
        "hostname": socket.gethostname(),
        "interfaces": interfaces(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _free_memory(),
        "folders": {folder: _free_bytes(folder) for folder in folders},
        "shares_files": Path(mark).exists(),
        "hvdkit": _digest(sorted(Path(package).rglob("*.py"))),
    }
    wait(resolved.values(), _NAME_S)
    slow: list[Future[Any]] = [gpus, runtimes, *([shared] if shared else [])]
    wait(slow, _PROGRAM_S)
    answers["resolves"] = {name: names.result() for name, names in resolved.items() if names.done()}
    answers["gpus"] = gpus.result() if gpus.done() else []
    answers["shared_memory"] = shared.result() if shared and shared.done() else None
    answers["runtimes"] = runtimes.result() if runtimes.done() else {}
    return answers


def interfaces() -> list[dict[str, Any]]:
    """The addresses of all interfaces, IPv4 first, and of IPv6 those that reach further than one link."""
    rows = []
    for name in names():
        address, mask = address_of(name), mask_of(name)
        if address is not None:
            bits = bin(struct.unpack("!I", socket.inet_aton(mask or "255.255.255.255"))[0]).count("1")
            rows.append({"name": name, "address": address, "bits": bits})
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return rows
    for text, _, length, scope, _, name in (line.split() for line in lines):
        if int(scope, 16) != 0x20:  # of a link alone
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(text))
            rows.append({"name": name, "address": address, "bits": int(length, 16)})
    return rows


def runtime(python: str, packages: list[str]) -> dict[str, Any]:
    """What an interpreter has: its version and those of `packages`, a digest of Horovod; or a `fault`."""
    say = "import sys; print('\\n'.join(['%d.%d.%d' % sys.version_info[:3]] + sys.path))"
    try:
        printed = _lines(python, "-I", "-c", say)
    except FileNotFoundError:
        return {"fault": "no interpreter there"}
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        return {"fault": getattr(error, "strerror", None) or (said or ["no answer"])[-1]}
    version, *path = printed
    folders = [Path(folder) for folder in path if Path(folder).is_dir()]
    versions = {"python": version}
    for site in reversed(folders):
        for entry in site.iterdir():
            match = re.fullmatch(r"(.+?)-([^-]+)(-.*)?\.(dist|egg)-info", entry.name)
            if match and match[1].lower().replace("_", "-") in packages:
                versions[match[1].lower().replace("_", "-")] = match[2]
    libraries = [library for folder in folders for library in sorted((folder / "horovod").glob("*/*.so"))]
    return {"versions": versions, "horovod": _digest(libraries)}


def _digest(files: list[Path]) -> str | None:
    """A digest of the files' contents and names; None where there are none."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(file.name.encode() + file.read_bytes())
        except OSError:
            return None
    return digest.hexdigest()[:16] if files else None


def _resolved(name: str) -> list[str]:
    """The addresses of a name, as this host knows them."""
    try:
        return list(dict.fromkeys(str(answer[4][0]) for answer in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)))
    except (OSError, UnicodeError):
        return []


def _free_memory() -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _free_bytes(folder: str) -> int | None:
    """The free space of the folder's disk; None where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _gpus() -> list[str]:
    """A line for each NVIDIA GPU that the driver knows: its name and the driver's version."""
    try:
        return _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError):
        return []


def _shared_memory(program: str) -> str | None:
    """What the program prints; None where it says nothing, as under Python 3.8."""
    try:
        return _lines(sys.executable, "-I", "-c", program)[-1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _lines(*command: str) -> list[str]:
    """What a program prints. Raises OSError and SubprocessError."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROGRAM_S, check=True
    ).stdout.splitlines()


def _listen(token: str) -> int:
    """Answer clients that have the token, on all addresses: others reach some of them. Returns the port."""
    listener = Listener("", token)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return listener.port


def _serve(listener: Listener) -> None:
    while True:
        for connection in listener.admit(0.5):
            threading.Thread(target=serve_link, args=(connection,), daemon=True).start()


def _way(address: str, port: int, token: str) -> dict[str, Any]:
    """Whether `address` is the neighbour's (it knows its `token`), from where, and how soon it answers."""
    way: dict[str, Any] = {"address": address}
    try:
        with connect(address, port, token, _ANSWER_S) as line:
            way["source"] = line.getsockname()[0]
        way["latency_us"] = round(1e6 * min(_connected_s(address, port) for _ in range(_CONNECTIONS)), 1)
    except PermissionError:
        way["fault"] = "another host has this address"
    except (OSError, EOFError) as error:
        way["fault"] = getattr(error, "strerror", None) or str(error) or "no answer"
    return way


def _connected_s(address: str, port: int) -> float:
    begin = time.perf_counter()
    socket.create_connection((address, port), _ANSWER_S).close()
    return time.perf_counter() - begin
