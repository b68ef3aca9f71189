"""What a task of one's own is looked at for before it trains: its samples, labels and loss."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from own_tasks import DOCUMENT, nothing

from hvdkit.data.batches import ArraySplit
from hvdkit.data.dataset import Dataset
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Metrics
from hvdkit.worker import sanity_check, user_code


class Spread(Own):
    """A regression whose session is a stub: no framework is needed to check it."""

    metrics = Metrics(("error",), lambda outputs, targets: (float(abs(outputs - targets).sum()),))
    loss = staticmethod(lambda outputs, targets: ((outputs - targets) ** 2).mean())


class Stub:
    """The parts of a session that the sanity check uses, with the model x -> 2x."""

    def __init__(self, loss: Any) -> None:
        self.own_loss = loss

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return 2 * inputs

    def mean_loss(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        return float(self.own_loss(outputs, targets))


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
        (
            np.ones(6),
            "got float64 of shape (6,) for outputs of shape (4, 2); for other targets give a loss of you",
        ),
    ]:
        with pytest.raises(RequestError, match=re.escape(got)):
            checked(classifier, ones, targets)
    with pytest.raises(ValueError, match="no good") as caught:
        checked(type("Task", (Spread,), {"metrics": Metrics(("e",), refused)})(recipe), ones, ones)
    what = user_code.described(caught.value, __file__)
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
    with pytest.raises(RequestError, match="ArraySplit: expected targets that are numbers, got the dtype object"):
        ArraySplit(np.ones(1), np.array([{}]))
