"""What-ifs that change a rank's own work, models that are known by a published figure alone, and that none contradicts.

Every case is drawn from its seed, so each run tries the same.
"""

from __future__ import annotations

import itertools
import random
from math import prod
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest

import hvdkit
from benchmarks import anchored
from hvdkit.errors import RequestError
from hvdkit.profiling import published
from hvdkit.profiling.published_models import MODELS
from hvdkit.recipe import registry, schema
from hvdkit.results import profile as profiles
from hvdkit.results.profile import Profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import what_ifs
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.predict import Point, Prediction, predict
from hvdkit.simulator.settings import Settings
from tests import simulating
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check
P3 = clusters.load(Path("aws-p3-16xlarge"))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("bert-base", 109_482_240), ("bert-large", 335_141_888), ("vit-b-16", 86_567_656), ("vit-l-16", 304_326_632),
        ("t5-small", 60_506_624), ("t5-base", 222_903_552), ("t5-large", 737_668_096),
    ],
)  # fmt: skip
def test_published_models_have_the_published_parameters(model: str, count: int) -> None:
    """The counts of Hugging Face's and torchvision's checkpoints; each layer with work has weights."""
    known = MODELS[model]
    assert sum(map(prod, known.shapes.values())) == count
    layers = {name.rpartition(".")[0] for name in known.shapes}
    work = known.work_by_layer(known.size)
    assert work.keys() <= layers and min(work.values()) > 0
    speed = {"images_per_second": 100.0} if known.unit == "images" else {"sequences_per_second": 100.0}
    made = published.profile(model, **{"images_per_second": None, "batch_size": 8, "device": "v100", **speed})  # type: ignore[arg-type]
    assert made.step.step_ms.mean == pytest.approx(80.0) and made.unit == known.unit
    assert sum(layer.forward_ms or 0 for layer in made.layers) == pytest.approx(80.0 / 3)


@pytest.mark.parametrize(("model", "gflop"), [("bert-base", 22.3), ("vit-b-16", 35.1), ("vit-l-16", 123.1)])
def test_their_work_is_the_published_one(model: str, gflop: float) -> None:
    """Twice the multiply-adds: torchvision's 17.56 and 61.55 GFLOPS of ViTs; 2 N + 4 L t d a token of BERT's blocks."""
    known = MODELS[model]
    assert 2e-9 * sum(known.work_by_layer(known.size).values()) == pytest.approx(gflop, rel=5e-3)


def test_gradients_in_16_bits_are_half_the_bytes() -> None:
    full, half = (
        published.profile("bert-large", None, 8, "v100", sequences_per_second=33.4, gradients=kind)
        for kind in ("fp32", "fp16")
    )
    assert sum(tensor.bytes for tensor in half.tensors) == 2 * 335_141_888
    slow = simulating.cluster(mbit_per_s=10_000.0)
    after, before = (predict(made, slow, [8], Settings(policy="naive")).points[0] for made in (half, full))
    assert after.bytes_per_step * 2 == before.bytes_per_step
    assert after.exposed_communication_ms == pytest.approx(
        before.exposed_communication_ms / 2, rel=0.05
    )  # and latencies


def test_16_bits_are_as_much_faster_as_in_published_pairs() -> None:
    """Of one V100 or A100 with the same batch, model and framework in fp32 and in mixed precision."""
    speeds: dict[tuple[str, ...], dict[bool, float]] = {}
    for name in ("filled_hosts", "filled_hosts_blind"):
        for row in anchored.table(name):
            if row["gpus"] == "1":
                key = row["hardware"], row["framework"], row["model"], row["batch_per_gpu"]
                speeds.setdefault(key, {})[row["precision"] == "mixed"] = float(row["per_s"])
    for row in anchored.table("nvidia_resnet50"):
        if row["gpus"] == "1":
            mixed = "AMP" in row["precision"]
            speeds.setdefault((row["framework"], row["hardware"]), {})[mixed] = float(row["images_per_s"])
    for row in anchored.table("csc_2023"):
        if row["gpus"] == "1":
            speeds.setdefault((row["machine"],), {})[row["precision"] == "fp16"] = float(row["images_per_s"])
    # ViT-B/16 with 64 images on a V100, seconds of 100 steps: PaddleViT's docs/paddlevit-amp.md, which set no constant.
    speeds["V100", "PaddlePaddle", "ViT-B/16", "64"] = {False: 6400 / 78.29, True: 6400 / 41.14}
    times = [pair[True] / pair[False] for pair in speeds.values() if len(pair) == 2]
    assert len(times) >= 21
    assert geometric_mean(times) == pytest.approx(what_ifs.HALF, rel=0.05)
    inside = [what_ifs.HALF_LEAST <= ratio <= what_ifs.HALF_MOST for ratio in times]
    assert 0.85 <= sum(inside) / len(inside) <= 0.98


