"""Where Horovod's ranks share memory, and where they cannot: containers, users, limits, refused calls, neighbours."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from errno import EACCES, ENOLCK, ENOMEM, ENOSPC, EPERM
from pathlib import Path

import pytest

from hvdkit.errors import RunError
from hvdkit.launch.launchers import direct
from tests.launching import framework_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("warm"), pytest.mark.timeout(120)]

# What a rank can do to itself before Horovod starts, and what it then tries.
RANK = """
import ctypes, os, pathlib, resource, struct, sys, time
import torch
import horovod.torch as hvd

rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
root, libc = os.geteuid() == 0, ctypes.CDLL(None, use_errno=True)

def done(result):
    assert result == 0, os.strerror(ctypes.get_errno())

def unshared(*kinds):
    flags = {"mount": 0x20000, "user": 0x10000000, "pid": 0x20000000, "ipc": 0x08000000}
    user, group = os.getuid(), os.getgid()
    done(libc.unshare(sum(flags[kind] for kind in (*kinds, "user")[: len(kinds) + (not root)])))
    if not root:
        for name, text in {"setgroups": "deny", "gid_map": f"0 {group} 1", "uid_map": f"0 {user} 1"}.items():
            pathlib.Path("/proc/self", name).write_text(text)

def mounted(folder, options):
    pathlib.Path(folder).mkdir(exist_ok=True)
    done(libc.mount(b"none", folder.encode(), b"tmpfs", 0, options.encode()))

def refused(call, action, argument=None, value=None):
    "The kernel's answer to a system call, if its 32 low bits of an argument have a value."
    load, equal, end = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (equal, 0, 1 if argument is None else 3, call)]
    if argument is not None:
        steps += [(load, 0, 0, 16 + 8 * argument), (equal, 0, 1, value)]
    steps += [(end, 0, 0, action), (end, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    done(libc.prctl(38, 1, 0, 0, 0))  # no new privileges
    done(libc.prctl(22, 2, struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))))

def work(add=0):
    for turn in range(3):
        for length in (1, 300_000):
            each = torch.arange(length, dtype=torch.float64) + add
            total = hvd.allreduce(each + rank, op=hvd.Sum, name=f"{length}.{turn}")
            assert torch.equal(total, size * each + size * (size - 1) / 2), length

def tried(what):
    hvd.init()
    print(f"{what}: shared by {hvd.mpi_ops._basics.shared_memory_ranks()}", flush=True)
    work()
    hvd.shutdown()

"""


def said(folder: Path, script: str) -> list[str]:
    """What each of two ranks has printed, after what failed, if anything did."""
    folder.mkdir(exist_ok=True)
    (folder / "rank.py").write_text(RANK + script)
    job, failed = framework_job("pytorch", folder, folder / "rank.py"), ""
    try:
        direct.run(job)
    except RunError as error:
        failed = f"{error}\n"
    return [failed + job.log(rank).read_text() for rank in range(2)]


PLACES = """
unshared("pid", "ipc", "mount")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert os.getpid() == 1
tried("in a PID namespace of each rank")
done(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))  # all private
mounted("/dev/shm", "size=64m")
tried("64 MB of /dev/shm")
mounted("/dev/shm", "size=4k")
open("/dev/shm/full", "wb", 0).write(b"0" * 4096)
tried("a full /dev/shm")
mounted("/dev", "size=64k")
assert not os.path.exists("/dev/shm")
tried("no /dev/shm")
mounted("/dev/shm", "mode=0700,uid=12345" if root else "mode=0")
if root:
    os.setuid(54321 + rank)
