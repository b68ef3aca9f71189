"""Sharded training (ZeRO): how parameters are divided, and updates over ranks that are threads of the null adapter."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from crowd import together

from hvdkit.adapters import local
from hvdkit.core.mesh import Mesh
from hvdkit.core.session import Session
from hvdkit.core.shares import buckets
from hvdkit.core.topology import Topology
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Loss, Optimizer, Recipe
from hvdkit.strategies import choose, sharded
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.sharded import Sharded

sys.path.insert(0, str(ROOT / "tests" / "contract"))
from grown import OPTIMIZERS, worst

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 5), "b.bias": (7,), "c": ()}
STEPS, FEATURES, CLASSES = 20, 5, 3


@pytest.fixture(autouse=True)
def _same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share the counter behind the names of reductions."""
    monkeypatch.setattr(sharded, "next_name", lambda: "gradients")


@pytest.mark.parametrize("whole_rule", [True, False])
@pytest.mark.parametrize("most_bytes", [1, 100, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 100])
def test_each_element_has_one_owner(ranks: int, most_bytes: int, whole_rule: bool) -> None:
    owned: dict[str, list[int]] = {name: [] for name in SHAPES}
    found = buckets(SHAPES, ranks, 4, most_bytes)
    for bucket in found:
        for rank in range(ranks):
            pieces = bucket.pieces(rank, whole_rule)
            assert sum(piece.size for piece in pieces) == bucket.share and all(piece.size for piece in pieces)
            for piece in pieces:
                kinds = {len(SHAPES[each.name]) < 2 for each in piece.fragments}
                assert len(kinds) <= 1 and (whole_rule or len(piece.fragments) <= 1)
                for each in piece.fragments:
                    owned[each.name] += range(each.start, each.stop)
    assert {name: sorted(each) for name, each in owned.items()} == {
        name: list(range(math.prod(shape))) for name, shape in SHAPES.items()
    }
    names = list(itertools.chain.from_iterable(bucket.shapes for bucket in found))
    assert sorted(names) == sorted(SHAPES) and "c" in found[0].shapes
    assert all(len(bucket.shapes) == 1 or 4 * bucket.size <= most_bytes for bucket in found)
    assert all(0 <= bucket.padding < ranks for bucket in found)


def session_of(adapter: Any, optimizer: Optimizer, strategy: Any) -> Any:
    session = Session(adapter, local.Linear(FEATURES, CLASSES), optimizer, Loss(), strategy)
    random = np.random.default_rng(1)
    session.load_state(
        {"fc.weight": random.standard_normal((CLASSES, FEATURES)), "fc.bias": random.standard_normal(CLASSES)}
    )
    return session


def batch(step: int, rank: int) -> Batch:
    random = np.random.default_rng((step, rank))
    return Batch(random.standard_normal((4, FEATURES)), random.integers(0, CLASSES, 4))


def on_ranks(ranks: int, optimizer: Optimizer, strategy: Callable[[Any, Topology], Any]) -> list[dict[str, np.ndarray]]:
    """Rank 0's state after each step."""
    steps = STEPS if ranks < 10 else 2

    def train(adapter: Any, topology: Topology) -> list[dict[str, np.ndarray]]:
        session = session_of(adapter, optimizer, strategy(adapter, topology))
        states = []
        for step in range(steps):
            parts = [batch(10 * step + part, topology.rank) for part in range(1 + step % 2)]
            session.train_step(parts)
            states.append(session.state())
        return states

    found: list[list[dict[str, np.ndarray]]] = together(ranks, train)
    assert all(worst(other[-1], found[0][-1]) == 0 for other in found)
    return found[0]


