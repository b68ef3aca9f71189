"""By what other samples are noticed: fingerprints of splits, shares of ranks, and a run that is resumed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hvdkit.checkpoint.resume import last_record
from hvdkit.data import Shard, fingerprint, shares
from hvdkit.data import batches as data
from hvdkit.data.dataset import ArraySplit, Batch, Dataset, PoolSplit, SharedSplit
from hvdkit.errors import RequestError
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import ImageFolder, Recipe
from hvdkit.results.train import TrainResult
from hvdkit.tasks.own import Own
from hvdkit.worker import alike, setup, train
from tests import local_adapter
from tests.data.pictures import draw_folder
from tests.local_adapter import Linear
from tests.own_tasks import DOCUMENT
from tests.resuming import rewrite_record

pytestmark = pytest.mark.check


def arrays(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.standard_normal((count, 3)).astype(np.float32), random.integers(0, 2, count)


def kind_of(one: Any, other: Any) -> str | None:
    return fingerprint.of_split(one).other(fingerprint.of_split(other))


class Turned(ArraySplit):
    """Its batches are not what the arrays say."""

    factor = 1.0

    def batch(self, indices: np.ndarray) -> Batch:
        found = super().batch(indices)
        return Batch(found.inputs * self.factor, found.targets)


class Noisy(ArraySplit):
    """Draws its samples anew each time."""

    def batch(self, indices: np.ndarray) -> Batch:
        found = super().batch(indices)
        return Batch(found.inputs + np.random.default_rng().standard_normal(found.inputs.shape), found.targets)


class Read:
    """Samples that are in no array."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        self.made = ArraySplit(inputs, targets)

    def __len__(self) -> int:
        return len(self.made)

    def batch(self, indices: np.ndarray) -> Batch:
        return self.made.batch(indices)


def test_one_value_one_target_and_the_order_are_seen_in_arrays(tmp_path: Path) -> None:
    x, y = arrays()
    changed, flipped = x.copy(), y.copy()
    changed[17, 1] += 1e-6
    flipped[23] ^= 1
    split = ArraySplit(x, y)
    assert kind_of(split, ArraySplit(x.copy(), y.copy())) is None
    assert kind_of(split, ArraySplit(np.asfortranarray(x), y[:80:1])) is None, "the values count, not their layout"
    assert kind_of(split, ArraySplit(x[:-1], y[:-1])) == "number"
    assert kind_of(split, ArraySplit(changed, y)) == kind_of(split, ArraySplit(x[::-1], y)) == "inputs"
    assert kind_of(split, ArraySplit(x, flipped)) == "targets"
    assert kind_of(ArraySplit((x, x), y), ArraySplit((x, changed), y)) == "inputs"
    assert kind_of(PoolSplit(split, 90), PoolSplit(ArraySplit(x[::-1], y), 90)) == "inputs"
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(10_000, 3))
    before = fingerprint.of_split(ArraySplit(mapped, np.zeros(10_000, int)))
    mapped[1] = 1
    assert before.other(fingerprint.of_split(ArraySplit(mapped, np.zeros(10_000, int)))) is None, "not all is read"
    mapped[-1] = 1
    assert before.other(fingerprint.of_split(ArraySplit(mapped, np.zeros(10_000, int)))) == "inputs"


def test_of_large_arrays_samples_are_taken_that_are_spread_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "IN_MEMORY", 20 * 12)
    x, y = arrays(1000)
    before = fingerprint.of_split(ArraySplit(x, y))
    for place, seen in ((0, True), (999, True), (1, False)):
        changed = x.copy()
        changed[place] += 1
        assert (before.other(fingerprint.of_split(ArraySplit(changed, y))) == "inputs") is seen


def test_batches_count_where_they_are_the_scripts_own() -> None:
    x, y = arrays()
    split, turned = Turned(x, y), Turned(x, y)
    assert kind_of(split, turned) is None
    object.__setattr__(turned, "factor", 2.0)
    assert kind_of(split, turned) == "inputs"
    assert kind_of(Read(x, y), Read(x.copy(), y)) is None
    assert kind_of(Read(x, y), Read(2 * x, y)) == "inputs" and kind_of(Read(x, y), Read(x, 1 - y)) == "targets"
    assert kind_of(Noisy(x, y), Noisy(x, y)) is None and kind_of(Noisy(x, y), Noisy(x, 1 - y)) == "targets"


