"""`hvdkit predict` and `hvdkit advise` from the command line, and the files that they read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.results import profile as profiles
from hvdkit.simulator import advise as advising
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
from hvdkit.simulator.advise import Advice
from hvdkit.simulator.money import Money
from hvdkit.simulator.settings import Settings
from tests import simulating
from tests.conftest import ROOT, Hvdkit

pytestmark = pytest.mark.check


@pytest.fixture()
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile and a cluster file in the folder that commands run in."""
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    clusters.save(simulating.cluster(), tmp_path / "cluster.yaml")
    return tmp_path / "profile.json", tmp_path / "cluster.yaml"


def test_a_profile_is_predicted_by_the_ring_drawn_and_traced(hvdkit: Hvdkit, files: tuple[Path, Path]) -> None:
    asked = ("--cluster", "cluster.yaml", "-n", "8", "-n", "1", "--policy", "horovod", "--set", "cycle_time_ms=0")
    done = hvdkit("predict", "profile.json", *asked, "--out", "o")
    assert done.returncode == 0, done.stderr
    folder = files[0].parent / "o"
    eight, one = json.loads((folder / "predict.json").read_text())["points"]
    shown = re.findall(r"^ +(\d+) +([\d.]+) +[\d.]+–[\d.]+ +[\d,]+ +[█·]{5} ", done.stdout, re.MULTILINE)
    assert shown == [("8", f"{eight['step_ms']:.1f}"), ("1", "65.0")], done.stdout
    assert one["step_ms"] == pytest.approx(65.0)
    assert eight["images_per_second"] == pytest.approx(8 * 32 / eight["step_ms"] * 1e3)
    assert eight["low_ms"] < eight["step_ms"] < eight["high_ms"]
    assert any("no collective has been measured" in warning for warning in eight["warnings"])
    (alone,) = predicting.predict(simulating.profile(), simulating.cluster(), [8], Settings()).points
    ring_ms = 2 * 7 * (10e-3 + 8e-3 * 4 * 272_474 / 8 / 8000)
    assert alone.step_ms == pytest.approx(65.0 + ring_ms) and alone.exposed_communication_ms == pytest.approx(ring_ms)
    assert (folder / "predict.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "predict-trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"simulated", "measured"}
    simulated = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert {"forward", "backward", "communication", "update"} <= {event["cat"] for event in simulated}
    # what is on the critical path fills the step
    critical = sum(event["dur"] for event in simulated if event["args"]["critical"])
    assert critical == pytest.approx(1e3 * eight["step_ms"], rel=0.02)


def test_the_same_seed_gives_the_same_answer() -> None:
    answers = [
        predicting.predict(simulating.profile(), simulating.cluster(), [64], Settings(jitter=0.1, seed=seed)).points
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1]
    assert answers[0][0].step_ms != answers[2][0].step_ms
    assert answers[0][0].p99_ms > answers[0][0].step_ms > 65.0


def test_a_profile_is_predicted_as_it_was_run_unless_it_is_asked_otherwise() -> None:
    """Compressed, seldom or otherwise sent, with what that took to compute as it was measured."""
    made, size = simulating.cluster(latency_us=0.0, mbit_per_s=8000.0), 4 * 272_474

    def step_ms(settings: dict[str, Any], *asked: str, compression_ms: float = 6.0) -> float:
        plain = simulating.profile()
        spread = profiles.Spread(**dict.fromkeys(("mean", "median", "low", "high"), compression_ms))
        compute = plain.step.compute_ms.model_copy(update={"mean": plain.step.compute_ms.mean + compression_ms})
        split = plain.step.model_copy(update={"compression_ms": spread, "compute_ms": compute})
        profile = plain.model_copy(update={"step": split, "settings": settings})
        (found,) = predicting.predict(profile, made, [4], settings_.read(asked)).points
        return found.step_ms

    ring, gathered = 2 * 3 / 4 * size / 1e6, 3 * 8 * 272_474 * 0.01 / 1e6
    topk = {"compression": {"method": "topk", "ratio": 0.01}}
    assert step_ms(topk) == pytest.approx(65 + 6 + gathered, rel=1e-3)
    assert step_ms(topk, "compression=none") == pytest.approx(65 + ring)
    assert step_ms({"allreduce": "hierarchical"}) == pytest.approx(65 + 6 + ring)
    assert step_ms({"allreduce": "hierarchical"}, "allreduce=ring") == pytest.approx(65 + ring)
    assert step_ms({"allreduce": "ring"}, compression_ms=0.0) == pytest.approx(65 + ring)
    # the mean of four steps of which one sends
    assert step_ms({"sync": {"every": 4}}, compression_ms=2.0) == pytest.approx(65 + 2 + ring / 4)
    assert step_ms({"sync": {"every": 4}}, "sync.every=1", compression_ms=2.0) == pytest.approx(65 + ring)
    # twice as fast a device packs twice as fast
    faster = step_ms({"allreduce": "hierarchical"}, "speed=2")
    assert faster == pytest.approx(2 + (63 + 6) / 2 + ring)


