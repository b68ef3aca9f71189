"""Horovod's collectives in shared memory, for which Horovod is patched (hvdkit/runtimes/patches)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import RunError
from hvdkit.launch.launchers import direct
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT, rest_thorough, run
from tests.launching import framework_job

pytestmark = pytest.mark.long

# Values are small integers, so that sums are exact in every type, whatever their order.
RANK = """
import numpy as np
import torch
import horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()

def drawn(length, of, kind):
    return torch.from_numpy(np.random.default_rng([length, of]).integers(-4, 5, length)).to(kind)

done = 0
# Nothing, what each rank adds up itself, a chunk and one more element, several chunks.
for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
    for length in (0, 1, 3, 1_000, 4_097, 131_073, 524_293):
        parts, name = [drawn(length, of, kind) for of in range(size)], f"{kind}.{length}"
        mine, total = parts[rank], sum(part.to(torch.int64) for part in parts).to(kind)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, name=name), total), name
        scaled = hvd.allreduce(mine, op=hvd.Sum, name=f"{name}.scaled", prescale_factor=2.0, postscale_factor=0.5)
        assert kind in (torch.int32, torch.int64) or torch.equal(scaled, total), name
        fused = hvd.grouped_allreduce([mine, mine[: length // 2].clone()], op=hvd.Sum, name=f"{name}.fused")
        assert torch.equal(fused[0], total) and torch.equal(fused[1], total[: length // 2]), name
        hvd.allreduce_(kept := mine.clone(), op=hvd.Sum, name=f"{name}.in place")
        assert torch.equal(kept, total), name
        for root in range(size):
            assert torch.equal(hvd.broadcast(mine, root, name=f"{name}.{root}"), parts[root]), name
        shares = [part[: length * (of + 1) // size] for of, part in enumerate(parts)]
        assert torch.equal(hvd.allgather(shares[rank], name=f"{name}.gathered"), torch.cat(shares)), name
        if length:
            share = torch.from_numpy(np.array_split(total.to(torch.int64).numpy(), size)[rank]).to(kind)
            scattered = hvd.reducescatter(mine.reshape(-1, 1), op=hvd.Sum, name=f"{name}.scattered")
            assert torch.equal(scattered.flatten(), share), name
            splits = [[length * (of + 1) * (to + 1) // size**3 for to in range(size)] for of in range(size)]
            sent = mine[: sum(splits[rank])]
            come, counts = hvd.alltoall(sent, torch.tensor(splits[rank], dtype=torch.int32), name=f"{name}.all")
            places = [sum(splits[of][:rank]) for of in range(size)]
            expected = [parts[of][at : at + splits[of][rank]] for of, at in enumerate(places)]
            assert torch.equal(come, torch.cat(expected)), name
            assert counts.tolist() == [splits[of][rank] for of in range(size)], name
        done += 1
for turn in range(10):
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="again").item() == size
print("right", done, hvd.mpi_ops._basics.shared_memory_ranks())
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("np", rest_thorough(3, 2))
def test_collectives_in_shared_memory(tmp_path: Path, np: int) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py", np=np)
    direct.run(job)
    for rank in range(np):
        assert job.log(rank).read_text().splitlines()[-1] == f"right 42 {np}"


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
def test_sockets_where_one_rank_asks_for_them(tmp_path: Path) -> None:
    alone = 'import os\nif os.environ["HOROVOD_RANK"] == "1":\n    os.environ["HOROVOD_SHARED_MEMORY"] = "0"\n'
    (tmp_path / "rank.py").write_text(alone + RANK)
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py")
    direct.run(job)
    for rank in range(2):
        assert job.log(rank).read_text().splitlines()[-1] == "right 42 0"


# Rank 1 ends, or stops, at some moment of a stream of collectives; rank 0 tells what it hears.
CUT_OFF = """
import os, pathlib, random, signal, sys, threading, time
import torch
import horovod.torch as hvd

# Both have imported: Gloo's short timeout is not for that.
here = pathlib.Path(__file__).parent
(here / f"ready-{os.environ['HOROVOD_RANK']}").touch()
while len([*here.glob("ready-*")]) < 2:
    time.sleep(0.01)
hvd.init()
assert hvd.mpi_ops._basics.shared_memory_ranks() == hvd.size()
drawn, lengths = random.Random(int(sys.argv[2])), random.Random(1)
if hvd.rank() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends a rank that has lost another one
else:
    threading.Timer(drawn.random(), os.kill, (os.getpid(), getattr(signal, sys.argv[1]))).start()
try:
    for turn in range(1_000_000):
        hvd.allreduce_(torch.ones(lengths.choice((1, 1_000, 300_000, 3_000_000))), name=f"turn.{turn % 50}")
except hvd.mpi_ops.HorovodInternalError as error:
    sys.exit(f"told: {error}")
"""


def cut_off(folder: Path, signal: str, seed: int) -> str:
    """What rank 0 has said when rank 1 got the signal."""
    folder.mkdir()
    (folder / "rank.py").write_text(CUT_OFF)
    patience = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    job = framework_job("pytorch", folder, folder / "rank.py", signal, seed, **patience)
    with pytest.raises(RunError):
        direct.run(replace(job, settle_s=1.0))
    return job.log(0).read_text()


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("signal", "times", "words"),
    [("SIGKILL", 1, "Connection closed by peer: rank 1"), ("SIGSTOP", 1, "Timed out waiting 5000ms for rank 1")],
)
def test_a_rank_that_ends_or_stops_is_told_to_the_other(tmp_path: Path, signal: str, times: int, words: str) -> None:
    before = {*Path("/dev/shm").iterdir()}
    for seed in range(times):
        said = cut_off(tmp_path / str(seed), signal, seed)
        assert "told: Horovod" in said and words in said, said
    assert {*Path("/dev/shm").iterdir()} <= before


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("phase", "gloo_s"), [("work", 30), ("start", 3)])
def test_100_kills(tmp_path: Path, phase: str, gloo_s: int) -> None:
    """While Horovod starts, a rank that waits for another one's address has but Gloo's timeout."""
    places = (Path("/dev/shm"), tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    before = [{*place.iterdir()} for place in places]
    command = [str(find("pytorch").python), str(ROOT / "tests" / "faults" / "kills.py"), "SIGKILL", phase, "100"]
    added = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_s), "TMPDIR": str(places[1]), "OMP_NUM_THREADS": "1"}
    done = run([*command, str(tmp_path / "turns")], 900, env={**os.environ, **added})
    assert done.returncode == 0, done.stderr
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(turns) == 100
    assert max(turn["s"] for turn in turns) < hygiene.patience(10)
    assert phase == "start" or all(turn["told"] for turn in turns)
    assert all({*place.iterdir()} <= there for place, there in zip(places, before, strict=True))
