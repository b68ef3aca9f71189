"""A pipeline: ranks with stages of a GPT compute what one process with the whole model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdkit.adapters.capabilities import ADDS_IN_BACKWARD, CAPABILITIES
from tests import hygiene
from tests.conftest import Hvdkit, rest_thorough
from tests.divided import SMALL, continues, far, reports
from tests.pipeline.rank import THREE_AXES
from tests.resuming import kill_ranks, under_way

FRAMEWORKS = tuple(name for name, own in CAPABILITIES.items() if "pipeline" in own)
INTERLEAVED = tuple(name for name, own in CAPABILITIES.items() if "interleaved" in own)
COMPILED = ("tensorflow", "keras")
MESHES = ("gpipe 2", "1f1b 2", "gpipe 4", "1f1b 4")
CHUNKS = ("interleaved 2", "interleaved 4", "interleaved in parts")
SHARES = ("shares of stages", "shares of parts")
CASES = (
    *MESHES,
    "1f1b in parts",
    CHUNKS[0],
    *SHARES,
    "shares with faults",
    "planted",
    "overflow",
    "counted",
    "dropout",
    "drifted",
)


def each(*cases: str, first: str | None = None, among: tuple[str, ...] = FRAMEWORKS) -> list[Any]:
    """Frameworks and cases. Those that compile for long are thorough or, where one is `first`, all others."""
    asked = [(name, case) for name in among for case in cases]
    rest = COMPILED if first is None else set(FRAMEWORKS) - {first}
    return [pytest.param(*both, marks=pytest.mark.thorough if both[0] in rest else ()) for both in asked]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of four ranks found in a case."""
    ask = reports("pipeline", tmp_path_factory)
    return lambda framework, case: [
        rank[case] for rank in ask(framework, *(CASES if framework == "pytorch" and case in CASES else (case,)))
    ]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), [*each(MESHES[0]), *each(*MESHES[1:], first="pytorch")])
def test_stages_compute_what_the_whole_model_computes(framework: str, case: str, report: Any) -> None:
    """Each gradient and weight in 20 forced steps; weights after free ones, of three optimizers in PyTorch; evaluation;
    state.

    On a mesh of two data ranks × two stages, and on one of four stages.
    """
    ranks, stages = report(framework, case), int(case[-1])
    for rank in ranks:
        assert not far(rank["gradients"]) and not far(rank["weights"]) and len(rank["weights"]) > 36 * stages
        assert not far(rank["free"], 1e-9) and rank["evaluation"] < 1e-10
        assert rank["evaluated"] == [2], "by microbatches, as in training"
        assert rank["loaded"] and rank["digest"][0] == rank["digest"][1]
        assert rank["bytes"][0]["parameters"] < rank["bytes"][1]["parameters"]
        held = rank["bytes"][0]
        assert held["gradients"] == held["parameters"] * (1 if framework in ADDS_IN_BACKWARD else 2)
    assert ("loss" in ranks[3]["gradients"]) == (stages == 4)
    first, last = ranks[0]["names"], ranks[3]["names"]
    assert set(first) & set(last) == {"transformer.wte.weight"}, "both ends have the table of tokens"
    assert len({name for rank in ranks for name in rank["names"]}) == 4 + 12 * (stages + 1)
    activation = 8 * 8 // 4 * 8 * 16  # bytes of float64: samples of a microbatch × context × width
    averaged = ranks[0]["bytes"][0]["parameters"] if stages == 2 else 0  # a ring of two sends as much
    assert ranks[0]["sent"] == 4 * activation + 8 * 37 * 16 + averaged


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("framework", "case"),
    [*each(CHUNKS[0], first="pytorch", among=INTERLEAVED), *each(*CHUNKS[1:], first="none", among=INTERLEAVED)],
)
def test_stages_of_two_chunks_compute_what_the_whole_model_computes(framework: str, case: str, report: Any) -> None:
    """On two data ranks × two stages, on four stages, and on two stages × two parts of their layers."""
    for number, rank in enumerate(report(framework, case)):
        assert not far(rank["gradients"]) and not far(rank["weights"]) and len(rank["weights"]) > 180
        assert not far(rank["free"], 1e-9) and rank["evaluation"] < 1e-10
        assert rank["loaded"] and rank["digest"][0] == rank["digest"][1]
        blocks = {int(name.split(".")[2]) for name in rank["names"] if name.startswith("transformer.h.")}
        if case == "interleaved 2":
            assert blocks == ({0, 2} if number < 2 else {1, 3, 4}), "blocks that are not neighbors"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("framework", "case"),
    [
        ("pytorch", case) if name == "pytorch" else pytest.param(name, case, marks=pytest.mark.thorough)
        for name in FRAMEWORKS
        for case in SHARES
    ],
)
def test_shares_of_divided_models_compute_what_the_whole_model_computes(framework: str, case: str, report: Any) -> None:
    """`sharding: optimizer` with an average, over two data ranks, with two stages or two parts of layers."""
    for rank in report(framework, case):
        assert not far(rank["gradients"]) and not far(rank["weights"]) and len(rank["weights"]) > 4 * 28
        assert not far(rank["free"], 1e-9) and rank["evaluation"] < 1e-10
        assert rank["loaded"] and rank["digest"][0] == rank["digest"][1]
        own = rank["bytes"][0]
        assert own["optimizer"] == pytest.approx(own["parameters"], rel=0.02), "half of two slots"