def test_waiting_for_the_slowest_of_more_ranks_than_were_profiled_is_told_and_doubted() -> None:
    """A noisy profile's compute must not pass for a cluster's."""
    quiet = simulating.profile()

    def found(spread: float, ranks: int) -> predicting.Point:
        """Each rank's compute varies by this share of its mean in the middle 80 % of steps."""
        compute = quiet.step.compute_ms
        wide = {"low": compute.mean * (1 - spread / 2), "high": compute.mean * (1 + spread / 2)}
        split = quiet.step.model_copy(update={"compute_ms": compute.model_copy(update=wide)})
        noisy = [each.model_copy(update={"split": split}) for each in quiet.ranks]
        profile = quiet.model_copy(update={"ranks": noisy})
        (point,) = predicting.predict(profile, simulating.cluster(0.0, 1e6), [ranks], Settings()).points
        return point

    steady, two, many = found(0.0, 1024), found(1.0, 2), found(1.0, 1024)
    assert steady.waiting_ms == 0 and steady.bound == "compute"
    assert many.waiting_ms > 0.5 * many.step_ms and many.bound == "waiting"
    assert any("waiting for the slowest rank" in told and "by 39 %" in told for told in many.warnings)
    assert not any("waiting" in told for told in (*steady.warnings, *found(0.05, 1024).warnings))
    # two ranks were profiled, so that many wait no longer than two do is within the interval
    assert many.low_ms < two.step_ms < many.step_ms
    assert many.low_ms < 0.5 * many.step_ms and two.low_ms > 0.9 * two.step_ms


def test_a_profile_of_cpus_on_gpus_is_told_and_overlap_is_not_advised_on_cpus() -> None:
    profile, gpus = simulating.profile(), clusters.load(Path("v100-nvlink-ib"))

    def warned(*asked: str, device: str = "cpu") -> bool:
        settings = settings_.read(asked)
        made = profile.model_copy(update={"device": device})
        return any("CPUs: this" in told for told in predicting.predict(made, gpus, [64], settings).points[0].warnings)

    assert (warned(), warned("speed=30"), warned(device="cuda")) == (True, False, False)

    def overlap_advised(cluster: clusters.Cluster, settings: Settings) -> bool:
        advice = advising.advise(profile, cluster, 8, settings, Money(None, None, None))
        return any(each.settings == {"policy": "mg-wfbp"} for each in advice.suggestions)

    slow = {"infiniband": settings_.LinkSetting(mbit_per_s=1000.0)}
    assert gpus.levels[-1].name in slow
    assert overlap_advised(settings_.applied(gpus, Settings(link=slow)), Settings(speed=30.0))
    assert not overlap_advised(simulating.cluster(mbit_per_s=100.0), Settings())


