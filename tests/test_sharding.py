"""Sharded training (ZeRO): how parameters are divided, and updates over ranks that are threads of the null adapter."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hvdkit import tasks
from hvdkit.core.buckets import buckets
from hvdkit.core.group import Group, Mesh, Topology, world_of
from hvdkit.core.pieces import Partition, StateEntry
from hvdkit.core.slices import sliced
from hvdkit.core.stages import Stages
from hvdkit.recipe import registry, schema
from hvdkit.recipe.schema import AdamW, Loss, Recipe
from hvdkit.strategies import choose
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.sharded import CopiedShares, Sharded
from hvdkit.tasks.parts import Cut
from hvdkit.worker import startup
from hvdkit.worker.setup import RankScript, Setup
from tests.contract.grown import OPTIMIZERS, worst
from tests.crowd import together
from tests.local_adapter import Linear, LocalAdapter, TrainableModel
from tests.local_adapter import adapter as local
from tests.sharing import CLASSES, FEATURES, InVectors, batch, on_ranks, session_of, staged

pytestmark = pytest.mark.check

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 5), "b.bias": (7,), "c": ()}


@pytest.mark.parametrize("may_span", [True, False])
@pytest.mark.parametrize("most_bytes", [1, 100, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 100])
def test_each_element_has_one_owner(ranks: int, most_bytes: int, may_span: bool) -> None:
    owned: dict[str, list[int]] = {name: [] for name in SHAPES}
    found = buckets(SHAPES, ranks, 4, most_bytes)
    for bucket in found:
        for rank in range(ranks):
            pieces = bucket.pieces(rank, may_span)
            assert sum(piece.local_shape[0] for piece in pieces) == bucket.share and all(
                piece.local_shape[0] for piece in pieces
            )
            for piece in pieces:
                kinds = {len(each.shape) < 2 for each in piece.parts}
                assert len(kinds) <= 1 and (may_span or len(piece.parts) <= 1)
                for each in piece.parts:
                    owned[each.name] += range(each.start, each.stop)
    assert {name: sorted(each) for name, each in owned.items()} == {
        name: list(range(math.prod(shape))) for name, shape in SHAPES.items()
    }
    names = list(itertools.chain.from_iterable(bucket.shapes for bucket in found))
    assert sorted(names) == sorted(SHAPES) and "c" in found[0].shapes
    assert all(len(bucket.shapes) == 1 or 4 * bucket.size <= most_bytes for bucket in found)
    assert all(0 <= bucket.padding < ranks for bucket in found)


@cache
def states(title: str, ranks: int, stage: str, **more: Any) -> list[dict[str, np.ndarray]]:
    """Rank 0's state after each step, with gradients apart."""
    return on_ranks(ranks, OPTIMIZERS[title], lambda adapter, topology: staged(adapter, topology, stage, **more))


@pytest.mark.parametrize(
    ("stage", "more"),
    [(stage, {"most_bytes": most}) for stage in ("optimizer", "gradients") for most in (8, 10_000)]
    + [("parameters", {})],
)
@pytest.mark.parametrize("title", OPTIMIZERS)
def test_each_stage_trains_as_the_whole_does(title: str, stage: str, more: dict[str, int]) -> None:
    """Eight steps of one and two batches; on 19 ranks, one more than there are elements, one has padding alone."""
    for ranks in (2, 3, 19):
        shared, whole = states(title, ranks, stage, **more), states(title, ranks, "none")
        for step, (mine, theirs) in enumerate(zip(shared, whole, strict=True)):
            assert worst(mine, theirs) < 1e-12, (ranks, step, worst(mine, theirs))


