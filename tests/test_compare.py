"""RunOrder, ratios, ties and baselines: what `hvdkit compare` makes of many runs, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdkit import usage
from hvdkit.baselines import registry
from hvdkit.commands import compare, run_order, train
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.commands.run_order import RunOrder
from hvdkit.core import group
from hvdkit.errors import RequestError
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.report.collect import Run
from hvdkit.report.compare import comparison_markdown, comparison_tables
from hvdkit.report.rounds import by_kind, efficiency, ratios
from hvdkit.results import intervals
from hvdkit.results.compare import Comparison, read_comparison
from hvdkit.results.intervals import Interval
from hvdkit.results.machine import this_machine
from hvdkit.results.train import TrainResult
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check


@pytest.fixture
def checked(recipe: Path) -> Recipe:
    return schema.load(recipe, ["threads=1"])


def result(
    framework: str = "pytorch", np: int = 2, rival: str | None = None, round: int = 1, **more: Any
) -> TrainResult:
    fields: dict[str, Any] = {
        "framework": framework, "np": np, "rival": rival, "round": round, "framework_version": "1",
        "horovod_version": "2", "hvdkit_version": "3", "recipe": "resnet20-digits", "model": "resnet20",
        "parameters": 1, "launcher": "direct", "device": "cpu", "threads": 1, "seed": 1, "batch_size": 32,
        "compression": "none", "optimizer": "sgd", "precision": "fp32", "accumulate": 1, "recompute": False,
        "epochs": 1, "steps": 2, "first_step": 0, "warmup_steps": 0, "measured_steps": 2, "images_per_second": 100.0,
        "step_ms_p50": 1.0, "step_ms_p90": 1.0, "train_loss": 1.0, "val_accuracy": None, "val_loss": None,
        "peak_rss_mib": 1.0, "train_s": 1.0, "initial_state_sha256": "", "final_weights_sha256": "",
    }  # fmt: skip
    return TrainResult(**fields | more)


def rounds(speeds: dict[tuple[int, str | None], list[float]]) -> list[TrainResult]:
    """Runs by (np, rival), a speed a round."""
    return [
        result(np=np, rival=rival, round=number, images_per_second=speed)
        for (np, rival), values in speeds.items()
        for number, speed in enumerate(values, 1)
    ]


def test_the_interval_of_a_median() -> None:
    even = intervals.of_values([1.0, 1.1, 0.9])
    assert (even.median, even.low, even.high) == (1.0, 0.9, 1.1), "of three values, all that there is"
    assert intervals.of_values([1.2]) == Interval(1.2, 1.2, 1.2)
    many = intervals.of_values([1 + 0.001 * index for index in range(101)])
    assert many.median == pytest.approx(1.05) and 1.03 < many.low < 1.05 < many.high < 1.07
    assert intervals.of_values([3.0, 1.0, 2.0]) == intervals.of_values([3.0, 1.0, 2.0]), "it is seeded"
    assert intervals.of_quotient([2.0] * 4, [1.0] * 4) == Interval(2.0, 2.0, 2.0)


def test_how_sure_few_rounds_can_be() -> None:
    assert [intervals.confidence(count) for count in (1, 2, 3, 5, 6, 20)] == [0, 0.5, 0.75, 0.9375, 0.95, 0.95]


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of 300 samples of nine from a skewed distribution whose median is 1."""
    import numpy as np

    random = np.random.default_rng(1)
    found = [intervals.of_values(np.exp(random.normal(0, 0.1, 9))) for _ in range(300)]
    assert 0.88 <= np.mean([each.low <= 1 <= each.high for each in found]) <= 0.99


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(1.02, 1.1, "faster"), (0.9, 0.98, "slower"), (0.98, 1.2, "tie"), (1.005, 1.2, "tie"), (0.9, 0.995, "tie")],
)
def test_what_is_a_tie(low: float, high: float, told: str) -> None:
    assert intervals.verdict(Interval((low + high) / 2, low, high)) == told


