"""The framework-agnostic core, on the null adapter."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit import tasks
from hvdkit.core import metrics
from hvdkit.core.group import Mesh, Topology, threads_per_rank, world_of
from hvdkit.core.loop import Loop
from hvdkit.core.session import Session
from hvdkit.core.state import canonical_name, digest, from_canonical
from hvdkit.core.step_plan import StepPlan
from hvdkit.core.update_rules import decay_of, rule_of
from hvdkit.data import batches, small_images
from hvdkit.data.augment import augment
from hvdkit.data.dataset import ArraySplit, PoolSplit, on_device
from hvdkit.handlers.metrics_file import MetricsFile
from hvdkit.handlers.standard import attach
from hvdkit.handlers.stopping import Preemption
from hvdkit.heartbeat import first_line, lost_a_peer
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Digits, Recipe, Sgd, Synthetic
from hvdkit.tasks import resnet
from hvdkit.tasks.image_classification import cross_entropy
from hvdkit.tasks.task import parameter_count
from tests import local_adapter
from tests.conftest import ROOT
from tests.local_adapter import Linear

pytestmark = pytest.mark.check

WORLD = world_of(Topology())


def make_recipe(**settings: Any) -> Recipe:
    base: dict[str, Any] = {
        "name": "test",
        "model": {"name": "resnet20"},
        "data": {"name": "digits"},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"base_batch_size": 32},
    }
    return Recipe.model_validate(base | settings)


# The architecture


COUNTS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def test_networks_have_torchvisions_parameter_counts_and_the_layers_of_their_names() -> None:
    assert {name: parameter_count(resnet.architecture(name, 1000)) for name in COUNTS} == COUNTS
    for layers in (20, 32, 44, 56, 110):
        model = resnet.architecture(f"resnet{layers}", 10)
        assert 1 + sum(len(block.convs) for block in model.blocks) + 1 == layers
    assert parameter_count(resnet.architecture("resnet20", 10)) == 272_474


def test_bottlenecks_have_their_stride_in_the_3x3() -> None:
    model = resnet.architecture("resnet50", 1000)
    strided = [row for _, _, row in model.convolutions() if row.stride == 2 and row.name.startswith("conv")]
    assert {row.kernel for row in strided} == {3, 7}


def test_initial_weights_are_he_normal_by_fan_out_and_depend_on_the_seed_alone() -> None:
    model = resnet.architecture("resnet50", 1000)
    state = model.initial_state(1)
    kernel = state["layer3.0.conv2.weight"]
    assert kernel.dtype == np.float32
    assert abs(kernel.std() / np.sqrt(2 / (256 * 9)) - 1) < 0.01
    assert np.all(state["bn1.weight"] == 1) and np.all(state["fc.bias"] == 0)
    small = resnet.architecture("resnet20", 10)
    assert digest(small.initial_state(1)) == digest(small.initial_state(1))
    assert digest(small.initial_state(1)) != digest(small.initial_state(2))


# Data


def test_digits_are_split_once_and_stratified() -> None:
    dataset = batches.open_dataset(Digits(name="digits"), 10, seed=1)
    assert (len(dataset.train), len(dataset.val)) == (1437, 360)
    val = dataset.val.batch(np.arange(360))
    assert val.inputs.shape == (360, 32, 32, 3) and val.inputs.dtype == np.float32 and val.targets.dtype == np.int64
    assert set(np.bincount(val.targets)) <= {35, 36, 37}
    train = dataset.train.batch(np.arange(1437)).inputs
    assert abs(train.mean()) < 0.01 and abs(train.std() - 1) < 0.01
    seen = {image.tobytes() for image in train}
    assert not any(image.tobytes() in seen for image in val.inputs)


def test_upscaling_keeps_an_even_picture_even_and_a_ramp_a_ramp() -> None:
    assert np.all(small_images.upscaled(np.full((1, 8, 8), 7, np.float32)) == 7)
    ramp = small_images.upscaled(np.tile(np.arange(8, dtype=np.float32), (1, 8, 1)))[0, 0]
    assert np.all(np.diff(ramp[2:-2]) == 0.25)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sample_is_on_two_ranks_and_the_order_changes_by_epoch(size: int) -> None:
    split = batches.ArraySplit(np.arange(100.0)[:, None], np.arange(100))
    epochs = []
    for epoch in (0, 1):
        shards = [
            [batch.targets for batch in batches.epoch_batches(split, 8, 5, epoch, rank, size)] for rank in range(size)
        ]
        steps = batches.steps_per_epoch(100, 8, size)
        assert all(len(shard) == steps for shard in shards)
        everything = np.concatenate([labels for shard in shards for labels in shard])
        assert len(set(everything)) == len(everything) == steps * 8 * size
        epochs.append([np.concatenate(labels) for labels in zip(*shards, strict=True)])
    assert not np.array_equal(epochs[0][0], epochs[1][0])


def test_two_ranks_see_together_what_one_rank_of_twice_the_batch_sees() -> None:
    split = batches.ArraySplit(np.arange(64.0)[:, None], np.arange(64))
    one = [batch.targets for batch in batches.epoch_batches(split, 16, 5, 0, 0, 1)]
    two = [[batch.targets for batch in batches.epoch_batches(split, 8, 5, 0, rank, 2)] for rank in (0, 1)]
    assert all(np.array_equal(np.concatenate(parts), whole) for whole, *parts in zip(one, *two, strict=True))


@pytest.mark.parametrize(("samples", "size", "rounds"), [(10, 1, 3), (10, 3, 1), (13, 3, 2), (1, 3, 1), (8, 2, 1)])
def test_evaluation_sees_each_sample_exactly_once(samples: int, size: int, rounds: int) -> None:
    """In as many batches on each rank, since ranks that share a model's weights compute together."""
    split = batches.ArraySplit(np.arange(float(samples))[:, None], np.arange(samples))
    seen: list[int] = []
    for rank in range(size):
        found = list(batches.evaluation_batches(split, 4, rank, size))
        assert len(found) == rounds
        for batch, valid in found:
            assert len(batch.targets) == 4
            seen += batch.targets[:valid].tolist()
            assert not valid or batch.targets[0] % 4 == 0, "a batch has the same samples on any number of ranks"
    assert sorted(seen) == list(range(samples))


