"""`hvdkit profile`: its file's format, and what it makes of marks and timelines whose truth is known."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands import predict
from hvdkit.commands import profile as profile_
from hvdkit.core import trace_events
from hvdkit.errors import RequestError, RunError
from hvdkit.launch.placement import Placement
from hvdkit.profiling import assemble, breakdown, chrome_trace, pipeline, timeline
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.report.pipeline import picture as draw_pipeline
from hvdkit.report.profile import picture, sentences, tables
from hvdkit.report.tabular import size
from hvdkit.results import profile
from hvdkit.results.pipeline import PipelineStep
from hvdkit.results.profile import Profile
from tests import profiled
from tests.conftest import ROOT
from tests.profiled import AHEAD, BACKWARD, FORWARD, MS, NEGOTIATION, SLOWER, STEP, TRANSFER, UPDATE

pytestmark = pytest.mark.check

DIGITS = ROOT / "recipes" / "resnet20-digits.yaml"


@pytest.fixture
def checked() -> Recipe:
    return schema.load(DIGITS)


@pytest.fixture
def found(checked: Recipe, tmp_path: Path) -> assemble.Findings:
    profiled.write(tmp_path)
    return assemble.read(tmp_path, checked)


@pytest.fixture
def made(found: assemble.Findings, checked: Recipe) -> Profile:
    return assemble.profile(found, checked)


def test_a_step_is_split_as_it_was(made: Profile) -> None:
    first, second = (rank.split for rank in made.ranks)
    assert first.step_ms.mean == second.step_ms.mean == STEP
    assert (first.input_ms.median, first.gaps_ms.median) == (2, 2)
    assert (first.forward_ms.mean, second.forward_ms.mean) == (FORWARD, FORWARD + SLOWER)
    assert first.backward_ms.mean == BACKWARD
    assert first.update_ms.mean == UPDATE
    assert first.waiting_ms.mean == pytest.approx(SLOWER, abs=0.01) and second.waiting_ms.mean < 0.01
    for split in (first, second, made.step):
        assert split.negotiation_ms.mean == pytest.approx(NEGOTIATION, abs=0.01)
        assert split.exposed_communication_ms.mean == pytest.approx(TRANSFER, abs=0.01)
        assert sum(part.mean for part in split.parts().values()) == pytest.approx(STEP, rel=1e-6)
        assert split.compression_ms is None
    assert made.step.compute_ms.mean == pytest.approx(FORWARD + SLOWER / 2 + BACKWARD + UPDATE)
    assert made.bound == "compute" and made.measured_steps == 8


def test_the_slow_rank_is_named(made: Profile) -> None:
    assert made.slowest and (made.slowest.rank, made.slowest.host) == (1, "host1")
    assert made.slowest.behind_ms == pytest.approx(SLOWER, abs=0.01) and made.slowest.last_share == 1
    told = " ".join(sentences(made))
    assert f"Rank 1 on host1 is the slowest: {SLOWER}.0 ms behind" in told and f"compute (+{SLOWER}.0 ms)" in told


def test_clocks_of_two_hosts_are_brought_together(checked: Recipe, made: Profile) -> None:
    """A meeting ends 2 ms after the last has come to it: so sure can one be."""
    assert made.ranks[1].clock_offset_ms == AHEAD / MS and made.ranks[1].clock_error_ms == 2
    one_machine = assemble.gather(profiled.record(("here", "here")), [], checked)
    assert [clock.error for clock in one_machine.clocks] == [0, 0]
    assert one_machine.clocks[1](7) == 7, "one machine has one clock, whatever the meetings say"


def test_tensors_come_in_the_order_of_backward(made: Profile) -> None:
    assert [tensor.name for tensor in made.tensors] == ["fc.weight", "bn1.weight", "bn1.bias", "conv1.weight"]
    assert [round(tensor.ready_ms, 6) for tensor in made.tensors] == [5, 20, 20, 40]
    assert made.tensors[-1].bytes == 4 * 4 * 27 and made.tensors[-1].layer == "conv1"
    layers = {layer.name: layer for layer in made.layers}
    assert list(layers) == ["conv1", "bn1", "fc"] and [layer.kind for layer in made.layers] == ["conv", "norm", "dense"]
    assert {name: round(layer.backward_ms or 0, 6) for name, layer in layers.items()} == {
        "fc": 5,
        "bn1": 15,
        "conv1": 20,
    }
    assert made.step.forward_ms
    share = made.step.forward_ms.median / FORWARD
    assert layers["conv1"].forward_ms == pytest.approx(10 * share, rel=0.03)
    assert layers["fc"].forward_ms == pytest.approx(6 * share, rel=0.03)


def test_communications_and_bandwidth(made: Profile) -> None:
    (one,) = made.communications
    size = sum(tensor.bytes for tensor in made.tensors)
    assert (one.operation, one.tensors, one.bytes) == ("allreduce", 4, size)
    assert one.ms == pytest.approx(TRANSFER) and one.start_ms == pytest.approx(BACKWARD + SLOWER + NEGOTIATION)
    assert made.bytes_per_step == size  # of two ranks in a ring each sends what it has
    assert made.link.achieved_mbit_per_s == pytest.approx(8e-3 * size / TRANSFER)
    (alone,) = made.latencies
    assert alone.ms.median == pytest.approx(4, abs=1.1) and alone.samples == 10
    assert made.link.measured_mbit_per_s == pytest.approx(8e-3 * 4_000_000 / alone.ms.median)
    assert made.link.rated_mbit_per_s == 10_000


def test_overlapped_communication_lies_under_compute(checked: Recipe) -> None:
    """A second collective runs while backward does: it costs the step nothing, and is told."""
    starts = [step.marks[0][1] for step in profiled.steps(0) if step.kind == "traced"]
    last = 3 + FORWARD + SLOWER + BACKWARD + NEGOTIATION
    operations = [
        timeline.Operation("allreduce", ("fc.weight",), 160, None, start + begin * MS, start + end * MS)
        for start in starts
        for begin, end in ((45, 55), (last, last + TRANSFER))
    ]
    made = assemble.profile(assemble.gather(profiled.record(), operations, checked), checked)
    assert made.step.overlapped_communication_ms.mean == pytest.approx(10)
    assert len(made.communications) == 2 and made.communications[0].start_ms == pytest.approx(45 - 3 - FORWARD)


def test_what_profiling_costs(made: Profile) -> None:
    assert made.cost and made.cost.turns == 2
    assert (made.cost.with_ms, made.cost.without_ms) == (STEP, STEP - 1)
    assert made.cost.percent == pytest.approx(100 / (STEP - 1))


def _set(content: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    place: Any = content
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    if value is None:
        del place[leaf]
    else:
        place[leaf] = value


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("schema_version", 2, "schema_version: expected 1, got 2; profile again"),
        ("tensors.0.ready_ms", -1, "tensors.0.ready_ms: Input should be greater than or equal to 0"),
        ("tensors.0.ready_ms", "5", "tensors.0.ready_ms: Input should be a valid number"),
        ("tensors.0.ready_ms", 39, "expected ready_ms >= 39"),
        ("tensors.0.bytes", 5, "expected 160 for [10, 4] in float32, got 5"),
        ("tensors.0.layer", "nowhere", "fc.weight: expected one of the layers, got nowhere"),
        ("step.step_ms.mean", None, "step.step_ms.mean: Field required"),
        ("step.step_ms.low", 1e9, "expected low <= median <= high"),
        ("layers.0.forward_ms", -0.1, "layers.0.forward_ms"),
        ("extra", 1, "extra: Extra inputs are not permitted"),
        ("ranks.1.rank", 0, "ranks: expected 0 to 1 in order"),
    ],
)
def test_a_wrong_profile_is_told_in_one_line(made: Profile, tmp_path: Path, path: str, value: Any, told: str) -> None:
    content = json.loads(made.model_dump_json())
    _set(content, path, value)
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(RequestError) as error:
        profile.load(tmp_path / "profile.json")
    assert told in str(error.value) and str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": true}', b"null"]
)
def test_a_damaged_profile_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(RequestError, match=r"not the profile.json of `hvdkit profile`") as error:
        profile.load(tmp_path / "profile.json")
    assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="No such file"):
        profile.load(tmp_path / "none.json")


def test_a_cut_timeline_is_told_in_one_line(tmp_path: Path, checked: Recipe) -> None:
    path = profiled.write(tmp_path)
    whole = path.read_text()
    for cut in (whole[:-1], whole[: len(whole) // 2], whole[:1], "", "{}", "[]", '[{"ph": "?"}]', "[" * 100_000):
        path.write_text(cut)
        with pytest.raises(RequestError, match="not a whole timeline of Horovod's") as error:
            assemble.read(tmp_path, checked)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    path.write_text(json.dumps(profiled.timeline()[1:]))
    with pytest.raises(RequestError, match="start_time_since_epoch_in_micros"):
        timeline.read(path)
    path.write_text(json.dumps([*profiled.timeline()[:1], {"name": "process_name", "ph": "M", "pid": 1}]))
    assert timeline.read(path) == [], "a tensor without a name is none"
    path.write_text(whole.replace("[4, 3, 3, 3]", "[4, 3"))
    with pytest.raises(RequestError, match="expected dtype and shape"):
        timeline.read(path)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(RequestError, match="not the record of a profiled run: framework"):
        assemble.read(tmp_path, checked)


def test_a_rank_alone_may_have_nothing_to_reduce(checked: Recipe, tmp_path: Path) -> None:
    """Adding up another way than by Horovod's own, it asks for nothing: the timeline is empty, and no fault."""
    profiled.write(tmp_path).write_text("")
    record = profiled.record()
    alone = record.model_copy(update={"ranks": record.ranks[:1], "hosts": 1})
    (tmp_path / "record.json").write_text(alone.model_dump_json())
    made = assemble.profile(assemble.read(tmp_path, checked), checked)
    assert made.communications == [] and made.link.achieved_mbit_per_s is None and made.slowest is None


