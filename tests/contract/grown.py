"""What every adapter promises beyond a plain step: optimizers, precisions, accumulation, recomputation, equal bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hvdkit import tasks
from hvdkit.core.group import Topology
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.precision import LOSS_SCALING, PRECISIONS
from hvdkit.core.seam import Adapter
from hvdkit.core.state import parameters_of
from hvdkit.data.batches import ArraySplit, Batch, Dataset
from hvdkit.errors import RunError
from hvdkit.handlers.rank_checks import check_ranks
from hvdkit.handlers.standard import attach
from hvdkit.recipe.schema import AdamW, EarlyStopping, Lamb, Lars, Optimizer, Recipe, Sgd
from tests.contract.cases import CLASSES, FEATURES, Make, batch, case, error, features, group_of, mesh_of, same
from tests.contract.papers import RULES, clipped

RATES = (0.1, 0.1, 0.03, 0.03, 0.2)
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(learning_rate=0.1, weight_decay=0.0),
    "sgd without momentum": Sgd(learning_rate=0.1, momentum=0.0, weight_decay=0.1),
    "nesterov, coupled decay": Sgd(learning_rate=0.1, nesterov=True, weight_decay=0.1),
    "coupled decay, weights alone": Sgd(learning_rate=0.1, weight_decay=0.1, decay="weights"),
    "decoupled decay": Sgd(learning_rate=0.1, weight_decay=0.1, decoupled=True),
    "nesterov, decoupled, weights alone": Sgd(
        learning_rate=0.1, nesterov=True, weight_decay=0.1, decoupled=True, decay="weights"
    ),
    "adamw": AdamW(learning_rate=0.1, weight_decay=0.1),
    "adamw, weights alone": AdamW(learning_rate=0.1, weight_decay=0.1, decay="weights", beta2=0.99, epsilon=1e-3),
    "lars": Lars(learning_rate=0.1, weight_decay=0.1, trust_coefficient=0.1),
    "lars, weights alone": Lars(learning_rate=0.1, weight_decay=0.1, decay="weights"),
    "lamb": Lamb(learning_rate=0.1, weight_decay=0.1),
    "lamb, weights alone": Lamb(learning_rate=0.1, weight_decay=0.1, decay="weights", clip_norm=0.5),
    "clipped": Sgd(learning_rate=0.1, clip_norm=0.5),
    "clipped, but never so long": Sgd(learning_rate=0.1, clip_norm=1e6),
}


def changed(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not same(before[name], after[name])]


def worst(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert got.keys() == expected.keys()
    return max(error(got[name], expected[name].astype(np.float64)) for name in expected)


@case
def optimizers_follow_their_papers(adapter: Adapter, topology: Topology, make: Make) -> None:
    same_weights = make(tiny=True, precision="fp64")  # tells the gradients, which it compiles once
    for title, optimizer in OPTIMIZERS.items():
        session = make(tiny=True, precision="fp64", optimizer=optimizer)
        expected = session.state()
        for step, rate in enumerate(RATES, start=1):
            mine = features(10 * step + topology.rank)
            same_weights.load_state(parameters_of(expected))
            averaged = same_weights.gradients(mine).averaged
            session.set_learning_rate(rate)
            session.train_step([mine])
            if optimizer.clip_norm is not None:
                averaged = clipped(averaged, optimizer.clip_norm)
            for name, gradient in averaged.items():
                kept = [key.split(".", 2) for key in expected if key.startswith("optimizer.") and key.count(".") > 1]
                slots = {slot: expected[f"optimizer.{slot}.{name}"] for _, slot, owner in kept if owner == name}
                weight, slots = RULES[optimizer.name](expected[name], gradient, slots, rate, step, optimizer)
                expected |= {name: weight} | {f"optimizer.{slot}.{name}": value for slot, value in slots.items()}
            if "optimizer.step" in expected:
                expected["optimizer.step"] = np.asarray(step)
            got = session.state()
            assert worst(got, expected) < 1e-12, f"{title}, step {step}: {worst(got, expected):.1e}"


@case
def own_gradients_average_to_the_applied(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make(precision="fp64")
    before = session.state()
    got = session.gradients(batch(topology.rank))
    assert got.outputs.shape == (8, CLASSES) and got.outputs.dtype == np.float64
    everyone = adapter.allgather_object(got.own, group_of(topology), name="grown.own")
    mean = {name: sum(own[name] for own in everyone) / topology.size for name in got.own}
    assert worst(got.averaged, mean) < 1e-12
    assert got.own.keys() == parameters_of(before).keys()
    after = session.state()
    assert [name for name in changed(before, after) if ".running_" not in name] == []
    loss = float(adapter.to_numpy(session.train_step([batch(topology.rank)])).mean())
    assert abs(got.loss - loss) < 1e-6


@case
def an_update_over_parts_equals_the_whole_batch(adapter: Adapter, topology: Topology, make: Make) -> None:
    """Rank 0 takes its batch in three parts, the others whole: were each part sent, ranks would wait for ever."""
    after = []
    for parts in (1, 3 if topology.rank == 0 else 1):
        session = make(tiny=True, precision="fp64", momentum=0.9)
        for step in range(3):
            whole = features(10 * step + topology.rank, count=12)
            pieces = zip(np.split(whole.inputs, parts), np.split(whole.targets, parts), strict=True)
            session.train_step([Batch(images, labels) for images, labels in pieces])
        after.append(session.state())
    assert worst(after[1], after[0]) < 1e-12
    assert changed(after[0], make(tiny=True, precision="fp64", momentum=0.9).state()) != []


def small_run(topology: Topology) -> tuple[Recipe, Dataset]:
    """Two epochs of three batches in updates of two, so the last of each epoch has one."""
    everything = features(1, count=3 * 4 * topology.size)
    split = ArraySplit(everything.inputs, everything.targets)
    dataset = Dataset(split, ArraySplit(split.inputs[:5], split.targets[:5]), (1, FEATURES, 1), CLASSES)
    recipe = Recipe.model_validate(
        {
            "name": "fit",
            "model": {"name": "resnet20"},
            "data": {"name": "digits"},
            "batch_size": 4,
            "epochs": 2,
            "steps": 3,
            "accumulate": 2,
            "optimizer": {"name": "adamw", "learning_rate": 0.01},
        }
    )
    return recipe, dataset


@case
def the_frameworks_own_loop_takes_the_same_updates(adapter: Adapter, topology: Topology, make: Make) -> None:
    """With a stop in an epoch."""
    recipe, dataset = small_run(topology)
    sessions = [make(tiny=True, precision="fp64", optimizer=recipe.optimizer) for _ in range(2)]
    loops = [attach(Loop(session, tasks.choose(recipe), recipe, mesh_of(topology), dataset)) for session in sessions]
    assert loops[0].group_sizes == [2, 1] and loops[0].total_steps == 3
    loops[0].train()
    loops[1].run()
    assert worst(sessions[0].state(), sessions[1].state()) < 1e-12
    assert loops[0].progress.step == loops[1].progress.step == 3
    assert abs(loops[0].progress.train_loss - loops[1].progress.train_loss) < 1e-6


class EndsAtOne(Handler):
    """Ends the run after its first step if it `asks` for it; notes what it has seen."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks
        self.seen: list[tuple[str, int, int]] = []

    def on_epoch_begin(self, run: Loop) -> None:
        self.seen.append(("epoch begins", run.epoch, run.step))

    def on_step_end(self, run: Loop) -> None:
        self.seen.append(("step", run.epoch, run.step))
        assert np.isfinite(run.loss)
        if self._asks and run.step == 1:
            run.stop("enough")

    def on_epoch_end(self, run: Loop) -> None:
        assert 0 <= run.progress.validation["accuracy"] <= 1
        self.seen.append(("epoch ends", run.epoch, run.step))


