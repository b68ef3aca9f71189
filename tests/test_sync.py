"""Local SGD and what surrounds compression in a run: rounds, checkpoints, settings; ranks as threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdkit import tasks
from hvdkit.core.group import Mesh, Topology, world_of
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.session import Session
from hvdkit.core.state import parameters_of
from hvdkit.core.step_plan import Progress
from hvdkit.core.strategy import without_strategy
from hvdkit.data import batches
from hvdkit.errors import RequestError
from hvdkit.handlers import rank_checks
from hvdkit.handlers.standard import attach
from hvdkit.recipe.schema import Recipe, flat
from hvdkit.strategies import choose
from hvdkit.strategies.compressed import Compressed
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.reducer import Reducer
from hvdkit.strategies.transports import TRANSPORTS
from hvdkit.worker.setup import check_alike
from tests.crowd import together
from tests.local_adapter import Linear

pytestmark = pytest.mark.check

DIGITS: dict[str, Any] = {
    "name": "local",
    "model": {"name": "resnet20"},
    "data": {"name": "digits"},
    "batch_size": 32,
    "optimizer": {"learning_rate": 0.05, "momentum": 0.9},
    "schedule": {"decay": "constant"},
    "steps": 12,
}
Weights = dict[str, np.ndarray]


def recipe_of(**settings: Any) -> Recipe:
    return Recipe.model_validate(DIGITS | settings)


@cache
def digits() -> batches.Dataset:
    recipe = recipe_of()
    return batches.open_dataset(recipe.data, 10, recipe.seed)


def weights_of(state: Weights) -> np.ndarray:
    return np.concatenate([value.reshape(-1) for _, value in sorted(parameters_of(state).items())])


class Watching(Handler):
    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch

    def on_step_end(self, run: Loop) -> None:
        self._watch()


class Run:
    """One rank's training; `watch(run)` is called behind each update."""

    def __init__(self, adapter: Any, topology: Topology, recipe: Recipe, held: Any = None) -> None:
        self.adapter, self.topology, self.recipe = adapter, topology, recipe
        # always by hvdkit's own reduction, as the null adapter's reduces nothing
        transport = TRANSPORTS[recipe.allreduce](adapter, Mesh(topology), "gradients")
        momentum = float(getattr(recipe.optimizer, "momentum", 0.0))
        reducer = Reducer(transport, recipe.compression, recipe.seed, momentum, recipe.optimizer.clip_norm)
        self.communication = Compressed(reducer) if recipe.sync is None else choose(adapter, Mesh(topology), recipe)
        model = Linear(32 * 32 * 3, 10)
        self.session = Session(adapter, model, recipe.optimizer, recipe.loss, self.communication)
        progress = Progress()
        if held:
            progress, state = copy.copy(held[0]), held[1]
            self.session.load_state(without_strategy(state))
            self.communication.load_state(state)
        self.kept: list[Any] = []
        self.final: Weights = {}  # the state at the end
        loop = Loop(self.session, tasks.choose(recipe), recipe, Mesh(topology), digits(), progress=progress)
        self.loop = attach(loop, None, self._keep)

    def _keep(self, progress: Progress, own: object) -> None:
        self.kept.append((copy.copy(progress), self.state()))

    def state(self) -> Weights:
        return self.session.state() | self.communication.state()

    def train(self, watch: Callable[[Run], None] = lambda run: None) -> Run:
        self.loop.handlers.append(Watching(lambda: watch(self)))
        self.loop.train()
        self.final = self.state()
        return self


def trained(recipe: Recipe, size: int = 2, held: Any = None) -> list[Run]:
    digits()
    return together(size, lambda adapter, topology: Run(adapter, topology, recipe, held).train())


def histories(recipe: Recipe, size: int = 2) -> list[list[np.ndarray]]:
    """By rank: the weights behind each update."""

    def work(adapter: Any, topology: Topology) -> list[np.ndarray]:
        seen: list[np.ndarray] = []
        Run(adapter, topology, recipe).train(lambda run: seen.append(weights_of(run.session.state())))
        return seen

    digits()
    return together(size, work)