def test_the_timeline_tells_what_was_fused(tmp_path: Path) -> None:
    operations = timeline.read(profiled.write(tmp_path), profiled.EPOCH)
    assert len(operations) == 4 and {each.names for each in operations} == {tuple(profiled.TENSORS)}
    first = operations[0]
    assert first.requested and first.start - first.requested == (SLOWER + NEGOTIATION) * MS
    assert first.end - first.start == TRANSFER * MS


def test_collectives_that_were_not_fused_stay_apart(tmp_path: Path) -> None:
    events = profiled.timeline()[:5]
    for pid in (1, 2):
        for name, ph, ts in (("ALLREDUCE", "B", 10), ("GLOO_ALLREDUCE", "B", 12), ("", "E", 18)):
            events.append({"name": name, "ph": ph, "ts": 100 * pid + ts, "pid": pid})
        args = {"dtype": "float16", "shape": "[4]"}
        events.append({"ph": "E", "ts": 100 * pid + 20, "pid": pid, "args": args})
    events.append({"ph": "E", "ts": 999, "pid": 3})  # began before the timeline
    events.append({"name": "ALLREDUCE", "ph": "B", "ts": 999, "pid": 4})  # ended after it
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    operations = timeline.read(tmp_path / "timeline.json", profiled.EPOCH)
    assert [(each.names, each.bytes, each.start, each.end) for each in operations] == [
        (("conv1.weight",), 8, 112_000, 120_000),
        (("bn1.weight",), 8, 212_000, 220_000),
    ]