def test_longer_and_shorter_windows_take_what_was_published() -> None:
    """BERT-large on a V100 with windows of 128 and of 512 tokens, each from the other; batches differ too."""
    rows = [row for row in anchored.table("filled_hosts") if row["model"] == "BERT-large" and row["gpus"] == "1"]
    errors, inside = list[float](), list[bool]()
    for hardware, precision in itertools.product(("DGX-1 16 GB", "DGX-1 32 GB"), ("fp32", "mixed")):
        pair = {
            int(row["framework"].split()[-1]): (int(row["batch_per_gpu"]), float(row["per_s"]))
            for row in rows
            if (row["hardware"], row["precision"]) == (hardware, precision) and " seq " in row["framework"]
        }
        for known, asked_for in ((128, 512), (512, 128)):
            batch, speed = pair[known]
            size, measured = pair[asked_for]
            kind = {"sequences_per_second": speed, "sequence_length": known}
            made = published.profile("bert-large", None, batch, "V100", None, "fp32", **kind)  # type: ignore[arg-type]
            (found,) = predict(made, P3, [1], Settings(sequence_length=asked_for, batch_size=size)).points
            errors.append(found.step_ms * measured / (1e3 * size) - 1)
            inside.append(found.low_ms <= 1e3 * size / measured <= found.high_ms)
    assert len(errors) == 8 and sum(inside) >= 7
    assert sum(map(abs, errors)) / len(errors) < 0.14, errors
    assert abs(sum(errors)) / len(errors) < 0.05, "to both sides"


def figure(seed: int) -> tuple[Profile, Cluster, int, Settings]:
    """A published figure that fits its devices, a cluster and other settings."""
    drawn = random.Random(seed)
    model = drawn.choice(["resnet50", "resnet101", "gpt2", "bert-base", "vit-b-16", "t5-small", "resnet20"])
    batch, step_s = drawn.choice([1, 4, 8, 16]), drawn.uniform(0.05, 0.5)
    if model in MODELS and MODELS[model].unit == "tokens":
        made = published.profile(model, None, batch, "V100", sequences_per_second=batch / step_s)
    elif model == "gpt2":
        made = published.profile(model, None, 1, "V100", 1024 / step_s)
    else:
        made = published.profile(model, batch / step_s, batch, "V100")
    place = clusters.load(Path(drawn.choice(["aws-p3-16xlarge", "v100-nvlink-ib", "a100-nvlink-ib"])))
    settings = Settings(
        policy=drawn.choice([None, "naive", "ddp", "grouped"]),
        accumulate=drawn.choice([1, 1, 2]),
        compression={"method": "fp16"} if drawn.random() < 0.3 else None,  # type: ignore[arg-type]
        precision=drawn.choice([None, None, "fp16"]),
    )
    return made, place, drawn.choice([1, 2, 8, 16, 64]), settings


def asked(seed: int, **change: object) -> tuple[Point, Point]:
    """The prediction of a case, and of the same with a change."""
    made, place, ranks, settings = figure(seed)
    before, after = (predict(made, place, [ranks], settings.model_copy(update=keys)) for keys in ({}, change))
    return before.points[0], after.points[0]


def check_memory(less: Point, more: Point) -> None:
    assert (less.memory_mib is None) == (more.memory_mib is None)
    assert (less.memory_mib or 0) <= (more.memory_mib or 0)


@pytest.mark.parametrize("seed", range(8))
def test_recompute_is_never_faster_and_never_takes_more_memory(seed: int) -> None:
    before, after = asked(seed, recompute=True)
    assert before.step_ms <= after.step_ms <= before.step_ms * (4 / 3 + 1e-3)
    assert before.high_ms <= after.high_ms and after.high_ms / after.low_ms >= before.high_ms / before.low_ms * 0.99
    check_memory(after, before)


@pytest.mark.parametrize("seed", range(8))
def test_accumulation_is_never_slower_a_sample(seed: int) -> None:
    times = random.Random(seed).choice([2, 3, 8])
    before, after = asked(seed, accumulate=2 * times)
    assert after.images_per_second >= before.images_per_second * (1 - 1e-9)
    more = 2 * times // figure(seed)[3].accumulate
    assert after.batch_size == more * before.batch_size
    compute_ms = before.step_ms - before.exposed_communication_ms
    assert 0.9 * more * compute_ms <= after.step_ms <= more * before.step_ms * (1 + 1e-9)
    assert after.exposed_communication_ms <= before.exposed_communication_ms * 1.001 + 1e-6
    check_memory(before, after)


