"""Methods of compression, against what their papers promise; over the null adapter, ranks as threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdkit.core.group import Mesh, Topology, world_of
from hvdkit.recipe.communication import METHODS, Compression, Int8, PowerSgd, TopK, Uncompressed
from hvdkit.strategies.codecs.base import RESIDUAL
from hvdkit.strategies.codecs.powersgd import orthonormal
from hvdkit.strategies.reducer import Reducer
from hvdkit.strategies.transports import TRANSPORTS, Ring
from tests.crowd import averaged, together

pytestmark = pytest.mark.check

SHAPES = {"fc.weight": (10, 64), "conv1.weight": (16, 3, 3, 3), "bn1.weight": (16,), "fc.bias": (10,), "odd": (7, 11)}
LENGTH = sum(int(np.prod(shape)) for shape in SHAPES.values())
METHODS_TRIED: list[Compression] = [
    *(kind() for kind in METHODS.values()),
    TopK(ratio=0.1, bucket_mib=0.001),
    TopK(ratio=0.3, momentum_correction=True),
    Int8(error_feedback=True),
    PowerSgd(rank=4),
]
TITLES = [str(each) for each in METHODS_TRIED]


def gradients(seed: int, rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng((seed, rank))
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def vector(named: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([named[name].reshape(-1) for name in sorted(named)])


def run(
    size: int, compression: Compression, steps: int, dtype: str = "float32", **settings: Any
) -> list[tuple[list[dict[str, np.ndarray]], Reducer]]:
    """By rank: the means of each step, and the reducer afterwards."""

    def work(adapter: Any, topology: Topology) -> Any:
        reducer = Reducer(Ring(adapter, Mesh(topology)), compression, seed=5, **settings)
        return [averaged(reducer, gradients(step, topology.rank, dtype)) for step in range(steps)], reducer

    return together(size, work)


def mean_of(step: int, size: int, dtype: str = "float32") -> np.ndarray:
    return np.mean([vector(gradients(step, rank, dtype)).astype(np.float64) for rank in range(size)], axis=0)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("compression", METHODS_TRIED, ids=TITLES)
def test_all_ranks_get_the_same_bits_in_the_shapes_and_dtype_of_what_they_gave(
    compression: Compression, size: int, dtype: str
) -> None:
    momentum = 0.9 if getattr(compression, "momentum_correction", False) else 0.0
    found = run(size, compression, 3, dtype, momentum=momentum)
    for step in range(3):
        first = found[0][0][step]
        assert {name: mean.shape for name, mean in first.items()} == SHAPES
        assert {mean.dtype.name for mean in first.values()} == {dtype}
        for means, _ in found[1:]:
            assert all(means[step][name].tobytes() == first[name].tobytes() for name in SHAPES)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize(
    ("compression", "most"),
    [(METHODS["none"](), 1e-6), (METHODS["fp16"](), 2e-3), (METHODS["bf16"](), 8e-3), (Int8(), 2e-2)],
)
def test_means_are_as_near_as_the_bits_allow(compression: Compression, most: float, size: int) -> None:
    ((means,), _), *_ = run(size, compression, 1)
    expected = mean_of(0, size)
    off = np.linalg.norm(vector(means) - expected) / np.linalg.norm(expected)
    assert off < most, off


def test_bf16_is_bfloat16() -> None:
    """To nearest, as its 16 bits are the upper half of a float32."""

    def rounded(values: np.ndarray) -> np.ndarray:
        bits = values.view(np.uint32).astype(np.uint64)
        return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)

    ((means,), _), *_ = run(1, METHODS["bf16"](), 1)
    assert np.array_equal(vector(means), rounded(rounded(vector(gradients(0, 0)))))


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("compression", [TopK(ratio=0.02), TopK(ratio=0.1, bucket_mib=0.001)], ids=str)
def test_what_top_k_sends_and_what_it_keeps_are_the_gradient_exactly(compression: Compression, size: int) -> None:
    """sent + residual = gradient + residual before, bit by bit, on every rank: what is kept is untouched, and no value
    is both sent and kept."""

    def work(adapter: Any, topology: Topology) -> Any:
        told: list[np.ndarray] = []

        class Listening(Ring):
            def gather(self, tensor: Any) -> Any:
                told.append(tensor.copy())
                return super().gather(tensor)

        reducer = Reducer(Listening(adapter, Mesh(topology)), compression)
        kept = np.zeros(LENGTH, np.float32)
        for step in range(5):
            given = vector(gradients(step, topology.rank)) + kept
            means = averaged(reducer, gradients(step, topology.rank))
            half = len(told[-1]) // 2
            values, places = told[-1][:half].view(np.float32), told[-1][half:].view(np.int32)
            sent = np.zeros(LENGTH, np.float32)
            inside = places < LENGTH  # beyond it a bucket is filled with zeros
            sent[places[inside]] = values[inside]
            kept = np.array(reducer._state[RESIDUAL])
            assert (sent + kept).tobytes() == given.tobytes()
            assert not np.any((sent != 0) & (kept != 0))
            everyone = adapter.allgather_object(sent.astype(np.float64), world_of(topology), name="sent")
            assert np.allclose(vector(means), np.mean(everyone, axis=0), rtol=1e-6)
        smallest = np.abs(values).min()
        assert size > 1 or compression.bucket_mib < 1 or np.abs(kept).max() <= smallest
        return True

    assert all(together(size, work))


@pytest.mark.parametrize("compression", [Int8(error_feedback=True), METHODS["bf16"](error_feedback=True), PowerSgd()])
def test_error_feedback_loses_nothing_but_rounding(compression: Compression) -> None:
    """Over steps with the same gradient, the mean of the means comes to it: only the last residual is owed."""
    steps = 60

    def work(adapter: Any, topology: Topology) -> Any:
        reducer = Reducer(Ring(adapter, Mesh(topology)), compression)
        mine = gradients(0, topology.rank)
        total = sum(vector(averaged(reducer, mine)).astype(np.float64) for _ in range(steps))
        left = np.mean(
            adapter.allgather_object(np.array(reducer._state[RESIDUAL]), world_of(topology), name="left"), axis=0
        )
        return total, left

    total, left = together(2, work)[0]
    owed = steps * mean_of(0, 2)
    # what int8 and bf16 round in the second half, the sums, is unbiased or small, but no one keeps it
    most = 1e-5 if isinstance(compression, PowerSgd) else 2e-3
    assert np.linalg.norm(total + left - owed) / np.linalg.norm(owed) < most


@pytest.mark.parametrize("compression", [TopK(ratio=1.0), TopK(ratio=0.6), TopK(ratio=1.0, bucket_mib=0.001)], ids=str)
def test_top_k_of_all_or_too_much_is_dense(compression: Compression) -> None:
    (means, reducer), *_ = run(2, compression, 3)
    dense, plain = run(2, Uncompressed(), 3)[0]
    for mine, theirs in zip(means, dense, strict=True):
        assert vector(mine).tobytes() == vector(theirs).tobytes()
    assert reducer.transport.sent == plain.transport.sent


def test_momentum_correction_at_full_ratio_is_momentum() -> None:
    """The optimizer's velocity, from what the reducer gives it, is that of the mean gradients."""
    (means, _), *_ = run(2, TopK(ratio=1.0, momentum_correction=True), 6, "float64", momentum=0.9)
    velocity, expected = np.zeros(LENGTH), np.zeros(LENGTH)
    for step, each in enumerate(means):
        velocity = 0.9 * velocity + vector(each)
        expected = 0.9 * expected + mean_of(step, 2, "float64")
        assert np.allclose(velocity, expected, rtol=1e-12, atol=1e-12)