def joined(counts: list[int], vals: list[int], same_val: bool = False) -> list[Dataset]:
    """The data sets of ranks that have shares of so many samples."""
    x, y = np.arange(200.0)[:, None], np.arange(200)
    starts = np.cumsum([0, *counts])
    held = [(0, vals[0]) if same_val else (100 + 10 * rank, 100 + 10 * rank + count) for rank, count in enumerate(vals)]
    own = [
        Dataset(ArraySplit(x[a : a + n], y[a : a + n]), ArraySplit(x[slice(*val)], y[slice(*val)]), (), 10)
        for a, n, val in zip(starts, counts, held, strict=False)
    ]
    everyone = [{name: vars(found) for name, found in fingerprint.of_dataset(each).items()} for each in own]
    return [shares.join(each, Shard(rank, len(own)), lambda value: everyone) for rank, each in enumerate(own)]


def test_an_epoch_takes_as_many_of_each_share_as_the_shortest_has() -> None:
    sets = joined([22, 27], [3, 4])
    assert [len(each.train) for each in sets] == [44, 44] and [len(each.val) for each in sets] == [7, 7]
    assert sets[0].note == (
        "shares: 49 (22, 27 by rank) samples for training, of which an epoch leaves out 5, since the shortest share "
        "decides; 7 (3, 4 by rank) for validation"
    )
    assert sets[0].fingerprints == sets[1].fingerprints and sets[0].fingerprints["train"].samples == 49  # type: ignore[index]
    orders = []
    for rank, each in enumerate(sets):
        epochs = [np.concatenate([b.targets for b in data.epoch_batches(each.train, 5, 1, e, rank, 2)]) for e in (0, 1)]
        for order in epochs:
            assert len(order) == len(set(order.tolist())) == 20 and set(order) <= set(each.train.mine.targets)  # type: ignore[attr-defined]
        assert not np.array_equal(*epochs)
        rest = [b.targets for b in data.epoch_batches(each.train, 5, 1, 1, rank, 2, first=20)]
        assert np.array_equal(np.concatenate(rest), epochs[1][10:]), "an interrupted epoch continues where it was"
        orders.append(epochs[0] - 22 * rank)
    assert not np.array_equal(*orders), "ranks have orders of their own"


@pytest.mark.parametrize("vals", [[3, 4], [9, 0]])
def test_each_share_of_the_validation_is_evaluated_once(vals: list[int]) -> None:
    seen, rounds = [], set()
    for rank, each in enumerate(joined([10, 10], vals)):
        found = list(data.evaluation_batches(each.val, 2, rank, 2))
        rounds.add(len(found))
        assert all(len(batch.targets) == 2 for batch, _ in found)
        seen += [label for batch, valid in found for label in batch.targets[:valid].tolist()]
    wanted = [100 + 10 * rank + place for rank, count in enumerate(vals) for place in range(count)]
    assert sorted(seen) == wanted and len(rounds) == 1


def test_what_is_the_same_on_all_ranks_is_no_share() -> None:
    sets = joined([10, 10], [5, 5], same_val=True)
    assert not isinstance(sets[0].val, SharedSplit) and len(sets[0].val) == 5
    assert "5 for validation, which are the same on all ranks" in (sets[0].note or "")
    x, y = arrays()
    whole = Dataset(ArraySplit(x, y), ArraySplit(x, y), (), 10)
    mine = {name: vars(found) for name, found in fingerprint.of_dataset(whole).items()}
    with pytest.raises(
        RequestError, match=r"data\.shares: expected other training samples on each rank, got the same 40"
    ):
        shares.join(whole, Shard(0, 2), lambda value: [mine, mine])
    alone = shares.join(whole, Shard(), lambda value: [mine])
    assert alone == replace(whole, fingerprints=fingerprint.of_dataset(whole)), "one rank has all"


class Grown(Own):
    """Samples of another run."""

    change: ClassVar[dict[str, Any]] = {}

    def samples(self) -> tuple[ArraySplit, ArraySplit]:
        random = np.random.default_rng(5)
        count = self.change.get("count", 60)
        x, y = random.standard_normal((100, 2))[:count], random.integers(0, 2, 100)[:count]
        if "value" in self.change:
            x[self.change["value"]] += 1e-3
        return ArraySplit(x[20:], y[20:]), ArraySplit(x[:20], y[:20])

    def model(self) -> Any:
        return Linear(2, 2)


