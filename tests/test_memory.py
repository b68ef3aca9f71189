"""`hvdkit memory`: published formulas and figures, the model's tables, what stages do, and the command."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdkit
from benchmarks import peaks
from hvdkit.adapters.capabilities import RESIDENT_MIB
from hvdkit.commands import memory as command
from hvdkit.core.pieces import BUCKET_BYTES
from hvdkit.errors import RequestError
from hvdkit.recipe import registry, schema
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import Recipe
from hvdkit.results.memory import MemoryNeed, MemoryRow, Parts
from hvdkit.runtimes.store import find
from hvdkit.simulator import memory, sharding
from hvdkit.simulator.sharding import STAGES, States
from hvdkit.tasks import choose, gpt, resnet
from hvdkit.tasks.parts import NthPlace
from tests.conftest import ROOT, Hvdkit, run

pytestmark = pytest.mark.check

ADAM = States(parameters=2, gradients=2, optimizer=8, masters=4)  # mixed precision, as in the paper
DEEPSPEED = States(parameters=2, gradients=2, optimizer=8, masters=8)  # and the gradients in fp32 too
GB, GIB, MIB = 1e9, 2**30, 2**20


def recipe(name: str, *overrides: str) -> Recipe:
    return schema.load(registry.locate(Path(name)), overrides)


def needs(subject: Recipe, ranks: int, stage: sharding.Stage, framework: str = "pytorch", gpu: bool = True) -> Parts:
    return memory.parts(subject, memory.sample_shape(subject), framework, gpu, ranks, stage)


@pytest.mark.parametrize(
    ("billions", "ranks", "expected"),
    [  # Rajbhandari et al. 2020, figure 1 (64 ranks) and table 1 (GB of a rank at each stage)
        (7.5, 64, (120, 31.4, 16.6, 1.88)),
        (7.5, 1, (120, 120, 120, 120)),
        (7.5, 4, (120, 52.5, 41.3, 30)),
        (7.5, 16, (120, 35.6, 21.6, 7.5)),
        (7.5, 256, (120, 30.4, 15.4, 0.47)),
        (7.5, 1024, (120, 30.1, 15.1, 0.12)),
        (128, 64, (2048, 536, 284, 32)),
        (1000, 1024, (16000, 4011, 2013, 15.6)),
    ],
)
def test_the_papers_table(billions: float, ranks: int, expected: tuple[float, ...]) -> None:
    found = [sharding.held(ADAM, round(billions * 1e9), ranks, stage).total / GB for stage in STAGES]
    assert found == pytest.approx(expected, rel=6e-3, abs=5e-3)


def test_deepspeeds_estimators() -> None:
    """Figures of its page "Memory Requirements": its ZeRO-2 keeps all fp16 gradients, and counts 20 bytes; its ZeRO-3
    18, and the largest layer with 4 bytes a parameter. The estimator in its release 0.19.8 divides the fp16 gradients
    of ZeRO-2 too (2Ψ + 18Ψ/N), for which the page still has the older figure."""
    t5_3b, zero3 = 2_851_000_000, States(parameters=2, gradients=0, optimizer=8, masters=8)
    assert sharding.held(DEEPSPEED, t5_3b, 8, "optimizer").total / GIB == pytest.approx(15.93, abs=5e-3)
    now = sharding.held(DEEPSPEED, t5_3b, 8, "gradients").total
    assert now == 2 * t5_3b + 18 * t5_3b / 8 and now / GIB == pytest.approx(11.28, abs=5e-3)
    layer = 4 * 32_000_000
    assert (sharding.held(zero3, t5_3b, 8, "parameters").total + layer) / GIB == pytest.approx(6.09, abs=5e-3)
    t5_large, largest = 737_670_000, 4 * 32_900_000
    assert (sharding.held(zero3, t5_large, 4, "parameters").total + largest) / MIB == pytest.approx(3291, abs=1)


def test_values_sent() -> None:
    """2Ψ, 2Ψ, 2Ψ and 3Ψ, of which a ring of N ranks sends (N - 1)/N."""
    for ranks in (1, 2, 64):
        found = [sharding.values_sent(1000, ranks, stage) for stage in STAGES]
        assert found == [times * 1000 * (ranks - 1) / ranks for times in (2, 2, 2, 3)]
    found = [sharding.values_sent(1000, 2, stage, accumulate=4) for stage in STAGES]
    assert found == [1000, 1000, 2500, 6000], (
        "each batch's gradients, where they are sharded; 3Ψ a batch in the last stage"
    )


@given(parameters=st.integers(1, 10**12), ranks=st.integers(1, 10**6))
def test_a_higher_stage_keeps_no_more_and_alone_all_are_equal(parameters: int, ranks: int) -> None:
    found = [sharding.held(ADAM, parameters, ranks, stage).total for stage in STAGES]
    assert found == sorted(found, reverse=True)
    assert ranks > 1 or len(set(found)) == 1
    assert found[-1] * ranks >= found[0]  # nothing is lost


@given(
    name=st.sampled_from(["gpt2", "gpt-tiny", "resnet20-digits", "resnet50-synthetic"]),
    ranks=st.integers(1, 4096),
    precision=st.sampled_from(["fp32", "bf16", "fp64"]),
    accumulate=st.sampled_from([1, 4]),
    gpu=st.booleans(),
)
def test_a_recipe_needs_no_more_at_a_higher_stage(
    name: str, ranks: int, precision: str, accumulate: int, gpu: bool
) -> None:
    subject = recipe(name).model_copy(update={"precision": precision, "accumulate": accumulate})
    found = [needs(subject, ranks, stage, gpu=gpu) for stage in STAGES]
    totals = [each.total for each in found]
    # Small models: their gradients are whole when they are packed.
    small = found[0].parameters if found[0].parameters <= 5 * BUCKET_BYTES else 0
    assert totals[0] >= totals[1] >= totals[2] - 8 - small, "shares are equal to one value"
    # Few ranks: the last stage packs the gradients of a whole block, such as GPT-2's table of tokens, beside them.
    assert totals[3] <= totals[2 if ranks > 4 else 0] + small
    assert ranks > 1 or len(set(totals)) == 1
    assert ranks == 1 or found[-1].parameters < found[0].parameters


@pytest.mark.parametrize("stage", STAGES)
def test_the_start_has_the_initial_weights_beside_the_model(stage: sharding.Stage) -> None:
    size = "model={name: gpt, layers: 12, heads: 12, width: 768, context: 64, vocabulary: 50257}"
    subject = recipe("gpt-tiny", size, "batch_size=1", "checkpoint=null")
    sizes = [math.prod(shape) for shape in choose(subject).architecture(None).parameter_shapes().values()]
    start = RESIDENT_MIB["pytorch"]["cpu"] * MIB + 4 * (2 * sum(sizes) + max(sizes))
    found = needs(subject, 64, stage, gpu=False)
    assert found.total == start if stage in ("gradients", "parameters") else found.start == 0 < found.total - start
    assert needs(subject, 64, stage, gpu=True).start == 0


def test_a_gpts_activations_are_korthikantis() -> None:
    """Without dropout: 32 s b h + 4 a s² b bytes a layer in 16 bits (section 4.1), of which attention's weights are
    2 a s² b; two inputs of layer norms are in fp32 here, 4 s b h more."""
    layers, heads, width, tokens, vocabulary = 3, 4, 64, 128, 1000
    table = gpt.GPT("gpt", layers, heads, width, tokens, vocabulary)
    kept = table.activations((tokens,))
    inside = layers * (32 + 4) * tokens * width + tokens * (2 + 4) * width
    assert 2 * kept.compute + 4 * kept.full == inside + tokens * (2 + 4) * vocabulary
    assert 2 * kept.scores == layers * 2 * heads * tokens**2
    again = table.activations((tokens,), recompute=True)
    assert again.scores * layers == kept.scores
    assert (kept.full - again.full) == (layers - 1) * tokens * width  # of two inputs a block, one remains


def test_recompute_keeps_the_inputs_of_blocks() -> None:
    for table, shape in ((resnet.architecture("resnet50", 10), (64, 64, 3)), (gpt.GPT("gpt", 8, 4, 64, 32, 99), (32,))):
        full, less = table.activations(shape), table.activations(shape, recompute=True)
        assert less.compute < full.compute and less.full <= full.full


def test_stages_of_a_model_add_up_to_it_but_for_the_table_of_both_ends() -> None:
    def held(*divided: str) -> list[Parts]:
        found = command.need(recipe("gpt2", "batch_size=8", "accumulate=1", *divided), [4], None, "pytorch").rows
        ranks = [rank for row in found for rank in row.held_by or []]
        assert ranks == list(range(4)) and all(row.supported for row in found)
        return [row.parts for row in found]

    count, table, places = 124_439_808, 50_257 * 768, 1024 * 768
    block = (count - table - places - 2 * 768) // 12
    equal = "parallel.pipeline=4", "parallel.microbatches=8", "parallel.split=[3, 3, 3, 3]"
    stages = held(*equal)
    ends = table + places, 0, 0, table + 2 * 768
    assert [each.parameters for each in stages] == [4 * (3 * block + end) for end in ends]
    assert [each.gradients for each in stages] == [each.parameters for each in stages], "sums, in backward"
    assert [each.communication for each in stages] == [4 * table, 0, 0, 4 * table]
    gpipe = held(*equal, "parallel.schedule=gpipe")
    for at, (few, many) in enumerate(zip(stages[:3], gpipe, strict=False)):
        assert few.activations and many.activations and few.activations * 8 == many.activations * (4 - at)
    outputs = 1024 * 50_257 * 2  # of one sample, in bf16
    assert stages[3].activations and gpipe[3].activations
    assert gpipe[3].activations - outputs == 8 * (stages[3].activations - outputs)
    runs = f"parallel.split={[1] * 12}"
    chunks = held(*equal[:2], runs, "parallel.schedule=interleaved", "parallel.chunks=3")
    assert [each.parameters for each in chunks] == [each.parameters for each in stages]
    kept = [(2 * (4 - at - 1) + 2 * 4 + 1) / (3 * (4 - at)) for at in range(3)]  # of a chunk, a third of a stage
    for few, many, more in zip(stages[1:3], chunks[1:3], kept[1:3], strict=True):
        assert few.activations and many.activations
        assert many.activations == pytest.approx(more * few.activations, rel=0.1), "each chunk keeps what it sends"
    (part,) = held("parallel.tensor=4")
    divided = 12 * (12 * 768**2 + 7 * 768) // 4 + -(-50_257 // 4) * 768
    whole = places + 12 * 6 * 768 + 2 * 768
    assert part.parameters == 4 * (divided + whole)


@pytest.mark.ranks
def test_activations_are_what_pytorch_saves() -> None:
    """What autograd keeps after forward; the block that `recompute` computes again comes only in backward."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run([str(find("pytorch").python), str(ROOT / "tests" / "saved_tensors.py")], 120, env=environment)
    assert done.returncode == 0, done.stderr
    gpt_table = gpt.GPT("gpt", 3, 4, 64, 128, 1000)
    table = {"gpt": gpt_table, "resnet": resnet.architecture("resnet18", 10)}
    shape = {"gpt": (128,), "resnet": (64, 64, 3)}
    *found, first, middle, last, in_parts = json.loads(done.stdout.splitlines()[-1])
    for number, (*_, name, measured) in ((0, first), (1, middle), (2, last), (1, in_parts)):
        stage = replace(
            table["gpt"].staged(Parallel(pipeline=3), number), tensor=NthPlace(1, 2) if "parts" in name else None
        )
        kept = stage.activations((128,))
        assert 4 * (kept.compute - kept.outputs + kept.full) == pytest.approx(measured, rel=0.03), name
    for half, recompute, name, measured in found:
        kept = table[name].activations(shape[name], recompute)
        low = 2 if half else 4
        counted = low * kept.compute + 4 * kept.full
        if not recompute:
            assert counted == pytest.approx(measured, rel=0.03), (half, name)
        elif name == "gpt":
            block = 128 * 64 * (14 * low + 1 * 4)
            assert counted - block == pytest.approx(measured, rel=0.03), half
        else:
            assert 0.7 * counted < measured < counted, half