@pytest.mark.parametrize("optimizer", [{}, {"nesterov": True}, {"weight_decay": 0.1, "momentum": 0.5}])
def test_local_sgd_that_meets_at_each_update_is_synchronous_sgd(optimizer: dict[str, Any]) -> None:
    settings = {"optimizer": DIGITS["optimizer"] | optimizer}
    one = histories(recipe_of(**settings))[0]
    other = histories(recipe_of(**settings, sync={"every": 1}))[1]
    for mine, theirs in zip(one, other, strict=True):
        assert np.linalg.norm(mine - theirs) / np.linalg.norm(theirs) < 1e-13


def test_ranks_go_apart_and_meet_at_their_mean() -> None:
    alone = histories(recipe_of(sync={"every": 1000}))  # the mean only at the end, behind the last watch
    met = histories(recipe_of(sync={"every": 4}))
    for step in range(12):
        same = np.array_equal(met[0][step], met[1][step])
        assert same == ((step + 1) % 4 == 0), step
    assert np.allclose(met[0][3], (alone[0][3] + alone[1][3]) / 2, rtol=1e-12)
    assert not np.allclose(alone[0][3], alone[1][3], rtol=1e-3)


def test_post_local_sgd_begins_where_it_is_told_to() -> None:
    steps_per_epoch = len(digits().train) // 64
    start = 6 / steps_per_epoch
    seen = histories(recipe_of(sync={"every": 4, "start": start}))
    synchronous = histories(recipe_of())
    for step in range(12):
        assert np.array_equal(seen[0][step], seen[1][step]) == (step < 6 or step == 9), step
    assert np.array_equal(seen[0][5], synchronous[0][5])


def test_diloco_follows_its_paper() -> None:
    """Algorithm 1 of Douillard et al. 2023 with Nesterov's momentum, written out over what ranks do in between."""
    rate, momentum = 0.7, 0.9
    sync = {"every": 3, "outer": {"method": "nesterov", "learning_rate": rate, "momentum": momentum}}

    def work(adapter: Any, topology: Topology) -> Any:
        seen: list[np.ndarray] = []
        run = Run(adapter, topology, recipe_of(sync=sync))
        synchronize = run.communication.synchronize

        def watched() -> None:
            if run.communication.diverged:
                seen.append(weights_of(run.session.state()))
            synchronize()
            seen.append(weights_of(run.session.state()))

        run.communication.synchronize = watched
        run.train()
        return seen

    digits()
    seen = together(2, work)
    anchor, velocity = np.zeros(30730), np.zeros(30730)
    for first, second, after in [(seen[0][i], seen[1][i], seen[0][i + 1]) for i in range(0, 8, 2)]:
        difference = anchor - (first + second) / 2
        velocity = momentum * velocity + difference
        anchor = anchor - rate * (difference + momentum * velocity)
        assert np.allclose(after, anchor, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": {"method": "topk", "ratio": 0.05}},
        {"compression": {"method": "topk", "ratio": 0.05, "momentum_correction": True}},
        {"compression": {"method": "powersgd", "rank": 2}},
        {"compression": {"method": "int8", "error_feedback": True}},
        {"sync": {"every": 4}},
        {"sync": {"every": 4, "outer": "nesterov"}, "compression": {"method": "topk", "ratio": 0.05}},
        {
            "sync": {"every": 3, "start": 0.2},
            "compression": "int8",
            "optimizer": {"name": "adamw", "learning_rate": 0.01},
        },
    ],
    ids=str,
)
def test_a_run_goes_on_from_its_checkpoint_bit_by_bit(settings: dict[str, Any]) -> None:
    """A checkpoint in the middle of a round too: what is kept is one model, from which the run itself goes on."""
    recipe = recipe_of(**settings, checkpoint={"every_steps": 5, "every_epochs": 0})
    whole = trained(recipe)
    progress, state = whole[0].kept[0]
    assert progress.step == 5
    for name, value in whole[1].kept[0][1].items():
        assert value.tobytes() == state[name].tobytes(), name
    again = trained(recipe, held=(progress, state))
    for before, after in zip(whole, again, strict=True):
        mine, theirs = before.final, after.final
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()] == []
    more = trained(recipe, size=3, held=(progress, state))
    assert np.isfinite(weights_of(more[2].final)).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": {"method": "topk", "ratio": 0.01}},
        {
            "compression": {"method": "topk", "ratio": 0.01, "momentum_correction": True, "warmup_epochs": 1},
            "optimizer": {"learning_rate": 0.01, "momentum": 0.9},
            "epochs": 3,
        },
        {"compression": "int8"},
        {"compression": "bf16"},
        {"compression": {"method": "powersgd", "rank": 1}},
        {"sync": {"every": 8}},
        {"sync": {"every": 8, "outer": {"method": "nesterov", "learning_rate": 0.7, "momentum": 0.5}}},
        {"sync": {"every": 4}, "compression": {"method": "topk", "ratio": 0.05}, "accumulate": 2},
        {"allreduce": "central", "compression": "fp16", "optimizer": DIGITS["optimizer"] | {"clip_norm": 1.0}},
    ],
    ids=str,
)
def test_each_way_learns(settings: dict[str, Any]) -> None:
    run, other = trained(recipe_of(**{"epochs": 2, "steps": None} | settings))
    assert run.loop.progress.validation["accuracy"] > 0.85
    assert run.loop.progress.validation == other.loop.progress.validation
    assert weights_of(run.final).tobytes() == weights_of(other.final).tobytes(), "one model at the end"
    sent, dense = run.communication.bytes_per_step, 8 * 30730
    assert sent > 0
    if "allreduce" not in settings and settings.get("compression") != "bf16":  # of which some rank sends more
        assert sent < 0.6 * dense


