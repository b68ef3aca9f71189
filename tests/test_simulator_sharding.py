"""Sharding in the simulator: bytes, time, what overlaps, memory, and what `predict` and `advise` say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvdkit.errors import RequestError
from hvdkit.report.predict import prediction_lines
from hvdkit.results.profile import Profile
from hvdkit.simulator import advise as advising
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import refusals, step
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.compression_costs import CompressionSetting
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.money import Money
from hvdkit.simulator.settings import Settings, read
from hvdkit.simulator.sharding import STAGES
from hvdkit.simulator.step import Case
from tests import simulating
from tests.test_simulator_refusals import TWO_LEVELS, machines, on_a_device

pytestmark = pytest.mark.check


def cases(ranks: int, compute_s: float = 0.3, **more: Any) -> list[Case]:
    """A ResNet-50 at each stage, over links that cost time by bytes alone."""
    work = simulating.workload(compute_s=compute_s)
    network = ClusterLinks(simulating.cluster(latency_us=0.0), ranks)
    return [Case(work, network, sharding=stage, **more) for stage in STAGES]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_without_overlap_stages_take_the_time_of_their_bytes(ranks: int) -> None:
    """2Ψ, 2Ψ, 2Ψ and 3Ψ values, of which backward needs not gather forward's last block again; compute is nothing."""
    made = cases(ranks, compute_s=1e-9, policy="naive")
    parameters = sum(tensor.bytes for tensor in made[0].workload.tensors)
    second = parameters * (ranks - 1) / ranks / (8000e6 / 8)
    times = (2, 2, 2, 3 - 1 / made[0].workload.blocks)
    assert [step.period(each) for each in made] == pytest.approx([each * second for each in times])
    sent = [sum(float(phase.sizes.sum()) for phase in each.traffic.phases) + each.gathered_bytes for each in made]
    assert sent == pytest.approx([parameters, *[parameters * (1 + 1 / ranks)] * 2, parameters * (1 + 2 / ranks)])


@pytest.mark.parametrize("policy", ["horovod", "grouped", "ddp"])
def test_alone_all_stages_are_equal_and_many_cases_agree_with_one(policy: str) -> None:
    assert len({step.period(each) for each in cases(1, policy=policy)}) == 1
    for made in cases(8, policy=policy):
        twice = [made, replace(made, slow=1.2)]
        assert step.periods(twice) == pytest.approx([step.period(each) for each in twice])


def test_gathers_are_hidden_under_compute_a_block_ahead() -> None:
    """With much compute the last stage exposes the first block's gather; others expose that of all weights."""
    none, optimizer, gradients, parameters = cases(8, compute_s=30.0, policy="ddp")
    alone = step.period(none.alone)
    exposed = [step.period(each) - alone for each in (none, optimizer, gradients, parameters)]
    assert exposed[1] == exposed[2] > exposed[0]
    first = parameters.gather_s / parameters.workload.blocks
    assert parameters.workload.blocks == 19  # 16, the stem, its norm, and the linear layer
    assert exposed[3] == pytest.approx(first + exposed[0] / 2, rel=0.5) and exposed[3] < exposed[1]


def test_nothing_hides_gathers_where_the_same_cores_compute_and_send() -> None:
    none, _, _, parameters = cases(8, compute_s=30.0, policy="naive")
    exposed = [step.period(each) - step.period(none.alone) for each in (none, parameters)]
    gathered = parameters.gather_s * (2 - 1 / parameters.workload.blocks)
    assert exposed[1] == pytest.approx(exposed[0] / 2 + gathered)
    order = [task.name for task in step.detailed(parameters) if task.resource == "device"]
    assert order.index("forward") < order.index("gather in backward") < order.index("backward end")


def test_joined_gradients_are_not_copied_and_a_share_is_copied_once() -> None:
    work = simulating.workload()
    network = ClusterLinks(simulating.cluster(latency_us=0.0), 8)
    sent = sum(tensor.bytes for tensor in work.tensors)
    device = network.cluster.device
    copy_s = 2 * sent / device.memory_bytes_per_s + 1e-6 * device.launch_us

    def saved(**more: Any) -> list[float]:
        made = [Case(work, network, "grouped", sharding=stage, **more) for stage in STAGES]
        joined = [replace(each, workload=replace(work, joined=True)) for each in made]
        return [step.period(apart) - step.period(each) for apart, each in zip(made, joined, strict=True)]

    assert saved() == pytest.approx([2 * copy_s, copy_s, 0, 0])
    whole = Case(work, network, "grouped")
    as_one = replace(whole, workload=replace(work, as_one=True))
    assert step.period(whole) - step.period(as_one) == pytest.approx(copy_s), "no copy comes back"
    assert saved(compression=CompressionSetting(method="fp16")) == pytest.approx([0, 0, 0, 0])


def test_ranks_update_their_share_and_copy_parameters_that_are_in_no_vector() -> None:
    """A rank reads and writes its share of them, and then all: under a framework that cannot shard parameters."""
    work, network = simulating.workload(update_s=0.08), ClusterLinks(simulating.cluster(), 8)
    assert [Case(work, network, sharding=stage).update_s for stage in STAGES] == [0.08, 0.01, 0.01, 0.01]
    copied = 2 * (1 + 1 / 8) * work.gradient_bytes / network.cluster.device.memory_bytes_per_s
    cannot = replace(work, stages=STAGES[:3])
    assert Case(cannot, network, sharding="gradients").update_s == pytest.approx(0.01 + copied)


