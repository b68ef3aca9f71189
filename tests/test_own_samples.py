"""What a task of one's own is looked at for before it trains: its samples, labels and loss."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdkit.core.strategy import Strategy
from hvdkit.data.batches import ArraySplit
from hvdkit.data.dataset import Batch, Dataset
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Metrics
from hvdkit.worker import own_task, sanity_check
from tests.own_tasks import DOCUMENT, nothing

pytestmark = pytest.mark.check


class Spread(Own):
    """A regression whose session is a stub: no framework is needed to check it."""

    metrics = Metrics(("error",), lambda outputs, targets: (float(abs(outputs - targets).sum()),))
    loss = staticmethod(lambda outputs, targets: ((outputs - targets) ** 2).mean())


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of training steps without an update."""
    batches: list[Batch] = []
    monkeypatch.setattr(sanity_check, "rehearse", lambda session, batch: batches.append(batch))
    return batches


class Stub:
    """The parts of a session that the sanity check uses, with the model x -> 2x."""

    adapter, strategy, pipeline = SimpleNamespace(rival=None), Strategy(), None

    def __init__(self, loss: Any) -> None:
        self.custom_loss = loss

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return 2 * inputs

    def mean_loss(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        return float(self.custom_loss(outputs, targets))

    def loss_of(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float | None]:
        found = self.custom_loss(outputs, targets)
        return found if isinstance(found, tuple) else (float(found), None)


def checked(task: Any, inputs: np.ndarray, targets: np.ndarray) -> list[str]:
    split = ArraySplit(inputs, targets)
    return sanity_check.sanity_check(Stub(task.loss), task, Dataset(split, split, (), 10), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "error", "warned"),
    [
        (lambda y, t: ((y - t) ** 2).mean(), lambda y, t: abs(y - t).sum(), ["loss", "metrics"]),
        (lambda y, t: ((y[:, 0] - t) ** 2).mean(), lambda y, t: abs(y - t).sum(), ["metrics"]),
        (lambda y, t: ((y[:, 0] - t) ** 2).mean(), lambda y, t: abs(y[:, 0] - t).sum(), []),
        (lambda y, t: ((y.squeeze() - t) ** 2).mean(), lambda y, t: abs(y.ravel() - t).sum(), []),
    ],
)
def test_outputs_that_are_broadcast_against_targets_are_a_warning(loss: Any, error: Any, warned: list[str]) -> None:
    inputs = np.random.default_rng(0).standard_normal((10, 1)).astype(np.float32)
    changes = {"loss": staticmethod(loss), "metrics": Metrics(("error",), lambda y, t: (float(error(y, t)),))}
    task = type("Task", (Own,), changes)(Recipe.model_validate(DOCUMENT))
    lines = checked(task, inputs, inputs[:, 0])
    assert [line.partition(":")[0] for line in lines] == warned
    assert all("outputs of shape (4, 1) and targets of shape (4,) are broadcast to (4, 4)" in line for line in lines)
    assert checked(Spread(Recipe.model_validate(DOCUMENT)), inputs, inputs) == []


def test_samples_and_labels_are_looked_at_before_training() -> None:
    recipe, ones = Recipe.model_validate(DOCUMENT), np.ones((6, 2), np.float32)
    assert checked(Spread(recipe), ones * [1, np.nan], ones) == [
        "samples: the training inputs have NaN or infinity",
        "samples: the validation inputs have NaN or infinity",
    ]
    classifier = type("Task", (Own,), {})(recipe)
    assert checked(classifier, ones, np.arange(6) % 2) == []
    for targets, got in [
        (np.arange(6), "from 0 to 1 (the model has 2 outputs), got 0 to 5"),
        (np.ones(6), "got float64 of shape (6,) for outputs of shape (4, 2); if they are labels, give targets.astype("),
    ]:
        with pytest.raises(RequestError, match=re.escape(got)):
            checked(classifier, ones, targets)
    with pytest.raises(ValueError, match="no good") as caught:
        checked(type("Task", (Spread,), {"metrics": Metrics(("e",), refused)})(recipe), ones, ones)
    what = own_task.described(caught.value, __file__)
    assert f"{__file__}, line {refused.__code__.co_firstlineno + 1}, in refused: ValueError: no good" in what
    assert "(in the metrics, with outputs of shape (4, 2) and targets of shape (4, 2)); the line is `raise Val" in what