def started(folder: Path, resume: bool = False, changes: dict[str, Any] | None = None, **keys: Any) -> TrainResult:
    task = type("Task", (Grown,), {"change": changes or {}})
    recipe = Recipe.model_validate(
        {**DOCUMENT, "model": {**DOCUMENT["model"], "script": str(folder / "own.py")}, **keys}
    )  # type: ignore[dict-item]
    return train.train(local_adapter.adapter, setup.RankScript(task.build, task), recipe, folder, Heartbeat(), resume)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"count": 80}, "data: not those of the checkpoint: 40 training samples are now 60; samples that were held"),
        ({"value": 3}, "the inputs of the 20 validation samples are others; "),
        ({"value": 30}, "the inputs of the 40 training samples are others; "),
    ],
)
def test_a_run_is_not_resumed_with_other_samples(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    started(tmp_path, epochs=2)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    with pytest.raises(RequestError) as caught:
        started(tmp_path, True, changes, epochs=4)
    assert told in str(caught.value) and "accept it with checkpoint.accept_changed_data=true" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    accepted = started(tmp_path, True, changes, epochs=4, checkpoint={"accept_changed_data": True})
    per_epoch = (changes.get("count", 60) - 20) // 8
    assert (accepted.first_step, accepted.steps) == (2 * per_epoch, 4 * per_epoch)
    assert "accepted (checkpoint.accept_changed_data)" in (tmp_path / "metrics.jsonl").read_text()
    again = started(tmp_path, True, changes, epochs=5)
    assert again.first_step == 4 * per_epoch, "the new samples are those of the checkpoint now"


def test_the_same_samples_and_old_checkpoints_are_resumed_and_a_changed_script_is_said(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("one")
    started(tmp_path, epochs=2)
    record = last_record(tmp_path / "checkpoints")
    assert record and record.data and record.data["train"].samples == 40 and record.script_sha256
    (tmp_path / "own.py").write_text("other")
    assert started(tmp_path, True, epochs=4).first_step == 10
    assert (
        "model.script: the file has changed since the checkpoint: SHA-256 " in (tmp_path / "metrics.jsonl").read_text()
    )
    for path in (tmp_path / "checkpoints").glob("step-*/checkpoint.json"):  # as hvdkit wrote them before
        rewrite_record(path, data=None, script_sha256=None)
    assert started(tmp_path, True, {"count": 80}, epochs=6).first_step == 20


def test_a_folder_is_known_by_names_sizes_and_classes(tmp_path: Path) -> None:
    place = draw_folder(tmp_path / "pictures")

    def taken(path: Path) -> dict[str, Any]:
        kind = ImageFolder.model_validate({"name": "imagefolder", "path": str(path), "size": 48, "resize": 56})
        return fingerprint.of_dataset(data.open_dataset(kind, 3, 1))

    before = taken(place)
    moved = shutil.copytree(place, tmp_path / "elsewhere")
    assert taken(moved) == before, "where it is does not matter"
    one = sorted((moved / "train").glob("*/*"))[0]
    one.write_bytes(one.read_bytes() + b"\0")
    assert before["train"].other(taken(moved)["train"]) == "inputs" and taken(moved)["val"] == before["val"]
    one.rename(one.with_name(f"zz{one.suffix}"))
    assert before["train"].other(taken(moved)["train"]) == "inputs"
    one.with_name(f"zz{one.suffix}").unlink()
    assert before["train"].other(taken(moved)["train"]) == "number"


def test_outputs_may_differ_as_much_as_processors_round() -> None:
    outputs = np.random.default_rng(3).standard_normal((32, 10)).astype(np.float32)
    for scale in (1e-6, 1e-2):
        other = outputs + scale * np.random.default_rng(4).standard_normal(outputs.shape)
        assert 0.2 * scale < alike._error(alike._projected(other), alike._projected(outputs)) < 5 * scale
    lost = outputs.copy()
    lost[3] = np.nan
    assert alike._error(alike._projected(lost), alike._projected(lost.copy())) == 0
    assert alike._error(alike._projected(lost), alike._projected(outputs)) == np.inf