def test_momentum_correction_follows_lin_et_al() -> None:
    """Algorithm 1 with momentum factor masking and local clipping, written out for two ranks."""
    ratio, momentum, clip = 0.05, 0.9, 3.0
    compression = TopK(ratio=ratio, momentum_correction=True)
    (means, _), *_ = run(2, compression, 6, "float64", momentum=momentum, clip_norm=clip)
    u, v, velocity = np.zeros((2, LENGTH)), np.zeros((2, LENGTH)), np.zeros(LENGTH)
    count = int(np.ceil(ratio * LENGTH))
    for step, each in enumerate(means):
        direction = np.zeros(LENGTH)
        for rank in range(2):
            gradient = vector(gradients(step, rank, "float64"))
            gradient *= min(1.0, clip / np.sqrt(2) / np.linalg.norm(gradient))
            u[rank] = momentum * u[rank] + gradient
            v[rank] += u[rank]
            chosen = np.argsort(-np.abs(v[rank]))[:count]
            direction[chosen] += v[rank][chosen] / 2
            u[rank][chosen] = v[rank][chosen] = 0
        velocity = momentum * velocity + vector(each)
        assert np.allclose(velocity, direction, atol=1e-12), step


def test_the_ratio_falls_over_the_warm_up() -> None:
    def work(adapter: Any, topology: Topology) -> list[float]:
        reducer = Reducer(Ring(adapter, Mesh(topology)), TopK(ratio=0.001, warmup_epochs=4))
        sent = []
        for epoch in range(6):
            reducer.epoch, before = epoch, reducer.transport.sent
            averaged(reducer, gradients(epoch, topology.rank))
            sent.append(reducer.transport.sent - before)
        return sent

    sent = together(2, work)[0]
    shares = [0.001 ** ((epoch + 1) / 5) for epoch in range(5)] + [0.001]
    assert sent == [8 * np.ceil(share * LENGTH) for share in shares]