@pytest.mark.parametrize(
    ("stage", "more"), [("none", {}), *(("optimizer", {"most_bytes": most}) for most in (8, 10_000))]
)
@pytest.mark.parametrize("title", ["sgd", "adamw, weights alone", "lamb, weights alone", "clipped"])
def test_joined_gradients_train_as_those_apart(
    title: str, stage: str, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (2, 3, 19):
        apart = states(title, ranks, stage, **more)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["tests.local_adapter"], "TrainableModel", InVectors)
            joined = states.__wrapped__(title, ranks, stage, **more)
        for mine, theirs in zip(joined, apart, strict=True):
            assert worst(mine, theirs) < 1e-14


def test_buckets_are_sent_in_one_order_and_few_are_under_way() -> None:
    """A rank whose backward computes gradients in another order sends its buckets as the others do."""
    sent: list[str] = []
    under_way: list[int] = []

    class Sending:
        def __init__(self, tensor: np.ndarray) -> None:
            self._tensor = tensor
            under_way.append(1 + (under_way[-1] if under_way else 0))

        def __call__(self) -> np.ndarray:
            under_way.append(under_way[-1] - 1)
            return self._tensor

        def ready(self) -> bool:
            return False

    class Slow(LocalAdapter):
        def start(self, what: str, tensor: Any, group: Group, name: str, out: Any = None) -> Any:
            sent.append(name)
            return Sending(tensor)

    slow = Slow()
    strategy = Sharded(slow, Mesh(Topology()).data, frees=True, most_bytes=8)
    strategy.at_once = 2
    trainable: Any = TrainableModel(Linear(1, 1), Loss())
    trainable.parameters = {name: np.zeros(2) for name in "abcd"}
    held = Partition(slow, trainable.parameters)
    session: Any = SimpleNamespace(trainable=trainable, adapter=slow, dtype="float64", held=lambda: held)
    strategy.bind(session)
    strategy.partition(AdamW(learning_rate=0.1))
    order = [name for bucket in strategy._shares.buckets for name in bucket.shapes]
    assert len(order) == len(strategy._shares.buckets) == 4
    for name in reversed(order[:-1]):
        assert strategy.begin(name, np.ones(2))
    assert sent == ["gradients.0", "gradients.1", "gradients.2"] and max(under_way) <= 3
    found = strategy.average({order[-1]: np.ones(2)})
    assert sent[-1] == "gradients.3" and len(sent) == 4 and len(found) == 4


@pytest.mark.parametrize("ranks", [2, 3, 4, 19])
@pytest.mark.parametrize(
    ("stage", "accumulate", "times"),
    [
        ("optimizer", 1, 2),
        ("optimizer", 3, 2),
        ("gradients", 1, 2),
        ("gradients", 3, 4),
        ("parameters", 1, 2),  # 3, but the root and the last block, which are all of this model, are gathered once
        ("parameters", 3, 6),
    ],
)
def test_state_bytes_are_the_closed_forms(stage: str, accumulate: int, times: int, ranks: int) -> None:
    """In float64; whole buckets have less than an element of padding on each rank. Bytes sent are those of weights, and
    of gradients once, or for each batch where they are sharded."""

    def sizes(adapter: Any, topology: Topology) -> tuple[dict[str, int], float]:
        strategy: Any = choose(adapter, Mesh(topology), recipe_of(sharding=stage, accumulate=accumulate))
        session = session_of(adapter, AdamW(learning_rate=0.1), strategy)
        session.train_step([batch(0, topology.rank)])
        return session.state_bytes(), strategy.bytes_per_step

    buckets_of = [CLASSES * FEATURES, CLASSES] if stage == "parameters" else [CLASSES * FEATURES + CLASSES]
    count = CLASSES * FEATURES + CLASSES
    share = 8 * sum(math.ceil(each / ranks) for each in buckets_of)
    for found, sent in together(ranks, sizes):
        assert found == {
            "parameters": share if stage == "parameters" else 8 * count,
            "gradients": 8 * count if stage == "optimizer" else share,
            "optimizer": 2 * share,
        }
        assert sent == pytest.approx(times * (ranks - 1) * share)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, "gradients"), (2, "optimizer")),
        ((2, "optimizer"), (4, "parameters")),
        ((4, "gradients"), (1, "none")),
        ((3, "parameters"), (2, "parameters")),
        ((2, "parameters"), (3, "none")),
    ],
)
def test_a_state_goes_on_with_other_shares(before: tuple[int, str], after: tuple[int, str]) -> None:
    """As an elastic run does, or one that resumes: from the state of one rank, on other ranks, in another stage."""
    (ranks, stage), optimizer = before, AdamW(learning_rate=0.1)
    held = on_ranks(ranks, optimizer, lambda adapter, topology: staged(adapter, topology, stage))[-1]

    def continued(stage: str) -> Callable[[Any, Topology], dict[str, np.ndarray]]:
        def work(adapter: Any, topology: Topology) -> dict[str, np.ndarray]:
            session = session_of(adapter, optimizer, staged(adapter, topology, stage))
            root = topology.size - 1
            session.broadcast_state(world_of(topology), root, held if topology.rank == root else {})
            session.train_step([batch(99, topology.rank)])
            state: dict[str, np.ndarray] = session.state()
            return state

        return work

    ranks, stage_now = after
    assert worst(together(ranks, continued(stage_now))[0], together(ranks, continued("none"))[0]) < 1e-12


