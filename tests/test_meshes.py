"""Steps of models that ranks divide, without ranks: closed forms, the schedules of training."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import mesh_rows
from hvdkit.commands import predict as predict_command
from hvdkit.core import cuts
from hvdkit.core.schedules import bubble
from hvdkit.errors import RequestError
from hvdkit.profiling import published as figures
from hvdkit.recipe import registry, schema
from hvdkit.recipe.communication import Parallel
from hvdkit.results.profile import Profile
from hvdkit.simulator import chains, memory, meshes
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.meshes import BlockWork, Divided, MeshLinks, ModelWork, Processor
from hvdkit.simulator.settings import Settings
from hvdkit.tasks.gpt import GPT, published
from hvdkit.tasks.parts import balanced
from hvdkit.tasks.resnet import architecture
from hvdkit.tasks.task import parameter_count
from tests import simulating

pytestmark = pytest.mark.check

A100 = clusters.load(Path("a100-nvlink-ib"))
IDEAL = Processor(1e12, 1e30, 0.0)


def even(blocks: int, sums: tuple[float, ...] = (), sends: float = 0.0, parameters: float = 0.0) -> ModelWork:
    """Blocks of a microsecond of forward for each sample on IDEAL, which neither update nor move anything."""
    block = BlockWork(multiply_adds=5e5, parameters=parameters, sums=sums, sends=sends)
    return ModelWork((block,) * blocks, update_bytes=0.0)


def on(chain: ModelWork, microbatches: int, samples: int = 1, recompute: bool = False, **axes: object) -> Divided:
    keys: dict[str, Any] = {"data": 1, "pipeline": 1, "tensor": 1} | axes
    return Divided(
        chain, Parallel.model_construct(None, **keys), microbatches, samples, IDEAL, MeshLinks(A100), recompute
    )


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 9, 40])
def test_the_bubble_is_that_of_the_closed_form(schedule: str, chunks: int, stages: int, rounds: int) -> None:
    many = stages * rounds
    step = on(even(32), many, pipeline=stages, schedule=schedule, chunks=chunks).step()
    assert step.bubble == pytest.approx(bubble(stages, many, chunks), abs=1e-12)
    ideal = 3e-6 * 32 / stages * many
    assert step.seconds == pytest.approx(ideal * (1 + (stages - 1) / (chunks * many)), rel=1e-12)


def test_many_microbatches_take_as_long_as_all_of_them_simulated() -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        forward = [[1.0 + 0.3 * (stage % 3) + 0.1 * chunk for chunk in range(chunks)] for stage in range(4)]
        backward = [[2.1 * seconds for seconds in of] for of in forward]
        ends = cuts.finished(schedule, 64, forward, backward, 0.05)
        assert ends == pytest.approx(cuts.simulated(schedule, 64, forward, backward, 0.05), rel=1e-3)


def test_a_message_takes_the_links_that_stages_are_apart() -> None:
    chain = even(4, sends=1e6)
    near, far = (on(chain, 4, pipeline=4, data=data) for data in (1, 8))
    assert near.hop_s == pytest.approx(float(ClusterLinks(A100, 2).cost("broadcast").line(4e6)))
    assert far.hop_s > 5 * near.hop_s  # 8 ranks of a host send at once
    # The first microbatch waits for all boundaries forward and backward, at least.
    alone = on(even(4), 4, pipeline=4).step().seconds
    assert near.step().seconds >= alone + 6 * near.hop_s * (1 - 1e-9)


def test_sums_of_a_tensor_group_are_in_forward_and_backward_and_in_what_is_computed_again() -> None:
    chain = even(6, sums=(1e5, 1e5))
    of_sum = float(ClusterLinks(A100, 4).cost("allreduce").line(4e5 * 2))
    for recompute, passes in ((False, 2), (True, 3)):
        step = on(chain, 3, 2, recompute, tensor=4).step()
        assert step.tensor_s == pytest.approx(3 * 6 * 2 * passes * of_sum)
        work = 3 * 6 * 2 * (4 if recompute else 3) * 1e-6 / 4
        assert step.seconds == pytest.approx(work + step.tensor_s)


def test_groups_that_average_at_once_share_the_links_of_a_host() -> None:
    alone = MeshLinks(A100).seconds("allreduce", 2, 8, 1e9)
    # 8 groups of two, one of each host's ranks, each through its own of 8 ports
    assert alone == pytest.approx(8e9 / 184e9, rel=0.05)
    assert MeshLinks(A100).seconds("allreduce", 16, 1, 1e9) < 2 * alone
    inside = MeshLinks(A100).seconds("allreduce", 2, 4, 1e9)
    assert inside == pytest.approx(MeshLinks(A100).seconds("allreduce", 2, 1, 1e9))


def test_sharded_state_updates_a_share_and_sends_as_much() -> None:
    chain = ModelWork(even(4, parameters=1e8).blocks, update_bytes=28.0)
    axes = Parallel.model_construct(data=8, pipeline=1, tensor=1)
    processor = Processor(1e12, 1e12, 0.0)
    whole, shares = (Divided(chain, axes, 1, 1, processor, MeshLinks(A100), False, way).step() for way in (False, True))
    assert shares.update_s == pytest.approx(whole.update_s / 8) == pytest.approx(4e8 * 28 / 8 / 1e12)
    assert shares.data_s == pytest.approx(whole.data_s, rel=0.02)


def test_one_figure_of_a_device_gives_back_the_time_that_it_was_taken_from() -> None:
    chain = chains.of_table(published("gpt2"), (1024,), 2, 2, 28)
    device = meshes.calibrated(chain, 8, 0.4, 1.4e12, 5e-6)
    again = Divided(chain, Parallel.model_construct(data=1, pipeline=1, tensor=1), 1, 8, device, MeshLinks(A100))
    assert sum(again.passes(chain.blocks)[:2]) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="than memory, launches"):
        meshes.calibrated(chain, 8, 1e-4, 1.4e12, 5e-6)


def test_chains_have_the_parameters_and_the_work_of_their_tables() -> None:
    for table, shape in ((published("gpt2"), (1024,)), (architecture("resnet50", 1000), (224, 224, 3))):
        chain = chains.of_table(table, shape, 4, 4, 28)
        held = sum(block.parameters + block.whole_parameters for block in chain.blocks) - chain.shared
        assert held == parameter_count(table)
        work = sum(block.multiply_adds + block.whole_multiply_adds for block in chain.blocks)
        expected = 1024 * sum(table.work_by_block().values()) if isinstance(table, GPT) else table.multiply_adds(224)
        assert work == expected


def test_the_automatic_split_is_the_best_of_all_cuts() -> None:
    work = [
        block.multiply_adds for block in chains.of_table(architecture("resnet50", 1000), (224, 224, 3), 4, 4, 28).blocks
    ]
    for runs in (2, 3, 4, 5):
        cuts = combinations(range(1, len(work)), runs - 1)
        least = min(
            max(sum(work[start:stop]) for start, stop in zip((0, *cut), (*cut, len(work)), strict=True)) for cut in cuts
        )
        split = balanced([int(one) for one in work], runs)
        ends = [sum(split[:index]) for index in range(runs + 1)]
        assert max(sum(work[start:stop]) for start, stop in pairwise(ends)) == least


def test_published_steps_are_predicted_from_one_row_of_each_model() -> None:
    sets: dict[str, list[float]] = {}
    for row in mesh_rows.rows():
        if row.used_for == "validation":
            sets.setdefault(row.set, []).append(row.error_percent)
    assert {name: len(errors) for name, errors in sets.items()} == {mesh_rows.VTRAIN: 403, mesh_rows.MEGATRON: 3}
    for errors in sets.values():
        assert fmean(map(abs, errors)) < 12
        assert abs(fmean(errors)) < 5


RESNET = schema.load(registry.locate(Path("resnet20-digits")), ["batch_size=32"])


def whole() -> Profile:
    """A step of 60 ms forward and backward, 3 ms update and 2 ms between steps."""
    return simulating.profile().model_copy(update={"settings": RESNET.model_dump(mode="json"), "framework": "pytorch"})


@pytest.mark.parametrize("axes, share", [({"pipeline": 2, "microbatches": 8}, 9 / 8), ({"tensor": 2}, 1.0)])
def test_a_profile_of_whole_models_predicts_a_divided_one(axes: dict[str, int], share: float) -> None:
    network = simulating.cluster(latency_us=0.0, mbit_per_s=1e12)
    settings = Settings.model_validate({"parallel": axes})
    (point,) = predicting.predict(whole(), network, [2], settings).points
    table = chains.of_recipe(RESNET, memory.sample_shape(RESNET))
    assert table is not None
    if "tensor" in axes:  # the rest of a block is whole on each rank
        parts, rest = (
            sum(getattr(block, key) for block in table.blocks) for key in ("multiply_adds", "whole_multiply_adds")
        )
        expected = 60 * (parts / 2 + rest) / (parts + rest)
    else:
        work = [block.multiply_adds + block.whole_multiply_adds for block in table.blocks]
        first = sum(work[: balanced([int(one) for one in work], 2)[0]]) / sum(work)
        expected = 60 * (7 / 8 * max(first, 1 - first) + 1 / 8)
        assert expected == pytest.approx(30 * share, rel=0.1)
        # The chain is cut by the schedule, which is as fast as the evenest cut, or faster.
        assert 30 * share + 3.5 <= point.step_ms <= 1.001 * (expected + 2 + 3 / 2)
    if "tensor" in axes:
        assert point.step_ms == pytest.approx(expected + 2 + 3 / 2, rel=0.03)
    assert point.low_ms < point.step_ms < point.high_ms
    assert point.memory_by_stage_mib and len(point.memory_by_stage_mib) == axes.get("pipeline", 1)
    assert point.memory_mib == max(point.memory_by_stage_mib)


@pytest.mark.parametrize(
    "settings, ranks, reason",
    [
        ({"parallel": {"pipeline": 2}}, 3, "parallel: expected a multiple of 2 ranks"),
        ({"parallel": {"pipeline": 2}, "compression": "fp16"}, 2, "--set compression: expected none together"),
        ({"parallel": {"pipeline": 16, "microbatches": 16}}, 16, "parallel.pipeline: expected at most 9 stages"),
    ],
)
def test_meshes_that_cannot_be_are_refused_by_key(settings: dict[str, Any], ranks: int, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        predicting.predict(whole(), simulating.cluster(), [ranks], Settings.model_validate(settings))


def test_a_published_figure_predicts_stages_of_a_model_that_hvdkit_knows() -> None:
    """It was refused with three lines about keys of a recipe that nobody had given."""
    place, stages = clusters.load(Path("a100-nvlink-ib")), Settings.model_validate({"parallel": {"pipeline": 4}})
    (point,) = predicting.predict(figures.profile("gpt2", None, 8, "A100", 80_000.0), place, [16], stages).points
    assert point.memory_by_stage_mib and len(point.memory_by_stage_mib) == 4
    assert (
        point.memory_parts_mib
        and point.memory_parts_mib["framework"] == 1343
        and 0 not in point.memory_parts_mib.values()
    )
    other = figures.profile("bert-base", None, 8, "A100", sequences_per_second=200.0)
    with pytest.raises(
        RequestError, match=r"^--set parallel: expected a profile of a ResNet or a GPT, got one of bert"
    ):
        predicting.predict(other, place, [16], stages)


def test_who_does_not_know_meshes_refuses_them() -> None:
    asked = predict_command.question(Path("a100-nvlink-ib"), [2], ["parallel.pipeline=2"], None)
    with pytest.raises(RequestError, match="parallel: only hvdkit predict and hvdkit plan know"):
        asked.of(whole())
    assert asked.of(whole(), may_divide=True).settings.parallel