tried("another user's /dev/shm, and a user for each rank")
"""


def test_memory_is_shared_whatever_dev_shm_is_and_whoever_a_rank_is(tmp_path: Path) -> None:
    for log in said(tmp_path, PLACES):
        assert log.count("shared by 2\n") == 5 and "sockets" not in log, log


CALLS = {
    "x86_64": {"memfd_create": 319, "fallocate": 285, "mmap": 9, "fcntl": 72, "socket": 41, "connect": 42},
    "aarch64": {"memfd_create": 279, "fallocate": 47, "mmap": 222, "fcntl": 25, "socket": 198, "connect": 203},
}[platform.machine()]
# The system calls by which a rank gets the memory: its number, and what tells it from others.
TO_MAP, TO_LOCK, TO_ASK, UNIX = ("mmap", 3, 0x8001), ("fcntl", 1, 6), ("connect", 2, 35), ("socket", 0, 1)
KILLED = 0x80000000


def filter_of(rank: int, answer: int, call: str, *which: int) -> str:
    """Code by which the kernel gives a rank that answer to a system call: an error's number, or the process's end."""
    action = answer if answer == KILLED else 0x50000 | answer
    return f"if rank == {rank}: refused({CALLS[call]}, {action}, *{which})"


ROOM = "0 cannot share memory: memory of 6307840 bytes"
# A refusal stays, so those come first that a rank meets last.
REFUSED = {
    filter_of(1, ENOLCK, *TO_LOCK): "1 cannot share memory: a lock on the memory: No locks available",
    filter_of(1, ENOMEM, *TO_MAP): "1 cannot share memory: mmap: Cannot allocate memory",
    filter_of(1, EPERM, *TO_ASK): "1 cannot share memory: asking for the memory's descriptor: Operation not permitted",
    filter_of(0, ENOSPC, "fallocate"): f"{ROOM}: No space left on device",
    "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))": f"{ROOM}: File too large",
    filter_of(0, EPERM, "memfd_create"): "0 cannot share memory: memfd_create: Operation not permitted",
    filter_of(0, EACCES, *UNIX): "0 cannot share memory: a Unix socket for the memory's descriptor: Permission denied",
    filter_of(1, EACCES, *UNIX): "1 cannot share memory: a Unix socket for the memory's descriptor: Permission denied",
}


def test_sockets_and_one_line_where_memory_is_refused(tmp_path: Path) -> None:
    """As by a container's seccomp profile, or by limits."""
    logs = said(tmp_path, "\n".join(f"{code}\ntried({number})" for number, code in enumerate(REFUSED)))
    for log in logs:
        assert log.count("shared by 0\n") == len(REFUSED), logs
    lines = [line for log in logs for line in log.splitlines() if "sockets" in line]
    for line, fault in zip(lines, REFUSED.values(), strict=True):
        assert line.endswith(f"Ranks of one host talk through sockets, as rank {fault}")


@pytest.mark.parametrize(("rank", "call"), [(0, ("fallocate",)), (1, TO_MAP)])
def test_a_rank_that_is_killed_while_it_gets_the_memory(tmp_path: Path, rank: int, call: tuple[str, int]) -> None:
    """As one that has touched more memory than its container may have."""
    for log in said(tmp_path, f"{filter_of(rank, KILLED, *call)}\ntried(0)"):
        assert log.startswith(f"rank {rank} on localhost was killed by SIGSYS"), log


AGAIN = """
def descriptors():
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return len(links), sum("memfd:horovod" in link for link in links)

kept = set()
for turn in range(21):
    hvd.init()
    assert hvd.mpi_ops._basics.shared_memory_ranks() == size and descriptors()[1] == 1, descriptors()
    work()  # whoever is done shuts Horovod down for all
    hvd.shutdown()
    kept.add(descriptors())
assert len(kept) == 1 and not kept.pop()[1], kept
assert "memfd:horovod" not in pathlib.Path("/proc/self/maps").read_text()
print("nothing kept")
"""


def test_descriptors_and_memory_are_given_back_at_20_new_starts(tmp_path: Path) -> None:
    for log in said(tmp_path, AGAIN):
        assert log.splitlines()[-1] == "nothing kept", log


BESIDE = """
here = pathlib.Path(__file__).parent
(here.parent / f"begun-{here.name}").touch()
while len([*here.parent.glob("begun-*")]) < 2:
    time.sleep(0.01)
tried("both")
hvd.init()
for turn in range(50):
    work(int(here.name))
print("right")
"""


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        runs = [*pool.map(lambda add: said(tmp_path / add, BESIDE), ("1000", "2000"))]
    for log in (log for logs in runs for log in logs):
        assert "both: shared by 2\n" in log and log.splitlines()[-1] == "right", log