@pytest.mark.parametrize("size", (1, 2))
def test_powersgd_is_exact_on_gradients_of_its_rank(size: int) -> None:
    left = np.random.default_rng(1).standard_normal((40, 3))

    def work(adapter: Any, topology: Topology) -> Any:
        right = np.random.default_rng((2, topology.rank)).standard_normal((3, 9 * 5))
        mine = (left @ right).reshape(40, 5, 3, 3)
        reducer = Reducer(Ring(adapter, Mesh(topology)), PowerSgd(rank=3))
        got = averaged(reducer, {"conv.weight": mine})["conv.weight"]
        expected = np.mean(adapter.allgather_object(mine, world_of(topology), name="all"), axis=0)
        return np.linalg.norm(got - expected) / np.linalg.norm(expected)

    assert max(together(size, work)) < 1e-12


def test_powersgd_recovers_from_a_gradient_of_zeros() -> None:
    """As a layer behind a batch norm of scale 0 has at first: its Q would be zero for ever."""

    def work(adapter: Any, topology: Topology) -> Any:
        reducer = Reducer(Ring(adapter, Mesh(topology)), PowerSgd(rank=2, error_feedback=False))
        matrix = np.outer(np.arange(1.0, 31), np.arange(1.0, 21))
        assert not averaged(reducer, {"w": np.zeros((30, 20))})["w"].any()
        return np.linalg.norm(averaged(reducer, {"w": matrix})["w"] - matrix) / np.linalg.norm(matrix)

    assert together(2, work)[0] < 1e-12


def test_gram_and_schmidt_leave_out_what_is_no_direction() -> None:
    from tests.local_adapter import adapter as local

    rows = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32)
    rows[2] = 2 * rows[0] - rows[1]
    found = orthonormal(local, rows, "float32")
    assert np.allclose(found @ found.T, np.diag([1, 1, 0, 1]), atol=1e-6)


def test_int8_is_unbiased() -> None:
    """The mean of many roundings of one gradient, with its standard error; and a rounding is not always the same."""
    count, size = 400, 2

    def work(adapter: Any, topology: Topology) -> Any:
        reducer = Reducer(Ring(adapter, Mesh(topology)), Int8(bucket_mib=0.002), seed=1)
        return np.array([vector(averaged(reducer, gradients(0, topology.rank))) for _ in range(count)], np.float64)

    drawn = together(size, work)[0]
    error = drawn.mean(axis=0) - mean_of(0, size)
    spread = drawn.std(axis=0)
    assert (spread > 0).mean() > 0.99
    scores = error / np.maximum(spread / np.sqrt(count), 1e-9)
    assert np.abs(scores).max() < 5.5 and abs(scores.mean()) < 4 / np.sqrt(LENGTH), (
        np.abs(scores).max(),
        scores.mean(),
    )
    # that a biased rounding would show: to nearest, the same every time
    assert spread.mean() / np.sqrt(count) < 0.02 * np.abs(mean_of(0, size)).mean()