@pytest.mark.parametrize("most_bytes", [8, 10_000])
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("title", OPTIMIZERS)
def test_each_stage_trains_as_the_whole_does(
    title: str, frees: bool, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps of one and two batches; on 19 ranks, one more than there are elements, one has padding alone."""
    optimizer = OPTIMIZERS[title]
    monkeypatch.setattr("hvdkit.strategies.dense.next_name", lambda: "dense")
    for ranks in (2, 3, 19):
        whole = on_ranks(ranks, optimizer, lambda adapter, topology: Dense(adapter, topology.size))
        shared = on_ranks(
            ranks,
            optimizer,
            lambda adapter, topology: Sharded(adapter, Mesh(topology).data, frees, most_bytes=most_bytes),
        )
        for step, (mine, theirs) in enumerate(zip(shared, whole, strict=True)):
            assert worst(mine, theirs) < 1e-12, (ranks, step, worst(mine, theirs))


@pytest.mark.parametrize("ranks", [2, 3, 4, 19])
@pytest.mark.parametrize(
    ("stage", "accumulate", "times"),
    [("optimizer", 1, 2), ("optimizer", 3, 2), ("gradients", 1, 2), ("gradients", 3, 4)],
)
def test_state_bytes_are_the_closed_forms(stage: str, accumulate: int, times: int, ranks: int) -> None:
    """In float64; whole buckets have less than an element of padding on each rank. Bytes sent are those of weights, and
    of gradients once, or for each batch where they are sharded."""

    def sizes(adapter: Any, topology: Topology) -> tuple[dict[str, int], float]:
        strategy: Any = choose(adapter, Mesh(topology), recipe_of(sharding=stage, accumulate=accumulate))
        session = session_of(adapter, AdamW(learning_rate=0.1), strategy)
        session.train_step([batch(0, topology.rank)])
        return session.state_bytes(), strategy.bytes_per_step

    count = CLASSES * FEATURES + CLASSES
    share = 8 * math.ceil(count / ranks)
    for found, sent in together(ranks, sizes):
        assert found == {
            "parameters": 8 * count,
            "gradients": share if stage == "gradients" else 8 * count,
            "optimizer": 2 * share,
        }
        assert sent == pytest.approx(times * (ranks - 1) * share)


@pytest.mark.parametrize(
    ("before", "after"), [((3, True), (2, False)), ((2, False), (4, True)), ((4, True), (1, None))]
)
def test_a_state_goes_on_with_other_shares(
    before: tuple[int, bool], after: tuple[int, bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an elastic run does, or one that resumes: from the state of one rank, on other ranks, in another stage."""
    monkeypatch.setattr("hvdkit.strategies.dense.next_name", lambda: "dense")
    (ranks, frees), optimizer = before, AdamW(learning_rate=0.1)
    held = on_ranks(ranks, optimizer, lambda adapter, topology: Sharded(adapter, Mesh(topology).data, frees))[-1]

    def continued(frees: bool | None) -> Callable[[Any, Topology], dict[str, np.ndarray]]:
        def work(adapter: Any, topology: Topology) -> dict[str, np.ndarray]:
            data = Mesh(topology).data
            strategy = Dense(adapter, data.size) if frees is None else Sharded(adapter, data, frees)
            session = session_of(adapter, optimizer, strategy)
            root = topology.size - 1
            session.broadcast_state(root, held if topology.rank == root else {})
            session.train_step([batch(99, topology.rank)])
            state: dict[str, np.ndarray] = session.state()
            return state

        return work

    ranks, frees_now = after
    assert worst(together(ranks, continued(frees_now))[0], together(ranks, continued(None))[0]) < 1e-12


def recipe_of(**settings: Any) -> Recipe:
    base = {"name": "test", "model": {"name": "resnet20"}, "data": {"name": "digits"}}
    return Recipe.model_validate(base | {"optimizer": {"learning_rate": 0.1}} | settings)


def test_what_sharding_does_not_go_with_is_refused_by_key() -> None:
    for key, value in (
        ("compression", "topk"),
        ("compression", "int8"),
        ("sync", {"every": 4}),
        ("allreduce", "hierarchical"),
        ("allreduce", "central"),
    ):
        with pytest.raises(ValueError, match=f"{key}: expected .* with sharding optimizer"):
            recipe_of(sharding="optimizer", **{key: value})
    assert recipe_of(sharding="gradients", compression="fp16").sharding == "gradients"


def test_a_stage_that_a_framework_lacks_is_refused_by_key() -> None:
    from hvdkit.adapters.capabilities import CAPABILITIES
    from hvdkit.core.precision import unsupported

    for framework in ("pytorch", "tensorflow", "keras", "mxnet"):
        for stage in ("none", "optimizer", "gradients", "parameters"):
            found = unsupported(framework, CAPABILITIES[framework], recipe_of(sharding=stage), "cpu")
            lacks = stage == "parameters" or (stage, framework) == ("gradients", "mxnet")
            assert bool(found) == lacks and all(line.startswith(f"sharding: {framework} cannot") for line in found)


def test_one_rank_has_nothing_to_share() -> None:
    assert isinstance(choose(local, Mesh(Topology()), recipe_of(sharding="optimizer")), Dense)