def test_a_checkpoint_takes_the_state_once_more() -> None:
    """On the rank that writes it, when activations are gone; tensors of sharded and divided models come one by one."""
    size = "model={name: gpt, layers: 2, heads: 4, width: 1024, context: 64, vocabulary: 256}"
    subject = recipe("gpt-tiny", size, "batch_size=1")
    kept, none = (needs(subject.model_copy(update=other), 1, "none", gpu=False) for other in ({}, {"checkpoint": None}))
    largest = max(math.prod(shape) for shape in choose(subject).architecture(None).parameter_shapes().values())
    state = kept.parameters + kept.optimizer
    assert kept.total == kept.framework + state + kept.gradients + state + 2 * 4 * largest
    assert none.start == 0 and needs(subject, 1, "none").start == 0
    few, many = (memory.largest_batch(kept, 1, room) for room in (kept.total - 1, kept.total))
    assert few == 0 < (many or 0)


def test_peaks_of_ranks_under_pytorch_are_counted() -> None:
    """What is counted today beside the measured peaks: the page has the figures."""
    page = " ".join((ROOT / "docs" / "memory.md").read_text().split())
    rows = json.loads((ROOT / "benchmarks" / "peaks.json").read_text())["rows"]
    for kind in ("fitted", "seen", "new"):
        errors = [
            100 * (peaks.counted_mib(row["run"], row["stage"]) / row["peak_rss_mib"] - 1)
            for row in rows
            if row["row"] == kind
        ]
        mean = sum(map(abs, errors)) / len(errors)
        said = f"{kind} | {len(errors)} | {mean:.1f} % | {min(errors):+.0f} to {max(errors):+.0f} %"
        assert said in page, said