def test_rows_have_the_same_sum_in_any_order() -> None:
    """Also where float64 rounds, and of what is no number."""
    adapter: Any = local_adapter.adapter
    rows = [[10.0**power, 1] for power in range(-20, 20)]
    found = metrics.add_rows(adapter, WORLD, ["loss", "count"], rows)
    assert found == metrics.add_rows(adapter, WORLD, ["loss", "count"], rows[::-1])
    assert found == {"loss": math.fsum(loss for loss, _ in rows), "count": 40}
    assert metrics.add_rows(adapter, WORLD, ["loss"], []) == {"loss": 0}
    assert math.isnan(metrics.add_rows(adapter, WORLD, ["loss"], [[math.inf], [-math.inf]])["loss"])


def test_synthetic_images_need_little_memory_however_many_there_are() -> None:
    wanted = Synthetic(name="synthetic", height=8, width=6, channels=1, train_images=10**9, val_images=3)
    dataset = batches.open_dataset(wanted, 5, seed=1)
    assert len(dataset.train) == 10**9
    batch = dataset.train.batch(np.array([0, 10**9 - 1]))
    assert batch.inputs.shape == (2, 8, 6, 1) and batch.targets.max() < 5


# Schedule and optimizer


@pytest.mark.parametrize(
    ("size", "steps", "settings", "rates"),
    [
        (  # a global batch of 512: twice the rate
            8,
            100,
            {"base_batch_size": 256, "warmup_epochs": 2, "decay": "cosine"},
            {0: 0.1, 50: 0.125, 100: 0.15, 150: 0.175, 200: 0.2, 600: 0.1, 1000: 0},
        ),
        (4, 10, {"scale": "none", "warmup_epochs": 0.9}, {0: 0.01, 1: 0.02, 8: 0.09, 9: 0.1}),
        (
            4,
            10,
            {"scale": "none", "decay": "step", "milestones": [3.0, 6.0]},
            {0: 0.1, 29: 0.1, 30: 0.01, 59: 0.01, 60: 0.001},
        ),
    ],
)
def test_learning_rate_scales_warms_up_and_decays(
    size: int, steps: int, settings: dict[str, Any], rates: dict[int, float]
) -> None:
    recipe = make_recipe(epochs=10, batch_size=64, optimizer={"learning_rate": 0.1}, schedule=settings)
    rate = StepPlan(recipe, steps * 64 * size, size).rate
    assert [rate(step) for step in rates] == pytest.approx(list(rates.values()), abs=1e-12)