def test_ratios_pair_the_runs_of_a_round() -> None:
    """The machine became twice as slow from round to round, which no ratio sees."""
    found = ratios(
        rounds(
            {
                (1, None): [120, 60, 30],
                (2, None): [200, 100, 50],
                (2, "ddp"): [100, 50, 25],
                (2, "plain"): [200, 99, 51],
            }
        )
    )
    told = {(ratio.np, ratio.against): ratio for ratio in found}
    assert set(told) == {(2, "ddp"), (2, "plain"), (2, "np=1")}
    ddp, plain, scaling = told[2, "ddp"], told[2, "plain"], told[2, "np=1"]
    assert (ddp.median, ddp.low, ddp.high, ddp.rounds, ddp.verdict) == (2.0, 2.0, 2.0, 3, "faster")
    assert plain.verdict == "tie" and plain.median == 1.0 and ddp.confidence == 0.75
    assert scaling.median == pytest.approx(200 / 240) and scaling.verdict is None


def test_over_several_hosts_efficiency_is_over_one_of_them() -> None:
    """One host of two ranks gives 150, both 240: 0.8 of twice as much. Of a single rank it says nothing."""
    hosts = ["h1", "h1", "h2", "h2"]
    runs = [
        result(np=np, images_per_second=speed, hosts=hosts[:np], launcher="slurm")
        for np, speed in {1: 100.0, 2: 150.0, 4: 240.0}.items()
    ]
    (scaling,) = ratios(runs)
    assert (scaling.np, scaling.against, scaling.verdict) == (4, "np=2", None)
    assert scaling.median == pytest.approx(0.8)
    groups = list(by_kind(map(Run, runs)).values())
    shares = [efficiency(runs_of, groups) for runs_of in groups]
    assert [share and round(share.middle, 3) for share in shares] == [None, 1.0, 0.8]
    text = comparison_markdown(comparison(runs, ratios=[scaling], rounds=3))
    assert comparison_tables(comparison(runs))[0].title.endswith("per rank; ranks 2 on h1, 2 on h2")
    assert "per second and rank ÷ those of the run on one host" in text
    assert "launcher slurm, ranks 2 on h1, 2 on h2, device cpu" in text and "| one host, 2 ranks | 0.800 |" in text
    on_one = [run.model_copy(update={"hosts": ["h1"] * run.np}) for run in runs]
    assert {(row.np, row.against) for row in ratios(on_one)} == {(2, "np=1"), (4, "np=1")}