def test_clipping_with_momentum_correction_is_the_ranks_own() -> None:
    settings = {"optimizer": DIGITS["optimizer"] | {"clip_norm": 0.1}}
    corrected = {"compression": {"method": "topk", "ratio": 1.0, "momentum_correction": True}}
    run = trained(recipe_of(**settings, **corrected))[0]
    assert run.communication.optimizer(run.recipe.optimizer).clip_norm is None and run.recipe.optimizer.clip_norm == 0.1
    plain = trained(recipe_of(**settings))[0]
    # smaller: each rank's part is at most 0.1 / √2 long
    assert np.linalg.norm(weights_of(run.final)) < np.linalg.norm(weights_of(plain.final))


def test_ranks_are_compared_when_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_ranks` falls into rounds here; nobody has drifted apart who was told to go alone."""
    compared, sound = set(), rank_checks.check_ranks

    def watched(session: Session, mesh: Mesh, step: int) -> None:
        compared.add(step)
        sound(session, mesh, step)

    monkeypatch.setattr(rank_checks, "check_ranks", watched)
    trained(recipe_of(sync={"every": 4}, check_ranks=3))
    assert compared == {4, 8, 12}, "asked for behind updates 3, 6, 9 and 12"


def test_bytes_of_horovods_own_reduction_are_counted_too() -> None:
    def work(adapter: Any, topology: Topology) -> Any:
        found = {}
        for name in ("none", "fp16"):
            strategy = choose(adapter, Mesh(topology), recipe_of(compression=name))
            assert isinstance(strategy, Dense)
            trainable = SimpleNamespace(overlaps=True, parameters={"weight": np.zeros(1000)})
            strategy.bind(SimpleNamespace(dtype="float32", trainable=trainable))
            found[name] = strategy.bytes_per_step
        return found

    assert together(4, work)[0] == {"none": 1.5 * 4000, "fp16": 1.5 * 2000}


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("compression.ratio", [{"compression": {"method": "topk", "ratio": ratio}} for ratio in (0.01, 0.02)]),
        ("sharding", [{"sharding": stage} for stage in ("optimizer", "parameters")]),
    ],
)
def test_ranks_that_disagree_on_a_setting_are_told(key: str, settings: list[dict[str, Any]]) -> None:
    def work(adapter: Any, topology: Topology) -> str:
        theirs = recipe_of(**settings[topology.rank == 2])
        with pytest.raises(RequestError) as caught:
            check_alike(adapter, world_of(topology), flat(theirs))
        check_alike(adapter, world_of(topology), flat(recipe_of()))
        return str(caught.value)

    told = set(together(3, work))
    first, other = (flat(recipe_of(**each))[key] for each in settings)
    assert told == {f"{key}: expected the same on all ranks, got {first} on rank 0 and {other} on rank 2"}
