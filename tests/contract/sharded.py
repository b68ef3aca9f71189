"""What every adapter promises to sharding: each stage makes the updates of a model that is not sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.core.group import Topology
from hvdkit.core.seam import Adapter
from hvdkit.core.state import parameters_of
from hvdkit.recipe.schema import AdamW, Lamb, Sgd
from hvdkit.strategies.sharded import Sharded
from hvdkit.strategies.sharded_parameters import ShardedParameters
from tests.contract.cases import Make, case, features, fresh, group_of, mesh_of, same
from tests.contract.grown import OPTIMIZERS, RATES, changed, worst

TINY_BUCKET = 400  # bytes: two buckets of the tiny model, and a tensor that is larger


def stages(adapter: Adapter) -> list[str]:
    """Those that the framework has."""
    return ["optimizer", *(each for each in ("gradients", "parameters") if f"shard-{each}" in adapter.CAPABILITIES)]


def sharded(adapter: Adapter, topology: Topology, stage: str, **more: Any) -> Sharded:
    axis, more = mesh_of(topology).data, {"name": fresh()} | more
    if stage == "parameters":
        return ShardedParameters(adapter, axis, **more)
    return Sharded(adapter, axis, stage == "gradients", **more)


# One of each rule; the others are tried over ranks that are threads (tests/test_sharding.py).
_TRIED = {
    "nesterov, coupled decay": ("optimizer",),
    "adamw, weights alone": ("optimizer", "gradients", "parameters"),
    "lars, weights alone": ("optimizer",),
    "lamb, weights alone": ("optimizer", "parameters"),  # and clipped
}


@case
def sharded_updates_are_those_of_the_whole(adapter: Adapter, topology: Topology, make: Make) -> None:
    """Step by step from the same state; biases and a matrix are split between ranks."""
    for title, tried in _TRIED.items():
        optimizer = OPTIMIZERS[title]
        whole = make(tiny=True, precision="fp64", optimizer=optimizer)
        for stage in (each for each in stages(adapter) if each in tried):
            more = {} if stage == "parameters" else {"most_bytes": TINY_BUCKET}
            strategy = sharded(adapter, topology, stage, **more)
            session = make(tiny=True, precision="fp64", optimizer=optimizer, strategy=strategy)
            for step, rate in enumerate(RATES):
                mine = features(10 * step + topology.rank)
                session.load_state(whole.state())
                for each in (whole, session):
                    each.set_learning_rate(rate)
                    each.train_step([mine])
                found = worst(session.state(), whole.state())
                assert found < 1e-12, f"{title}, {stage}, step {step}: {found:.1e}"


@case
def sharded_updates_by_the_frameworks_kernels_are_those_of_the_whole(
    adapter: Adapter, topology: Topology, make: Make
) -> None:
    """In float32, for which MXNet's kernels are used; biases are spared from decay."""
    tried = [stage for stage in stages(adapter) if stage != "gradients"]
    for optimizer in (AdamW(learning_rate=0.1, decay="weights"), Sgd(learning_rate=0.1, decay="weights")):
        whole = make(tiny=True, optimizer=optimizer)
        sessions = [make(tiny=True, optimizer=optimizer, strategy=sharded(adapter, topology, each)) for each in tried]
        for step in range(2):
            for each in (whole, *sessions):
                each.train_step([features(10 * step + topology.rank)])
        for stage, session in zip(tried, sessions, strict=True):
            assert worst(session.state(), whole.state()) < 1e-4, (stage, worst(session.state(), whole.state()))


@case
def sharded_accumulation_is_that_of_the_whole(adapter: Adapter, topology: Topology, make: Make) -> None:
    optimizer = AdamW(learning_rate=0.1, clip_norm=0.5)
    for stage in stages(adapter):
        whole = make(tiny=True, precision="fp64", optimizer=optimizer)
        session = make(tiny=True, precision="fp64", optimizer=optimizer, strategy=sharded(adapter, topology, stage))
        for step in range(3):
            parts = [features(100 * step + 10 * part + topology.rank) for part in range(3)]
            for each in (whole, session):
                each.train_step(parts if step else parts[:1])
        assert worst(session.state(), whole.state()) < 1e-12