def test_half_precision_keeps_fp32_weights_and_their_copies() -> None:
    single, half = (needs(recipe("gpt2", "accumulate=1", f"precision={name}"), 1, "none") for name in ("fp32", "bf16"))
    count = 124_439_808
    assert single.parameters == half.parameters == half.gradients == 4 * count and half.optimizer == 8 * count
    assert (single.casts, half.casts) == (0, 2 * count)
    assert half.activations and single.activations and half.activations < single.activations


def test_what_needs_more() -> None:
    plain = needs(recipe("gpt-tiny"), 2, "none", gpu=False)
    count = 834_304
    assert (plain.parameters, plain.gradients, plain.optimizer) == (4 * count, 4 * count, 8 * count)
    assert plain.batch == 4 * 64 * 2 * 8  # 4 windows of 64 tokens and of what follows them
    assert needs(recipe("gpt-tiny", "accumulate=2"), 2, "none").gradients == 8 * count
    assert needs(recipe("gpt-tiny", "compression=topk"), 2, "none", gpu=False).communication == 8 * count
    stored = needs(recipe("gpt-tiny"), 2, "none", "tensorflow", gpu=False)
    assert stored.activations and plain.activations
    assert stored.activations - plain.activations == 4 * 4 * 4 * 4 * 64**2  # batch, bytes, layers, heads


