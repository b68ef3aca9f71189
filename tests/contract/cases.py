"""What every adapter promises. Each case runs on all ranks at once, under every framework; `local` runs them alone.

A case gets the adapter, the rank's topology and a `make` that binds a fresh model to its optimizer: ResNet-8, or with
`tiny` two dense layers. Importing this file loads no framework. The cases here are of a plain step; the files that
`everything.py` names add theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdkit.adapters.capabilities import MEANINGS
from hvdkit.core.group import Group, Mesh, Topology
from hvdkit.core.seam import Adapter
from hvdkit.data.batches import Batch
from hvdkit.errors import RequestError
from hvdkit.strategies.dense import from_wire, on_wire

SHAPE = (16, 16, 3)
CLASSES = 10
FEATURES = 12  # of the tiny model
# What one collective can show; the others have cases of their own in grown.py, but for those of a GPU, and those that
# `hvdkit profile` asks for, which tests/test_profile_runs.py tries.
_TRAINS = {"gpu", "fp64", "bf16", "fp16", "gpu-bf16", "gpu-fp16", "recompute", "exact-sums"} | {
    "shard-gradients",
    "shard-parameters",
}
PROBED = sorted(
    set(MEANINGS)
    - _TRAINS
    - {"layer-times", "order", "own-profile", "shard-gradients", "shard-parameters"}
    - {"pipeline", "pipeline-own", "pipeline-resnet", "interleaved", "tensor", "tensor-resnet"}
)
Make = Callable[..., Any]
seeds_from = 0  # of batches: another value for each group of ranks, so that what leaks from one to the other is seen


@dataclass(frozen=True)
class Place(Topology):
    """This rank among those of its data axis, which run the cases together, beside the other data axes of `mesh`."""

    mesh: Mesh = field(default_factory=lambda: Mesh(Topology()))


_numbers = itertools.count()


def fresh() -> str:
    """A name for a strategy's collectives: MXNet may still run those of one when the next begins."""
    return f"case.{next(_numbers)}"


def mesh_of(topology: Topology) -> Mesh:
    return topology.mesh if isinstance(topology, Place) else Mesh(topology)


def group_of(topology: Topology) -> Group:
    """The ranks that run a case."""
    return mesh_of(topology).data


Case = Callable[[Adapter, Topology, Make], None]
CASES: dict[str, Case] = {}
# Cases of what ranks send each other. TensorFlow compiles too much for all of them on four ranks.
BETWEEN: list[str] = []
# Cases that see collectives over more ranks than their group.
LEAKS = (
    "allreduce_reduces_by_each_op",
    "allgather_joins_unequal_parts_in_rank_order",
    "reducescatter_gives_each_rank_its_share_of_the_whole",
    "own_gradients_average_to_the_applied",
)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    if function.__module__.rpartition(".")[2] in ("collectives", "sharded", "squeezed") or function.__name__ in LEAKS:
        BETWEEN.append(function.__name__)
    return function


def probe(capability: str, adapter: Adapter, topology: Topology) -> str:
    """Try a capability; returns what is wrong, empty where it works. `gpu` is not to be tried everywhere."""
    group = group_of(topology)
    try:
        if capability in ("scalars", "empty"):
            array = np.float32(1.5) if capability == "scalars" else np.empty((0, 3), np.float32)
            array = np.asarray(array)
            (got,) = adapter.allreduce([adapter.from_numpy(array)], group, op="sum", name=f"probe.{capability}")
            good = same(adapter.to_numpy(got), (array * topology.size).astype(np.float32))
        else:
            tensor = adapter.cast(adapter.from_numpy(np.array([1, 2, 3], np.float32)), capability)
            (got,) = adapter.allreduce([tensor], group, op="sum", name=f"probe.{capability}")
            total = adapter.to_numpy(adapter.cast(got, "float32"))
            good = adapter.dtype(got) == capability and same(total, np.array([1, 2, 3], np.float32) * topology.size)
        return "" if good else f"a wrong result: {got}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def batch(seed: int, count: int = 8) -> Batch:
    random = np.random.default_rng(seeds_from + seed)
    images = random.standard_normal((count, *SHAPE)).astype(np.float32)
    return Batch(images, random.integers(0, CLASSES, count))


def features(seed: int, count: int = 8) -> Batch:
    """A batch for the tiny model."""
    random = np.random.default_rng(seeds_from + seed)
    return Batch(random.standard_normal((count, FEATURES)).astype(np.float32), random.integers(0, CLASSES, count))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / max(1e-30, np.linalg.norm(expected)))