def test_sgd_follows_the_formula() -> None:
    settings = Sgd(learning_rate=0.1, momentum=0.5, weight_decay=0.1, nesterov=True)
    rule = rule_of(settings)(settings, local_adapter.adapter)
    weight, gradient, velocity = (np.array([[value]]) for value in (2.0, 1.0, 4.0))
    corrections = rule.bias_corrections(1.0)
    (found,) = rule.updates([(1, 1)], [weight], [gradient], [(velocity,)], 0.1, corrections, lambda *kinds: [])
    weight, (velocity,) = found
    assert velocity == pytest.approx(0.5 * 4 + 1.2)
    assert weight == pytest.approx(2 - 0.1 * (1.2 + 0.5 * 3.2))
    assert decay_of(settings.model_copy(update={"decay": "weights"}), (7,)) == 0
    assert decay_of(settings.model_copy(update={"decay": "weights"}), (7, 3)) == 0.1


def test_augmentation_is_decided_by_seed_epoch_and_sample_alone() -> None:
    images = np.random.default_rng(0).standard_normal((200, 12, 10, 3)).astype(np.float32)
    samples = np.arange(200)
    first = augment(images, "crop-flip", 1, 0, samples)
    order = np.random.default_rng(1).permutation(200)
    assert np.array_equal(augment(images[order], "crop-flip", 1, 0, samples[order]), first[order])
    assert np.array_equal(augment(images[7:9], "crop-flip", 1, 0, samples[7:9]), first[7:9])
    for seed, epoch, other in ((1, 1, samples), (2, 0, samples), (1, 0, samples + 200)):
        same = (augment(images, "crop-flip", seed, epoch, other) == first).all(axis=(1, 2, 3))
        assert same.mean() < 0.05  # 1 of 162
    assert augment(images, "none", 1, 0, samples) is images


def test_a_crop_moves_by_at_most_four_pixels_and_a_flip_mirrors() -> None:
    marked = np.zeros((4000, 9, 9, 1), np.float32)
    marked[:, 4, 4] = 1
    moved = augment(marked, "crop", 3, 5, np.arange(4000))
    assert moved.shape == marked.shape and (moved.sum(axis=(1, 2, 3)) == 1).all()
    _, rows, columns, _ = np.nonzero(moved)
    for places in (rows, columns):
        counts = np.bincount(places, minlength=9)
        assert (counts > 4000 / 9 * 0.8).all() and (counts < 4000 / 9 * 1.2).all()
    sloped = np.tile(np.arange(9, dtype=np.float32)[None, None, :, None], (4000, 9, 1, 1))
    both = augment(sloped, "crop-flip", 3, 5, np.arange(4000))
    falling = both[:, 4, 4, 0] < both[:, 4, 3, 0]
    assert 0.45 < falling.mean() < 0.55
    assert (marked.sum() == 4000) and np.array_equal(sloped[0, 0, :, 0], np.arange(9))


def test_augmented_epochs_are_the_same_whatever_the_number_of_ranks() -> None:
    dataset = batches.open_dataset(Digits(name="digits"), 10, 1)
    whole = list(batches.epoch_batches(dataset.train, 64, 1, 2, 0, 1, "crop-flip"))
    halves = [list(batches.epoch_batches(dataset.train, 32, 1, 2, rank, 2, "crop-flip")) for rank in range(2)]
    for index, batch in enumerate(whole[:3]):
        joined = np.concatenate([half[index].inputs for half in halves])
        assert np.array_equal(joined, batch.inputs)