def refused(outputs: np.ndarray, targets: np.ndarray) -> tuple[float]:
    raise ValueError("no good\n\nsecond line\nthird line")


def test_what_is_measured_follows_the_loss_and_the_targets() -> None:
    recipe = Recipe.model_validate(DOCUMENT)

    def opened(targets: np.ndarray, **more: Any) -> Own:
        split = ArraySplit(np.ones((4, 2)), targets)
        loss = staticmethod(lambda y, t: 0.0)
        task: Own = type("Task", (Own,), {"samples": lambda task: (split, split), "loss": loss, **more})(recipe)
        task.open_data(None)  # type: ignore[arg-type]
        return task

    labels, values = np.zeros(4, np.int64), np.zeros((4, 1))
    assert [(task.metrics.names, task.best) for task in (opened(labels), opened(values))] == [
        (("accuracy",), "accuracy"),
        ((), "-loss"),
    ]
    mine = Metrics(("error",), nothing)
    assert opened(values, metrics=mine).best == "-loss" and opened(values, metrics=mine, best="error").best == "error"
    with pytest.raises(RequestError, match=r"best checkpoint, one of error, loss, with a minus sign .*; got 'errors'"):
        opened(values, metrics=mine, best="errors")


def test_samples_are_arrays_of_numbers_or_become_them() -> None:
    split = ArraySplit([[1.0], [2.0]], [0, 1])  # type: ignore[arg-type]
    assert split.batch(np.array([1])).inputs.tolist() == [[2.0]] and split.targets.tolist() == [0, 1]
    masked = np.ma.MaskedArray([1.0, 2.0], [False, True])
    for inputs, told in (
        (np.array([{}, {}]), "ArraySplit: inputs: expected numbers, got the dtype object"),
        (["a", "b"], "ArraySplit: inputs: expected numbers, got the dtype <U1 of a list"),
        ([[1.0], [2.0, 3.0]], "ArraySplit: inputs: expected numbers, got "),
        (np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"), "got the dtype datetime64[D]"),
        (masked, "got a masked array with values that are masked; fill them"),
        (np.float32(3), "got inputs of shape (), targets (2,)"),
        ([np.ones((2, 3))] * 3, "got inputs of shape (3, 2, 3), targets (2,); several inputs are a tuple, not a list"),
    ):
        with pytest.raises(RequestError, match=re.escape(told)):
            ArraySplit(inputs, np.zeros(2))
    with pytest.raises(RequestError, match=r"got inputs of shape \(\), targets \(\)"):
        ArraySplit(np.float32(3), np.float32(3))  # type: ignore[arg-type]


class Tensor:
    """As PyTorch's with a gradient on a GPU: it becomes an array after `detach` and `cpu` alone."""

    steps = 2

    def detach(self) -> Tensor:
        self.steps -= 1
        return self

    cpu = detach

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert self.steps == 0
        return np.ones((2, 1), np.float32)


def test_a_batch_has_the_dtypes_that_every_framework_has(tmp_path: Path) -> None:
    x = np.memmap(tmp_path / "x", ">u2", "w+", shape=(4, 2))
    x[:] = [[1, 2], [3, 4], [5, 6], [7, 65535]]
    split = ArraySplit((x, np.arange(8)[::-2]), np.array([0, 1, 0, 1], ">i2"))
    assert isinstance(split.inputs[0], np.memmap), "no copy of it in memory"
    batch = split.batch(np.array([3, 0]))
    (left, right), targets = batch.inputs, batch.targets
    assert (left.tolist(), right.tolist(), targets.tolist()) == ([[7, 65535], [1, 2]], [1, 7], [1, 0])
    assert [each.dtype for each in (left, right, targets)] == ["int64"] * 3
    assert all(each.flags.c_contiguous and each.flags.writeable for each in (left, right, targets))
    kept = {
        kind: Batch(np.ones(2, kind), np.ones(2, bool)) for kind in ("bool", "uint8", "int32", "float16", "float32")
    }
    assert all(batch.inputs.dtype == kind and batch.targets.dtype == bool for kind, batch in kept.items())
    same = np.ones((2, 2), np.float32)
    assert Batch(same, np.zeros(2, np.int64)).inputs is same, "what is right is not copied"
    assert Batch(Tensor(), [1, 0]).inputs.dtype == np.float32
    with pytest.raises(
        RequestError, match=r"Batch: targets: expected whole numbers below 2\^63, got 18446744073709551615"
    ):
        Batch(same, np.array([0, 2**64 - 1], np.uint64))


def test_a_split_of_ones_own_class_returns_a_batch_or_a_pair() -> None:
    class Mine:
        def __init__(self, targets: Any, pair: Any = tuple) -> None:
            self.targets, self.pair = targets, pair

        def __len__(self) -> int:
            return 4

        def batch(self, indices: np.ndarray) -> Any:
            return self.pair((np.ones((4, 2), ">f8")[indices], self.targets[indices]))

    recipe, bools = Recipe.model_validate(DOCUMENT), np.array([True, False, True, True])

    def opened(split: Any, **more: Any) -> Batch:
        task: Own = type("Task", (Own,), {"samples": lambda task: (split, split), **more})(recipe)
        return task.open_data(None).train.batch(np.arange(2))  # type: ignore[arg-type]

    for split in (
        Mine(bools),
        Mine(bools, list),
        Mine(bools, lambda pair: Batch(*pair)),
        ArraySplit(np.ones(4), bools),
    ):
        batch = opened(split)
        assert batch.targets.dtype == np.int64 and batch.targets.tolist() == [1, 0], "labels of a cross-entropy"
        assert opened(split, loss=lambda task, y, t: 0).targets.dtype == bool, "a mask of a loss of one's own"
    for pair, got in ((dict, "dict"), (lambda pair: pair[0].tolist(), "list"), (lambda pair: (*pair, 1), "tuple")):
        with pytest.raises(RequestError, match=rf"Mine.batch: expected Batch\(inputs, targets\), got a {got}"):
            opened(Mine(np.arange(4), pair) if pair is not dict else Mine(np.arange(4), lambda pair: {}))


def test_a_batch_has_a_row_for_each_sample_and_the_step_is_rehearsed(rehearsed: list[Batch]) -> None:
    recipe, ones = Recipe.model_validate(DOCUMENT), np.ones((6, 2), np.float32)

    class Short(ArraySplit):
        def batch(self, indices: np.ndarray) -> Batch:
            return Batch(self.inputs[indices], self.targets[indices][:1])

    task, whole = Spread(recipe), ArraySplit(ones, ones)
    session: Any = Stub(task.loss)
    sanity_check.sanity_check(session, task, Dataset(whole, whole, (), 10), 4)
    assert rehearsed[0].inputs.shape == (4, 2)
    for train, val in ((Short(ones, ones), whole), (whole, Short(ones, ones))):
        with pytest.raises(
            RequestError, match=r"samples: expected a batch of 4 samples, .*inputs of shape \(4, 2\) and"
        ):
            sanity_check.sanity_check(session, task, Dataset(train, val, (), 10), 4)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda y, t: ((y - t) ** 2).mean(), None),
        (lambda y, t: ((y - t) ** 2 * (t > 0)).sum() / (t > 0).sum(), "of which it is not the mean"),
        (lambda y, t: ((y - t) ** 2).sum(), "of which it is not the mean"),
        (lambda y, t: (((y - t) ** 2 * (t > 0)).sum(), float((t > 0).sum())), None),
        (lambda y, t: (((y - t) ** 2).mean(), 4.0), "is not that of one half plus that of the other"),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_a_warning(loss: Any, told: str | None) -> None:
    """Sums over ranks and batches need it: a quotient of a batch's own sum and count is no mean."""
    inputs = np.array([[1.0], [-2.0], [3.0], [4.0]], np.float32)
    task = type("Task", (Spread,), {"loss": staticmethod(loss)})(Recipe.model_validate(DOCUMENT))
    lines = checked(task, inputs, inputs + 1)
    assert [told in line for line in lines] == ([True] if told else []), lines


def test_a_count_below_zero_is_refused() -> None:
    task = type("Task", (Spread,), {"loss": staticmethod(lambda y, t: (1.0, -3.0))})(Recipe.model_validate(DOCUMENT))
    with pytest.raises(RequestError, match=r"loss: expected a count of 0 or more in \(sum, count\), got -3"):
        checked(task, np.ones((6, 1), np.float32), np.ones((6, 1), np.float32))