def velocities(adapter: Adapter, session: Any) -> dict[str, np.ndarray]:
    return {name: value for name, value in session.state().items() if name.startswith("optimizer.momentum.")}


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
def state_has_canonical_names_and_comes_back_bit_for_bit(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    session.train_step([batch(topology.rank)])
    saved = session.state()
    assert "fc.weight" in saved and saved["fc.weight"].shape[0] == CLASSES
    assert "optimizer.momentum.fc.weight" in saved
    session.train_step([batch(5)])
    assert not same(session.state()["fc.weight"], saved["fc.weight"])
    session.load_state(saved)
    restored = session.state()
    assert restored.keys() == saved.keys()
    assert [name for name in saved if not same(saved[name], restored[name])] == []


@case
def a_state_that_does_not_fit_is_refused_by_name(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    state = session.state()
    bad = dict(state, **{"fc.bias": np.zeros(CLASSES + 1, np.float32), "extra.weight": np.zeros(1, np.float32)})
    del bad["fc.weight"]
    try:
        session.load_state(bad)
    except RequestError as refusal:
        text = str(refusal)
        assert "fc.weight is missing" in text and "fc.bias" in text and "extra.weight is unknown" in text, text
    else:
        raise AssertionError("a state that does not fit was loaded")
    assert same(session.state()["fc.bias"], state["fc.bias"]), "nothing may be loaded by halves"
    slot = "optimizer.momentum.fc.bias"
    strange = {slot: np.zeros(CLASSES + 1, np.float32), "optimizer.exp_avg.fc.bias": np.zeros(CLASSES, np.float32)}
    for wrong, part in (
        (state | {slot: strange[slot]}, f"{slot}: expected shape"),
        (state | {"optimizer.exp_avg.fc.bias": strange["optimizer.exp_avg.fc.bias"]}, "exp_avg.fc.bias is unknown"),
        ({name: value for name, value in state.items() if name != slot}, f"{slot} is missing"),
    ):
        try:
            session.load_state(wrong)
        except RequestError as refusal:
            assert part in str(refusal), str(refusal)
        else:
            raise AssertionError(f"loaded, though {part}")


@case
def broadcast_state_brings_parameters_buffers_and_slots(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    session.train_step([batch(topology.rank)])
    mine = {name: value + np.asarray(topology.rank, value.dtype) for name, value in session.state().items()}
    session.load_state(mine)
    session.broadcast_state(group_of(topology))
    got = session.state()
    roots = adapter.allgather_object(mine, group_of(topology), name="case.state")[0]
    assert [name for name in roots if not same(got[name], roots[name])] == []


@case
def the_applied_gradient_is_the_mean_of_the_ranks_own(adapter: Adapter, topology: Topology, make: Make) -> None:
    # The first velocity is the averaged gradient. A rank's own gradient depends on its own batch alone.
    session = make()
    start = session.state()

    def first_velocities(seed: int) -> dict[str, np.ndarray]:
        session.load_state(start)
        session.train_step([batch(seed)])
        return velocities(adapter, session)

    own = [first_velocities(seed) for seed in range(topology.size)]  # the same batch everywhere: the mean is each's own
    mixed = first_velocities(topology.rank)
    mean = {name: sum(each[name].astype(np.float64) for each in own) / topology.size for name in mixed}
    worst = max(error(mixed[name], mean[name]) for name in mixed)
    assert worst < 1e-5, worst
    if topology.size > 1:
        assert error(mixed["optimizer.momentum.fc.weight"], own[0]["optimizer.momentum.fc.weight"]) > 1e-2


@case
def ranks_stay_equal(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    session = make()
    for step in range(3):
        session.train_step([batch(10 * step + topology.rank)])
    everyone = adapter.allgather_object(
        {name: value for name, value in session.state().items() if ".running_" not in name}, group, name="case.equal"
    )
    for name, value in everyone[0].items():
        assert all(same(value, other[name]) for other in everyone), name


@case
def momentum_keeps_the_learning_rate_outside(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    for step, rate in enumerate((0.1, 0.003, 0.2)):
        before = session.state()
        session.set_learning_rate(rate)
        session.train_step([batch(step)])
        after = session.state()
        for name in ("fc.weight", "fc.bias"):
            expected = before[name].astype(np.float64) - rate * after[f"optimizer.momentum.{name}"]
            assert np.abs(after[name] - expected).max() < 1e-6, (step, name)


@case
def fp16_goes_over_the_wire_in_half_precision(adapter: Adapter, topology: Topology, make: Make) -> None:
    sent, own = on_wire(adapter, adapter.from_numpy(np.array([1 / 3, 2.0], np.float32)), half=True)
    assert adapter.dtype(sent) == "float16"
    assert adapter.dtype(from_wire(adapter, sent, own)) == "float32"
    whole = adapter.from_numpy(np.array([1, 2], np.int32))
    assert adapter.dtype(on_wire(adapter, whole, half=True)[0]) == "int32"
    slots = {}
    for name in ("none", "fp16"):
        session = make(tiny=True, compression=name)
        session.train_step([features(topology.rank)])
        slots[name] = velocities(adapter, session)["optimizer.momentum.fc.weight"]
    assert 1e-6 < error(slots["fp16"], slots["none"]) < 2e-3


@case
def the_loss_is_this_ranks_mean(adapter: Adapter, topology: Topology, make: Make) -> None:
    for smoothing in (0.0, 0.1):
        session = make(label_smoothing=smoothing)
        mine = batch(topology.rank)
        loss = float(adapter.to_numpy(session.train_step([mine])).mean())
        # the model starts with logits near zero, where the loss is log(classes) whatever the smoothing
        assert abs(loss - np.log(CLASSES)) < 0.2, loss


@case
def evaluation_changes_nothing(adapter: Adapter, topology: Topology, make: Make) -> None:
    session = make()
    session.train_step([batch(0)])
    before = session.state()
    images = batch(3).inputs
    first, second = session.predict(images), session.predict(images)
    assert first.shape == (len(images), CLASSES) and same(first, second)
    after = session.state()
    assert [name for name in before if not same(before[name], after[name])] == []