@case
def a_handler_on_one_rank_ends_the_run_on_all(adapter: Adapter, topology: Topology, make: Make) -> None:
    """In the middle of an epoch: at a step that is logged, whatever early stopping says of the epoch."""
    recipe, dataset = small_run(topology)
    session = make(tiny=True, precision="fp64", optimizer=recipe.optimizer)
    recipe = recipe.model_copy(update={"log_every": 1, "early_stopping": EarlyStopping(patience=9)})
    handler = EndsAtOne(asks=topology.rank == topology.size - 1)
    loop = Loop(session, tasks.choose(recipe), recipe, mesh_of(topology), dataset)
    kept: list[int] = []
    attach(loop, None, lambda progress, own: kept.append(progress.step), of_task=[handler]).train()
    assert handler.seen == [("epoch begins", 0, 0), ("step", 0, 1), ("epoch ends", 0, 1)], handler.seen
    assert loop.stopped_early == "stopped early after step 1 of 3: enough" and kept == [1] and loop.progress.evaluated


@case
def declared_precisions_train(adapter: Adapter, topology: Topology, make: Make) -> None:
    exact = make()
    start = parameters_of(exact.state())
    exact.train_step([batch(topology.rank)])
    reference = parameters_of(exact.state())
    moved = {name: reference[name] - start[name] for name in start}
    for precision, tolerance in (("fp64", 1e-3), ("bf16", 0.5), ("fp16", 0.1)):
        if precision not in adapter.CAPABILITIES or adapter.NAME == "local":
            continue
        session = make(precision=precision)
        session.train_step([batch(topology.rank)])
        after = parameters_of(session.state())
        assert {str(value.dtype) for value in after.values()} == {PRECISIONS[precision].parameters}, precision
        got = {name: after[name] - start[name] for name in start}
        total = np.sqrt(sum(np.sum((got[name] - moved[name]) ** 2) for name in start))
        apart = total / np.sqrt(sum(np.sum(moved[name] ** 2) for name in start))
        assert apart < tolerance, (precision, apart)
        assert precision == "fp64" or apart > 1e-5, f"{precision} computed in fp32"