@pytest.mark.parametrize("name", ["gpt2", "resnet50-synthetic"])
@pytest.mark.parametrize("room", [2 * GIB, 16 * GIB, 80 * GIB])
def test_the_largest_batch_fits_and_one_more_does_not(name: str, room: int) -> None:
    subject = recipe(name)
    largest = memory.largest_batch(needs(subject, 8, "gradients"), subject.batch_size, room)
    assert largest is not None
    sizes = [max(1, largest), largest + 1]
    found = [needs(subject.model_copy(update={"batch_size": size}), 8, "gradients").total for size in sizes]
    assert largest == 0 or found[0] <= room
    assert found[1] > room


def test_the_command(hvdkit: Hvdkit, tmp_path: Path) -> None:
    done = hvdkit("memory", "gpt2", "-n", 1, "-n", 8, "--device", "24GiB", "--out", tmp_path / "found", "batch_size=12")
    assert done.returncode == 0, done.stderr
    for part in ("8 ranks, sharding:", "optimizer", "activations", "largest batch_size", "8 ranks: fits", "1,343 MiB"):
        assert part in done.stdout, part
    found = MemoryNeed.model_validate_json((tmp_path / "found" / MemoryNeed.FILE).read_text())
    assert [(row.ranks, row.stage) for row in found.rows] == [(1, "none"), *((8, stage) for stage in STAGES)]
    assert found.device_bytes == 24 * GIB and found.batch_size == 12 and found.rows[0].fits
    printed = hvdkit("memory", "gpt2", "-n", 1, "-n", 8, "--device", "24GiB", "batch_size=12", "--json")
    assert json.loads(printed.stdout) == json.loads((tmp_path / "found" / MemoryNeed.FILE).read_text())