def test_ranks_without_a_batch_gather_for_those_that_evaluate() -> None:
    def outputs(adapter: Any, topology: Topology) -> list[Any]:
        strategy = staged(adapter, topology, "parameters")
        session = session_of(adapter, AdamW(learning_rate=0.1), strategy)
        mine = [batch(number, 0).inputs for number in range(1 + topology.rank % 2)]
        return [session.predict(each) for each in strategy.evaluated(iter(mine))]

    first, second, third = together(3, outputs)
    assert (len(first), len(second), len(third)) == (1, 2, 1)
    assert np.array_equal(first[0], second[0]) and np.isfinite(second[1]).all()


def recipe_of(**settings: Any) -> Recipe:
    base = {"name": "test", "model": {"name": "resnet20"}, "data": {"name": "digits"}}
    return Recipe.model_validate(base | {"optimizer": {"learning_rate": 0.1}} | settings)


ABLE = {
    "none": ("pytorch", "tensorflow", "keras", "mxnet"),
    "optimizer": ("pytorch", "tensorflow", "keras", "mxnet"),
    "gradients": ("pytorch", "tensorflow", "keras"),
    "parameters": ("pytorch",),
}


def test_a_stage_that_a_framework_lacks_is_refused_by_key() -> None:
    from hvdkit.adapters.capabilities import CAPABILITIES, unsupported

    for framework in ("pytorch", "tensorflow", "keras", "mxnet"):
        for stage in ("none", "optimizer", "gradients", "parameters"):
            found = unsupported(framework, CAPABILITIES[framework], recipe_of(sharding=stage), "cpu")
            lacks = framework not in ABLE[stage]
            assert bool(found) == lacks and all(line.startswith(f"sharding: {framework} cannot") for line in found)


def test_one_rank_has_nothing_to_share() -> None:
    assert isinstance(choose(local, Mesh(Topology()), recipe_of(sharding="optimizer")), Dense)


@pytest.mark.parametrize(
    ("framework", "model", "stage", "ranks", "mib"),
    [
        ("pytorch", "gpt-tiny", "none", 2, None),
        ("pytorch", "gpt-tiny", "gradients", 1, None),
        ("mxnet", "gpt-tiny", "optimizer", 2, None),
        ("pytorch", "gpt-tiny", "gradients", 2, 32),
        ("pytorch", "gpt2", "gradients", 2, 4),
    ],
)
def test_large_sharded_models_return_smaller_blocks(
    monkeypatch: pytest.MonkeyPatch, framework: str, model: str, stage: str, ranks: int, mib: int | None
) -> None:
    asked: list[int | None] = []

    def own_pages(then_from: int | None = None) -> nullcontext[None]:
        asked.append(then_from)
        return nullcontext()

    monkeypatch.setattr(startup, "own_pages", own_pages)
    monkeypatch.setattr(startup, "done", lambda: None)
    monkeypatch.setattr("hvdkit.worker.setup.Session", lambda *_: None)
    recipe = schema.load(registry.locate(Path(model)), [f"sharding={stage}"])
    adapter: Any = SimpleNamespace(NAME=framework, rival=None)
    mesh: Any = Mesh(Topology(size=ranks))
    script, nothing = RankScript(lambda architecture: None), cast("Any", None)
    task = tasks.choose(recipe)
    Setup(adapter, script, recipe, mesh, nothing, task, task.architecture(None)).session(recipe)
    assert asked == [mib and mib * 2**20]