@case
def an_overflow_on_one_rank_skips_the_step_on_all(adapter: Adapter, topology: Topology, make: Make) -> None:
    if "fp16" not in adapter.CAPABILITIES:
        return
    for optimizer in (Sgd(learning_rate=0.1), AdamW(learning_rate=0.1)):
        session = make(tiny=True, precision="fp16", optimizer=optimizer)
        assert float(session.state()["optimizer.loss_scale"]) == LOSS_SCALING.initial
        scale = 256.0  # the first of all may well overflow
        session.load_state(session.state() | {"optimizer.loss_scale": np.asarray(scale)})
        session.train_step([features(topology.rank)])
        before = session.state()
        assert int(before["optimizer.good_steps"]) == 1
        huge = features(topology.rank)
        if topology.rank == topology.size - 1:
            huge = replace(huge, inputs=huge.inputs * np.float32(1e38))
        session.train_step([huge])
        after = session.state()
        assert set(changed(before, after)) == {"optimizer.loss_scale", "optimizer.good_steps"}, changed(before, after)
        assert float(after["optimizer.loss_scale"]) == scale * LOSS_SCALING.backoff
        assert int(after["optimizer.good_steps"]) == 0
        session.train_step([features(topology.rank)])
        assert "fc.weight" in changed(after, session.state())
        session.train_step([huge, features(topology.rank)])
        before = session.state()
        session.train_step([features(topology.rank), features(topology.rank)])
        assert "fc.weight" in changed(before, session.state()), "an overflow of an earlier microbatch stays in the sums"


@case
def scaling_the_loss_does_not_show_in_the_update(adapter: Adapter, topology: Topology, make: Make) -> None:
    if "fp16" not in adapter.CAPABILITIES:
        return
    results = []
    for precision in ("fp32", "fp16"):
        session = make(tiny=True, precision=precision, clip_norm=0.5)
        if precision == "fp16":
            session.load_state(session.state() | {"optimizer.loss_scale": np.asarray(256.0)})
        session.train_step([features(topology.rank), features(7 + topology.rank)])
        results.append(parameters_of(session.state()))
    assert worst(results[1], results[0]) < 1e-2  # half precision is good for three digits


@case
def recomputed_activations_give_the_same_step(adapter: Adapter, topology: Topology, make: Make) -> None:
    if "recompute" not in adapter.CAPABILITIES:
        return
    found = []
    for recompute in (False, True):
        session = make(precision="fp64", recompute=recompute)
        start = session.state()
        gradients = session.gradients(batch(topology.rank)).own
        session.load_state(start)
        for step in range(3):
            session.train_step([batch(10 * step + topology.rank)])
        found.append((gradients, session.state()))
    assert worst(found[1][0], found[0][0]) < 1e-12
    assert worst(found[1][1], found[0][1]) < 1e-9, "buffers too: a batch must count once"


@case
def the_same_seed_gives_the_same_bits(adapter: Adapter, topology: Topology, make: Make) -> None:
    runs = []
    for _ in range(2):
        session = make()
        for step in range(3):
            session.train_step([batch(10 * step + topology.rank)])
        runs.append(session.state())
    assert changed(runs[0], runs[1]) == []


@case
def slots_and_counts_are_saved_loaded_and_broadcast(adapter: Adapter, topology: Topology, make: Make) -> None:
    settings = [{"optimizer": AdamW(learning_rate=0.1)}]
    if "fp16" in adapter.CAPABILITIES:
        settings.append({"optimizer": Lamb(learning_rate=0.1), "precision": "fp16"})
    for each in settings:
        create = partial(make, tiny=True, **each)
        session: Any = create()
        state = session.state()
        state = {name: value + np.asarray(topology.rank, value.dtype) for name, value in state.items()}
        session.load_state(state)
        assert changed(session.state(), state) == []
        session.broadcast_state(group_of(topology))
        roots = adapter.allgather_object(state, group_of(topology), name="grown.slots")[0]
        assert changed(session.state(), roots) == []
        session.train_step([features(topology.rank)])
        first = session.state()
        other = create()
        other.load_state(roots)
        other.train_step([features(topology.rank)])
        assert changed(other.state(), first) == []


@case
def ranks_that_have_drifted_apart_are_named(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    check_ranks(session, mesh_of(topology), step=4)
    state = session.state()
    if topology.rank == topology.size - 1:
        state["fc.bias"] = state["fc.bias"] + np.float32(1e-3)
    session.load_state(state)
    if topology.size == 1:
        return
    try:
        check_ranks(session, mesh_of(topology), step=5)
    except RunError as told:
        text = str(told)
        everyone = mesh_of(topology).world.size
        last = range(everyone - everyone // topology.size, everyone)  # of each group: they have one stage
        found = f"rank{'s' if len(last) > 1 else ''} {', '.join(map(str, last))} differ"
        assert found in text and "step 5" in text and "fc.bias" in text, text
    else:
        raise AssertionError("nobody has noticed")
