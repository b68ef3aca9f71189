"""What every adapter promises. Each case runs on all ranks at once, under every framework; `local` runs them alone.

A case gets the adapter, the rank's topology and a `make` that binds a fresh network to its optimizer: ResNet-8, or with
`tiny` two dense layers. Importing this file loads no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdkit.config import Sgd
from hvdkit.core import compression, metrics
from hvdkit.core.adapter import CAPABILITIES, Adapter
from hvdkit.core.data import Batch
from hvdkit.core.topology import Topology
from hvdkit.errors import RequestError

SHAPE = (16, 16, 3)
CLASSES = 10
FEATURES = 12  # of the tiny network
# What one collective can show; the others have cases of their own in grown.py, but for those of a GPU, and those that
# `hvdkit profile` asks for, which tests/test_profile_runs.py tries.
_TRAINS = {"gpu", "fp64", "bf16", "fp16", "gpu-bf16", "gpu-fp16", "recompute", "exact-sums"}
PROBED = sorted(set(CAPABILITIES) - _TRAINS - {"layer-times", "own-profile"})
Make = Callable[..., Any]
Case = Callable[[Adapter, Topology, Make], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def probe(capability: str, adapter: Adapter, topology: Topology) -> str:
    """Try a capability; returns what is wrong, empty where it works. `gpu` is not to be tried everywhere."""
    try:
        if capability in ("scalars", "empty"):
            array = np.float32(1.5) if capability == "scalars" else np.empty((0, 3), np.float32)
            array = np.asarray(array)
            (got,) = adapter.allreduce([adapter.from_numpy(array)], op="sum", name=f"probe.{capability}")
            good = same(adapter.to_numpy(got), (array * topology.size).astype(np.float32))
        else:
            tensor = adapter.cast(adapter.from_numpy(np.array([1, 2, 3], np.float32)), capability)
            (got,) = adapter.allreduce([tensor], op="sum", name=f"probe.{capability}")
            total = adapter.to_numpy(adapter.cast(got, "float32"))
            good = adapter.dtype(got) == capability and same(total, np.array([1, 2, 3], np.float32) * topology.size)
        return "" if good else f"a wrong result: {got}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def batch(seed: int, count: int = 8) -> Batch:
    random = np.random.default_rng(seed)
    images = random.standard_normal((count, *SHAPE)).astype(np.float32)
    return Batch(images, random.integers(0, CLASSES, count))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / max(1e-30, np.linalg.norm(expected)))


def velocities(adapter: Adapter, session: Any) -> dict[str, np.ndarray]:
    return {name: value for name, value in adapter.state(session).items() if name.startswith("optimizer.momentum.")}


@case
def topology_is_consistent(adapter: Adapter, topology: Topology, make: Make) -> None:
    everyone = adapter.allgather_object((topology.rank, topology.size, topology.local_rank))
    assert [rank for rank, _, _ in everyone] == list(range(topology.size)), everyone
    assert {size for _, size, _ in everyone} == {topology.size}
    assert topology.is_root == (topology.rank == 0)
    assert topology.local_size * topology.cross_size == topology.size


@case
def arrays_survive_the_way_in_and_out(adapter: Adapter, topology: Topology, make: Make) -> None:
    for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8"):
        array = np.arange(24).reshape(2, 3, 4).astype(dtype)
        tensor = adapter.from_numpy(array)
        assert adapter.dtype(tensor) == dtype
        back = adapter.to_numpy(tensor)
        assert same(back, array), dtype
        back += 1
        assert same(adapter.to_numpy(tensor), array), "to_numpy must copy"


@case
def cast_rounds_as_numpy_does(adapter: Adapter, topology: Topology, make: Make) -> None:
    array = np.array([1 / 3, 1000.1, -7.0], np.float32)
    half = adapter.cast(adapter.from_numpy(array), "float16")
    assert adapter.dtype(half) == "float16"
    assert same(adapter.to_numpy(half), array.astype(np.float16))
    assert same(adapter.to_numpy(adapter.cast(half, "float64")), array.astype(np.float16).astype(np.float64))


@case
def allreduce_reduces_by_each_op(adapter: Adapter, topology: Topology, make: Make) -> None:
    size, mine = topology.size, float(topology.rank + 1)
    expected = {"sum": size * (size + 1) / 2, "average": (size + 1) / 2, "min": 1.0, "max": float(size)}
    for op, value in expected.items():
        for dtype in ("float32", "float64"):
            tensor = adapter.from_numpy(np.full((3, 2), mine, dtype))
            (reduced,) = adapter.allreduce([tensor], op=op, name=f"case.{op}.{dtype}")  # type: ignore[arg-type]
            assert same(adapter.to_numpy(reduced), np.full((3, 2), value, dtype)), (op, dtype)
            assert same(adapter.to_numpy(tensor), np.full((3, 2), mine, dtype)), "the input must stay as it was"


@case
def a_list_is_reduced_as_one_group(adapter: Adapter, topology: Topology, make: Make) -> None:
    shapes = [(1,), (5, 2), (7,)]
    arrays = [np.full(shape, topology.rank * 10.0 + index, np.float32) for index, shape in enumerate(shapes)]
    reduced = adapter.allreduce([adapter.from_numpy(array) for array in arrays], op="sum", name="case.group")
    ranks = sum(range(topology.size)) * 10.0
    for index, (got, array) in enumerate(zip(reduced, arrays, strict=True)):
        assert same(adapter.to_numpy(got), np.full(array.shape, ranks + index * topology.size, np.float32)), index


@case
def odd_shapes_are_reduced_exactly(adapter: Adapter, topology: Topology, make: Make) -> None:
    for shape in ((1,), (1, 1, 1, 1), (3, 5, 7), (2, 1, 1, 1, 1, 3), (9973,), (1021, 1031)):
        array = (np.arange(np.prod(shape)) % 1000 + topology.rank).reshape(shape).astype(np.float32)
        (got,) = adapter.allreduce([adapter.from_numpy(array)], op="sum", name=f"case.shape.{shape}")
        ranks = sum(range(topology.size))
        expected = (np.arange(np.prod(shape)) % 1000 * topology.size + ranks).reshape(shape).astype(np.float32)
        assert same(adapter.to_numpy(got), expected), shape


@case
def a_thousand_tensors_go_in_one_step(adapter: Adapter, topology: Topology, make: Make) -> None:
    arrays = [np.full((index % 7 + 1,), index + topology.rank, np.float32) for index in range(1000)]
    for step in range(2):  # the second time Horovod answers from its cache
        got = adapter.allreduce([adapter.from_numpy(array) for array in arrays], op="sum", name="case.thousand")
        ranks = sum(range(topology.size))
        for index, (tensor, array) in enumerate(zip(got, arrays, strict=True)):
            expected = np.full(array.shape, index * topology.size + ranks, np.float32)
            assert same(adapter.to_numpy(tensor), expected), (step, index)


@case
def a_name_serves_again_and_again(adapter: Adapter, topology: Topology, make: Make) -> None:
    for step in range(5):
        (got,) = adapter.allreduce([adapter.from_numpy(np.full(3, float(step)))], op="sum", name="case.again")
        assert same(adapter.to_numpy(got), np.full(3, float(step * topology.size)))


def disagreement(adapter: Adapter, topology: Topology, tensors: list[np.ndarray], name: str) -> str:
    """What is raised on every rank where each puts in its own of `tensors`; empty where nothing is raised."""
    raised = ""
    try:
        for got in adapter.allreduce([adapter.from_numpy(tensors[topology.rank % 2])], op="sum", name=name):
            adapter.to_numpy(got)
    except Exception as error:
        raised = str(error)
    everyone = adapter.allgather_object(raised, name=f"{name}.raised")
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
    got = adapter.to_numpy(adapter.allgather(adapter.from_numpy(mine), name="case.nothing"))
    assert same(got, np.ones((sum(2 * rank for rank in range(topology.size)), 3), np.float32))


@case
def allgather_joins_unequal_parts_in_rank_order(adapter: Adapter, topology: Topology, make: Make) -> None:
    mine = np.full((topology.rank + 1, 2), topology.rank, np.float32)
    got = adapter.to_numpy(adapter.allgather(adapter.from_numpy(mine), name="case.gather"))
    expected = np.concatenate([np.full((rank + 1, 2), rank, np.float32) for rank in range(topology.size)])
    assert same(got, expected), got


@case
def alltoall_gives_each_rank_its_share_of_all(adapter: Adapter, topology: Topology, make: Make) -> None:
    for dtype in ("float32", "uint8", "int64"):
        every = [np.arange(6 * topology.size).reshape(-1, 3).astype(dtype) + 50 * rank for rank in range(topology.size)]
        mine = adapter.from_numpy(every[topology.rank])
        got = adapter.to_numpy(adapter.alltoall(mine, name=f"case.alltoall.{dtype}"))
        shares = [np.split(each, topology.size)[topology.rank] for each in every]
        assert same(got, np.concatenate(shares)), (dtype, got)


@case
def reducescatter_gives_each_rank_its_share_of_the_whole(adapter: Adapter, topology: Topology, make: Make) -> None:
    for op, scale in (("sum", topology.size), ("average", 1)):
        mine = np.arange(4 * topology.size, dtype=np.float32).reshape(-1, 2) + topology.rank
        name = f"case.reducescatter.{op}"
        got = adapter.to_numpy(adapter.reducescatter(adapter.from_numpy(mine), op=op, name=name))  # type: ignore[arg-type]
        mean = mine - topology.rank + (topology.size - 1) / 2
        assert same(got, np.split((mean * scale).astype(np.float32), topology.size)[topology.rank]), (op, got)


@case
def broadcast_gives_the_roots_tensor(adapter: Adapter, topology: Topology, make: Make) -> None:
    root = topology.size - 1
    mine = np.arange(4, dtype=np.float32) + 100 * topology.rank
    got = adapter.to_numpy(adapter.broadcast(adapter.from_numpy(mine), root, name="case.broadcast"))
    assert same(got, np.arange(4, dtype=np.float32) + 100 * root)


@case
def any_object_can_be_gathered(adapter: Adapter, topology: Topology, make: Make) -> None:
    got = adapter.allgather_object({"rank": topology.rank, "text": "x" * topology.rank}, name="case.objects")
    assert got == [{"rank": rank, "text": "x" * rank} for rank in range(topology.size)]


@case
def metric_averages_are_exact_over_unequal_shards(adapter: Adapter, topology: Topology, make: Make) -> None:
    count = 10**topology.rank
    sums = metrics.reduce_sums(adapter, total=float(count * topology.rank), count=count)
    counts = [10**rank for rank in range(topology.size)]
    assert sums == {"total": sum(rank * count for rank, count in enumerate(counts)), "count": sum(counts)}


@case
def state_has_canonical_names_and_comes_back_bit_for_bit(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    adapter.train_step(session, [batch(topology.rank)])
    saved = adapter.state(session)
    assert "fc.weight" in saved and saved["fc.weight"].shape[0] == CLASSES
    assert "optimizer.momentum.fc.weight" in saved
    adapter.train_step(session, [batch(5)])
    assert not same(adapter.state(session)["fc.weight"], saved["fc.weight"])
    adapter.load_state(session, saved)
    restored = adapter.state(session)
    assert restored.keys() == saved.keys()
    assert [name for name in saved if not same(saved[name], restored[name])] == []


@case
def a_state_that_does_not_fit_is_refused_by_name(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    state = adapter.state(session)
    bad = dict(state, **{"fc.bias": np.zeros(CLASSES + 1, np.float32), "extra.weight": np.zeros(1, np.float32)})
    del bad["fc.weight"]
    try:
        adapter.load_state(session, bad)
    except RequestError as refusal:
        text = str(refusal)
        assert "fc.weight is missing" in text and "fc.bias" in text and "extra.weight is unknown" in text, text
    else:
        raise AssertionError("a state that does not fit was loaded")
    assert same(adapter.state(session)["fc.bias"], state["fc.bias"]), "nothing may be loaded by halves"
    slot = "optimizer.momentum.fc.bias"
    strange = {slot: np.zeros(CLASSES + 1, np.float32), "optimizer.exp_avg.fc.bias": np.zeros(CLASSES, np.float32)}
    for wrong, part in (
        (state | {slot: strange[slot]}, f"{slot}: expected shape"),
        (state | {"optimizer.exp_avg.fc.bias": strange["optimizer.exp_avg.fc.bias"]}, "exp_avg.fc.bias is unknown"),
        ({name: value for name, value in state.items() if name != slot}, f"{slot} is missing"),
    ):
        try:
            adapter.load_state(session, wrong)
        except RequestError as refusal:
            assert part in str(refusal), str(refusal)
        else:
            raise AssertionError(f"loaded, though {part}")


@case
def broadcast_state_brings_parameters_buffers_and_slots(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    adapter.train_step(session, [batch(topology.rank)])
    mine = {name: value + np.asarray(topology.rank, value.dtype) for name, value in adapter.state(session).items()}
    adapter.load_state(session, mine)
    adapter.broadcast_state(session, root_rank=0)
    got = adapter.state(session)
    roots = adapter.allgather_object(mine, name="case.state")[0]
    assert [name for name in roots if not same(got[name], roots[name])] == []


@case
def the_applied_gradient_is_the_mean_of_the_ranks_own(adapter: Adapter, topology: Topology, make: Make) -> None:
    # The first velocity is the averaged gradient. A rank's own gradient depends on its own batch alone.
    own = []
    for seed in range(topology.size):
        session = make(weight_decay=0.0)
        adapter.train_step(session, [batch(seed)])  # the same batch everywhere: the mean is each rank's own
        own.append(velocities(adapter, session))
    session = make(weight_decay=0.0)
    adapter.train_step(session, [batch(topology.rank)])
    mixed = velocities(adapter, session)
    mean = {name: sum(each[name].astype(np.float64) for each in own) / topology.size for name in mixed}
    worst = max(error(mixed[name], mean[name]) for name in mixed)
    assert worst < 1e-5, worst
    if topology.size > 1:
        assert error(mixed["optimizer.momentum.fc.weight"], own[0]["optimizer.momentum.fc.weight"]) > 1e-2


@case
def ranks_stay_equal(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    for step in range(3):
        adapter.train_step(session, [batch(10 * step + topology.rank)])
    everyone = adapter.allgather_object(
        {name: value for name, value in adapter.state(session).items() if ".running_" not in name}, name="case.equal"
    )
    for name, value in everyone[0].items():
        assert all(same(value, other[name]) for other in everyone), name


@case
def momentum_keeps_the_learning_rate_outside(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make(weight_decay=0.0)
    for step, rate in enumerate((0.1, 0.003, 0.2)):
        before = adapter.state(session)
        adapter.set_learning_rate(session, rate)
        adapter.train_step(session, [batch(step)])
        after = adapter.state(session)
        for name in ("fc.weight", "fc.bias"):
            expected = before[name].astype(np.float64) - rate * after[f"optimizer.momentum.{name}"]
            assert np.abs(after[name] - expected).max() < 1e-6, (step, name)


@case
def weight_decay_is_added_to_the_gradient(adapter: Adapter, topology: Topology, make: Make) -> None:
    for settings, decays_bias in (({"decay": "all"}, True), ({"decay": "weights"}, False)):
        plain, decayed = make(weight_decay=0.0), make(weight_decay=0.5, **settings)
        start = {name: value + 1 for name, value in adapter.state(plain).items() if not name.startswith("optimizer.")}
        for session in (plain, decayed):
            adapter.load_state(session, start)
            adapter.train_step(session, [batch(1)])
        v_plain, v_decayed = velocities(adapter, plain), velocities(adapter, decayed)
        for name in ("fc.weight", "fc.bias"):
            slot = f"optimizer.momentum.{name}"
            share = 0.5 if decays_bias or name == "fc.weight" else 0.0
            expected = v_plain[slot] + share * start[name].astype(np.float64)
            assert error(v_decayed[slot], expected) < 1e-5, (settings, name)


@case
def fp16_goes_over_the_wire_in_half_precision(adapter: Adapter, topology: Topology, make: Make) -> None:
    compressor = compression.Fp16(adapter)
    sent, context = compressor.compress(adapter.from_numpy(np.array([1 / 3, 2.0], np.float32)))
    assert adapter.dtype(sent) == "float16"
    assert adapter.dtype(compressor.decompress(sent, context)) == "float32"
    whole = adapter.from_numpy(np.array([1, 2], np.int32))
    assert adapter.dtype(compressor.compress(whole)[0]) == "int32"
    slots = {}
    for name in ("none", "fp16"):
        session = make(compression=name, weight_decay=0.0)
        adapter.train_step(session, [batch(topology.rank)])
        slots[name] = velocities(adapter, session)["optimizer.momentum.fc.weight"]
    assert 1e-6 < error(slots["fp16"], slots["none"]) < 2e-3


@case
def the_loss_is_this_ranks_mean(adapter: Adapter, topology: Topology, make: Make) -> None:
    for smoothing in (0.0, 0.1):
        session = make(label_smoothing=smoothing)
        mine = batch(topology.rank)
        loss = float(adapter.to_numpy(adapter.train_step(session, [mine])).mean())
        # the network starts with logits near zero, where the loss is log(classes) whatever the smoothing
        assert abs(loss - np.log(CLASSES)) < 0.2, loss


@case
def evaluation_changes_nothing(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    adapter.train_step(session, [batch(0)])
    before = adapter.state(session)
    images = batch(3).images
    first, second = adapter.eval_step(session, images), adapter.eval_step(session, images)
    assert first.shape == (len(images), CLASSES) and same(first, second)
    after = adapter.state(session)
    assert [name for name in before if not same(before[name], after[name])] == []


@case
def settings_reach_the_optimizer(adapter: Adapter, topology: Topology, make: Make) -> None:
    images = batch(2)
    results = {}
    for nesterov in (False, True):
        session = make(nesterov=nesterov, weight_decay=0.0)
        start = adapter.state(session)["fc.bias"].astype(np.float64)
        adapter.set_learning_rate(session, 0.1)
        adapter.train_step(session, [images])
        results[nesterov] = adapter.state(session)["fc.bias"] - start
    # first step: velocity = gradient, so Nesterov's update is (1 + momentum) times the plain one
    assert error(results[True], results[False].astype(np.float64) * (1 + Sgd(learning_rate=1.0).momentum)) < 1e-5
