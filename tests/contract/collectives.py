"""What every adapter promises of its collectives: exact results, and faults that all ranks hear of."""

from __future__ import annotations

import time

import numpy as np

from hvdkit.core import metrics
from hvdkit.core.group import Topology
from hvdkit.core.seam import Adapter
from tests.contract.cases import Make, case, group_of, mesh_of, same


@case
def topology_is_consistent(adapter: Adapter, topology: Topology, make: Make) -> None:
    everyone = adapter.allgather_object((topology.rank, topology.size, topology.local_rank), group_of(topology))
    assert [rank for rank, _, _ in everyone] == list(range(topology.size)), everyone
    assert {size for _, size, _ in everyone} == {topology.size}
    assert topology.is_root == (topology.rank == 0)
    assert topology.local_size * topology.cross_size == topology.size


@case
def allreduce_reduces_by_each_op(adapter: Adapter, topology: Topology, make: Make) -> None:
    size, first = topology.size, 1.0 + 10 * mesh_of(topology).tensor.index  # another value in each group
    mine, mean = first + topology.rank, first + (size - 1) / 2
    expected = {"sum": size * mean, "average": mean, "min": first, "max": first + size - 1}
    for op, value in expected.items():
        for dtype in ("float32", "float64"):
            tensor = adapter.from_numpy(np.full((3, 2), mine, dtype))
            (reduced,) = adapter.allreduce([tensor], group_of(topology), op=op, name=f"case.{op}.{dtype}")
            assert same(adapter.to_numpy(reduced), np.full((3, 2), value, dtype)), (op, dtype)
            assert same(adapter.to_numpy(tensor), np.full((3, 2), mine, dtype)), "the input must stay as it was"


