"""What every adapter promises to compression: tensor operations, and the same means and bytes as NumPy's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.core.group import Topology
from hvdkit.core.seam import Adapter
from hvdkit.core.state import parameters_of
from hvdkit.recipe.communication import METHODS, Compression, Int8, TopK
from hvdkit.recipe.schema import Sgd
from hvdkit.strategies.compressed import Compressed
from hvdkit.strategies.reducer import Reducer
from hvdkit.strategies.transports import TRANSPORTS, Ring
from tests.contract.cases import Make, case, error, group_of, mesh_of, same
from tests.contract.grown import changed, features, worst
from tests.crowd import averaged, together

SHAPES = {"conv1.weight": (16, 3, 3, 3), "fc.weight": (10, 16), "fc.bias": (10,)}


def drawn(seed: int, rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng((seed, rank))
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


@case
def tensor_operations_are_numpys(adapter: Adapter, topology: Topology, make: Make) -> None:
    ops, there, back = adapter, adapter.from_numpy, adapter.to_numpy
    for dtype in ("float32", "float64"):
        x = np.random.default_rng(1).standard_normal((5, 7)).astype(dtype)
        tensor, size = there(x), x.itemsize
        assert same(back(abs(tensor)), np.abs(x)) and same(back(ops.floor(tensor)), np.floor(x))
        assert same(back(ops.largest(tensor)), x.max(axis=1, keepdims=True))
        assert same(back(ops.concat([tensor, tensor[1:3]])), np.concatenate([x, x[1:3]]))
        assert same(back(ops.concat([tensor, tensor[:, 2:]], axis=1)), np.concatenate([x, x[:, 2:]], axis=1))
        pieces = [x, x[0, 2:4], x[1:, :1]]
        doubled = ops.scaled(there(x.copy()), ops.norm(there(np.full(1, 2, dtype))))
        assert same(back(doubled), 2 * x)
        joined = ops.join([there(piece.copy()) for piece in pieces])
        assert same(back(joined), np.concatenate([piece.reshape(-1) for piece in pieces]))
        parts = ops.part(joined, [piece.shape for piece in pieces])
        assert all(same(back(part), piece) for part, piece in zip(parts, pieces, strict=True)) and len(parts) == 3
        chosen = back(ops.top_k(tensor, 3))
        assert chosen.dtype == np.int32
        assert np.array_equal(np.sort(chosen), np.sort(np.argsort(-x, axis=1)[:, :3]))
        vector, places = ops.reshape(tensor, (-1,)), there(np.array([30, 2, 9], np.int32))
        assert same(back(ops.gather(vector, places)), x.reshape(-1)[[30, 2, 9]])
        expected = x.reshape(-1).copy()
        expected[[30, 2, 9]] = 0
        got = ops.scatter_add(vector * 1.0, places, ops.gather(vector, places) * -1.0)
        assert same(back(got), expected) and same(back(tensor), x)
        sent = back(ops.view(tensor, "uint8"))
        assert sent.dtype == np.uint8 and sent.shape == (5, 7 * size) and sent.tobytes() == x.tobytes()
        for start in (1, 3):  # of which the first is aligned for nothing larger
            assert same(back(ops.view(ops.view(tensor, "uint8")[:, start * size :], dtype)), x[:, start:])
            assert same(back(ops.view(ops.view(vector, "uint8")[start * size :], dtype)), x.reshape(-1)[start:])
        product = ops.matmul(there(x[:3]), ops.transpose(there(x[3:]), (1, 0)))
        assert error(back(product), x[:3] @ x[3:].T) < 1e-6
        average = ops.variable(tensor)
        assert not back(average).any()
        ops.assign(average, tensor)
        ops.blend([average], [there(x + 1)], 0.75)
        assert error(back(average), x + 0.25) < 1e-6
        ops.add(average, tensor)
        assert error(back(average), 2 * x + 0.25) < 1e-6 and same(back(tensor), x)
        assert error(back(ops.divided(average, 4.0)), x / 2 + 0.0625) < 1e-6
        ops.clear(average)
        assert not back(average).any()
        random = [back(ops.uniform(tensor, seed)) for seed in (2**63 - 1, 2**63 - 1, 0)]
        assert random[0].dtype == x.dtype and random[0].shape == x.shape and same(random[0], random[1])
        assert not same(random[0], random[2])
        many = back(ops.uniform(there(np.zeros(100_000, dtype)), 7))
        assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.005
        assert abs(many.std() - 12**-0.5) < 0.005


@case
def alltoall_gives_each_rank_its_part(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    size, rank = topology.size, topology.rank
    for dtype in ("float32", "uint8", "float64"):
        mine = (np.arange(size * 6).reshape(2 * size, 3) + 100 * rank).astype(dtype)
        got = adapter.to_numpy(adapter.alltoall(adapter.from_numpy(mine), group, name=f"case.alltoall.{dtype}"))
        everyone = [(np.arange(size * 6).reshape(2 * size, 3) + 100 * each).astype(dtype) for each in range(size)]
        assert same(got, np.concatenate([each[2 * rank : 2 * rank + 2] for each in everyone])), dtype
    splits = [4] + [1] * (size - 1)
    mine = np.arange(sum(splits), dtype=np.float32) + 10 * rank
    got = adapter.to_numpy(adapter.alltoall(adapter.from_numpy(mine), group, name="case.splits", splits=splits))
    first = int(np.sum(splits[:rank]))
    sent = [np.arange(sum(splits), dtype=np.float32) + 10 * each for each in range(size)]
    assert same(got, np.concatenate([each[first : first + splits[rank]] for each in sent]))


@case
def compression_is_numpys_and_so_are_its_bytes(adapter: Adapter, topology: Topology, make: Make) -> None:
    """Means of two updates, what is kept and what is sent, against the null adapter's with as many ranks."""
    group = group_of(topology)
    methods: list[Compression] = [kind() for kind in METHODS.values()]
    methods += [TopK(ratio=0.05, bucket_mib=0.001), TopK(ratio=0.05, momentum_correction=True), Int8(bucket_mib=1.0)]
    for index, method in enumerate(methods):

        def reduced(adapter: Any, topology: Topology, method: Any = method, index: int = index) -> Any:
            reducer = Reducer(Ring(adapter, mesh_of(topology), f"case.{index}"), method, seed=3, momentum=0.9)
            named = [drawn(step, topology.rank) for step in range(2)]
            there = [{name: adapter.from_numpy(value) for name, value in each.items()} for each in named]
            means = [{name: adapter.to_numpy(mean) for name, mean in averaged(reducer, each).items()} for each in there]
            return means, reducer.state(), reducer.transport.sent

        means, state, sent = reduced(adapter, topology)
        expected_means, expected_state, expected_sent = together(topology.size, reduced)[topology.rank]
        assert sent == expected_sent, (method, sent, expected_sent)
        most = 0.05 if isinstance(method, Int8) else 1e-5  # random numbers are each framework's own
        for mine, theirs in zip(means, expected_means, strict=True):
            assert worst(mine, theirs) < most, (method, worst(mine, theirs))
            digests = adapter.allgather_object([value.tobytes() for value in mine.values()], group, name="case.bits")
            assert digests.count(digests[0]) == len(digests), method
        if isinstance(method, TopK):
            assert worst(state, expected_state) < 1e-6, method


