"""`hvdkit bench`: what it times, that it finds every wrong element, and what it makes of a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import hvdkit
from hvdkit.commands import bench
from hvdkit.core.group import Topology
from hvdkit.errors import RequestError
from hvdkit.results.bench import COLLECTIVES, DTYPES, Bench, BenchRow, BenchSpec
from hvdkit.results.bus import bus_factor
from hvdkit.results.machine import this_machine
from hvdkit.simulator import cluster, piecewise_linear
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.worker import bench as bench_rank
from tests import local_adapter
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

LOCAL: Any = local_adapter.adapter


def request(collective: str, **changes: Any) -> BenchSpec:
    given = {"collective": collective, "dtype": "float32", "redop": "sum", "sizes_bytes": [48], "seconds": 0.001}
    return BenchSpec.model_validate(given | changes)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_alone_is_timed(collective: str) -> None:
    seen: list[BenchRow] = []
    rows = bench_rank.measure(LOCAL, Topology(), request(collective, sizes_bytes=[4, 400]), seen.append)
    assert rows == seen
    assert [(row.size_bytes, row.count, row.wrong) for row in rows] == [(4, 1, 0), (400, 100, 0)]
    for row in rows:
        assert 0 < row.p50_us <= row.p95_us <= row.p99_us
        assert row.algbw_mbit_per_s == pytest.approx(8 * row.size_bytes / row.time_us)
        assert row.repeats >= 3


class Faulty:
    """The null adapter, but what it reduces first has one wrong element."""

    def __init__(self) -> None:
        self.reduced = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(LOCAL, name)

    def allreduce(
        self, tensors: list[np.ndarray], group: Any, op: str = "average", name: str = "", **more: Any
    ) -> list[np.ndarray]:
        result = LOCAL.allreduce(tensors, group, op, name, **more)
        if len(result[0]) == 12:
            self.reduced += 1
            result[0][5] += self.reduced == 1
        return result


def test_a_wrong_element_is_counted() -> None:
    adapter: Any = Faulty()
    (row,) = bench_rank.measure(adapter, Topology(), request("allreduce"))
    assert row.wrong == 1
    assert adapter.reduced > 3


@pytest.mark.parametrize("redop", ["sum", "average", "min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "uint8"])
def test_what_is_expected_is_what_the_collective_is(dtype: str, redop: str) -> None:
    """By brute force over the inputs of three ranks."""
    size, count = 3, 36
    reduce = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max}[redop]

    def of(collective: str) -> list[tuple[np.ndarray, np.ndarray]]:
        asked = request(collective, dtype=dtype, redop=redop)
        return [bench_rank._arrays(asked, Topology(rank=rank, size=size), count) for rank in range(size)]

    inputs, expected = zip(*of("allreduce"), strict=True)
    whole = reduce(np.array(inputs, np.float64), axis=0)
    assert not np.array_equal(inputs[0], inputs[1])
    assert all(np.array_equal(each, whole) and each.dtype == dtype for each in expected)
    if redop in ("sum", "average"):
        _, parts = zip(*of("reducescatter"), strict=True)
        assert np.array_equal(np.concatenate(parts), whole)
    inputs, gathered = zip(*of("allgather"), strict=True)
    assert all(np.array_equal(each, np.concatenate(inputs)) for each in gathered)
    inputs, given = zip(*of("alltoall"), strict=True)
    for rank in range(size):
        assert np.array_equal(given[rank], np.concatenate([each.reshape(size, -1)[rank] for each in inputs]))
    inputs, given = zip(*of("broadcast"), strict=True)
    assert all(np.array_equal(each, inputs[0]) for each in given)


def test_sizes_rise_by_the_factor_in_whole_steps() -> None:
    assert bench.sizes(4, 64 * 2**20, 4, 4) == [4 ** (power + 1) for power in range(13)]
    assert bench.sizes(4, 100, 2, 16) == [16, 32, 64]
    assert bench.sizes(5, 5, 2, 16) == [16]
    assert bench.sizes(10, 20, 1.1, 4) == [8, 12, 16, 20]


def test_bus_factors_are_nccl_tests() -> None:
    assert [bus_factor(collective, 4) for collective in COLLECTIVES] == [1.5, 0.75, 1.0, 0.75, 0.75]


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        hvdkit.bench(
            "reduce", framework="mxnet", min_bytes=0, factor=1, dtype="float128", redop="prod", seconds=0,
            device="tpu", link_mbit_per_s=-1,
        )  # fmt: skip
    assert str(caught.value).splitlines() == [
        "reduce: expected allreduce, allgather, broadcast, alltoall or reducescatter",
        "--min-bytes 0: expected at least 1, at most 2,147,483,647",
        "--factor 1: expected at least 1.1, at most 1,024",
        "--dtype float128: expected float16, float32, float64, int32, int64, uint8 or int8",
        "--redop prod: expected sum, average, min or max",
        "--seconds 0: expected more than 0, at most 3,600",
        "--on tpu: expected auto, cpu or gpu",
        "--link-mbit-per-s -1: expected more than 0",
    ]
    with pytest.raises(RequestError) as caught:
        hvdkit.bench(
            "allreduce", framework="mxnet", np=0, launcher="ssh", stall_timeout=-1, min_bytes=8, max_bytes=4,
            add_to="no.yaml",
        )  # fmt: skip
    for said in (
        "-np 0: ",
        "--launcher ssh: ",
        "--stall-timeout -1.0: ",
        "--min-bytes 8: expected at most --max-bytes 4",
        "--add-to: no.yaml: no such file",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"collective": "reducescatter", "redop": "max"}, "--redop max: expected one of sum, average$"),
        ({"framework": "pytorch", "dtype": "int8"}, "--dtype int8: pytorch does not reduce it"),
        ({"framework": "caffe"}, "unknown framework 'caffe'"),
        ({"max_bytes": 2**40}, "--max-bytes 1099511627776: expected at least 1, at most 2,147,483,647"),
        ({"hosts": "a"}, "expected host:slots"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"collective": "allreduce", "framework": "mxnet", "max_bytes": 64}
    with pytest.raises(RequestError, match=said):
        hvdkit.bench(**given | changes)


def measured(collective: str, np_: int, latency_us: float, us_per_byte: float, algorithm: str = "ring") -> Bench:
    """A bench of a network that is a straight line over the bytes that a rank puts in."""
    share = np_ if collective == "allgather" else 1
    rows = []
    for size in (2**power * share for power in range(2, 26)):
        times = dict.fromkeys(("time_us", "p50_us", "p95_us", "p99_us"), latency_us + us_per_byte * size / share)
        rates = {"algbw_mbit_per_s": 1, "busbw_mbit_per_s": 1}
        kind = {"size_bytes": size, "count": size // 4, "dtype": "float32", "redop": "sum", "repeats": 3, "wrong": 0}
        rows.append(BenchRow.model_validate({**kind, **times, **rates}))
    return Bench.model_validate(
        {
            "collective": collective, "framework": "mxnet", "framework_version": "1", "horovod_version": None,
            "hvdkit_version": "0", "np": np_, "hosts": ["a"] * (np_ // 2) + ["b"] * (np_ // 2), "device": "cpu",
            "algorithm": algorithm, "link_mbit_per_s": None, "settings": {}, "rows": rows, "machine": this_machine(),
        }
    )  # fmt: skip


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_cluster_file_gives_the_measured_times_again(collective: str, tmp_path: Path) -> None:
    found = measured(collective, 4, 900.0, 0.12)
    cluster.save(bench.network(found), tmp_path / "cluster.yaml")
    read = cluster.load(tmp_path / "cluster.yaml")
    (line,) = read.measured
    assert (line.operation, line.ranks, line.ranks_per_host) == (collective, 4, 2)
    assert line.residual_percent < 0.1
    for size in (4, 40_000, 2**25):
        assert 1e6 * piecewise_linear.of_pieces(line.pieces)(size) == pytest.approx(900 + 0.12 * size, rel=1e-3)


def test_the_cluster_file_has_the_measured_rate_of_copies() -> None:
    found = measured("allreduce", 4, 900.0, 0.12)
    assert bench.network(found).device.memory_bytes_per_s == 1e10
    copied = found.model_copy(update={"memory_bytes_per_s": 1.9e10})
    assert bench.network(copied).device.memory_bytes_per_s == 1.9e10


@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling", "memory"])
def test_the_simulator_makes_of_it_what_was_measured(algorithm: str) -> None:
    """By the link alone too, without the measured line, which other numbers of ranks need."""
    found = measured("allreduce", 4, 900.0, 0.12, algorithm)
    if algorithm == "memory":
        found = found.model_copy(update={"hosts": ["a"] * 4})
    made = bench.network(found)
    assert made.levels[0].kind == ("memory" if algorithm == "memory" else "link")
    alone = made.model_copy(update={"measured": []})
    for network in (made, alone):
        cost = ClusterLinks(network, 4).cost("allreduce")
        for size in (4, 10_000_000):
            assert 1e6 * cost.line(size) == pytest.approx(900 + 0.12 * size, rel=1e-3)


def test_memory_within_hosts_and_links_between_them_come_together() -> None:
    """Of two benches, in either order: of one host's ranks, and of a rank on each host."""
    memory = measured("allreduce", 2, 20.0, 0.001, "memory").model_copy(update={"hosts": ["a", "a"]})
    links = measured("allreduce", 2, 200.0, 0.08)
    for first, second in ((memory, links), (links, memory)):
        row = bench.measured(second)
        both = bench.with_level(bench.network(first), row)
        assert [(level.name, level.ranks) for level in both.levels] == [("memory", 2), ("link", None)]
        both = both.model_copy(update={"measured": [*both.measured, row]})
        for size in (4.0, 1e7):
            within = 1e6 * ClusterLinks(both, 2).cost("allreduce").line(size)
            assert within == pytest.approx(20 + 0.001 * size, rel=1e-3)
            between = 1e6 * ClusterLinks(both, 4).cost("allreduce").line(size)
            assert between == pytest.approx(20 + 0.001 * size + 200 + 0.08 * size, rel=1e-3)
    several = bench.network(measured("allreduce", 4, 900.0, 0.12, "memory"))
    assert [level.kind for level in several.levels] == ["memory", "link"]
    assert 1e6 * ClusterLinks(several, 4).cost("allreduce").line(1e7) == pytest.approx(900 + 1.2e6, rel=1e-3)


