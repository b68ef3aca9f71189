"""What Horovod's collectives give in shared memory and over sockets, bit by bit: types, reductions, process sets,
joined ranks (hvdkit/runtimes/patches)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.launching import framework_job

# Each rank knows what all have. It prints a digest of what came, and whether a TCP connection sent anything meanwhile.
RANK = """
import hashlib, os, socket, struct
import numpy as np
import torch
import horovod.torch as hvd

pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3]), hvd.ProcessSet([3, 1, 0])]
hvd.init(process_sets=pairs if os.environ["HOROVOD_SIZE"] == "4" else [])
rank, size = hvd.rank(), hvd.size()
digest = hashlib.sha256()
DATA_SEGMENTS_OUT = 156  # the field's offset in the kernel's struct tcp_info

def segments():
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("I", information, DATA_SEGMENTS_OUT)[0]
        except OSError:  # gone, or not TCP
            continue
    return total

def drawn(length, of, kind, seed=0):
    return torch.from_numpy(np.random.default_rng([length, of, seed]).integers(0, 3, length)).to(kind)

def same(got, expected, name):
    assert got.dtype == expected.dtype and torch.equal(got, expected), (name, got, expected)
    digest.update(got.contiguous().view(torch.uint8).numpy().tobytes())

KINDS = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
FOLDS = {hvd.Sum: torch.sum, hvd.Min: torch.amin, hvd.Max: torch.amax, hvd.Product: torch.prod}
hvd.barrier()
before = segments()
for kind in KINDS:
    element = torch.ones(1, dtype=kind).element_size()
    # 4 KiB, and the bounds at which another way of adding begins, and at which a second chunk does
    for length in (1, 4_096 // element, *(edge // element + by for edge in (16_384, 524_288) for by in (-1, 0, 1))):
        parts = torch.stack([drawn(length, of, kind) for of in range(size)])
        name = f"{kind}.{length}"
        for op, fold in FOLDS.items():
            expected = fold(parts.double(), 0).to(kind)
            same(hvd.allreduce(parts[rank], op=op, name=f"{name}.{op}"), expected, name)
        if kind in (torch.int32, torch.float16):
            both, total = [parts[rank], parts[rank][: length // 2].clone()], parts.double().sum(0).to(kind)
            fused = hvd.grouped_allreduce(both, op=hvd.Sum, name=f"{name}.fused")
            same(fused[0], total, name)
            same(fused[1], total[: length // 2], name)
            hvd.allreduce_(kept := both[0].clone(), op=hvd.Sum, name=f"{name}.in place")
            same(kept, total, name)
        if kind.is_floating_point:
            scaled = hvd.allreduce(parts[rank], op=hvd.Average, name=name + ".mean", prescale_factor=2.0 * size)
            same(scaled, 2 * parts.double().sum(0).to(kind), name + ".mean")
for kind in (torch.uint8, torch.int8):  # which Horovod does not add for PyTorch
    parts = [drawn(1_001, of, kind) for of in range(size)]
    same(hvd.allgather(parts[rank], name=f"{kind}.all"), torch.cat(parts), kind)
    same(hvd.broadcast(parts[rank], size - 1, name=f"{kind}.one"), parts[-1], kind)
# Some ranks have no rows, some send nothing.
rows = [drawn(6 * of, of, torch.float32).reshape(-1, 2) for of in range(size)]
same(hvd.allgather(rows[rank], name="rows"), torch.cat(rows), "rows")
both = hvd.grouped_allgather([rows[rank], rows[rank] + 1], name="both")
same(both[1], torch.cat(rows) + 1, "both")
splits = torch.zeros(size, dtype=torch.int32)
splits[0] = 300_000 * rank
come, counts = hvd.alltoall(drawn(300_000 * rank, rank, torch.float32), splits, name="to the first")
sent = torch.cat([drawn(300_000 * of, of, torch.float32) for of in range(size)])
same(come, sent if rank == 0 else sent[:0], "to the first")
# Fewer rows than ranks, uneven shares, shares of several segments of 1 MiB.
for kind in (torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64):
    for count in (1, 2, 5, 7, 1_000, *([400_001] if kind == torch.float32 else [])):
        parts = [drawn(2 * count, of, kind).reshape(-1, 2) for of in range(size)]
        name, kept = f"shares.{kind}.{count}", parts[rank].clone()
        share = torch.from_numpy(np.array_split(sum(part.double() for part in parts).numpy(), size)[rank]).to(kind)
        both = hvd.grouped_reducescatter([parts[rank], parts[rank].flip(1)], op=hvd.Sum, name=name)
        same(both[0], share, name)
        same(both[1], share.flip(1), name)
        if os.environ.get("HOROVOD_FUSION_THRESHOLD") != "0":  # it scales in the buffer for fusion
            scaled = hvd.reducescatter(parts[rank], op=hvd.Sum, name=f"{name}.scaled", prescale_factor=2.0)
            assert torch.equal(scaled, 2 * share), name
        assert torch.equal(parts[rank], kept), f"{name}: the input has changed"
# Additions are in the order of an allreduce, whose chunks are the same where they divide the tensor.
mine = torch.from_numpy(np.random.default_rng(rank).standard_normal(size * 2_000)).float()
total = hvd.allreduce(mine, op=hvd.Sum, name="whole")
same(hvd.reducescatter(mine, op=hvd.Sum, name="part"), total.chunk(size)[rank], "part")
# Sums that round: the bits tell the order of additions.
for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    value = torch.from_numpy(np.random.default_rng(rank).standard_normal(600_007)).to(kind)
    for cut in (7, 5_000, 600_007):
        for op in (hvd.Sum, hvd.Average):
            total = hvd.allreduce(value[:cut], op=op, name=f"rounded.{kind}.{cut}.{op}", prescale_factor=0.3)
            digest.update(total.view(torch.uint8).numpy().tobytes())
for chosen in pairs if size == 4 else []:
    if chosen.included():
        ranks = sorted(chosen.ranks)
        for turn in range(20):
            parts = {of: drawn(70_001, of, torch.float32, turn) for of in ranks}
            total = hvd.allreduce(parts[rank], op=hvd.Sum, name=f"set.{turn}", process_set=chosen)
            same(total, sum(parts.values()), "set")
            root = ranks[turn % len(ranks)]
            same(hvd.broadcast(parts[rank], root, name=f"from.{turn}", process_set=chosen), parts[root], "from")
            hvd.barrier(process_set=chosen)
# The first rank has less to do than the others.
for turn in range(3 * rank):
    there = sum(3 * of > turn for of in range(size))
    assert (hvd.allreduce(torch.ones(200_000), op=hvd.Sum, name=f"late.{turn}") == there).all(), turn
assert hvd.join() >= 0
told = hvd.mpi_ops._basics.shared_memory_ranks(), segments() - before, digest.hexdigest()
for turn in range(10 if size == 3 else 0):
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="again").item() == size
print("digest", *told)
"""

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("warm"), pytest.mark.timeout(300)]


def digests(folder: Path, np: int, before: str = "", **environment: str) -> list[str]:
    """What the ranks print of what they got; they do something `before`."""
    folder.mkdir()
    (folder / "rank.py").write_text(before + RANK)
    job = framework_job("pytorch", folder, folder / "rank.py", np=np, **environment)
    direct.run(job)
    found = []
    for rank in range(np):
        word, sharing, segments, digest = job.log(rank).read_text().splitlines()[-1].split()
        wanted = not before and environment.get("HOROVOD_SHARED_MEMORY") != "0"
        assert (word, int(sharing)) == ("digest", np if wanted else 0)
        assert (int(segments) == 0) == wanted, "the count of TCP segments"
        found.append(digest)
    return found


def test_two_ranks_have_the_bits_that_sockets_give(tmp_path: Path) -> None:
    assert digests(tmp_path / "a", 2) == digests(tmp_path / "b", 2, HOROVOD_SHARED_MEMORY="0")


def test_ranks_use_sockets_where_one_asks_for_them(tmp_path: Path) -> None:
    """Three ranks: the ring of a reduce-scatter, which two do not show."""
    alone = 'import os\nif os.environ["HOROVOD_RANK"] == "1":\n    os.environ["HOROVOD_SHARED_MEMORY"] = "0"\n'
    digests(tmp_path / "a", 3, alone)


def test_three_ranks_have_the_same_bits_in_each_run(tmp_path: Path) -> None:
    assert digests(tmp_path / "a", 3) == digests(tmp_path / "b", 3, HOROVOD_FUSION_THRESHOLD="0")


def test_process_sets_of_four_ranks(tmp_path: Path) -> None:
    digests(tmp_path / "a", 4)