def test_a_comparison_over_hosts_is_on_one_of_them_and_on_all(checked: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare._ranks(Placement(1)) == [1, 2]
    assert compare._ranks(Placement(1, "h1:4,h2:4", "horovodrun")) == [4, 8]
    monkeypatch.setattr(compare, "make_plan", lambda recipe, framework, placement, rival: fake(recipe, placement))
    recipe = checked.model_copy(update={"threads": "auto"})
    over = compare.schedule(recipe, ["pytorch"], [4, 8], Placement(1, "h1:4,h2:4", "horovodrun"))
    assert [plan.settings for plan in over.plans] == [{group.MOST: "4"}] * 2
    assert [plan.placement.np for plan in over.plans] == [4, 8], "each rank has a fourth of its host's cores"
    here = compare.schedule(recipe, ["pytorch"], [1, 2], Placement(1))
    assert [plan.recipe.threads for plan in here.plans] == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
    monkeypatch.setenv(group.MOST, "4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    assert [group.threads_per_rank(*given) for given in ((None, 1), (None, 6), (5, 1))] == [3, 2, 5]


def test_rounds_are_interleaved_in_an_order_that_changes_and_can_be_had_again(checked: Recipe) -> None:
    plans = [replace(fake(checked), placement=Placement(np), rival=rival) for np in (1, 2) for rival in (None, "plain")]
    order = list(RunOrder(plans, 6, 1))
    assert order == list(RunOrder(plans, 6, 1)) != list(RunOrder(plans, 6, 2))
    by_round = [[plan for number, plan in order if number == wanted] for wanted in range(1, 7)]
    assert [number for number, _ in order] == sorted(number for number, _ in order)
    assert all(sorted(map(run_order.name, each)) == sorted(map(run_order.name, plans)) for each in by_round)
    assert len({tuple(map(run_order.name, each)) for each in by_round}) > 2
    names = [RunOrder(plans, 6, 1).name(number, plan) for number, plan in order]
    assert len(set(names)) == 24 and "pytorch-np2-plain-round6" in names


def fake(recipe: Recipe, placement: Placement | None = None) -> CheckedRun:
    from hvdkit.runtimes.store import Runtime

    runtime = Runtime(
        name="pytorch", python=Path("python"), key="", gpu=False, added=True, versions={}, controllers=[], operations=[]
    )
    return CheckedRun(recipe, "pytorch", runtime, placement or Placement(2))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No process is started: each run takes a file, and is kept in this list by its folder's name."""
    ran: list[str] = []

    def run(plan: CheckedRun, folder: Path, watch: Any = None, resume: bool = False) -> TrainResult:
        ran.append(folder.name)
        speed = {None: 200.0, "plain": 100.0}[plan.rival] * plan.np
        found = result(plan.framework, plan.np, plan.rival, images_per_second=speed)
        (folder / "config.yaml").write_text(schema.dump(plan.recipe))
        return found

    monkeypatch.setattr(train, "trained", run)
    return ran


def test_resuming_keeps_whole_rounds_only(checked: Recipe, trained: list[str], tmp_path: Path) -> None:
    plans = [replace(fake(checked), rival=rival) for rival in (None, "plain")]
    schedule = RunOrder(plans, 3, 1)
    first = compare.compared(schedule, None, tmp_path)
    assert len(trained) == 6 and first.order == trained
    assert [(run.round, run.rival) for run in first.runs] == [
        (n, rival) for n in (1, 2, 3) for rival in (None, "plain")
    ]
    assert read_comparison(tmp_path / "compare.json") == first
    trained.clear()
    (tmp_path / "runs" / "pytorch-np2-plain-round2" / "result.json").unlink()
    again = compare.compared(schedule, None, tmp_path, resume=True)
    assert sorted(trained) == ["pytorch-np2-plain-round2", "pytorch-np2-round2"] and again.runs == first.runs
    trained.clear()
    longer = checked.model_copy(update={"epochs": 3})
    changed = RunOrder([replace(plan, recipe=longer) for plan in plans], 3, 1)
    compare.compared(changed, None, tmp_path, resume=True)
    assert len(trained) == 6, "of another recipe nothing is kept"


def comparison(runs: list[TrainResult], **more: Any) -> Comparison:
    return Comparison(runs=runs, machine=this_machine(), **more)


def written(folder: Path, found: Comparison) -> Path:
    path = folder / "old.json"
    path.write_text(found.model_dump_json())
    return path


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ([100, 102, 98], "tie"),
        ([80, 81, 79], "worse"),
        ([97, 96, 98], "tie"),  # lost for sure, but within the margin
        ([60, 100, 130], "tie"),  # beyond the margin by the median, but not for sure
        ([130, 131, 129], "better"),
    ],
)
def test_a_baseline_tells_sure_changes_beyond_the_margin(
    new: list[float], told: str, checked: Recipe, tmp_path: Path
) -> None:
    old = comparison(rounds({(2, None): [100, 101, 99]}))
    found = compare.earlier(written(tmp_path, old), 0.05, checked, [fake(checked)]).rows(rounds({(2, None): new}))
    assert [row.verdict for row in found] == [told] and (found[0].rounds, found[0].old_rounds) == (3, 3)


def test_baselines_that_do_not_fit(checked: Recipe, tmp_path: Path) -> None:
    good = comparison(rounds({(2, None): [100]}))
    elsewhere = good.model_copy(update={"machine": good.machine.model_copy(update={"cores": 999})})
    other = good.model_copy(update={"runs": [run.model_copy(update={"batch_size": 64}) for run in good.runs]})
    for bad, words in (
        (elsewhere, "cores: the earlier one has 999, here are"),
        (other, "batch_size: the earlier one has 64, this comparison 32"),
        (
            comparison([result(hosts=["h1", "h2"])]),
            "expected as many ranks on each host; the earlier one has 1 on h1, 1 on h2, this comparison 2 on localhost",
        ),
        (comparison(rounds({(4, None): [100]})), "it has pytorch at 4 rank(s)"),
        (good.model_copy(update={"runs": []}), "it has no runs"),
    ):
        with pytest.raises(RequestError) as error:
            compare.earlier(written(tmp_path, bad), 0.05, checked, [fake(checked)])
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_file_from_before_rivals_reads_on(tmp_path: Path) -> None:
    old = json.loads(comparison([result()]).model_dump_json())
    for key in ("rounds", "order_seed", "order", "ratios", "baseline"):
        del old[key]
    for key in ("rival", "round", "step_ms_p99", "step_ms", "cpu_s_per_image", "startup_s", "load", "noisy", "pinned"):
        del old["runs"][0][key]
    (tmp_path / "old.json").write_text(json.dumps(old))
    found = read_comparison(tmp_path / "old.json")
    assert found.rounds == 1 and found.runs[0].rival is None and len(comparison_tables(found)) == 1


