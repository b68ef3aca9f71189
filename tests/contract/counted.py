"""Cases of losses that are (sum, count): an update divides one sum by one count, however the samples are divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.core.metrics import evaluate
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import ArraySplit, Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.communication import Sync, TopK, Uncompressed
from hvdkit.recipe.schema import AdamW, Loss, Optimizer, Sgd
from hvdkit.strategies.compressed import Compressed
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.local_sgd import LocalSgd
from hvdkit.strategies.reducer import Reducer
from hvdkit.strategies.transports import TRANSPORTS
from hvdkit.tasks.image_classification import METRICS, cross_entropy
from hvdkit.tasks.task import Metrics
from tests.contract.cases import CLASSES, FEATURES, Adapter, Make, Topology, case, error, fresh, group_of, mesh_of
from tests.contract.grown import changed, worst
from tests.contract.sharded import TINY_BUCKET, sharded, stages
from tests.contract.tiny import tiny_network, tiny_state, two_inputs

ALL = 24  # samples in an update; 1, 2, 3 and 4 ranks divide them
CLIPPED = (Sgd(learning_rate=0.1, clip_norm=0.5), AdamW(learning_rate=0.1, clip_norm=0.5))
WEIGHTS = [0.5, 3.0, 0.0, *[1.0] * (CLASSES - 3)]
IGNORED = -100


def total(tensor: Any) -> Any:
    if hasattr(tensor, "sum"):
        return tensor.sum()
    import tensorflow as tf

    return tf.reduce_sum(tensor)


def weighted(outputs: Any, targets: Any) -> Any:
    """The squared error of what counts; targets (n, 6) have a weight for each value."""
    difference, weights = outputs - targets[:, :3], targets[:, 3:]
    return total(weights * difference * difference), total(weights)


def samples(step: int, start: int = 0, stop: int = ALL) -> Batch:
    """Some of a step's samples. The first third has no weight, so that one of several ranks counts nothing."""
    random = np.random.default_rng(step)
    left = random.standard_normal((ALL, FEATURES)).astype(np.float32)
    right, weights = random.integers(0, 5, (ALL, 2)), random.integers(0, 50, (ALL, 3)) * 0.25
    weights[: ALL // 3] = 0
    targets = np.concatenate([random.standard_normal((ALL, 3)), weights], 1)
    return Batch((left[start:stop], right[start:stop]), targets[start:stop])


def divided(step: int, topology: Topology, batches: int) -> list[Batch]:
    """This rank's batches of an update."""
    size = ALL // topology.size // batches
    starts = [(batch * topology.size + topology.rank) * size for batch in range(batches)]
    return [samples(step, start, start + size) for start in starts]


def bound(
    adapter: Adapter, optimizer: Optimizer, strategy: Strategy, loss: Any = weighted, targets: int = 1
) -> Session:
    model, state = two_inputs(adapter.NAME)
    session = Session(adapter, model, optimizer, loss, strategy, "fp64", targets=targets)
    session.load_state(state)
    return session


def strategies(adapter: Adapter, topology: Topology) -> dict[str, Callable[[], Strategy]]:
    mesh = mesh_of(topology)

    def compressed(transport: str, method: Any) -> Compressed:
        return Compressed(Reducer(TRANSPORTS[transport](adapter, mesh, f"counted.{transport}"), method))

    found: dict[str, Callable[[], Strategy]] = {
        "dense": lambda: Dense(adapter, group_of(topology), name=fresh()),
        "central": lambda: compressed("central", Uncompressed()),
        "all of top-k": lambda: compressed("ring", TopK(ratio=1.0)),
    }
    for stage in stages(adapter):
        more = {} if stage == "parameters" else {"most_bytes": TINY_BUCKET}
        found[stage] = lambda stage=stage, more=more: sharded(adapter, topology, stage, **more)  # type: ignore[misc]
    return found


@case
def sums_are_divided_once_however_samples_are_divided(adapter: Adapter, topology: Topology, make: Make) -> None:
    """One rank with all samples; as many with a share; and both with two or three batches an update.

    An update that counts nothing changes nothing.
    """
    if adapter.NAME == "local":
        return
    for optimizer in CLIPPED:
        whole = bound(adapter, optimizer, Strategy(), targets=72)
        states, losses = [], []
        for step in range(3):
            losses.append(float(adapter.to_numpy(whole.train_step([samples(step)])).mean()))
            states.append(whole.state())
        alone = bound(adapter, optimizer, Strategy(), targets=9)
        for step in range(3):
            loss = alone.train_step([samples(step, 0, 3), samples(step, 3, 13), samples(step, 13)])
            assert abs(float(adapter.to_numpy(loss).mean()) - losses[step]) < 1e-12, (loss, losses)
            assert worst(alone.state(), states[step]) < 1e-12
        for title, strategy in strategies(adapter, topology).items():
            for batches in (1, 2) if optimizer is CLIPPED[-1] else (2,):
                session = bound(adapter, optimizer, strategy(), targets=ALL // topology.size // batches * 3)
                for step in range(3):
                    session.train_step(divided(step, topology, batches))
                    found = worst(session.state(), states[step])
                    assert found < 1e-12, f"{optimizer.name}, {title}, {batches} batches, step {step}: {found:.1e}"
                nothing = [
                    replace(each, targets=each.targets * [1, 1, 1, 0, 0, 0]) for each in divided(3, topology, batches)
                ]
                before = session.state()
                loss = session.train_step(nothing)
                assert float(adapter.to_numpy(loss).mean()) == 0 and session.counting and session.counting.last() == 0
                assert changed(before, session.state()) == [], title
                session.train_step(divided(3, topology, batches))
                assert "fc.weight" in changed(before, session.state()), title


@case
def what_a_codec_keeps_is_in_the_unit_of_updates(adapter: Adapter, topology: Topology, make: Make) -> None:
    """With counts that change from step to step, residuals are those of the same loss given as a mean."""
    if adapter.NAME == "local":
        return

    def mean(outputs: Any, targets: Any) -> Any:
        value, count = weighted(outputs, targets)
        return value / count

    mesh = mesh_of(topology)
    sessions = []
    for name, loss in (("means", mean), ("sums", weighted)):
        reducer = Reducer(TRANSPORTS["ring"](adapter, mesh, name), TopK(ratio=0.2))
        sessions.append(bound(adapter, Sgd(learning_rate=0.1), Compressed(reducer), loss))
    for step in range(4):
        batch = samples(step, ALL // 2 + topology.rank, ALL // 2 + topology.rank + 4)
        targets = batch.targets.copy()
        targets[:, 3:] = 1 + 10 * step  # the same count on all ranks
        for session in sessions:
            session.train_step([Batch(batch.inputs, targets)])
    assert worst(sessions[1].state(), sessions[0].state()) < 1e-12


@case
def local_updates_are_by_a_ranks_own_count(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    transport = TRANSPORTS["ring"](adapter, mesh_of(topology), "counted.local")
    strategy = LocalSgd(Reducer(transport, Uncompressed()), Reducer(transport, Uncompressed()), Sync(every=9, start=1))
    session, alone = (bound(adapter, CLIPPED[0], each) for each in (strategy, Strategy()))
    together = bound(adapter, CLIPPED[0], Dense(adapter, group_of(topology), name=fresh()))
    for step in range(3):
        strategy.begin_step(step, steps_per_epoch=1)
        session.train_step(divided(step, topology, 1))
        if step == 0:  # before local updates begin
            together.train_step(divided(step, topology, 1))
            alone.load_state(together.state())
        else:
            alone.train_step(divided(step, topology, 1))
        assert worst(session.state(), alone.state()) < 1e-12, step


@case
def half_precision_needs_no_smaller_scale_for_sums(adapter: Adapter, topology: Topology, make: Make) -> None:
    """The first update of a large batch is made at the first loss scale, as of means."""
    if "fp16" not in adapter.CAPABILITIES:
        return
    sessions = []
    for loss in (Loss(), Loss(ignored_label=IGNORED)):
        model = tiny_network(adapter.NAME, "float32")
        strategy = Dense(adapter, group_of(topology), half=True, name=fresh())
        session = Session(adapter, model, Sgd(learning_rate=0.1), loss, strategy, "fp16", targets=4096)
        session.load_state(tiny_state())
        sessions.append(session)
    random = np.random.default_rng(topology.rank)
    inputs, labels = random.standard_normal((4096, FEATURES)) / 9, random.integers(0, CLASSES, 4096)
    for session in sessions:
        session.train_step([Batch(inputs.astype(np.float32), labels)])
    means, sums = (session.state() for session in sessions)
    assert sums["optimizer.good_steps"] == 1 and worst(sums, means) < 1e-2, worst(sums, means)


def tokens(seed: int, length: int = 8) -> Batch:
    """Features (n, 12) and labels, of which rank 0 ignores all but one."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, length)
    labels[random.random(length) < 0.3] = IGNORED
    if seed % 10 == 0:
        labels[1:] = IGNORED
    return Batch(random.standard_normal((length, FEATURES)).astype(np.float32), labels)


def errors_of(logits: np.ndarray, labels: np.ndarray, loss: Loss) -> tuple[float, np.ndarray, float]:
    """The sum, its derivative by the logits, and the count, as PyTorch's CrossEntropyLoss documents them."""
    weights = np.array(loss.class_weights or [1.0] * CLASSES)
    kept = labels != IGNORED
    some = weights[np.where(kept, labels, 0)] * kept
    smooth = loss.label_smoothing
    goal = (1 - smooth) * some[:, None] * np.eye(CLASSES)[np.where(kept, labels, 0)]
    goal = goal + smooth / CLASSES * weights * kept[:, None]
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -(goal * logs).sum(), np.exp(logs) * goal.sum(axis=1, keepdims=True) - goal, some.sum()


@case
def the_recipes_loss_ignores_a_label_and_weighs_classes(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    if adapter.NAME == "local":
        return
    for loss in (
        Loss(ignored_label=IGNORED),
        Loss(class_weights=WEIGHTS, ignored_label=IGNORED),
        Loss(class_weights=WEIGHTS, ignored_label=IGNORED, label_smoothing=0.1),
        Loss(ignored_label=IGNORED, label_smoothing=0.1),
    ):
        model = tiny_network(adapter.NAME, PRECISIONS["fp64"].parameters)
        session = Session(adapter, model, Sgd(learning_rate=0.1), loss, Dense(adapter, group, name=fresh()), "fp64")
        session.load_state(tiny_state())
        mine = tokens(topology.rank)
        got = session.gradients(mine)
        value, derivative, count = errors_of(got.outputs, mine.targets, loss)
        assert abs(got.loss - value / count) < 1e-12, (loss, got.loss, value / count)
        everyone = adapter.allgather_object([derivative.sum(axis=0), count], group, name="counted.bias")
        bias = sum(each for each, _ in everyone) / sum(each for _, each in everyone)
        assert error(got.averaged["fc.bias"], bias) < 1e-12, loss
        contributed = np.mean(adapter.allgather_object(got.own["fc.bias"], group, name="counted.own"), axis=0)
        assert error(got.averaged["fc.bias"], contributed) < 1e-12
    two = Loss(class_weights=[1.0, 2.0])
    wrong = Session(adapter, tiny_network(adapter.NAME, "float64"), Sgd(learning_rate=0.1), two, None, "fp64")
    try:
        wrong.train_step([tokens(1)])
    except RequestError as refusal:
        assert f"loss.class_weights: expected {CLASSES}" in str(refusal)
    else:
        raise AssertionError("two weights for ten classes")


@case
def evaluation_divides_sums_by_counts(adapter: Adapter, topology: Topology, make: Make) -> None:
    """The same for all batch sizes: a loss of the user's, metrics that return pairs, and an ignored label."""
    if adapter.NAME == "local":
        return

    def absolute(y: np.ndarray, t: np.ndarray) -> tuple[Any, ...]:
        return (float((np.abs(y - t[:, :3]) * t[:, 3:]).sum()), t[:, 3:].sum()), len(t)

    of_pairs = Metrics(("absolute", "rows"), absolute)
    session = bound(adapter, Sgd(learning_rate=0.1), Strategy())
    whole = samples(5)
    split = ArraySplit(whole.inputs, whole.targets)
    outputs = np.concatenate(
        [session.predict(tuple(each[i : i + 8] for each in whole.inputs)) for i in range(0, ALL, 8)]
    )
    difference, weights = outputs - whole.targets[:, :3], whole.targets[:, 3:]
    for batch_size in (3, 8):
        found = evaluate(adapter, session, of_pairs, split, batch_size, group_of(topology))
        assert abs(found["loss"] - (weights * difference**2).sum() / weights.sum()) < 1e-12 * found["loss"]
        assert abs(found["absolute"] - (weights * abs(difference)).sum() / weights.sum()) < 1e-12 * found["absolute"]
        assert found["rows"] == 1
    labelled = make(tiny=True, precision="fp64")
    batch = tokens(7, 24)
    logits = np.concatenate([labelled.predict(batch.inputs[i : i + 8]) for i in range(0, 24, 8)])
    kept = batch.targets != IGNORED
    expected = cross_entropy(logits[kept], batch.targets[kept]).mean()
    split = ArraySplit(batch.inputs, batch.targets)
    for batch_size in (3, 8):
        for measured in (METRICS, Metrics(("loss",), None)):
            ignoring = Metrics(measured.names, measured.sums, ignored=IGNORED)
            found = evaluate(adapter, labelled, ignoring, split, batch_size, group_of(topology))
            assert abs(found["loss"] - expected) < 1e-12
