"""Recipes through the real command line: four frameworks, two ranks, real Horovod; and what is refused."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdkit.checkpoint import snapshots
from hvdkit.core.state import digest, parameters_of
from hvdkit.recipe import schema
from hvdkit.results.compare import Comparison
from hvdkit.results.evaluate import read_evaluation
from hvdkit.results.train import MetricLine, TrainResult, kept_lines
from hvdkit.runtimes.store import find
from hvdkit.tasks import resnet
from tests.conftest import FRAMEWORKS, KERAS_THOROUGH, ROOT, Hvdkit, rest_thorough, run
from tests.residents import Ranks

pytestmark = pytest.mark.long

TWO_STEPS = ("model.name=resnet8", "steps=2", "log_every=1", "check_ranks=1", "data.augment=crop-flip")


class Trained(NamedTuple):
    """A run by `hvdkit train` over two ranks: what it printed, its folder, and when the command began and ended."""

    printed: str
    folder: Path
    began: float
    ended: float

    @property
    def result(self) -> TrainResult:
        return TrainResult.model_validate_json((self.folder / "result.json").read_text())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Callable[[str], Trained]:
    """`two_steps(framework)` trains on the first call; later ones get the same run, which is to be read only."""

    @cache
    def train(framework: str) -> Trained:
        folder, began = tmp_path_factory.mktemp(framework), time.time()
        command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", framework, "-np", "2"]
        done = run([*command, "--out", "run", *TWO_STEPS], timeout=120, cwd=folder)
        assert done.returncode == 0, done.stderr
        return Trained(done.stdout, folder / "run", began, time.time())

    return train


@pytest.mark.parametrize("framework", KERAS_THOROUGH)
def test_two_steps_on_two_ranks(framework: str, two_steps: Callable[[str], Trained], recipe: Path) -> None:
    trained = two_steps(framework)
    folder, result, began, ended = trained.folder, trained.result, trained.began, trained.ended
    assert (result.framework, result.np, result.steps, result.launcher) == (framework, 2, 2, "direct")
    assert result.parameters == 78_042 and result.horovod_version == "0.28.1"
    assert result.ended_at and began < result.ended_at.timestamp() + 1 < ended + 1
    # from the command's start, and what comes after the first step is but a part
    assert result.startup_s and 0.5 < result.startup_s < result.ended_at.timestamp() + 1 - began
    assert result.images_per_second > 0 and result.peak_rss_mib > 100 and result.step_ms_p50 <= result.step_ms_p90
    assert result.val_accuracy is not None and round(result.val_accuracy * 360, 6).is_integer()
    lines = [MetricLine.model_validate_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line.step, line.ends_epoch) for line in lines] == [(1, False), (2, False), (2, True)]
    assert {"config.yaml", "logs", "checkpoints"} <= {path.name for path in folder.iterdir()}
    assert result.checkpoints == dict.fromkeys(("last", "best"), "checkpoints/step-00000002")
    assert all(line in trained.printed.splitlines() for line in kept_lines(result, Path("run")))
    assert {"rank-0.log", "rank-1.log"} <= {path.name for path in (folder / "logs").iterdir()}
    # all frameworks start from the same bytes: those that are drawn without one
    initial = resnet.architecture("resnet8", 10).initial_state(schema.load(recipe).seed)
    assert result.initial_state_sha256 == digest(initial) != result.final_weights_sha256


def test_a_start_counts_from_the_command() -> None:
    """`startup_s` begins with the process of the command line, not with that of a rank."""
    code = "import os, time; here = time.time(); time.sleep(0.5); "
    # The least of twenty: whoever is interrupted between two clocks gets a later one.
    code += "from hvdkit.usage import process_began as began, started_at as started; "
    code += "print(here, min(began() for _ in range(20)), min(started() for _ in range(20))); "
    code += "os.environ['HVDKIT_STARTED'] = '7.5'; print(started())"
    before = time.time()
    here, began, alone, told = map(float, run([sys.executable, "-c", code], timeout=60).stdout.split())
    assert before - 0.05 < began < here + 0.05 and abs(alone - began) < 0.05 and told == 7.5


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_plain_horovodrun(framework: str, two_steps: Callable[[str], Trained], recipe: Path, tmp_path: Path) -> None:
    """As many ranks by another launcher: the same seed gives the same bits. Their import is shared here."""
    bin_folder = find(framework).python.parent
    script = ROOT / "recipes" / framework / "resnet.py"
    ranks = (bin_folder / "python", script, recipe, "--out", tmp_path, *TWO_STEPS)
    command = [str(word) for word in (bin_folder / "horovodrun", "-np", 2, *ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = run(command, timeout=180, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = TrainResult.model_validate_json((tmp_path / "result.json").read_text())
    assert (result.framework, result.np, result.launcher) == (framework, 2, "horovodrun")
    kept = snapshots.read(tmp_path / "checkpoints" / "best")
    assert digest(parameters_of(kept.state)) == result.final_weights_sha256
    assert all(line in done.stdout for line in kept_lines(result, tmp_path))
    assert result.final_weights_sha256 == two_steps(framework).result.final_weights_sha256


def test_one_process_without_launcher(recipe: Path, tmp_path: Path) -> None:
    script = ROOT / "recipes" / "mxnet" / "resnet.py"
    # Gloo looks up the host's name where it is not told an interface, and few hosts without a network know theirs.
    nameless = ["unshare", "-u" if os.geteuid() == 0 else "-Uru", "sh", "-c", 'hostname nowhere && exec "$@"', "sh"]
    command = [*nameless, str(find("mxnet").python), str(script), str(recipe), *TWO_STEPS]
    done = run(command, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "images/s, step" in done.stdout.splitlines()[-1] and "--out FOLDER keeps" in done.stdout.splitlines()[-1]


@pytest.mark.usefixtures("warm")
def test_hvdkit_train_by_horovodrun(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    arguments = ("--framework", "mxnet", "-np", 2, "--launcher", "horovodrun", "--out", "run")
    done = hvdkit("train", recipe, *arguments, *TWO_STEPS)
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert result.launcher == "horovodrun"
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()
    # what it says last but one is the command that evaluates what it has trained
    words = shlex.split(done.stdout.splitlines()[-2].removeprefix("evaluate them: "))
    assert words[:2] == ["hvdkit", "evaluate"]
    done = hvdkit(*words[1:], "--out", "evaluated")
    assert done.returncode == 0, done.stderr
    evaluated = read_evaluation(tmp_path / "evaluated" / "evaluate.json")
    assert (evaluated.accuracy, evaluated.step) == (result.val_accuracy, 2)


@pytest.mark.usefixtures("warm")
def test_compare_writes_one_table_and_replaces_its_folder(
    hvdkit: Hvdkit, inside: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    arguments = ("--framework", "pytorch", "--framework", "mxnet", "-np", 2, "--out", "c", *TWO_STEPS)
    done = hvdkit("compare", recipe, *arguments, timeout=240)
    assert done.returncode == 0, done.stderr
    comparison = Comparison.model_validate_json((tmp_path / "c" / "compare.json").read_text())
    assert [(run.framework, run.np) for run in comparison.runs] == [("pytorch", 2), ("mxnet", 2)]
    assert len({run.threads for run in comparison.runs}) == 1, "every rank of a comparison has as many threads"
    assert comparison.machine.cores > 0
    assert comparison.parity and comparison.parity.passed and set(comparison.parity.frameworks) == {"pytorch", "mxnet"}
    assert not list((tmp_path / "c").rglob("checkpoints")), "a comparison keeps no weights"
    table = (tmp_path / "c" / "compare.md").read_text()
    assert f"| {comparison.parity.frameworks['mxnet'].step_f64:.0e} |" in table
    assert "Passed: none of 12 limits is exceeded." in table
    for run_ in comparison.runs:
        assert f"| {run_.images_per_second:,.1f} |" in table and f"{run_.images_per_second:,.1f}" in done.stdout
    again = inside("compare", recipe, "--framework", "mxnet", "-np", 1, "--out", "c", *TWO_STEPS)
    assert again.returncode == 2 and "the folder is not empty; add --overwrite" in again.stderr
    proof = ("--parity", "c/parity/parity.json")
    foreign = inside("compare", recipe, "--framework", "keras", "-np", 1, "--out", "d", *proof, *TWO_STEPS)
    assert foreign.returncode == 2 and "got no keras" in foreign.stderr and not (tmp_path / "d").exists()
    replaced = ("--framework", "mxnet", "-np", 1, "--out", "c", "--overwrite", *TWO_STEPS)
    lost = inside("compare", recipe, *replaced, *proof)
    assert lost.returncode == 2 and "--overwrite would remove c/parity/parity.json" in lost.stderr
    (tmp_path / "c" / "parity" / "parity.json").rename(tmp_path / "proof.json")
    again = hvdkit("compare", recipe, *replaced, "--parity", "proof.json")
    assert again.returncode == 0, again.stderr
    assert [path.name for path in (tmp_path / "c" / "runs").iterdir()] == ["mxnet-np1"]
    comparison = Comparison.model_validate_json((tmp_path / "c" / "compare.json").read_text())
    assert comparison.parity and set(comparison.parity.frameworks) == {"pytorch", "mxnet"}


@pytest.mark.usefixtures("warm")
def test_no_proof_is_told_as_such(hvdkit: Hvdkit, inside: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    done = hvdkit("compare", recipe, "--framework", "mxnet", "-np", 1, "--no-parity", "--out", "c", *TWO_STEPS)
    assert done.returncode == 0, done.stderr
    assert Comparison.model_validate_json((tmp_path / "c" / "compare.json").read_text()).parity is None
    assert "not checked" in done.stdout and "not checked" in (tmp_path / "c" / "compare.md").read_text()
    both = inside("compare", recipe, "--no-parity", "--parity", "c/compare.json", "--out", "d")
    assert both.returncode == 2 and "expected one of them" in both.stderr
    damaged = inside("compare", recipe, "--parity", "c/compare.json", "--out", "d")
    assert damaged.returncode == 2 and "not the parity.json" in damaged.stderr and not (tmp_path / "d").exists()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough("pytorch", "tensorflow"))
def test_low_precision_with_accumulation(framework: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """4 batches of 16 an epoch and rank: an update of three and one of what is left."""
    data = "data={name: synthetic, height: 16, width: 16, train_images: 128, val_images: 32}"
    settings = ("model.name=resnet8", "batch_size=16", "accumulate=3", "precision=bf16", "recompute=true")
    done = hvdkit("train", recipe, "--framework", framework, "-np", 2, "--out", "run", *settings, data, "epochs=2")
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert (result.precision, result.accumulate, result.recompute) == ("bf16", 3, True)
    assert result.steps == 4 and 1 < result.train_loss < 5  # ten classes, drawn by lot: about 2.3


def test_a_missing_runtime_is_named_with_its_remedy(inside: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    done = inside("train", recipe, "--framework", "keras", HVDKIT_RUNTIMES=str(tmp_path / "none"))
    assert done.returncode == 2
    assert "hvdkit runtime build tensorflow" in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("warm")
def test_what_only_a_rank_can_find_leaves_nothing_either(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """The folder is gone, or has what it had, so the corrected command runs as it is."""
    (tmp_path / "wrong.py").write_text("def open_pipeline(job):\n    return 3\n")
    right = ("train", recipe, "--framework", "mxnet", "steps=2", "model.name=resnet8", "--out", "runs/mine")
    wrong = (*right, "data={name: native, module: wrong.py}")
    done = hvdkit(*wrong, "-np", 2)
    assert (done.returncode, done.stdout) == (2, "")
    assert "data.module: wrong.py: expected open_pipeline to return a NativePipeline, got int" in done.stderr
    assert "Traceback" not in done.stderr and [str(path) for path in tmp_path.rglob("*")] == [
        str(tmp_path / "wrong.py")
    ]
    done = hvdkit(*right)
    assert done.returncode == 0, done.stderr
    result = (tmp_path / "runs" / "mine" / "result.json").read_text()
    done = hvdkit(*wrong, "--overwrite", "--launcher", "horovodrun")
    assert done.returncode == 2 and "expected open_pipeline to return" in done.stderr
    assert (tmp_path / "runs" / "mine" / "result.json").read_text() == result
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "last").exists()


def test_compare_tells_what_any_framework_cannot_do_before_the_first_starts(
    inside: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    arguments = ("--framework", "pytorch", "--framework", "mxnet", "-np", 1, "--out", "out")
    done = inside("compare", recipe, *arguments, "precision=fp16", "recompute=true")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("precision: mxnet cannot train in fp16") == 1 == done.stderr.count("recompute: mxnet")
    assert not (tmp_path / "out").exists() and "pytorch" not in done.stderr
    done = inside("parity", recipe, *arguments[:4], "precision=bf16", "--steps", 0)  # in float64 anyway
    assert done.returncode == 2 and "precision" not in done.stderr


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", ("pytorch", "keras"))
def test_one_value_a_channel_is_one_line(framework: str, recipe: Path, tmp_path: Path) -> None:
    """What the command line makes of such a refusal is tested above."""
    data = "data={{name: synthetic, height: 4, width: {width}, train_images: 8, val_images: 0}}"
    case: dict[str, Any] = {"framework": framework, "recipe": recipe, "out": tmp_path / "run"}
    ranks = Ranks(framework, tmp_path / "ranks", np=1)
    try:
        found = ranks.do("train", **case, overrides=["batch_size=1", "threads=1", data.format(width=4)])
        assert found["status"] == 2, found
        assert found["message"].startswith("batch_size: resnet20 reduces images of 4×4 pixels to 1×1"), found
        assert ranks.do("train", **case, overrides=["batch_size=1", "threads=1", data.format(width=5)])["steps"] == 64
    finally:
        ranks.end()
