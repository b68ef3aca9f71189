"""Rivals train the same recipe by other means: each runs on two ranks, is proved the same, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hvdkit.baselines.registry import RIVALS, check_recipe, label
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.results.compare import Comparison
from hvdkit.results.parity import Parity
from hvdkit.results.train import TrainResult
from tests import hygiene
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit, rest_thorough, run
from tests.launching import gone_within, marked, wait_until

pytestmark = pytest.mark.long

# those with a runtime of their own: tests/test_deepspeed.py; that divide models: tests/test_parity_divided.py
USUAL = {name: rival for name, rival in RIVALS.items() if rival.runtime is None and not rival.divides}
TRAINED = [(framework, name) for name, rival in USUAL.items() for framework in rival.frameworks]
QUICK = ("model.name=resnet8", "threads=1", "batch_size=8", "warmup_steps=1", "log_every=2")


@pytest.mark.check
def test_the_table_is_what_the_modules_have() -> None:
    """Read from the source, as no framework is here to import."""
    for framework in FRAMEWORKS:
        place = ROOT / "hvdkit" / "baselines" / framework
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        table = file.read_text().partition("\nRIVALS = {")[2]
        names = [name for name, rival in RIVALS.items() if framework in rival.frameworks]
        assert re.findall(r'"([\w-]+)": ', table) == names


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("frameworks", rest_thorough(("pytorch", "mxnet"), ("tensorflow", "keras")))
def test_rivals_compute_what_hvdkit_computes(
    frameworks: tuple[str, ...], hvdkit: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    """In float64, to the marks of every framework, in one run; the reference is plain PyTorch."""
    named = [name for name, rival in USUAL.items() if rival.averaging and set(frameworks) & set(rival.frameworks)]
    options = [*(("--framework", each) for each in frameworks), *(("--rival", each) for each in named)]
    settings = ("model.name=resnet8", "batch_size=4", "loss.label_smoothing=0.1", "optimizer.clip_norm=1.0")
    words = [word for option in options for word in option]
    done = hvdkit("parity", recipe, *words, "--steps", 2, "--out", "run", *settings, timeout=560)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    proof = Parity.model_validate_json((tmp_path / "run" / "parity.json").read_text())
    pairs = [(each, None) for each in frameworks] + [(f, n) for f, n in TRAINED if f in frameworks and n in named]
    names = {label(framework, name) for framework, name in pairs}
    assert {name for name in proof.frameworks if name.partition("-")[0] in frameworks} == names
    for framework, name in pairs:
        each, own = proof.frameworks[label(framework, name)], proof.frameworks[framework]
        assert each.passed, each.missed
        assert abs(each.logits_f64 - own.logits_f64) < 1e-12 and each.applied_f64 <= proof.marks["applied_f64"]


@pytest.mark.usefixtures("warm")
def test_a_rival_trains_alike_and_says_what_it_cost(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """Those of PyTorch, with accumulation; their weights are hvdkit's, their figures their own."""
    results = {}
    adamw = ("optimizer.name=adamw", "optimizer.learning_rate=0.001")
    for out, more in (("own", ()), *((name, ("--rival", name)) for name in ("ddp", "zero_redundancy", "fsdp"))):
        words = ("--framework", "pytorch", "-np", 2, *more, "--out", out, *QUICK)
        done = hvdkit("train", recipe, *words, "steps=4", "accumulate=2", "check_ranks=1", "precision=fp64", *adamw)
        assert done.returncode == 0, done.stderr
        results[out] = TrainResult.model_validate_json((tmp_path / out / "result.json").read_text())
    own, ddp, zero, fsdp = results["own"], results["ddp"], results["zero_redundancy"], results["fsdp"]
    assert (own.rival, ddp.rival, ddp.framework, ddp.np) == (None, "ddp", "pytorch", 2)
    assert ddp.horovod_version is None and own.horovod_version
    assert [ddp.train_loss, zero.train_loss, fsdp.train_loss] == pytest.approx([own.train_loss] * 3, rel=1e-9)
    assert fsdp.val_loss == pytest.approx(own.val_loss, rel=1e-9), "evaluated with gathered weights"
    whole = 8 * own.parameters  # bytes in float64
    assert ddp.state_bytes is None and zero.state_bytes is not None
    assert (zero.state_bytes["parameters"], zero.state_bytes["gradients"]) == (whole, whole)
    assert whole <= zero.state_bytes["optimizer"] < 1.2 * whole, "the larger share of whole tensors, of two slots"
    halves = {"parameters": whole // 2, "gradients": whole // 2, "optimizer": whole}
    assert fsdp.state_bytes == halves, "every tensor has an even number of rows"
    images = 3 * 2 * 2 * 8  # steps, batches a step, ranks, images a batch
    for each in results.values():
        assert len(each.step_ms) == each.measured_steps == 3 and each.step_ms_p50 <= each.step_ms_p90
        assert each.cpu_s_per_image and images * each.cpu_s_per_image < (os.cpu_count() or 1) * 300
        assert each.load is not None and each.noisy == (each.load > 0.1)


@pytest.mark.check
@pytest.mark.parametrize(
    ("rival", "changes", "words"),
    [
        ("fsdp", ["optimizer.name=lars"], "optimizer.name=lars; choose sgd or adamw"),
        ("fsdp", ["sharding=optimizer"], "sharding=optimizer; choose none or gradients or parameters"),
        ("fsdp", ["precision=fp16"], "loss scaling; choose precision=bf16 or fp32"),
        ("fsdp", ["compression=fp16"], "compression fp16; choose compression=none"),
        ("ddp", ["sharding=gradients"], "sharding=gradients; choose none"),
        ("zero_redundancy", ["sharding=gradients"], "sharding=gradients; choose none or optimizer"),
        ("deepspeed", [], "sharding=none; choose optimizer or gradients or parameters"),
        ("deepspeed", ["sharding=parameters", "precision=bf16"], "precision=bf16; choose fp32"),
        ("deepspeed_offload", ["sharding=gradients", "optimizer.momentum=0"], "SGD without momentum"),
    ],
)
def test_what_a_rival_cannot_do_is_refused_by_key(rival: str, changes: list[str], words: str, recipe: Path) -> None:
    with pytest.raises(RequestError, match=f"^--rival {rival}: does not (support|have) {words}[^\\n]*$"):
        check_recipe(rival, schema.load(recipe, changes), hosts_are_here=True)


@pytest.mark.usefixtures("warm")
def test_independent_processes_count_together(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    words = ("--framework", "mxnet", "-np", 2, "--rival", "independent", "--out", "run", *QUICK, "steps=4")
    done = hvdkit("train", recipe, *words)
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert (result.np, result.rival, result.steps) == (2, "independent", 4)
    assert result.shared_memory_ranks is None
    assert result.images_per_second == pytest.approx(2 * 8 * 3 / (sum(result.step_ms) / 1000), rel=1e-2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4], "one process writes"
    assert "mxnet, independent, one of 2: step 4/4" in done.stderr


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(400)
def test_compare_runs_rivals_in_rounds(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    words = ["--framework", "mxnet", "-np", 2, "--no-parity", "--rival", "plain", "--rival", "kvstore"]
    first = hvdkit("compare", recipe, *words, "--rounds", 2, "--out", "c", *QUICK, "steps=3", timeout=300)
    assert first.returncode == 0, first.stderr
    found = Comparison.model_validate_json((tmp_path / "c" / "compare.json").read_text())
    kinds = [None, "plain", "kvstore"]
    assert [(run.round, run.np, run.rival) for run in found.runs] == [(r, 2, kind) for r in (1, 2) for kind in kinds]
    assert (found.rounds, len(found.order), found.order_seed) == (2, 6, 1)
    against = {(ratio.np, ratio.against): ratio.rounds for ratio in found.ratios}
    assert against == {(2, "plain"): 2, (2, "kvstore"): 2}
    assert all(run.pinned is not None and len(run.pinned) == run.np for run in found.runs)
    assert "against" in first.stdout and "| kvstore |" in (tmp_path / "c" / "compare.md").read_text()
    old = json.loads((tmp_path / "c" / "compare.json").read_text())
    for each in old["runs"]:
        each["images_per_second"] *= 1000
    (tmp_path / "old.json").write_text(json.dumps(old))
    again = [*words, "--rounds", 2, "--out", "c", "--resume", "--baseline", "old.json", *QUICK, "steps=3"]
    done = hvdkit("compare", recipe, *again, timeout=60)  # nothing is run again
    now = Comparison.model_validate_json((tmp_path / "c" / "compare.json").read_text())
    assert done.returncode == 1 and now.runs == found.runs and now.baseline is not None, done.stderr
    assert [row.verdict for row in now.baseline] == ["worse"] * 3 and "worse" in done.stdout


@pytest.mark.parametrize("victim", ["rank", "hvdkit"])
def test_a_killed_parameter_server_job_leaves_no_process(victim: str, recipe: Path, tmp_path: Path) -> None:
    """Scheduler and server are rank 0's children; they must end whichever process is killed by force."""
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "-np", "2"]
    command += ["--rival", "kvstore", "--out", str(tmp_path / "run"), "threads=1", "epochs=50", "log_every=1"]
    environment = os.environ | {"HVDKIT_TEST_MARK": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    told: list[Any] = []
    reader = threading.Thread(target=lambda: told.append(process.stderr and process.stderr.read()))
    reader.start()
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 90)
        assert sum(runs_mxnet_alone(pid) for pid in marked(str(tmp_path))) == 2, "scheduler and server"
        os.kill(rank_zero(str(tmp_path)) if victim == "rank" else process.pid, signal.SIGKILL)
        process.wait(hygiene.patience(30))
        assert gone_within(str(tmp_path), 30), marked(str(tmp_path))
        reader.join(hygiene.patience(10))
        if victim == "rank":
            assert process.returncode == 1 and "rank 0 on localhost was killed by SIGKILL" in told[0]
    finally:
        for pid in marked(str(tmp_path)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(hygiene.patience(30))
        reader.join(hygiene.patience(10))


def runs_mxnet_alone(pid: int) -> bool:
    try:
        return b"import mxnet" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def rank_zero(mark: str) -> int:
    """The parent of scheduler and server."""
    helper = next(pid for pid in marked(mark) if runs_mxnet_alone(pid))
    return int(Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.check
def test_nothing_is_proved_of_independent_processes(inside: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    done = inside("parity", recipe, "--framework", "mxnet", "--rival", "independent", "--out", "run")
    assert done.returncode == 2 and "--rival independent: does not average gradients" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_rival_without_a_launcher_is_refused(recipe: Path, tmp_path: Path) -> None:
    """Two ranks need somebody who brings them together."""
    from hvdkit.runtimes.store import find

    script = ROOT / "recipes" / "mxnet" / "resnet.py"
    environment = os.environ | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    words = [str(find("mxnet").python), str(script), str(recipe), "--rival", "kvstore", "steps=1"]
    done = run(words, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "--rival: expected Horovod's rendezvous server" in done.stderr
    words[words.index("kvstore")] = "ddp"
    done = run(words, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "--rival ddp: expected --framework pytorch, got mxnet" in done.stderr