# State


def test_names_and_layouts_become_torchvisions() -> None:
    assert canonical_name("layer1.0.conv1/kernel") == "layer1.0.conv1.weight"
    assert canonical_name("bn1.moving_variance") == "bn1.running_var"
    for canonical, shape in (((7, 5, 3, 3), (3, 3, 5, 7)), ((5, 7), (7, 5)), ((7,), (7,))):
        assert from_canonical(np.zeros(canonical)).shape == shape


def test_zero_init_residual_makes_each_block_its_shortcut() -> None:
    for name in ("resnet20", "resnet50"):
        plain = resnet.architecture(name, 10)
        zero = replace(plain, zero_init_residual=True)
        before, after = plain.initial_state(7), zero.initial_state(7)
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        last = "bn3" if name == "resnet50" else "bn2"
        assert changed == {f"{block.name}.{last}.weight" for block in plain.blocks} and len(changed) in (9, 16)
        assert all(not after[name].any() for name in changed)


def test_the_last_feature_maps_are_as_large_as_the_strides_leave_them() -> None:
    for name, side, expected in (("resnet50", 224, 7), ("resnet50", 33, 2), ("resnet50", 32, 1), ("resnet20", 32, 8)):
        assert resnet.architecture(name, 10).last_map(side, side) == (expected, expected)
    assert resnet.architecture("resnet20", 10).last_map(4, 5) == (1, 2)


def test_looks_for_an_end_come_each_five_seconds_whatever_a_step_takes() -> None:
    adapter: Any = local_adapter.adapter
    for step_s, longest in ((0.01, 500), (0.7, 7), (60.0, 1)):
        asked_at: list[int] = []
        seconds: list[float] = []
        stopping = Preemption(adapter, WORLD, lambda at=asked_at, so_far=seconds: bool(at.append(len(so_far))), 0)
        for step in range(1, 3001):
            seconds.append(step_s)
            assert not stopping.wanted(step, seconds)
        gaps = np.diff([0, *asked_at])
        assert gaps[0] == 1 and gaps.max() == longest, (step_s, gaps)
    always = Preemption(adapter, WORLD, lambda: True, 5)
    assert not always.wanted(5, [0.1]) and always.wanted(6, [0.1])


def test_a_lost_peer_is_told_from_a_failure_of_ones_own() -> None:
    class HorovodInternalError(RuntimeError):
        pass

    assert lost_a_peer(RuntimeError("[127.0.0.1]: Connection reset by peer")) and lost_a_peer(HorovodInternalError())
    assert not lost_a_peer(ValueError("boom")) and not lost_a_peer(HorovodInternalError("Mismatched allreduce"))
    assert first_line(HorovodInternalError()) == "HorovodInternalError"
    assert first_line(ValueError("one\ntwo")) == "one"


def test_threads_are_shared_among_the_ranks_of_a_host() -> None:
    assert threads_per_rank(3, 2) == 3
    assert threads_per_rank(None, 10**6) == 1


# The loop


def trained(recipe: Recipe, folder: Path) -> tuple[Loop, list[dict[str, Any]]]:
    adapter: Any = local_adapter.adapter
    dataset = batches.open_dataset(recipe.data, 10, recipe.seed)
    session = Session(adapter, Linear(32 * 32 * 3, 10), recipe.optimizer, recipe.loss)
    path = folder / "metrics.jsonl"
    loop = Loop(session, tasks.choose(recipe), recipe, Mesh(Topology()), dataset)
    attach(loop, MetricsFile(path)).train()
    return loop, [json.loads(line) for line in path.read_text().splitlines()]