WHOLE = {"a.bias": (8,), "a.weight": (4, 8), "b.bias": (3,), "b.weight": (8, 3), "table": (5, 3), "z": (2,)}
OF_STAGE = [("table", "a.weight", "a.bias"), ("b.weight", "b.bias", "table", "z")]  # both ends have the table
CUTS = {"a.weight": Cut(1, 2), "a.bias": Cut(0, 2), "b.weight": Cut(0), "table": Cut(0, equal=False)}


@pytest.mark.parametrize("may_span", [True, False])
@pytest.mark.parametrize("most_bytes", [8, 100, 10_000])
def test_shares_of_stages_in_parts_are_put_together(most_bytes: int, may_span: bool) -> None:
    """On two data ranks × two stages × two parts: whole tensors, loaded and gathered; sums of squares, and norms."""
    random = np.random.default_rng(2)
    whole = {name: random.standard_normal(shape) for name, shape in WHOLE.items()}

    def found(adapter: Any, topology: Topology) -> tuple[dict[str, np.ndarray], float, dict[str, float]]:
        mesh = Mesh(topology, 2, 2)
        names = OF_STAGE[mesh.pipeline.index]
        pieces = {name: sliced(name, WHOLE[name], CUTS[name], mesh.tensor) for name in names if name in CUTS}
        trainable: Any = SimpleNamespace(parameters={name: np.zeros(WHOLE[name]) for name in names})
        for name, piece in pieces.items():
            trainable.parameters[name] = np.zeros(piece.local_shape)
        held = Stages(adapter, trainable.parameters, mesh.pipeline, pieces)
        shapes = {name: tensor.shape for name, tensor in trainable.parameters.items()}
        divided = buckets(shapes, mesh.data.size, 8, most_bytes)
        shares = CopiedShares(adapter, trainable, mesh.data, "shares", may_span, divided, held)
        slot = StateEntry(shares, shares.variables(), "slot.")
        slot.load({f"slot.{name}": array for name, array in whole.items()})
        shares.stored.load(whole)
        both = dict(slot.gather()) | dict(shares.stored.gather(sorted(WHOLE)))
        own = [np.sqrt(np.sum(tensor**2)) for tensor in slot.tensors.values()]
        total = float(np.squeeze(shares.sum_of_squares(own)))
        norms = {} if may_span else dict(zip(shares.pieces, shares.norms(list(slot.tensors.values()))[0], strict=True))
        for piece, tensor in zip(shares.weights(), slot.tensors.values(), strict=True):
            assert np.array_equal(piece, tensor)
        return both, total, {shares.pieces[name].name: float(np.squeeze(norm)) for name, norm in norms.items()}

    squares = {name: float(np.sum(array**2)) for name, array in whole.items()}
    for both, total, norms in together(8, found):
        assert all(np.array_equal(both[name], array) for name, array in whole.items())
        assert all(np.array_equal(both[f"slot.{name}"], array) for name, array in whole.items())
        assert total == pytest.approx(sum(squares.values()), rel=1e-14)
        assert norms == {name: pytest.approx(squares[name] ** 0.5, rel=1e-14) for name in norms}
        assert may_span or norms