@case
def training_takes_what_it_is_given_as_the_mean(adapter: Adapter, topology: Topology, make: Make) -> None:
    """In several parts too, and with what was left over in the step before."""
    reducer = Reducer(Ring(adapter, mesh_of(topology), "case.training"), TopK(ratio=0.05))
    session = make(tiny=True, precision="fp64", strategy=Compressed(reducer), momentum=0.0, weight_decay=0.0)
    simulated: list[list[dict[str, np.ndarray]]] = []  # by step and rank
    for step in range(2):
        before = parameters_of(session.state())
        parts = [features(10 * step + part + 100 * topology.rank) for part in range(2)]
        own = [session.gradients(part).own for part in parts]
        mine = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
        simulated.append(adapter.allgather_object(mine, group_of(topology), name="case.own"))

        def reduced(adapter: Any, topology: Topology) -> dict[str, np.ndarray]:
            again = Reducer(Ring(adapter, mesh_of(topology)), TopK(ratio=0.05))
            return [averaged(again, everyone[topology.rank]) for everyone in simulated][-1]

        expected = together(topology.size, reduced)[0]
        session.train_step(parts)
        after = parameters_of(session.state())
        moved = {name: (before[name] - after[name]) / 0.1 for name in before}
        assert worst(moved, expected) < 1e-9, (step, worst(moved, expected))
        assert reducer._step == step + 1, "`gradients` must leave no trace"


@case
def an_overflow_is_not_kept(adapter: Adapter, topology: Topology, make: Make) -> None:
    if "fp16" not in adapter.CAPABILITIES:
        return
    reducer = Reducer(Ring(adapter, mesh_of(topology), "case.overflow"), TopK(ratio=0.05))
    session = make(tiny=True, precision="fp16", strategy=Compressed(reducer), optimizer=Sgd(learning_rate=0.1))
    session.load_state(session.state() | {"optimizer.loss_scale": np.asarray(256.0)})
    session.train_step([features(topology.rank)])
    before, kept = session.state(), reducer.state()
    huge = features(topology.rank)
    if topology.rank == topology.size - 1:
        huge = replace(huge, inputs=huge.inputs * np.float32(1e38))
    session.train_step([huge])
    after = session.state()
    assert set(changed(before, after)) == {"optimizer.loss_scale", "optimizer.good_steps"}, changed(before, after)
    assert changed(kept, reducer.state()) == []


@case
def weights_come_and_go_on_the_device(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    weights, state = session.weights(), session.state()
    expected = np.concatenate([value.reshape(-1) for _, value in sorted(parameters_of(state).items())])
    assert same(adapter.to_numpy(weights), expected)
    session.set_weights(weights + 1.0)
    moved = session.state()
    for name, value in parameters_of(state).items():
        assert same(moved[name], value + value.dtype.type(1)), name
    assert same(adapter.to_numpy(weights), expected)


@case
def other_ways_than_the_ring_give_the_mean(adapter: Adapter, topology: Topology, make: Make) -> None:
    vector = np.arange(1000, dtype=np.float32) * (topology.rank + 1)
    expected = np.arange(1000) * (topology.size + 1) / 2
    for way in ("central", "hierarchical"):
        transport = TRANSPORTS[way](adapter, mesh_of(topology), f"case.{way}")
        for _ in range(2):
            assert error(adapter.to_numpy(transport.mean(adapter.from_numpy(vector))), expected) < 1e-6, way
