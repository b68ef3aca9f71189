"""`--dry-run`: what is shown of a command without starting it or writing anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdkit.launch.job import Job
from hvdkit.launch.launchers import Launcher
from hvdkit.recipe import registry, schema
from hvdkit.results.dry_run import DryRun
from hvdkit.results.memory import Parts
from hvdkit.runtimes import machine
from hvdkit.tasks import resnet
from tests.conftest import Hvdkit
from tests.data.pictures import draw_folder
from tests.resuming import local_run

pytestmark = pytest.mark.check

DIGITS = "resnet20-digits"
PARAMETERS = 4 * 272_474  # bytes of ResNet-20


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Launcher, job: Job, on_tick: Any = None) -> None:
        raise AssertionError("a dry run starts nothing")

    monkeypatch.setattr(Launcher, "run", start)


def shown(inside: Hvdkit, *words: object, notes: str | None = "") -> DryRun:
    """What a dry run shows as JSON, beside `notes` on standard error."""
    done = inside(*words, "--dry-run", "--json")
    assert done.returncode == 0 and notes in (None, done.stderr), done.stderr
    return DryRun.model_validate_json(done.stdout)


def test_a_training_run_as_text(inside: Hvdkit, tmp_path: Path) -> None:
    done = inside("train", DIGITS, "-np", 2, "--out", "runs/mine", "epochs=3", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    recipe, _, about = done.stdout.partition("\n\n")
    about = " ".join(about.split())
    assert schema.revise(yaml.safe_load(recipe), "shown") == schema.load(registry.locate(Path(DIGITS)), ["epochs=3"])
    for part in (
        "run pytorch, 2 ranks",
        "0 on localhost (slot 0), 1 on localhost (slot 1)",
        "in a host shared memory; HOROVOD_SHARED_MEMORY=0 turns it off",
        "launcher direct",
        "pytorch/bin/python ",
        "recipes/pytorch/resnet.py",
        "HOROVOD_CYCLE_TIME 5: for a Horovod without",
        "HOROVOD_FUSION_THRESHOLD Horovod's default, 128 MiB: it holds all gradients",
        "1,437 training and 360 validation samples of 32×32×3",
        "66 in 3 epochs of 22; 64 samples per batch",
        "at least parameters 1.0 MiB, gradients 1.0 MiB, optimizer 1.0 MiB, communication 0.1 MiB, activations 47.5",
        "time not known: found no earlier run of this recipe",
        "writes to runs/mine",
    ):
        assert part in about, (part, about)


@pytest.mark.parametrize(
    ("hosts", "shared", "told"),
    [
        ("a:2,b:2", "1", "shared memory by the 2 ranks of each, and sockets between hosts"),
        ("a:2,b:2", "0", "sockets, as HOROVOD_SHARED_MEMORY is 0"),
        ("a:3,b:1", "1", "sockets, as hosts have unequal numbers of ranks, 1 to 3"),
        ("a:1,b:1,c:1,d:1", "1", "each has one rank"),
        ("localhost:2,127.0.0.1:2", "1", "shared memory; "),
    ],
)
def test_it_says_how_ranks_of_a_host_talk(
    hosts: str, shared: str, told: str, inside: Hvdkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_SHARED_MEMORY", shared)
    words = ["train", DIGITS, "-np", 4, "-H", hosts, "--launcher", "horovodrun"]
    (run,) = shown(inside, *words, notes=None).runs
    assert run.within_hosts and run.within_hosts.startswith(told)


def test_the_same_as_json(inside: Hvdkit, tmp_path: Path) -> None:
    (run,) = shown(inside, "train", DIGITS, "-np", 3, "-H", "localhost:2,127.0.0.1:2", "precision=fp64").runs
    assert [(each.rank, each.host, each.slot) for each in run.ranks] == [
        (0, "localhost", 0), (1, "localhost", 1), (2, "127.0.0.1", 0),
    ]  # fmt: skip
    assert (run.train, run.val, run.shape, run.global_batch) == (1437, 360, [32, 32, 3], 96)
    assert (run.steps_per_epoch, run.epochs, run.steps, run.first_step) == (14, 8, 112, 0)
    assert run.memory and run.memory.parameters == run.memory.gradients == run.memory.optimizer == 2 * PARAMETERS
    assert 0 < run.memory.communication < PARAMETERS and run.seconds is None and "no earlier run" in run.seconds_from
    assert run.environment["HOROVOD_CYCLE_TIME"] == "5" and run.tuning["HOROVOD_CYCLE_TIME"]["value"] == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("epochs=2 schedule.warmup_epochs=10", "schedule.warmup_epochs=10.0: the run ends after 44 steps (2 epochs)"),
        ("epochs=1", "schedule.warmup_epochs=1.0: "),
        ("epochs=2 schedule.decay=step schedule.milestones=[1,2,30]", "schedule.milestones=["),
        ("epochs=4 steps=44", "schedule.decay=cosine: the run ends after 44 steps (2 epochs)"),
        ("epochs=4 steps=44 schedule.decay=polynomial", "schedule.decay=polynomial: the run ends after 44 steps"),
        ("epochs=4 steps=44 schedule.decay=constant", None),
        ("accumulate=23 warmup_steps=0", "accumulate=23: an epoch has 22 batches"),
        ("checkpoint.every_epochs=9", "checkpoint.every_epochs=9: "),
        ("checkpoint={every_epochs:\xa00,every_steps:\xa0177}", "checkpoint.every_steps=177: "),
        ("checkpoint={every_epochs:\xa09,every_steps:\xa0176}", None),
        ("check_ranks=177", "check_ranks=177: "),
        ("log_every=177", "log_every=177: "),
        ("sync={every:\xa0177}", "sync.every=177: "),
        ("sync={every:\xa08,start:\xa08}", "sync.start=8"),
        ("elastic={max_np:\xa02,commit_every:\xa0177}", "elastic.commit_every=177: "),
        ("compression={method:\xa0topk,warmup_epochs:\xa08}", "compression.warmup_epochs="),
        ("early_stopping={patience:\xa07}", "early_stopping.patience=7: "),
        ("early_stopping={patience:\xa06}", None),
        ("warmup_steps=176", "warmup_steps=176: "),
        ("tune=measure", "tune: 12 short runs"),
        ("", None),
    ],
)
def test_what_never_happens_is_said(overrides: str, told: str | None, inside: Hvdkit) -> None:
    given = [word.replace("\xa0", " ") for word in overrides.split(" ") if word]
    notes = shown(inside, "train", DIGITS, "-np", 2, *given, notes=None).notes
    assert len(notes) == (told is not None) and all(note.startswith(told or "") for note in notes), notes


def test_memory_follows_the_recipe(inside: Hvdkit) -> None:
    def memory(*overrides: str) -> Parts:
        found = shown(inside, "train", DIGITS, "-np", 2, *overrides).runs[0].memory
        assert found and found.activations
        return found

    plain = memory()
    assert plain.parameters == plain.gradients == plain.optimizer == PARAMETERS
    assert plain.communication < PARAMETERS / 5, "the largest gradient, until it is copied to the others"
    assert memory("accumulate=2").communication == memory("compression=fp16").communication == PARAMETERS
    assert memory("optimizer={name: adamw, learning_rate: 0.001}").optimizer == 2 * PARAMETERS
    assert memory("compression=topk").communication == 2 * PARAMETERS
    assert memory("sync={every: 4, outer: nesterov}").communication == 3 * PARAMETERS
    half, double, less = memory("precision=bf16"), memory("batch_size=64"), memory("recompute=true")
    assert plain.activations and half.activations and less.activations
    assert plain.activations == 2 * half.activations and double.activations == 2 * plain.activations
    assert less.activations < plain.activations and half.casts == PARAMETERS // 2


def test_activations_are_counted_from_the_table() -> None:
    """By hand: the stem and three blocks of ResNet-8 at 32×32, two values for each output of a convolution."""
    stem, first = 2 * 32 * 32 * 16, 4 * 32 * 32 * 16
    second, third = 4 * 16 * 16 * 32 + 16 * 16 * 32, 4 * 8 * 8 * 64 + 8 * 8 * 64
    assert resnet.architecture("resnet8", 10).activations((32, 32, 3))[:3] == (stem + first + second + third, 0, 0)


def test_time_is_that_of_an_earlier_run_of_the_same_recipe(inside: Hvdkit, tmp_path: Path) -> None:
    recipe = schema.load(registry.locate(Path(DIGITS)), ["epochs=1", "checkpoint=null", "accumulate=3"])
    (tmp_path / "runs" / "before").mkdir(parents=True)
    result = local_run(tmp_path / "runs" / "before", recipe)
    assert result and result.steps == 15
    place = tmp_path / "runs" / "before"
    (place / "config.yaml").write_text(schema.dump(recipe))
    threads = len(os.sched_getaffinity(0))
    took = {"framework": "mxnet", "launcher": "direct", "threads": threads, "train_s": 30.0, "startup_s": 4.0}
    (place / "result.json").write_text(json.dumps(json.loads((place / "result.json").read_text()) | took))
    asked = ("train", DIGITS, "--framework", "mxnet", "accumulate=3", "epochs=10", "seed=5")
    (run,) = shown(inside, *asked).runs
    assert run.seconds == 4 + 10 * 30.0 and run.seconds_from == "runs/before took 30 s for 15 steps, and 4 s to start"
    for other in (["-np", 2], ["batch_size=16"], ["--launcher", "horovodrun"], ["precision=fp64"]):
        assert "no earlier run of this recipe" in shown(inside, *asked, *other).runs[0].seconds_from, other
    done = inside(*asked, "--dry-run")
    assert "about 5 min: runs/before took" in done.stdout


def test_memory_beyond_the_machine_is_noted(inside: Hvdkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank needs 4 × 1.04 MiB, 1.42 × 1.5 MiB an image, and 302 MiB for PyTorch; on a GPU 1,343, a buffer of 128, and
    1.5 MiB an image."""
    monkeypatch.setattr(machine, "memory", lambda: 660 * 2**20)
    monkeypatch.setattr(machine, "gpus", lambda: ["GPU 0", "GPU 1"])
    monkeypatch.setattr(machine, "gpu_memory", lambda: [1600 * 2**20, 1500 * 2**20])

    def noted(*overrides: object) -> list[str]:
        return [line for line in shown(inside, "train", DIGITS, *overrides).notes if line.startswith("memory: ")]

    assert noted() == []
    (line,) = noted("-np", 2)
    assert line.startswith("memory: 2 ranks need at least 0.7 GiB, and this machine has 0.6 GiB; give batch_size=11")
    assert noted("-np", 2, "batch_size=11") == [] and noted("-np", 2, "batch_size=12")
    (line,) = noted("-np", 2, "device=gpu")
    assert "a rank needs at least" in line and "the smallest GPU has" in line and "batch_size=17" in line
    assert noted("-np", 2, "device=gpu", "batch_size=17") == []
    monkeypatch.setattr(machine, "memory", lambda: 2**20)
    (line,) = noted()
    assert line.endswith("give fewer ranks or a smaller model")