@case
def sharded_gradients_can_be_looked_at(adapter: Adapter, topology: Topology, make: Make) -> None:
    whole = make(tiny=True, precision="fp64")
    for stage in stages(adapter):
        session = make(tiny=True, precision="fp64", strategy=sharded(adapter, topology, stage))
        before = session.state()
        mine = features(topology.rank)
        for _ in range(2):
            assert worst(session.gradients(mine).averaged, whole.gradients(mine).averaged) < 1e-12
        assert changed(before, session.state()) == []


@case
def an_overflow_on_one_rank_skips_all_shares(adapter: Adapter, topology: Topology, make: Make) -> None:
    if "fp16" not in adapter.CAPABILITIES:
        return
    for stage in stages(adapter):
        optimizer = Lamb(learning_rate=0.1, clip_norm=1.0)
        session = make(tiny=True, precision="fp16", optimizer=optimizer, strategy=sharded(adapter, topology, stage))
        session.load_state(session.state() | {"optimizer.loss_scale": np.asarray(256.0)})
        session.train_step([features(topology.rank)])
        before, huge = session.state(), features(topology.rank)
        if topology.rank == topology.size - 1:
            huge = replace(huge, inputs=huge.inputs * np.float32(1e38))
        session.train_step([huge])
        found = changed(before, session.state())
        assert set(found) == {"optimizer.loss_scale", "optimizer.good_steps"}, found
        session.train_step([features(topology.rank)])
        assert "fc.weight" in changed(before, session.state())


@case
def shares_go_into_a_state_and_come_back(adapter: Adapter, topology: Topology, make: Make) -> None:
    """Into a session that is not sharded, and to every rank from one that has another's state."""
    optimizer = AdamW(learning_rate=0.1)
    for stage in (each for each in stages(adapter) if each != "gradients"):
        session = make(tiny=True, optimizer=optimizer, strategy=sharded(adapter, topology, stage))
        session.train_step([features(topology.rank)])
        saved = session.state()
        everyone = adapter.allgather_object(saved, group_of(topology), name="sharded.state")
        assert all(same(other[name], saved[name]) for other in everyone for name in saved)
        whole = make(tiny=True, optimizer=optimizer)
        whole.load_state(saved)
        assert changed(whole.state(), saved) == []
        moved = {name: value + np.asarray(1, value.dtype) for name, value in saved.items()}
        session.broadcast_state(group_of(topology), group_of(topology).root, moved if topology.rank == 0 else {})
        assert changed(session.state(), moved) == []


@case
def half_precision_gradients_reach_shares(adapter: Adapter, topology: Topology, make: Make) -> None:
    results = []
    for half in (False, True):
        session = make(tiny=True, strategy=sharded(adapter, topology, "optimizer", half=half), weight_decay=0.0)
        session.train_step([features(topology.rank)])
        results.append({name: value for name, value in session.state().items() if "momentum" in name})
    assert 1e-6 < worst(results[1], results[0]) < 2e-3


@case
def state_bytes_are_the_closed_forms(adapter: Adapter, topology: Topology, make: Make) -> None:
    """Rajbhandari et al. 2020, section 3, with one dtype throughout, but for a padding of up to an element a rank."""
    for optimizer, slots in ((Sgd(learning_rate=0.1), 1), (AdamW(learning_rate=0.1), 2)):
        for stage in ("none", *stages(adapter)):
            strategy = None if stage == "none" else sharded(adapter, topology, stage)
            session = make(tiny=True, optimizer=optimizer, strategy=strategy)
            session.train_step([features(topology.rank)])
            weights = parameters_of(session.state()).values()
            whole, itemsize = sum(value.nbytes for value in weights), max(value.itemsize for value in weights)
            share = itemsize * -(-whole // itemsize // topology.size)
            assert session.state_bytes() == {
                "parameters": share if stage == "parameters" else whole,
                "gradients": share if stage in ("gradients", "parameters") else whole,
                "optimizer": slots * (whole if stage == "none" else share),
            }, (optimizer.name, stage, session.state_bytes())