@pytest.mark.parametrize("seed", range(8))
def test_a_smaller_input_is_never_slower_and_never_takes_more_memory(seed: int) -> None:
    made, _, _, _ = figure(seed)
    shape = calibrate(made).workload.shape
    assert shape
    key = "sequence_length" if made.unit == "tokens" else "image_size"
    sizes = [max(8, shape[0] // parts) for parts in (1, 2, 4)]
    points = [asked(seed, **{key: size})[1] for size in sizes]
    assert points[0] == asked(seed)[0], "its own size changes nothing"
    for larger, smaller in itertools.pairwise(points):
        assert smaller.step_ms <= larger.step_ms and smaller.high_ms <= larger.high_ms * 1.001
        check_memory(smaller, larger)


@pytest.mark.parametrize("seed", range(5))
def test_precision_there_and_back_is_the_profile_and_each_is_unsure(seed: int) -> None:
    made, place, ranks, _ = figure(seed)
    half = made.model_copy(update={"precision": "fp16"})
    for profile, other in ((made, "fp16"), (half, "fp32")):
        same, changed = (predict(profile, place, [ranks], Settings(precision=kind)).points[0]
                         for kind in (profile.precision, other))  # fmt: skip
        assert same == predict(profile, place, [ranks], Settings()).points[0]
        faster = same.step_ms >= changed.step_ms
        assert faster == (other == "fp16")
        assert changed.high_ms / changed.low_ms >= same.high_ms / same.low_ms
        assert any("was not measured: published pairs" in told for told in changed.warnings)


def test_what_ifs_of_a_measured_profile_scale_what_it_measured() -> None:
    """One more forward of the blocks; then all of it in 16 bits, but what is sent."""
    work = calibrate(simulating.profile(1)).workload
    made = what_ifs.applied(work, Settings(recompute=True), P3.device)
    assert made is what_ifs.applied(work, Settings(recompute=True), P3.device)
    blocks = sum(seconds for name, seconds in work.forward if name.startswith("layer"))
    assert made.compute_s == pytest.approx(work.compute_s + blocks)
    both = what_ifs.applied(work, Settings(recompute=True, precision="fp16"), P3.device)
    assert both.compute_s == pytest.approx(made.compute_s / what_ifs.HALF)
    assert len(both.changes) == 2 and both.given is work
    assert np.allclose(both.sizes, work.sizes), "gradients are sent in fp32"


def test_stages_may_recompute_and_accumulate() -> None:
    """Of a divided model too: neither faster nor with more memory; and the bubble is less of a longer update."""
    settings = schema.load(registry.locate(Path("resnet20-digits"))).model_dump()
    made, stages = simulating.profile(1), {"parallel": {"pipeline": 2}}
    made = made.model_copy(update={"settings": settings, "framework": "pytorch"})
    place = simulating.cluster()
    plain, again, longer = (
        predict(made, place, [2], Settings.model_validate(stages | more)).points[0]
        for more in ({}, {"recompute": True}, {"accumulate": 4})
    )
    assert plain.step_ms < again.step_ms < 4 / 3 * plain.step_ms
    check_memory(again, plain)
    assert longer.images_per_second > plain.images_per_second


def test_a_cpu_in_16_bits_is_not_guessed() -> None:
    with pytest.raises(
        RequestError, match=r"precision: none, .* is taken for a CPU, and CPUs may be slower in bf16; profile"
    ):
        predict(simulating.profile(), simulating.cluster(), [2], Settings(precision="bf16"))


def test_options_are_the_keys_of_set(inside: Hvdkit, tmp_path: Path) -> None:
    profiles.save(published.profile("gpt2", None, 4, "v100", 12_000.0), tmp_path / "g.json")
    options = ["--accumulate", 4, "--recompute", "--precision", "fp16", "--sequence-length", 256]
    keys = {"accumulate": 4, "recompute": True, "precision": "fp16", "sequence_length": 256}
    done = inside("predict", "g.json", "--cluster", "aws-p3-16xlarge", "-n", 16, *options, "--out", "o")
    assert done.returncode == 0, done.stderr
    written = Prediction.model_validate_json((tmp_path / "o" / "predict.json").read_text())
    assert written.settings == keys
    asked = hvdkit.predict(tmp_path / "g.json", cluster="aws-p3-16xlarge", ranks=16, settings=keys, out=tmp_path / "p")
    assert asked.points == written.points