def test_a_damaged_image_is_found(inside: Hvdkit, tmp_path: Path) -> None:
    draw_folder(tmp_path / "images")
    broken = tmp_path / "images" / "train" / "cat" / "000.JPEG"
    asked = ("train", "resnet20-folder", "data.path=images", "batch_size=4")
    assert "images: all 30 have been decoded" in shown(inside, *asked, notes=None).notes
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    done = inside(*asked, "--dry-run")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert "images/train/cat/000.JPEG: image file is truncated" in done.stderr.splitlines()[-1]
    assert "fix or remove them, or give data.corrupt=replace" in done.stderr
    (line,) = [line for line in shown(inside, *asked, "data.corrupt=replace", notes=None).notes if "images" in line]
    assert line.startswith("images: all 30 have been decoded; 1 cannot be read, and others take their place, such as")


def test_a_task_of_the_users_own(inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    done = inside("train", DIGITS, "model={name: own, script: mine.py}", "data.name=own", "--dry-run")
    about = " ".join(done.stdout.partition("\n\n")[2].split())
    assert "steps only the ranks know how many; 32 samples per batch memory not known: only the script" in about
    done = inside("train", DIGITS, "model={name: own, script: mine.py}", "data.name=own", "steps=9", "--dry-run")
    assert "at most 9; 32 samples per batch" in done.stdout


def test_a_resumed_run_goes_on_from_its_checkpoint(inside: Hvdkit, tmp_path: Path) -> None:
    recipe = schema.load(registry.locate(Path(DIGITS)), ["checkpoint.every_steps=20"])
    assert local_run(tmp_path / "run", recipe, kill_at=50) is None
    before = sorted(tmp_path.rglob("*"))
    found = shown(inside, "train", DIGITS, "--resume", "--out", "run")
    assert found.runs[0].first_step == 44 and "run: continues from step 44" in found.notes
    done = inside("train", DIGITS, "--resume", "--out", "run", "model.name=resnet32", "--dry-run")
    assert done.returncode == 2 and "the newest checkpoint is of another recipe" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_comparison_a_proof_and_a_profile(inside: Hvdkit, tmp_path: Path) -> None:
    compared = shown(inside, "compare", DIGITS, "--framework", "pytorch", "--rival", "ddp", "--rounds", 2)
    assert [(run.rival, len(run.ranks), run.times) for run in compared.runs] == [
        (None, 1, 2),
        (None, 2, 2),
        ("ddp", 2, 2),
    ]
    assert compared.notes == ["first a parity check of 5 steps: pytorch, pytorch-ddp must compute the same"]
    proof = shown(inside, "parity", DIGITS, "--framework", "mxnet", "--steps", 7)
    assert [(run.title, run.steps) for run in proof.runs] == [("pytorch, plain, 2 ranks", 7), ("mxnet, 2 ranks", 7)]
    profiled = shown(inside, "profile", DIGITS, "--steps", 8, "sync={every: 3}")
    assert profiled.runs[0].steps and profiled.runs[0].steps > 16 and "whole rounds" in profiled.notes[0]
    for command in ("compare", "parity", "profile"):
        done = inside(command, DIGITS, "--dry-run")
        assert done.returncode == 0 and f"hvdkit {command} would start this" in done.stdout, done.stderr
        assert "None" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_is_refused_in_a_dry_run_too(inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "result.json").touch()
    for words, part in (
        (("--out", "full", "--dry-run"), "the folder is not empty"),
        (("batch_size=5000", "--dry-run"), "batch_size: expected at most 1437"),
    ):
        done = inside("train", DIGITS, *words)
        assert done.returncode == 2 and part in done.stderr, done.stderr