def test_advice_is_ranked_priced_and_applied(hvdkit: Hvdkit, tmp_path: Path) -> None:
    settings = schema.load(ROOT / "recipes" / "resnet20-digits.yaml").model_dump()
    profile = simulating.profile().model_copy(update={"settings": settings})
    profiles.save(profile, tmp_path / "profile.json")
    clusters.save(simulating.cluster(mbit_per_s=10.0, hosts=64), tmp_path / "slow.yaml")
    done = hvdkit(
        "advise", "profile.json", "--cluster", "slow.yaml", "-n", "4", "--price", "2", "--apply", "new.yaml",
        "--out", "found",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    advice = Advice.model_validate_json((tmp_path / "found" / "advise.json").read_text())
    software = [each for each in advice.suggestions if each.kind == "software"]
    assert [each.sure for each in software] == sorted((each.sure for each in software), reverse=True)
    by_name = {each.what: each for each in advice.suggestions}
    half = by_name["compress gradients: fp16"]
    size = 4 * 272_474
    dense, fp16 = (65.0 + 2 * 3 * (10e-3 + 8e-3 * part * size / 4 / 10) for part in (1, 0.5))
    assert half.gain == pytest.approx(dense / fp16, rel=1e-3)
    assert half.sure
    assert half.gain_low <= half.gain <= half.gain_high
    assert half.epoch_s == pytest.approx(1437 // 128 * 128 / half.images_per_second)
    assert half.epoch_cost == pytest.approx(half.epoch_s / 3600 * 4 * 2)
    assert half.saved is not None
    assert half.saved > 0
    assert half.risk == advising.evidence()["fp16"][0]
    text = (tmp_path / "new.yaml").read_text()
    assert schema.load(tmp_path / "new.yaml").name == "resnet20-digits"
    assert text != schema.dump(schema.load(ROOT / "recipes" / "resnet20-digits.yaml"))
    again = hvdkit("advise", "profile.json", "--cluster", "slow.yaml", "-n", "4", "--apply", "new.yaml", "--out", "o")
    assert (again.returncode, "is there already" in again.stderr) == (2, True)


@pytest.mark.parametrize(("mbit_per_s", "both"), [(1.0, True), (1000.0, False)])
def test_compression_and_local_sgd_are_advised_together_where_that_is_faster(mbit_per_s: float, both: bool) -> None:
    made = simulating.cluster(mbit_per_s=mbit_per_s)
    advice = advising.advise(simulating.profile(), made, 4, Settings(), Money(None, None, None))
    joined = [each for each in advice.suggestions if {"sync", "compression"} <= (each.recipe or {}).keys()]
    assert len(joined) == both
    for each in joined:
        alone = [other for other in advice.suggestions if other.recipe and other is not each]
        assert each.gain > 1.05 * max(other.gain for other in alone)
        assert all(advising.evidence()[name][0] in each.risk for name in ("topk", "local-sgd"))


@pytest.mark.parametrize(
    "compression", [{"method": "topk", "ratio": 0}, {"method": None}, {"method": "topk", "rank": "x"}]
)
def test_a_profile_whose_compression_cannot_be_is_told_by_key(compression: dict[str, object]) -> None:
    made = simulating.profile()
    damaged = made.model_copy(update={"settings": made.settings | {"compression": compression}})
    with pytest.raises(RequestError, match=r"settings\.compression\.(ratio|method|rank): .*, got") as error:
        predicting.predict(damaged, simulating.cluster(), [4], Settings())
    assert "\n" not in str(error.value)


def test_evidence_of_accuracy_is_what_was_measured() -> None:
    """benchmarks/bench-network.json, to the digit."""
    story = json.loads((ROOT / "benchmarks" / "bench-network.json").read_text())
    rows = {row["method"]: row for row in story["rows"] if row["framework"] == "pytorch"}
    known = {name: entry for name, entry in advising.evidence().items() if entry.points_lost is not None}
    assert known.keys() == {"fp16", "int8", "topk", "powersgd", "local-sgd-4", "local-sgd-8"}
    figures = "{accuracy_mean:.3f} ({accuracy_low:.3f} to {accuracy_high:.3f})"
    assert figures.format(**rows["local24-int8"]) in str(advising.evidence()["local-sgd"].measured)
    for name, (_, text, points_lost) in known.items():
        row, dense = rows[name.replace("local-sgd-", "local")], rows["dense"]
        assert text and figures.format(**row) in text and figures.format(**dense) in text, name
        lost = round(dense["accuracy_mean"], 3) - round(row["accuracy_mean"], 3)
        assert points_lost == pytest.approx(100 * lost), name


def test_advice_says_when_more_ranks_lose() -> None:
    """One server for all: at some count what goes through its link outgrows what ranks add."""
    made = simulating.cluster(latency_us=2000.0)
    advice = advising.advise(simulating.profile(), made, 8, Settings(policy="central"), Money(None, None, None))
    speeds = {ranks: speed for ranks, (speed, _) in advice.adding.points.items()}
    assert advice.adding.loses == [2, 4]
    assert speeds[2] < speeds[4] < speeds[1] < speeds[8]
    assert advice.adding.most is not None
    assert speeds[2 * advice.adding.most] < 1.1 * speeds[advice.adding.most]
    assert "2, 4 ranks are slower than fewer" in advice.adding.told


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("schema_version", 7, "schema_version: expected 1, got 7"),
        ("levels", [], "levels: "),
        ("colour", "red", "colour: unknown key"),
        ("device", None, "device: "),
        ("jitter", -1.0, "jitter: expected greater than or equal to 0, got -1.0"),
        (
            "levels",
            [{"name": "net", "pieces": [{"from_bytes": 0, "latency_us": -1.0, "mbit_per_s": 0.0}]}],
            "levels.0.pieces.0.latency_us: expected greater than or equal to 0",
        ),
    ],
)
def test_a_damaged_cluster_file_is_told_by_key(tmp_path: Path, key: str, value: object, expected: str) -> None:
    document = simulating.cluster().model_dump() | {key: value}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(RequestError) as fault:
        clusters.load(tmp_path / "c.yaml")
    assert f"{tmp_path / 'c.yaml'}: {expected}" in str(fault.value)


@pytest.mark.parametrize("name", clusters.shipped())
def test_every_cluster_that_comes_with_hvdkit_predicts(name: str) -> None:
    made = clusters.load(Path(name))
    assert made.name == name and made.source
    found = predicting.predict(simulating.profile(), made, [1, 2, 4], Settings())
    assert all(point.low_ms <= point.step_ms <= point.high_ms for point in found.points)