def test_tables_tell_rivals_intervals_ties_and_noise() -> None:
    runs = rounds({(2, None): [200, 210, 190], (2, "plain"): [100, 100, 100], (2, "ddp"): [201, 209, 190]})
    runs = [run.model_copy(update={"load": 0.4, "noisy": True}) if run.round == 2 else run for run in runs]
    found = comparison(runs, rounds=3, ratios=ratios(runs))
    text = comparison_markdown(found)
    assert "| pytorch 1 | plain | 2 | 100.0 |" in text and "| 40 %, 1 of 3 noisy |" in text
    assert "| pytorch | 2 | plain | 2.000 | 1.900 | 2.100 | 3 | 75 % | faster |" in text
    assert "| pytorch | 2 | ddp | 1.000 | 0.995 | 1.005 | 3 | 75 % | tie |" in text
    assert "at most 75 %; with 6 or more rounds it is 95 %" in text and len(comparison_tables(found)) == 2


def test_the_models_state_is_shown_where_a_run_shards() -> None:
    held = {"parameters": 2 << 20, "gradients": 1 << 20, "optimizer": 1 << 19}
    runs = rounds({(2, None): [200], (2, "fsdp"): [100], (2, "ddp"): [100]})
    runs = [run.model_copy(update={"state_bytes": None if run.rival == "ddp" else held}) for run in runs]
    text = comparison_markdown(comparison(runs))
    assert "| model's state, MiB |" in text and text.count("| 3.50 |") == 2
    assert "model's state" not in comparison_markdown(comparison([run for run in runs if run.rival != "fsdp"]))


def test_load_is_what_others_used() -> None:
    earlier, later = usage.Snapshot(1.0, 100.0, 400.0), usage.Snapshot(3.0, 110.0, 420.0)
    mine = later.since(earlier)
    assert mine == {"own_s": 2.0, "busy_s": 10.0, "capacity_s": 20.0}
    assert usage.load_of_others([mine, mine]) == pytest.approx((10 - 2 * 2) / 20)
    assert usage.load_of_others([mine | {"own_s": 50.0}]) == 0 == usage.load_of_others([mine | {"capacity_s": 0.0}])
    now = usage.Snapshot.take(0.0)
    assert 0 < now.busy_s < now.capacity_s


REFUSED: list[tuple[list[Any], str]] = [
    (["--rival", "dpp"], "did you mean 'ddp'?"),
    (["--rival", "kvstore"], "--rival kvstore: expected --framework mxnet, got pytorch"),
    (["--rival", "ddp", "--rival", "ddp"], "--rival ddp: given 2 times"),
    (["--rival", "zero_redundancy", "optimizer.name=lars"], "optimizer.name=lars; choose sgd or adamw"),
    (["--rival", "zero_redundancy", "optimizer.momentum=0"], "does not support SGD without momentum"),
    (["--framework", "keras", "--rival", "multiworker", "accumulate=2"], "does not support accumulation"),
    (["--rounds", 0], "--rounds 0: expected at least 1"),
    (["--earlier", "none.json"], "none.json: cannot be read"),
    (["--earlier", "damaged.json"], "damaged.json: not the compare.json of `hvdkit compare`"),
    (["--earlier", "old.json", "batch_size=16"], "batch_size: the earlier one has 32, this comparison 16"),
    (["--resume"], "--resume: expected --out"),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_bad_requests_are_one_clear_line(
    arguments: list[Any], told: str, inside: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "damaged.json").write_text('{"runs": [')
    written(tmp_path, comparison([result(np=1), result(np=2)]))
    before = sorted(tmp_path.rglob("*"))
    done = inside("compare", recipe, "--framework", "pytorch", "--no-parity", *arguments, "threads=1")
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def test_what_a_rival_is_left_out_of_is_told() -> None:
    assert compare.left_out(["ddp", "plain"], ["pytorch", "mxnet"], [1, 2]) == [
        "--rival ddp: not for pytorch at 1, mxnet at 1, mxnet at 2 rank(s)"
    ]
    assert registry.fitting(["ddp", "plain", "independent"], "pytorch", 1) == ["plain"]