@case
def a_list_is_reduced_as_one_group(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    shapes = [(1,), (5, 2), (7,)]
    arrays = [np.full(shape, topology.rank * 10.0 + index, np.float32) for index, shape in enumerate(shapes)]
    reduced = adapter.allreduce([adapter.from_numpy(array) for array in arrays], group, op="sum", name="case.group")
    ranks = sum(range(topology.size)) * 10.0
    for index, (got, array) in enumerate(zip(reduced, arrays, strict=True)):
        assert same(adapter.to_numpy(got), np.full(array.shape, ranks + index * topology.size, np.float32)), index


@case
def odd_shapes_are_reduced_exactly(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    for shape in ((1,), (1, 1, 1, 1), (3, 5, 7), (2, 1, 1, 1, 1, 3), (9973,), (1021, 1031)):
        array = (np.arange(np.prod(shape)) % 1000 + topology.rank).reshape(shape).astype(np.float32)
        (got,) = adapter.allreduce([adapter.from_numpy(array)], group, op="sum", name=f"case.shape.{shape}")
        ranks = sum(range(topology.size))
        expected = (np.arange(np.prod(shape)) % 1000 * topology.size + ranks).reshape(shape).astype(np.float32)
        assert same(adapter.to_numpy(got), expected), shape


@case
def a_thousand_tensors_go_in_one_step(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    arrays = [np.full((index % 7 + 1,), index + topology.rank, np.float32) for index in range(1000)]
    for step in range(2):  # the second time Horovod answers from its cache
        got = adapter.allreduce([adapter.from_numpy(array) for array in arrays], group, op="sum", name="case.thousand")
        ranks = sum(range(topology.size))
        for index, (tensor, array) in enumerate(zip(got, arrays, strict=True)):
            expected = np.full(array.shape, index * topology.size + ranks, np.float32)
            assert same(adapter.to_numpy(tensor), expected), (step, index)


@case
def a_name_serves_again_and_again(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    for step in range(5):
        (got,) = adapter.allreduce([adapter.from_numpy(np.full(3, float(step)))], group, op="sum", name="case.again")
        assert same(adapter.to_numpy(got), np.full(3, float(step * topology.size)))


@case
def who_waits_for_another_rank_takes_no_core(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    adapter.allgather_object(None, group, name="case.waiting.begins")
    if topology.rank:
        time.sleep(1)
    began = time.thread_time()
    adapter.allgather_object(topology.rank, group, name="case.waiting")
    busy = adapter.allgather_object(
        time.thread_time() - began, group, name="case.waiting.ended"
    )  # before any rank may fail
    assert busy[0] < 0.3, f"rank 0 computed for {busy[0]:.2f} s while it waited for 1 s"


def disagreement(adapter: Adapter, topology: Topology, tensors: list[np.ndarray], name: str) -> str:
    """What is raised on every rank where each puts in its own of `tensors`; empty where nothing is raised."""
    group = group_of(topology)
    raised = ""
    try:
        for got in adapter.allreduce([adapter.from_numpy(tensors[topology.rank % 2])], group, op="sum", name=name):
            adapter.to_numpy(got)
    except Exception as error:
        raised = str(error)
    everyone = adapter.allgather_object(raised, group, name=f"{name}.raised")
    openings = {text.partition("[")[0] for text in everyone}  # behind it, some name the tensor by a number of their own
    assert topology.size == 1 or (len(openings) == 1 and "" not in everyone), everyone
    return raised


@case
def ranks_that_disagree_on_a_shape_all_hear_it(adapter: Adapter, topology: Topology, make: Make) -> None:
    text = disagreement(adapter, topology, [np.ones(2, np.float32), np.ones(3, np.float32)], "case.shapes")
    assert topology.size == 1 or ("ismatched" in text and "shape" in text and "[2]" in text and "[3]" in text), text


@case
def ranks_that_disagree_on_a_dtype_all_hear_it(adapter: Adapter, topology: Topology, make: Make) -> None:
    text = disagreement(adapter, topology, [np.ones(2, np.float32), np.ones(2, np.float64)], "case.dtypes")
    assert topology.size == 1 or ("ismatched" in text and "float32" in text and "float64" in text), text


@case
def a_rank_may_have_nothing_to_gather(adapter: Adapter, topology: Topology, make: Make) -> None:
    if topology.size == 1 or "empty" not in adapter.CAPABILITIES:
        return  # the capability's own probe covers this
    mine = np.full((2 * topology.rank, 3), 1.0, np.float32)
    got = adapter.to_numpy(adapter.allgather(adapter.from_numpy(mine), group_of(topology), name="case.nothing"))
    assert same(got, np.ones((sum(2 * rank for rank in range(topology.size)), 3), np.float32))


@case
def allgather_joins_unequal_parts_in_rank_order(adapter: Adapter, topology: Topology, make: Make) -> None:
    mine = np.full((topology.rank + 1, 2), topology.rank, np.float32)
    got = adapter.to_numpy(adapter.allgather(adapter.from_numpy(mine), group_of(topology), name="case.gather"))
    expected = np.concatenate([np.full((rank + 1, 2), rank, np.float32) for rank in range(topology.size)])
    assert same(got, expected), got


@case
def alltoall_gives_each_rank_its_share_of_all(adapter: Adapter, topology: Topology, make: Make) -> None:
    for dtype in ("float32", "uint8", "int64"):
        every = [np.arange(6 * topology.size).reshape(-1, 3).astype(dtype) + 50 * rank for rank in range(topology.size)]
        mine = adapter.from_numpy(every[topology.rank])
        got = adapter.to_numpy(adapter.alltoall(mine, group_of(topology), name=f"case.alltoall.{dtype}"))
        shares = [np.split(each, topology.size)[topology.rank] for each in every]
        assert same(got, np.concatenate(shares)), (dtype, got)


@case
def reducescatter_gives_each_rank_its_share_of_the_whole(adapter: Adapter, topology: Topology, make: Make) -> None:
    for op, scale in (("sum", topology.size), ("average", 1)):
        mine = np.arange(4 * topology.size, dtype=np.float32).reshape(-1, 2) + topology.rank
        name = f"case.reducescatter.{op}"
        got = adapter.to_numpy(adapter.reducescatter(adapter.from_numpy(mine), group_of(topology), op=op, name=name))
        mean = mine - topology.rank + (topology.size - 1) / 2
        assert same(got, np.split((mean * scale).astype(np.float32), topology.size)[topology.rank]), (op, got)


@case
def broadcast_gives_the_roots_tensor(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    root = topology.size - 1
    mine = np.arange(4, dtype=np.float32) + 100 * topology.rank
    got = adapter.to_numpy(adapter.broadcast(adapter.from_numpy(mine), group, group.ranks[root], name="case.broadcast"))
    assert same(got, np.arange(4, dtype=np.float32) + 100 * root)


@case
def any_object_can_be_gathered(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    got = adapter.allgather_object({"rank": topology.rank, "text": "x" * topology.rank}, group, name="case.objects")
    assert got == [{"rank": rank, "text": "x" * rank} for rank in range(topology.size)]


@case
def metric_averages_are_exact_over_unequal_shards(adapter: Adapter, topology: Topology, make: Make) -> None:
    count = 10**topology.rank
    sums = metrics.reduce_sums(adapter, group_of(topology), total=float(count * topology.rank), count=count)
    counts = [10**rank for rank in range(topology.size)]
    assert sums == {"total": sum(rank * count for rank, count in enumerate(counts)), "count": sum(counts)}