def test_on_cpus_the_count_says_what_it_is_worth() -> None:
    said = [command.need(recipe("gpt-tiny"), [1], device, "pytorch").notes for device in (None, "16GiB")]
    assert memory.ON_CPUS in said[0] and memory.ON_CPUS not in said[1]


def test_what_does_not_fit_gets_advice() -> None:
    def notes(*overrides: str, ranks: int = 64, device: str = "16GiB") -> str:
        return "\n".join(command.need(recipe("gpt2", *overrides), [ranks], device, "pytorch").notes)

    assert notes("model.name=gpt2-large", "batch_size=1") == "64 ranks: fits from stage optimizer on"
    assert notes("model.name=gpt2-xl", "batch_size=8", "recompute=true").startswith("64 ranks: ")
    assert "does not fit at any stage that pytorch has; give batch_size=" in notes("batch_size=512")
    assert (
        notes(ranks=1, device="2GiB")
        == "1 rank: does not fit at any stage that pytorch has; give recompute=true, or more ranks, or a smaller model"
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_tenth_of_a_gpu_stays_free_and_the_largest_batch_fits(seed: int) -> None:
    """gpt2-xl filled 95 % of a device and was said to fit."""
    drawn = random.Random(seed)
    asked = [f"model.name={drawn.choice(['gpt2', 'gpt2-medium', 'gpt2-xl'])}", f"recompute={drawn.random() < 0.5}"]
    ranks, device = drawn.choice([1, 8, 64]), f"{drawn.uniform(4, 100):.3f}GiB"

    def row(batch: int) -> MemoryRow:
        need = command.need(recipe("gpt2", *asked, f"batch_size={batch}"), [ranks], device, "pytorch")
        assert need.device_bytes and need.room_bytes == round(0.9 * need.device_bytes)
        assert all(row.fits == (row.total_bytes <= 0.9 * need.device_bytes) for row in need.rows)
        return need.rows[0]

    largest = row(1).largest_batch
    assert largest is not None
    assert not row(largest + 1).fits and (largest == 0 or row(largest).fits)


def test_devices_are_those_of_the_cluster_files() -> None:
    known = command.devices()
    assert known["h100"].memory_mib == 81_000 and known["t4"].memory_mib == 15_109 and "cpu core" not in known
    found = command.need(recipe("resnet50-synthetic"), [1], "H100", "mxnet")
    assert found.device_bytes == 81_000 * MIB
    assert command.need(recipe("gpt2"), [1], "1.5gb", "keras").device_bytes == 1_500_000_000


def test_from_python(tmp_path: Path) -> None:
    found = hvdkit.memory("gpt-tiny", {"batch_size": 8}, ranks=[1, 2], device="h100")
    assert found.cheapest(2) == "none" and len(found.records()) == 5
    assert found.records()[0]["activations_bytes"] == found.rows[0].parts.activations
    assert all(math.isfinite(row.total_bytes) for row in found.rows)
    written = hvdkit.memory("gpt-tiny", out=tmp_path / "there")
    assert (written.folder / MemoryNeed.FILE).is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "h10"}, "--device 'h10': expected one of a100"),
        ({"device": "0GiB"}, "--device '0GiB': expected one of"),
        ({"ranks": [0]}, "-n 0: expected at least 1"),
        ({"framework": "jax"}, "unknown framework 'jax'"),
    ],
)
def test_wrong_requests(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as fault:
        hvdkit.memory("gpt-tiny", **options)
    assert said in str(fault.value)


def test_a_model_of_the_users_own_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    text = "name: mine\nmodel: {name: own, script: mine.py}\ndata: {name: own}\noptimizer: {learning_rate: 0.1}\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(RequestError, match="only its script knows the model"):
        hvdkit.memory(tmp_path / "mine.yaml")