def test_the_trace_has_all_ranks_on_one_clock(found: assemble.Findings) -> None:
    events = json.loads(chrome_trace.dump(found))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == pytest.approx(0, abs=2500)
    assert all(event["dur"] >= 0 for event in spans)
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(named.values()) == {"rank 0 on host0", "rank 1 on host1", "Horovod, as rank 0 saw it"}
    received = [
        [e["ts"] + e["dur"] for e in spans if e["name"] == "communication" and e["pid"] == p] for p in (100, 101)
    ]
    assert len(received[0]) == 16 and received[0] == pytest.approx(received[1], abs=2500)
    (horovod,) = [pid for pid, name in named.items() if name.startswith("Horovod")]
    assert len([e for e in spans if e["pid"] == horovod and e["name"] == "allreduce"]) == 4
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int), "viewers cut fractions off"
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():  # what overlaps in a lane without being nested is left out by Perfetto
        lane.sort()
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(lane))
    assert not {lane for _, lane in lanes} & named.keys(), "Perfetto would take such a lane for its process's first"


def test_collectives_that_overlap_are_drawn_one_behind_the_other(checked: Recipe) -> None:
    """Two are asked for, one of them while the other is negotiated, and the second begins before the first is over."""
    start = next(step.marks[0][1] for step in profiled.steps(0) if step.kind == "traced")
    operations = [
        timeline.Operation(name, (name,), 4, start + requested * MS, start + begin * MS, start + end * MS)
        for name, requested, begin, end in (("allreduce", 10, 20, 30), ("allgather", 15, 28, 40))
    ]
    events = json.loads(chrome_trace.dump(assemble.gather(profiled.record(), operations, checked)))["traceEvents"]
    (process,) = (event["pid"] for event in events if event.get("args", {}).get("name", "").startswith("Horovod,"))
    lanes = [[e for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", process, lane)] for lane in (1, 2)]
    assert [[event["dur"] for event in lane] for lane in lanes] == [[10_000, 8_000], [10_000, 10_000]]
    for first, second in lanes:
        assert second["ts"] >= first["ts"] + first["dur"]


def test_the_picture_and_tables_are_drawn(found: assemble.Findings, made: Profile, tmp_path: Path) -> None:
    picture(made, found, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    first, second = tables(made)
    assert first.row_count == 11 and second.row_count == 3
    share = r"Compute bounds the step: .* communication that does not overlap with compute takes \d+\.\d %\."
    assert re.search(share, sentences(made)[0])


def test_the_overhead_is_stated_only_if_all_pairs_of_steps_show_it(made: Profile) -> None:
    def last(**changes: float | None) -> str:
        assert made.cost
        return sentences(made.model_copy(update={"cost": made.cost.model_copy(update=changes)}))[-1]

    pairs = "in 2 pairs of traced and plain steps"
    assert last(percent=8.7, low_percent=2.0, high_percent=9.5) == (
        f"Tracing overhead: a step is 8.7 % longer, 2.0 to 9.5 %, {pairs}."
    )
    unclear = last(percent=27.6, low_percent=-12.0, high_percent=31.0)
    assert unclear == f"Tracing overhead: none that these steps can show (-12.0 to +31.0 % {pairs})."
    assert last(percent=1.0, low_percent=None, high_percent=None).startswith("Tracing overhead: a step is 1.0 % longer")


@pytest.mark.parametrize(
    ("count", "text"), [(40, "40 bytes"), (2560, "2.5 KiB"), (104_000, "101.6 KiB"), (1_089_896, "1.0 MiB")]
)
def test_a_size_is_never_zero_of_a_large_unit(count: int, text: str) -> None:
    assert size(count) == text


def test_without_marks_there_is_nothing_to_tell(checked: Recipe) -> None:
    record = profiled.record()
    for rank in record.ranks:
        for step in rank.steps:
            step.marks = []
    with pytest.raises(RunError, match="no step recorded trace events"):
        assemble.profile(assemble.gather(record, [], checked), checked)


def test_what_a_timeline_does_not_tell_is_known_from_core(checked: Recipe, tmp_path: Path) -> None:
    """An allgather's result is in the timeline, not what a rank puts in; of an all-to-all there is nothing."""
    record = profiled.record()
    for step in (step for rank in record.ranks for step in rank.steps if step.kind == "traced"):
        at = next(at for name, at in step.marks if name == trace_events.SENT)
        step.marks += [(f"{trace_events.PUT}alltoall:1000:500", at), (f"{trace_events.PUT}allgather:400:0", at)]
        step.marks.sort(key=lambda each: each[1])
    starts = [step.marks[0][1] for step in profiled.steps(0) if step.kind == "traced"]
    operations = [
        timeline.Operation(kind, ("x",), size, None, start + begin * MS, start + (begin + 2) * MS)
        for start in starts
        for kind, size, begin in (("alltoall", 0, 80), ("allgather", 800, 83), ("allreduce", 4, 86))
    ]
    made = assemble.profile(assemble.gather(record, operations, checked), checked)
    assert [(each.operation, each.bytes, each.link_bytes) for each in made.communications] == [
        ("alltoall", 1000, 500),
        ("allgather", 400, 0),
        ("allreduce", 4, 4),
    ]
    assert made.link.achieved_mbit_per_s == pytest.approx(8e-3 * 504 / 4), "while something crosses the link"
    json.loads(chrome_trace.dump(assemble.gather(record, operations, checked)))


def test_what_is_not_profiled_is_told(checked: Recipe) -> None:
    texts = ["sync={every: 4, start: 2}", "compression={method: topk, warmup_epochs: 2}", "elastic={max_np: 2}"]
    plan = profile_.plan(schema.load(DIGITS, texts), "pytorch", Placement(2), steps=21)
    keys = ("elastic", "sync.start", "compression.warmup_epochs", "--steps 21")
    assert [line.split(":")[0] for line in plan.left_out] == list(keys)
    assert "24 steps" in plan.left_out[-1]
    run = plan.plan.recipe
    assert run.sync and run.sync.start == 0 and run.elastic is None and plan.given.elastic is not None
    assert not profile_.plan(checked, "pytorch", Placement(2)).left_out
    with pytest.raises(RequestError, match=r"sync\.every: expected at most 1000"):
        profile_.plan(schema.load(DIGITS, ["sync={every: 1001}"]), "pytorch", Placement(2))


def test_the_plan_lets_horovod_begin_its_timeline_late(checked: Recipe) -> None:
    plan = profile_.plan(checked, "pytorch", Placement(2))
    assert plan.plan.settings["HOROVOD_TIMELINE"] == "DYNAMIC"


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 5)])
def test_a_step_of_a_pipeline_is_told_as_it_was(stages: int, microbatches: int, tmp_path: Path) -> None:
    """Measured and predicted passes are at the same times, and both bubbles are those of the formula."""
    forward, backward = 3, 6
    divided = f"parallel.pipeline={stages}", f"parallel.microbatches={microbatches}", f"batch_size={microbatches}"
    recipe = schema.load(ROOT / "recipes" / "gpt-tiny.yaml", divided)
    found = assemble.gather(profiled.pipelined(stages, microbatches, forward, backward), [], recipe)
    step = pipeline.measured(found, recipe)
    busy, length = microbatches * (forward + backward), (microbatches + stages - 1) * (forward + backward)
    assert step.predicted_ms == pytest.approx(length) and step.step_ms == pytest.approx(length + 6)
    assert step.equal_bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert step.predicted_bubble == pytest.approx(step.equal_bubble)
    assert step.bubble == pytest.approx(1 - busy / (length + 6))
    assert step.forward_ms == pytest.approx([forward] * stages) and step.backward_ms == pytest.approx(
        [backward] * stages
    )
    for rank in step.ranks:
        passes = [span for span in rank.measured if span.doing in ("forward", "backward")]
        assert [span.model_dump() for span in passes] == [
            pytest.approx(span.moved(1).model_dump()) for span in rank.predicted
        ]
        kinds = {span.doing: 0.0 for span in rank.measured}
        for span in rank.measured:
            kinds[span.doing] += span.end_ms - span.start_ms
        waits = length - busy - (rank.stage * backward if rank.stage else 0)  # those before its last pass
        assert kinds["wait"] == pytest.approx(waits) and kinds["update"] == pytest.approx(3)
    split = breakdown.split(found.durations, False, 0.0)
    assert split.forward_ms and split.forward_ms.mean == pytest.approx(microbatches * forward)
    assert sum(part.mean for part in split.parts().values()) == pytest.approx(length + 6)
    paths = tmp_path / "pipeline.png", tmp_path / "pipeline.svg"
    draw_pipeline(step, *paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG") and b"<svg" in paths[1].read_bytes()
    step.written(tmp_path)
    assert PipelineStep.read(tmp_path / PipelineStep.FILE) == step


def test_a_profile_of_stages_is_not_predicted_from(made: Profile, tmp_path: Path) -> None:
    settings = made.settings | {"parallel": made.settings["parallel"] | {"pipeline": 2}}
    profile.save(made.model_copy(update={"settings": settings}), tmp_path / "profile.json")
    with pytest.raises(RequestError, match=r"settings\.parallel: expected ranks that have the whole model"):
        predict.read(tmp_path / "profile.json")