def test_training_learns_and_writes_a_line_a_logged_step_and_epoch(tmp_path: Path) -> None:
    loop, lines = trained(make_recipe(epochs=2, log_every=20), tmp_path)
    assert [(line["step"], line["epoch"], line["ends_epoch"]) for line in lines] == [
        (20, 0, False), (40, 0, False), (44, 0, True), (60, 1, False), (80, 1, False), (88, 1, True),
    ]  # fmt: skip
    assert loop.progress.validation["accuracy"] > 0.85
    assert lines[-1]["val_accuracy"] == loop.progress.validation["accuracy"]
    assert lines[-1]["val_loss"] == loop.progress.validation["loss"]
    assert lines[-1]["loss"] < lines[2]["loss"]
    assert len(loop.clock.seconds) == 88


def test_each_batch_of_an_update_is_reported(tmp_path: Path) -> None:
    """An update of many batches, as `hvdkit plan` writes them, takes longer than a rank may be silent."""
    told = list[str]()
    recipe = make_recipe(epochs=1, accumulate=4, steps=3)
    adapter: Any = local_adapter.adapter
    dataset = batches.open_dataset(recipe.data, 10, recipe.seed)
    session = Session(adapter, Linear(32 * 32 * 3, 10), recipe.optimizer, recipe.loss)
    Loop(
        session, tasks.choose(recipe), recipe, Mesh(Topology()), dataset, lambda phase, step: told.append(phase)
    ).train()
    assert told.count("train step") == 3 * (1 + 4)


def test_an_epochs_loss_is_the_mean_of_its_steps_whatever_is_logged_between(tmp_path: Path) -> None:
    losses = []
    for log_every in (1, 7, 1000):
        (tmp_path / str(log_every)).mkdir()
        _, lines = trained(make_recipe(log_every=log_every), tmp_path / str(log_every))
        losses.append(lines[-1]["loss"])
        if log_every == 1:
            assert lines[-1]["loss"] == pytest.approx(np.mean([line["loss"] for line in lines[:-1]]))
    assert losses == pytest.approx([losses[0]] * 3)


def test_steps_ends_a_run_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    loop, lines = trained(make_recipe(epochs=5, steps=50), tmp_path)
    assert (loop.progress.step, loop.epochs, loop.finished) == (50, 2, True)
    assert lines[-1]["ends_epoch"] and lines[-1]["epoch"] == 1


def test_label_smoothing_raises_the_loss_that_is_reached(tmp_path: Path) -> None:
    ends = []
    for name, smoothing in (("a", 0.0), ("b", 0.2)):
        (tmp_path / name).mkdir()
        ends.append(trained(make_recipe(loss={"label_smoothing": smoothing}), tmp_path / name)[0].progress.train_loss)
    assert ends[1] > ends[0] + 0.3


def test_cross_entropy_survives_large_logits() -> None:
    logits = np.array([[1e4, 0.0], [0.0, 0.0]])
    assert cross_entropy(logits, np.array([1, 0])) == pytest.approx([1e4, np.log(2)])


def test_the_readmes_recipe_is_what_these_tests_assume() -> None:
    readme = (ROOT / "README.md").read_text()
    (named,) = set(re.findall(r"recipes/([\w-]+)\.yaml", readme))
    assert f"hvdkit train {named} --framework" in readme
    recipe, assumed = schema.load(ROOT / "recipes" / f"{named}.yaml"), make_recipe()
    assert (recipe.model, recipe.data) == (assumed.model, assumed.data)


def test_a_pool_is_put_on_the_device_once() -> None:
    pool = ArraySplit(np.arange(24, dtype=np.float32).reshape(6, 2, 2, 1), np.arange(6))
    split = PoolSplit(pool, 100)
    put: list[np.ndarray] = []

    def on_the_device(images: np.ndarray) -> np.ndarray:
        put.append(images)
        return images.copy()

    pools: dict[int, np.ndarray] = {}
    for batch in itertools.islice(batches.epoch_batches(split, 8, 1, 0, 0, 2), 3):
        found = on_device(batch, pools, on_the_device, lambda images, indices: images[indices])
        assert np.array_equal(found, batch.inputs) and np.array_equal(found[:, 0, 0, 0], 4 * batch.targets)
    assert len(put) == 1 and put[0] is pool.inputs
    assert on_device(split.batch(np.arange(2)), pools, on_the_device, np.take).shape == (2, 2, 2, 1) and len(put) == 2