def test_int8s_bytes_do_not_grow_with_ranks() -> None:
    sent = {size: run(size, Int8(), 1)[0][1].transport.sent for size in (2, 4, 8)}
    for size, each in sent.items():
        assert each == pytest.approx(2 * (size - 1) / size * LENGTH, rel=0.05)


@pytest.mark.parametrize("compression", METHODS_TRIED, ids=TITLES)
def test_a_state_goes_on_bit_by_bit_and_no_debt_is_lost_with_other_ranks(compression: Compression) -> None:
    momentum = 0.9 if getattr(compression, "momentum_correction", False) else 0.0

    def work(adapter: Any, topology: Topology) -> Any:
        first = Reducer(Ring(adapter, Mesh(topology)), compression, momentum=momentum)
        for step in range(3):
            averaged(first, gradients(step, topology.rank))
        state = {name: array.copy() for name, array in first.state().items()}
        after = averaged(first, gradients(3, topology.rank))
        second = Reducer(Ring(adapter, Mesh(topology)), compression, momentum=momentum)
        second.load_state(state)
        again = averaged(second, gradients(3, topology.rank))
        assert vector(after).tobytes() == vector(again).tobytes()
        assert {name: a.tobytes() for name, a in first.state().items()} == {
            name: a.tobytes() for name, a in second.state().items()
        }
        return state

    states = together(2, work)
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])

    def fewer(adapter: Any, topology: Topology) -> Any:
        reducer = Reducer(Ring(adapter, Mesh(topology)), compression, momentum=momentum)
        reducer.load_state(states[0])
        reducer._bind(vector(gradients(0, 0)), {name: SHAPES[name] for name in sorted(SHAPES)})
        return {slot: np.array(value) for slot, value in reducer._state.items()}

    if f"{RESIDUAL}.fc.bias" in states[0]:
        owed = np.concatenate([states[0][f"{RESIDUAL}.{name}"].mean(axis=0).reshape(-1) for name in sorted(SHAPES)])
        for now in together(3, fewer):
            assert np.allclose(now[RESIDUAL], owed, rtol=1e-6)


@pytest.mark.parametrize("compression", [TopK(ratio=0.1), Int8(), PowerSgd()], ids=str)
def test_a_scaled_loss_does_not_show_and_an_overflow_leaves_no_trace(compression: Compression) -> None:
    def work(adapter: Any, topology: Topology) -> Any:
        plain, scaled = (Reducer(Ring(adapter, Mesh(topology), name), compression) for name in ("plain", "scaled"))
        for step, scale in enumerate((1024.0, 2048.0, 2048.0)):
            mine = gradients(step, topology.rank)
            big = {name: value * np.float32(scale) for name, value in mine.items()}
            if step == 1:
                broken = dict(big)
                if topology.rank == 1:
                    broken["fc.bias"] = broken["fc.bias"] * np.float32(np.inf)
                assert all(np.isnan(mean).all() for mean in averaged(scaled, broken, scale).values())
            expected, got = vector(averaged(plain, mine)), vector(averaged(scaled, big, scale))
            assert (expected * np.float32(scale)).tobytes() == got.tobytes()
            with scaled.peek():
                averaged(scaled, big, scale)
        return True

    assert all(together(2, work))


@pytest.mark.parametrize("way", TRANSPORTS)
@pytest.mark.parametrize("hosts", (1, 2, 4))
def test_every_way_gives_the_mean(way: str, hosts: int) -> None:
    def work(adapter: Any, topology: Topology) -> Any:
        transport = TRANSPORTS[way](adapter, Mesh(topology), "way")
        return vector(
            averaged(Reducer(transport, Uncompressed()), gradients(0, topology.rank, "float64"))
        ), transport.sent

    found = together(4, work, hosts)
    for mean, _ in found:
        assert np.allclose(mean, mean_of(0, 4, "float64"), rtol=1e-12)
        assert mean.tobytes() == found[0][0].tobytes()
    payload = 8 * LENGTH
    ring = {4: 1.5, 2: 1.0, 1: 0.0}  # of so many ranks
    inside, between = ring[4 // hosts], ring[hosts]
    back = 1.0 if 1 < hosts < 4 else 0.0
    expected = {"ring": ring[4], "central": 3.0, "hierarchical": inside + between + back}
    assert max(sent for _, sent in found) == expected[way] * payload