MEAN = "after optimizer.exp_avg.transformer"  # AdamW divides the norm out of its update


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), [*each("1f1b in parts"), *((name, "few") for name in COMPILED)])
def test_stages_in_parts_compute_what_the_whole_model_computes(framework: str, case: str, report: Any) -> None:
    """On a mesh of two stages × two parts of their layers."""
    for number, rank in enumerate(report(framework, case)):
        assert not far(rank["gradients"]) and not far(rank["weights"]) and ("loss" in rank["gradients"]) == (number > 1)
        assert not far(rank["free"], 1e-9) and rank["evaluation"] < 1e-10
        assert rank["loaded"] and rank["digest"][0] == rank["digest"][1]
        assert rank["bytes"][0]["parameters"] < 0.4 * rank["bytes"][1]["parameters"]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_copies_of_stages_in_parts_compute_what_the_whole_model_computes(
    framework: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """20 forced steps, and the weights after 20 without a teacher, on two data ranks × two stages × two parts of their
    layers."""
    for rank in reports("pipeline", tmp_path_factory)(framework, THREE_AXES, np=8):
        forced, free = rank[THREE_AXES]["forced"], rank[THREE_AXES]["free"]
        assert not far(forced) and not far(free, 1e-9) and len(free) > 36
        assert {name for name in forced if "transformer.ln_f" in name or "transformer.wpe" in name}


FAULTS = {
    # what is seen wrong first on each stage, and what is right still
    "a microbatch dropped": (("transformer.wpe.weight", "transformer.ln_f.weight"), ""),
    "gradients of another microbatch": (("transformer.wpe.weight", ""), "transformer.ln_f.weight"),
    "an activation scaled twice": (("transformer.wpe.weight", "transformer.ln_f.weight"), ""),
    "tied weights not summed": (("transformer.wte.weight", "transformer.wte.weight"), "transformer.ln_f.weight"),
    "divided by ranks": (("transformer.wpe.weight", "transformer.ln_f.weight"), ""),
    "norm over one axis": ((f"{MEAN}.wpe.weight", f"{MEAN}.ln_f.weight"), "transformer.wpe.weight"),
    "stale weights": (("transformer.wpe.weight", "transformer.ln_f.weight"), ""),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), each("planted"))