def test_a_sharded_profile_has_the_update_of_a_share() -> None:
    document = simulating.profile(np=4).model_dump(mode="json")
    document["settings"]["sharding"] = "gradients"
    document["memory"]["device_peak_mib"] = 100.0
    found, plain = calibrate(Profile.model_validate(document)), calibrate(simulating.profile(np=4))
    whole = found.workload.state_bytes
    assert (whole.parameters, whole.gradients, whole.optimizer) == (10**6, 10**6, 4 * 10**6)
    assert found.workload.activation_bytes == pytest.approx(100 * 2**20 - 10**6 - 10**6 / 4 - 10**6, rel=1e-5)
    assert found.known.sharding == "gradients"
    assert found.workload.update_s == pytest.approx(4 * plain.workload.update_s)
    assert found.case(simulating.cluster(), 4, Settings()).update_s == pytest.approx(plain.workload.update_s)


def test_memory_by_part() -> None:
    profile, cluster = on_a_device(), machines()
    found = [predicting.predict(profile, cluster, [8], read([f"sharding={stage}"])) for stage in STAGES]
    totals = [each.points[0].memory_mib for each in found]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]  # type: ignore[type-var, operator]
    parts = found[2].points[0].memory_parts_mib
    assert parts and sum(parts.values()) == pytest.approx(totals[2])
    whole = 10**6 / 2**20
    assert (parts["parameters"], parts["gradients"]) == pytest.approx((whole, whole / 8), rel=1e-3)
    (line,) = [line for line in prediction_lines(found[2]) if "of memory" in str(line)]
    assert "MiB of memory: parameters 1, gradients 0" in line
    alone = [predicting.predict(profile, cluster, [1], read([f"sharding={stage}"])).points[0] for stage in STAGES]
    assert len({(each.memory_mib, each.step_ms) for each in alone}) == 1


def heavy() -> Profile:
    """A profile whose states are most of its memory: 1,000 MiB of parameters, 2,000 of optimizer, 4,500 at the peak."""
    document = simulating.profile().model_dump(mode="json")
    document["memory"] = {
        "parameter_bytes": 1000 * 2**20,
        "optimizer_bytes": 2000 * 2**20,
        "peak_rss_mib": 500.0,
        "device_peak_mib": 4500.0,
    }
    return Profile.model_validate(document)


@pytest.mark.parametrize(
    ("room_mib", "stage"), [(5000, "none"), (3000, "optimizer"), (2000, "gradients"), (1200, "parameters"), (500, None)]
)
def test_the_cheapest_stage_that_fits(room_mib: int, stage: str | None) -> None:
    """At 16 ranks 4,564, 2,689, 1,752 and 814 MiB, of which 500 are activations and 64 the fusion buffer."""
    found, cluster = calibrate(heavy()), machines(room_mib / 0.9)
    found = replace(found, workload=replace(found.workload, stages=STAGES))
    case = found.case(cluster, 16, Settings())
    assert refusals.cheapest(case) == stage
    assert refusals.cheapest(found.case(cluster, 16, read(["compression=topk"]))) is None
    fault = refusals.refusal(case, Settings())
    assert (fault is None) == (stage == "none")
    if stage and fault:
        assert f"--set sharding={stage}" in fault
        assert refusals.refusal(replace(case, sharding=stage), Settings()) is None  # type: ignore[arg-type]


def test_only_stages_that_the_framework_has_are_proposed() -> None:
    document = heavy().model_dump(mode="json")
    able = {}
    for framework in ("pytorch", "mxnet"):
        found = calibrate(Profile.model_validate(document | {"framework": framework}))
        able[framework] = found.workload.stages
        assert refusals.cheapest(found.case(machines(3000.0), 16, Settings())) == "optimizer"
    assert able["mxnet"] == ("none", "optimizer") and "gradients" in able["pytorch"]


def test_advice_shards_where_a_larger_batch_fits_by_it() -> None:
    found = advising.advise(heavy(), machines(5300.0), 16, Settings(), Money())
    sharded = [each for each in found.suggestions if each.recipe and "sharding" in each.recipe]
    assert {"batch_size": 128, "sharding": "optimizer"} in [each.recipe for each in sharded]


@pytest.mark.parametrize("other", ["compression=topk", "sync.every=4", "allreduce=hierarchical"])
def test_what_does_not_go_with_sharding(other: str) -> None:
    cluster = simulating.cluster(levels=TWO_LEVELS, ranks_per_host=4)
    with pytest.raises(RequestError, match="sharding: gradients needs"):
        predicting.predict(simulating.profile(), cluster, [8], read(["sharding=gradients", other]))


def test_gradients_of_several_batches_are_not_foreseen_sharded() -> None:
    """Stage `gradients` sends those of each batch, which no profile of a step shows; `optimizer` sends them once."""
    made = [replace(each, workload=replace(each.workload, earlier_s=0.1)) for each in cases(8)]
    found = [refusals.refusal(each, Settings()) for each in made]
    assert found[:2] == [None, None]
    assert all(fault and "a profile of one batch per update" in fault for fault in found[2:])