@pytest.mark.ranks
def test_the_command_writes_what_it_says(hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Real ranks; a second collective is added to the first one's cluster file."""
    options = ["--framework", "mxnet", "-np", 2, "--max-bytes", 65536, "--factor", 16, "--seconds", 0.05]
    first = hvdkit("bench", "allreduce", *options, "--link-mbit-per-s", 1000, "--out", "one")
    assert first.returncode == 0, first.stderr
    assert first.stderr.count(" of the link") == 4
    told = Bench.model_validate_json((tmp_path / "one" / "bench.json").read_bytes())
    assert [row.size_bytes for row in told.rows] == [4, 64, 1024, 16384]
    assert not any(row.wrong for row in told.rows)
    assert (told.shared_memory_ranks, told.algorithm) == (2, "memory")
    assert told.settings["HOROVOD_IDLE_CYCLE_TIME"] == "100"
    assert all(row.of_link == pytest.approx(row.busbw_mbit_per_s / 1000) for row in told.rows)
    written = {path.name for path in (tmp_path / "one").iterdir()}
    assert written == {"bench.csv", "bench.json", "bench.png", "cluster.yaml", "logs"}
    assert (tmp_path / "one" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert told.memory_bytes_per_s == cluster.load(tmp_path / "one" / "cluster.yaml").device.memory_bytes_per_s
    assert 1e8 < told.memory_bytes_per_s < 1e12
    more = ["--framework", "pytorch", "--add-to", "one/cluster.yaml", "--dtype", "int32", "--out", "two"]
    second = hvdkit("bench", "alltoall", *options, *more)
    assert second.returncode == 0, second.stderr
    both = cluster.load(tmp_path / "two" / "cluster.yaml")
    assert [each.operation for each in both.measured] == ["allreduce", "alltoall"]
    assert [(level.name, level.kind) for level in both.levels] == [("memory", "memory")]
    assert json.loads((tmp_path / "two" / "bench.json").read_text())["rows"][0]["size_bytes"] == 8


def test_dtypes_and_collectives_are_known() -> None:
    assert all(np.dtype(name).itemsize == size for name, size in DTYPES.items())
    assert get_args(cluster.Operation) == COLLECTIVES