def test_each_planted_fault_is_seen(framework: str, case: str, report: Any) -> None:
    """On two data ranks × two stages, of which ranks 0 and 1 have the first."""
    for number, planted in enumerate(report(framework, case)):
        assert not far(planted["no fault"])
        assert planted.keys() == {"no fault", *FAULTS}
        for fault, (wrong, right) in FAULTS.items():
            seen = far(planted[fault], 1e-6)
            of_stage = wrong[number // 2]
            assert (not of_stage or of_stage in seen) and right not in seen, (fault, seen)


@pytest.mark.usefixtures("warm")
def test_wrong_norms_of_shares_are_seen(report: Any) -> None:
    for rank in report("pytorch", "shares with faults"):
        found = {fault: far(errors, 1e-6) for fault, errors in rank.items()}
        assert not found.pop("no fault") and len(found) == 2
        for seen in found.values():
            assert f"{MEAN}.wpe.weight" in seen and "transformer.wpe.weight" not in seen


@pytest.mark.usefixtures("warm")
def test_ranks_draw_what_the_whole_model_draws_and_other_masks_are_seen(report: Any) -> None:
    """With dropout, under PyTorch: each stage draws its own, parts of a stage the same."""
    right = {"gpipe", "1f1b", "in parts", "another order without dropout"}
    for number, rank in enumerate(report("pytorch", "dropout")):
        found = {name: far(errors) for name, errors in rank.items()}
        assert found.keys() == right | {"another order", "other masks in each part"}
        assert not any(found[name] for name in right) and found["another order"]
        assert found["other masks in each part"] or number == 0


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough("mxnet", *COMPILED))
def test_masks_are_those_of_a_rank_of_the_data_axis(framework: str, report: Any) -> None:
    """Schedules draw the same, ranks with parts of a layer too, ranks with other samples others; another order of
    microbatches is seen."""
    ranks = report(framework, "dropout")
    for rank in ranks:
        assert not far(rank["1f1b"]) and not far(rank["1f1b in parts"]) and len(rank["1f1b"]) > 12
        assert far(rank["another order"], 1e-6)
    first, second = ranks[:2]
    assert first["data"] != second["data"] and first["parts"] == second["parts"] and first["wrong"] != second["wrong"]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_a_rank_that_differs_from_those_of_its_stage_is_named(framework: str, report: Any) -> None:
    """On two data ranks × two stages, and on two stages × two parts, by `check_ranks`."""
    for rank in report(framework, "drifted"):
        for in_step, told in rank.values():
            assert not in_step
            assert told.startswith("check_ranks: after step 1 the weights of rank 3 differ from rank 2's, first in"), (
                told
            )
            assert "transformer.ln_f.weight;" in told


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), each("overflow"))
def test_an_overflow_on_one_stage_skips_the_update_of_all(framework: str, case: str, report: Any) -> None:
    changed = ["optimizer.loss_scale"] if "fp16" in CAPABILITIES[framework] else None
    assert report(framework, case) == [changed] * 4


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), each("counted"))
def test_a_loss_that_is_a_sum_is_divided_once(framework: str, case: str, report: Any) -> None:
    """By the counts of all microbatches and data ranks, which the last stage alone sees; each of two meshes."""
    for number, rank in enumerate(report(framework, case)):
        for mesh, errors in rank.items():
            assert not far(errors) and ("loss" in errors) == (mesh == "4" and number == 3), (mesh, far(errors))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("framework", "case"), each("two ranks"))
def test_a_run_continues_in_other_stages(framework: str, case: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    stages = ("-np", 2, "parallel.pipeline=2", "parallel.microbatches=2")
    results = continues(hvdkit, framework, stages, tmp_path)
    for key in ("val_loss", "train_loss"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-10)
    assert results[0]["parameters"] == results[1]["parameters"]


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("axis", ("pipeline", "tensor"))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_of_shares_continues_alone(framework: str, axis: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Two data ranks × two stages, or two parts, with `sharding: optimizer` and an average of the weights."""
    shared = ("-np", 4, f"parallel.{axis}=2", "sharding=optimizer", "average_weights.decay=0.5")
    results = continues(hvdkit, framework, shared, tmp_path, alone=("batch_size=8", "average_weights.decay=0.5"))
    for key in ("val_loss", "train_loss"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-10)


@pytest.mark.usefixtures("warm")
def test_a_stage_that_is_killed_is_named(tmp_path: Path) -> None:
    options = ("--framework", "pytorch", "-np", 2, "parallel.pipeline=2", "checkpoint.every_steps=1", "threads=1")
    with under_way(tmp_path / "run", "gpt-tiny", *options, *SMALL) as process:
        kill_ranks(tmp_path / "run", rank=1)
        told = process.communicate(timeout=hygiene.patience(60))[1]
    assert process.returncode == 1
    assert "rank 1 on localhost (data 0, pipeline 1, tensor 0) was killed by SIGKILL" in told
