"""Requests that are wrong: each is refused with its fault, changes no file, and runs once the fault is corrected."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.commands import checks
from hvdkit.core.step_plan import Progress
from hvdkit.data import counts
from hvdkit.data.batches import open_dataset
from hvdkit.errors import RequestError, RunError
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import Launcher
from hvdkit.profiling import published
from hvdkit.recipe.schema import Cifar10, Digits, ImageFolder
from hvdkit.results import profile as profiles
from hvdkit.runtimes import machine
from hvdkit.simulator import cluster as clusters
from hvdkit.tasks import resnet
from tests import simulating
from tests.comparisons import REAL
from tests.conftest import Hvdkit
from tests.data.pictures import draw_folder, write_cifar
from tests.resuming import local_recipe
from tests.test_checkpoint import whole

pytestmark = pytest.mark.check

OUT = ("--out", "runs/mine")
DIGITS = ("resnet20-digits", *OUT)
TEXT, STAGES = ("gpt-tiny", *OUT), "parallel.pipeline=2"
CHUNKS = ("parallel.schedule=interleaved", "parallel.chunks=3")
FOLDER = ("resnet50-imagenet", *OUT, "batch_size=2", "model.classes=3", "data.size=32", "data.resize=36")
PREDICT, ADVISE = ("profile.json", "--cluster", "v100-nvlink-ib", "-n", 2, *OUT), ("profile.json", *OUT)
Words = tuple[object, ...]
# The command with what stays; the faulty words, what is said of them, and the words that correct them.
REQUESTS: list[tuple[str, Words, Words, str, Words]] = [
    ("train", FOLDER, ("data.path=nowhere",), "data.path: nowhere: no such folder", ("data.path=pictures",)),
    ("train", FOLDER, ("data.path=pictures/val/cat",), "pictures/val/cat", ("data.path=pictures",)),
    ("train", FOLDER, ("data.path=broken",), "cat/no.jpg: neither JPEG nor PNG", ("data.path=pictures",)),
    ("train", FOLDER, ("data.path=pictures", "model.classes=2"), "has 3 class folders", ("data.path=pictures",)),
    ("train", FOLDER, ("data.path=pictures", "batch_size=25"), "at most 24 samples", ("data.path=pictures",)),
    ("train", DIGITS, ("data={name: cifar10, path: cifar}",), "data.path: cifar: no such", ("data.name=mnist5k",)),
    ("train", DIGITS, ("data={name: cifar10, path: half}",), "expected the 30,730,000 of", ("data.name=mnist5k",)),
    ("train", DIGITS, ("data={name: native, module: no.py}",), "data.module: no.py: no such file", ()),
    ("train", DIGITS, ("model={name: own, script: no.py}",), "model.script: no.py: no such file", ()),
    ("train", DIGITS, ("model.classes=9",), "model.classes: expected at least 10 for data 'digits', got 9", ()),
    ("train", DIGITS, ("-np", 2, "batch_size=719"), "got 719 × 2 = 1438; give batch_size=718 or less", ("-np", 2)),
    ("train", DIGITS, ("batch_size=1", "model.name=resnet18"), "1×1, and one value per channel", ("batch_size=2",)),
    ("train", DIGITS, ("device=gpu",), "device: expected a GPU for each of this host's 1 rank(s), pytorch sees 0", ()),
    ("train", DIGITS, ("model.weights=no.safetensors",), "model.weights: no.safetensors: cannot be read", ()),
    ("train", DIGITS, ("model.weights=pipe",), "model.weights: pipe: cannot be read (it is a FIFO, not a file)", ()),
    ("train", DIGITS, ("model.weights=profile.json",), "model.weights: profile.json: no safetensors file", ()),
    ("train", DIGITS, ("model.weights=w.safetensors", "model.classes=11"), "shape (11, 64), got (10, 64)",
     ("model.weights=w.safetensors", "model.classes=11", "model.new_head=true")),
    ("train", DIGITS, ("model.weights=w.safetensors", "model.name=resnet32"), "recipe's model, got a resnet20",
     ("model.weights=w.safetensors",)),
    ("train", ("resnet20-digits",), ("--out", "w.safetensors"), "is a file", OUT),
    ("train", ("resnet20-digits",), ("--out", "mine", "--overwrite"), "holds 'thesis.tex', which hvdkit has not", OUT),
    ("train", DIGITS, ("--framework", "jax"), "unknown framework 'jax'", ("--framework", "mxnet")),
    ("train", DIGITS, ("--framework", "mxnet", "precision=bf16"), "precision: mxnet", ("--framework", "mxnet")),
    ("train", DIGITS, ("--rival", "ddp", "-np", 2, "sync.every=2"), "--rival ddp: does not support Local SGD",
     ("--rival", "ddp", "-np", 2)),
    ("train", TEXT, ("-np", 3, STAGES), "expected a multiple of 2 ranks, which is 2 (pipeline) × 1 (tensor)", ()),
    ("train", TEXT, ("-np", 2, "parallel.data=3"), "expected -np 3, which is 3 (data) × 1 (pipeline) × 1 (t", ()),
    ("train", TEXT, ("-np", 5, "batch_size=5", "parallel.pipeline=5"), "pipeline: expected at most 4 stages, as", ()),
    ("train", TEXT, ("-np", 2, STAGES, "parallel.split=[2, 1]"), "parallel.split: expected 4 blocks together", ()),
    ("train", TEXT, ("-np", 2, STAGES, *CHUNKS), "parallel.chunks: expected at most 4 chunks in all stages, as", ()),
    ("train", TEXT, ("-np", 3, "parallel.tensor=3"), "parallel.tensor: expected a divisor of model.heads 4, and", ()),
    ("train", TEXT, ("-np", 2, STAGES, "--rival", "plain"), "--rival plain: does not divide models over ranks", ()),
    ("parity", TEXT, ("-np", 2, STAGES, "--rival", "plain"), "--rival plain: does not divide models over ranks", ()),
    ("train", TEXT, ("-np", 2, "--rival", "pipelining"), "--rival pipelining: needs a model that is divided; ch", ()),
    ("train", TEXT, ("-np", 4, STAGES, "parallel.tensor=2", "--rival", "pipelining"), "choose parallel.tensor=1", ()),
    ("advise", TEXT, (STAGES,), "parallel: hvdkit advise does not know models that are divided", ()),
    ("train", DIGITS, ("--rival", "ddp", "-np", 1), "--rival ddp: expected -np 2 or more", ("--rival", "plain")),
    ("train", DIGITS, ("-np", 2, "elastic={max_np: 1}"), "-np 2: expected 1 to 1, as elastic says", ("-np", 2)),
    ("train", DIGITS, ("--host-discovery-script", "/bin/true"), "expected an `elastic` section in the recipe", ()),
    ("train", (*DIGITS, "elastic={max_np: 2}"), ("--host-discovery-script", "/no"), "expected a program that", ()),
    ("train", DIGITS, ("-np", 3, "-H", "localhost:2"), "-np 3: -H offers 2 slots", ("-np", 2, "-H", "localhost:2")),
    ("train", DIGITS, ("--launcher", "mpi"), "--launcher mpi: expected one of", ("--launcher", "horovodrun")),
    ("train", DIGITS, ("--resume", "checkpoint=null"), "--resume: expected --out with", ("--resume",)),
    ("train", DIGITS, ("--resume", "--overwrite"), "expected one of them, got both", ("--overwrite",)),
    ("compare", (*FOLDER, "--no-parity"), ("data.path=nowhere",), "nowhere: no such folder", ("data.path=pictures",)),
    ("compare", DIGITS, ("-np", 1, "-np", 4, "batch_size=400"), "over 4 ranks, got 400 × 4 = 1600", ("--no-parity",)),
    ("compare", DIGITS, ("--rival", "ddp", "compression=fp16"), "ddp: does not support comp", ("--rival", "ddp")),
    ("compare", DIGITS, ("--parity", "no.json"), "no.json: cannot be read", ("--no-parity",)),
    ("compare", DIGITS, ("--earlier", "compare.json"), "--earlier compare.json: expected this machine", ()),
    ("parity", DIGITS, ("-np", 2, "batch_size=1000"), "over 2 ranks, got 1000", ()),
    ("parity", DIGITS, ("--steps", 0), "--steps 0: expected at least 1", ("--steps", 2)),
    ("parity", DIGITS, ("data={name: native, module: no.py}",), "data native: parity needs the same bytes", ()),
    ("profile", DIGITS, ("batch_size=1000",), "over 2 ranks, got 1000 × 2 = 2000", ("-np", 1, "batch_size=1000")),
    ("profile", DIGITS, ("--steps", 1), "--steps 1: expected at least 8", ("--steps", 8)),
    ("profile", DIGITS, ("--torch-profiler", "--framework", "mxnet"), "--torch-profiler: mxnet has none", ()),
    ("evaluate", ("kept", *OUT), ("model.classes=11",), "fc.weight: expected shape (11, 64), got (10, 64)", ()),
    ("evaluate", ("kept", *OUT), ("model.name=resnet32",), "tensor layer1.3.conv1.weight is missing", ()),
    ("evaluate", ("kept", *OUT), ("data={name: synthetic, height: 32, width: 32}",), "expected validation samples", ()),
    ("evaluate", OUT, ("nowhere",), "nowhere: no such folder", ("kept",)),
    ("export", ("kept",), ("--out", "net.onyx"), "expected a file that ends in", ("--out", "net.safetensors")),
    ("export", ("kept",), ("--out", "no/net.keras"), "no is no folder that can be written", ("--out", "net.keras")),
    ("bench", OUT, ("allreduse",), "allreduse: expected allreduce", ("allreduce",)),
    ("bench", ("allreduce", *OUT), ("--device", "gpu"), "device: expected a GPU for each of this host's 2", ()),
    ("bench", ("allreduce", *OUT), ("--add-to", "profile.json"), "--add-to: profile.json", ()),
    ("predict", PREDICT, ("--set", "batch=1"), "batch: unknown key", ("--set", "batch_size=1")),
    ("predict", PREDICT, ("-n", 0), "-n 0: expected at least 1", ("-n", 4)),
    ("advise", ADVISE, ("--cluster", "v100"), "did you mean 'v100-nvlink-ib'", ("--cluster", "v100-nvlink-ib")),
    ("advise", ("resnet20-digits", *OUT), ("batch_size=1000",), "over 2 ranks, got 1000", ()),
    ("advise", DIGITS, ("-np", 1), "--cluster: expected a cluster file", ()),
    ("advise", ("resnet20-digits",), ("--resume",), "--resume: expected --out", OUT),
    ("advise", DIGITS, ("--steps", 2), "--steps 2: expected at least 8", ()),
    ("advise", DIGITS, ("--price", -1), "--price -1", ()),
    ("advise", ADVISE, ("batch_size=4", "-np", 2), "-np, key=value: expected a recipe",
     ("--cluster", "v100-nvlink-ib")),
    ("advise", ("alone.json", *OUT), (), "--cluster: expected a cluster file", ("--cluster", "v100-nvlink-ib")),
    ("advise", ADVISE, ("--new-recipe", "profile.json"), "is there already", ("--cluster", "v100-nvlink-ib")),
    ("report", (), ("kept", "--out", "page"), "neither compare.json nor result.json", (REAL, "--out", "page")),
    ("report", (), (REAL, "--out", "profile.json"), "--out profile.json: cannot be made", (REAL, "--out", "page")),
]  # fmt: skip

FIGURE = ("--images-per-second", 2470, "--batch-size", 256, "--device", "a100")
PUBLISHED, LINKS = ("profile", "--from", "resnet50"), ("bench", "links", "-H", "a:1,b:1")
SWEEP = ("predict", "profile.json", "--cluster", "p100-roce25")
ON_TWO = ("predict", "profile.json", "--cluster", "cluster.yaml", "-n", 2)
LIMITED = ("advise", "profile.json", "--cluster", "v100-nvlink-ib", "-n", 8)
# By both commands.
WHAT_IFS: list[tuple[Words, str]] = [
    (("--set", "accumulate=2", "--accumulate", 2), "--set accumulate: expected it once, got --accumulate too"),
    (("--accumulate", 0), "--accumulate 0: expected at least 1"),
    (("--image-size", 64), "image_size: expected a model of images whose layers hvdkit knows, got gpt2"),
    (("--precision", "bf16"), "precision: V100s are known to compute in fp16, got bf16"),
    (("--precision", "fp8"), "--precision"),
    (("--sequence-length", 0), "--sequence-length 0: expected"),
]
# Requests that are wrong, and what the one line says that answers each.
IN_A_LINE: list[tuple[Words, str]] = [
    (("profile",), "expected a recipe to measure, or --from"),
    (PUBLISHED, "--batch-size, --device: needed too"),
    (("profile", "--batch-size", 3, "--device", "x", "--images-per-second", 3), "--from: needed too"),
    (("profile", "--from", "resnet5", *FIGURE), "did you mean 'resnet56'"),
    (("profile", "resnet20-digits", "--from", "resnet50", *FIGURE), "RECIPE.yaml: leave it out"),
    ((*PUBLISHED, *FIGURE, "--np", 2), "-np: leave it out"),
    ((*PUBLISHED, *FIGURE[:1], 0, *FIGURE[2:]), "--images-per-second 0: expected"),
    ((*PUBLISHED, *FIGURE[:1], "nan", *FIGURE[2:]), "--images-per-second: expected a number"),
    ((*PUBLISHED, *FIGURE[:3], 0, *FIGURE[4:]), "--batch-size 0: expected"),
    ((*PUBLISHED, *FIGURE[:5], " "), "--device ' ': expected"),
    ((*PUBLISHED, *FIGURE, "--precision", "fp8"), "--precision"),
    (("profile", "--precision", "fp16"), "--from, --batch-size, --device: needed too"),
    *((("profile", *DIGITS, "--batch-sizes", word), "--batch-sizes") for word in ("8", "8,8", "8,x", "0,8", "8,,16")),
    (("bench", "links", "-H", "a:1"), "-H: expected two hosts or more"),
    ((*LINKS, "--every", "ten"), "--every 'ten': expected a number and s, m, h or d"),
    ((*LINKS, "--for", "1h"), "--for: expected --every with it"),
    ((*LINKS, "--resume"), "--resume: expected --every and --out with it"),
    ((*LINKS, "--rated", "0"), "--rated 0: expected more than 0"),
    (("doctor", "-H", "a;reboot:2"), "-H: 'a;reboot:2': expected host:slots"),
    (("doctor", "-H", "a:1", "--hostfile", "hosts"), "--hostfile: expected either it or -H"),
    (("doctor", "-H", "a:1", "--interface", "10.0.0/999"), "--interface 10.0.0/999: expected a name such as eth0, or"),
    (("doctor", "--interface", "eth0"), "--interface: expected -H or --hostfile with it"),
    (("doctor", "--overwrite"), "--overwrite: expected -H or --hostfile with it"),
    (("doctor", "--hostfile", "nowhere"), "nowhere: cannot be read (No such file or directory)"),
    (("hosts", "--n", 0), "--n 0: expected at least 1"),
    (("hosts", "--mbit-per-s", 0), "--mbit-per-s 0: expected at least 0.1"),
    (("hosts", "--slots", 65), "--slots 65: expected at least 1, at most 64"),
    (("hosts", "nowhere", "-H", "HOSTS"), "nowhere: no such command; expected a program and its arguments after --"),
    (SWEEP, "-n: expected the number of ranks"),
    ((*SWEEP, "--sweep", "batch_size=32"), "-n: expected -n or --sweep n=8,16"),
    ((*SWEEP, "--sweep", "n=8", "-n", 8), "-n: expected either"),
    ((*SWEEP, "--sweep", "n=0,8"), "-n 0: expected at least 1"),
    ((*SWEEP, "--sweep", "n=8,x"), "--sweep n: expected whole numbers, got 'x'"),
    ((*SWEEP, "--sweep", "n=8,16,...,1000.5"), "lead to 1000.5 neither"),
    ((*SWEEP, "--sweep", "n=8,...,64"), "expected two numbers before"),
    ((*SWEEP, "--sweep", "n"), "expected KEY=VALUE,VALUE"),
    ((*SWEEP, "--sweep", "n="), "expected at least one value"),
    ((*SWEEP, "--sweep", "n=8,,16"), "--sweep n=8,,16: expected"),
    ((*SWEEP, "--sweep", "n=[8"), "expected values with commas"),
    ((*SWEEP, "--sweep", "n=8", "--sweep", "n=9"), "given twice"),
    ((*SWEEP, "--sweep", "batch=1", "-n", 8), "--sweep: batch: unknown key; did you mean 'batch_size'?"),
    ((*SWEEP, "--sweep", "batch_size=0,32", "-n", 8), "batch_size: expected greater than or equal to 1, got 0"),
    ((*SWEEP, "--sweep", "policy=dpp", "-n", 8), "did you mean 'ddp'"),
    ((*SWEEP, "--sweep", "policy=ddp", "-n", 8, "--policy", "horovod"), "leave out --policy"),
    ((*SWEEP, "--sweep", "link.x.busy=0.1", "-n", 8), "link.x: expected one of p100-roce25's levels"),
    ((*SWEEP, "--sweep", "link=1", "-n", 8), "--sweep: link: expected"),
    ((*SWEEP, "--sweep", "n=1,2,...,500", "--sweep", "jitter=0,0.001,...,0.3"), "100,000 what-ifs, got 150,500"),
    (("predict", "none.json", "--cluster", "cluster.yaml", "-n", 2), "none.json: cannot be read"),
    (("predict", "profile.json", "--cluster", "none.yaml", "-n", 2), "none.yaml: no such file"),
    (("predict", "profile.json", "--cluster", "dgx1-p100", "-n", 9), "-n 9: expected at least 1 and at most 8 ranks"),
    ((*ON_TWO, "--policy", "dpp"), "did you mean 'ddp'"),
    ((*ON_TWO, "--set", "batch_size=-1"), "batch_size: "),
    ((*ON_TWO, "--set", "batch_size"), "key=value"),
    ((*ON_TWO, "--set", "compression=zip"), "none, fp16"),
    ((*ON_TWO, "--set", "link.x.ports=2"), "levels net"),
    (("advise", "profile.json", "--cluster", "cluster.yaml", "-n", 2, "--price", -1), "--price -1"),
    ((*LIMITED, "--deadline", "soon"), "--deadline 'soon': expected a time such as 36h"),
    ((*LIMITED, "--deadline", "2020-01-01"), "--deadline 2020-01-01: expected a time to come"),
    ((*LIMITED, "--deadline", "0h"), "--deadline 0h: expected a time to come"),
    ((*LIMITED, "--deadline", "36h"), "--deadline: expected --epoch-images and --epochs too"),
    ((*LIMITED, "--budget", "5", "--epoch-images", "100000"), "--budget: expected --epochs too"),
    ((*LIMITED, "--budget", "0"), "--budget 0: expected more than 0"),
    ((*LIMITED, "--spot-interruption", "-1"), "--spot-interruption -1: expected at least 0"),
    ((*LIMITED, "--spot-interruption", "0.1"), "--spot-interruption: expected --epoch-images and --epochs too"),
    *(((command, "gpt2.json", "--cluster", "aws-p3-16xlarge", "-n", 16, *words), told)
      for command in ("predict", "advise") for words, told in WHAT_IFS),
]  # fmt: skip


class Started(RunError):
    """Ranks would be started now."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the requests name."""
    place = tmp_path_factory.mktemp("made")
    draw_folder(place / "pictures")
    draw_folder(place / "broken")
    (place / "broken" / "train" / "cat" / "no.jpg").write_text("no picture")
    (place / "half").mkdir()
    (place / "half" / "data_batch_1.bin").write_bytes(b"0" * 3073)
    comparison = (REAL / "compare.json").read_text()
    # Any processor may be the one that runs this test, also the one of the recorded comparison.
    (place / "compare.json").write_text(re.sub(r'("processor": ")[^"]*', r"\1another machine", comparison))
    profiles.save(simulating.profile(), place / "profile.json")
    profiles.save(simulating.profile(np=1), place / "alone.json")
    profiles.save(published.profile("gpt2", None, 4, "v100", 12_000.0), place / "gpt2.json")
    clusters.save(simulating.cluster(), place / "cluster.yaml")
    (place / "mine").mkdir()
    (place / "mine" / "thesis.tex").touch()
    state = resnet.architecture("resnet20", 10).initial_state(1)
    save_file(state, place / "w.safetensors")
    zeros = {f"optimizer.momentum.{name}": np.zeros_like(value) for name, value in state.items()}
    recipe = local_recipe().model_dump(mode="json")
    record = snapshots.CheckpointRecord(
        progress=Progress(step=1), np=1, framework="mxnet", framework_version="1", hvdkit_version="1", recipe=recipe
    )
    writer = Checkpoints(place / "checkpoints", local_recipe().checkpoint, "accuracy")
    writer.write(*whole(record, state | zeros))
    writer.wait()
    os.mkfifo(place / "pipe")
    (place / "kept").symlink_to(place / "checkpoints" / "step-00000001")
    return place


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would start ranks raises `Started`; the machine has no GPU."""

    def start(self: Launcher, job: Job, on_tick: Any = None) -> None:
        raise Started("started")

    monkeypatch.setattr(Launcher, "run", start)
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(checks, "_AMD", Path("/dev/nothing"))


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder, and its folders."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: " ".join(map(str, (each[0], *each[2][:1]))))
def test_a_refused_request_leaves_nothing_and_runs_when_corrected(
    request_: tuple[str, Words, Words, str, Words], inside: Hvdkit, made: Path, tmp_path: Path, starts: None
) -> None:
    command, stays, wrong, told, right = request_
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    before = content(tmp_path)
    done = inside(command, *stays, *wrong)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert content(tmp_path) == before
    done = inside(command, *stays, *right)
    # `advise` without a cluster and such lines end where ranks would start, those without ranks with their result
    assert (done.returncode, done.stderr.splitlines()[-1:]) in ((1, ["started"]), (0, [])), done.stderr


@pytest.mark.parametrize(("words", "told"), IN_A_LINE)
def test_a_wrong_request_is_told_in_a_line(
    words: Words, told: str, inside: Hvdkit, made: Path, tmp_path: Path, starts: None
) -> None:
    names = {"cluster.yaml", "gpt2.json", "profile.json"}
    for name in names:
        (tmp_path / name).symlink_to(made / name)
    done = inside(*words)
    assert (done.returncode, told in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == names


def test_files_of_other_machines_are_for_their_ranks_to_check(inside: Hvdkit, tmp_path: Path, starts: None) -> None:
    there = ("--launcher", "horovodrun", "-H", "elsewhere.invalid:2", "-np", 2)
    done = inside("train", *FOLDER, *there, "data.path=nowhere", "device=gpu")
    assert (done.returncode, done.stderr) == (1, "started\n")


def test_what_is_known_of_data_sets_is_so(made: Path, tmp_path: Path) -> None:
    folder = ImageFolder(name="imagefolder", path=str(made / "pictures"), size=32, resize=36)
    cifar = Cifar10(name="cifar10", path=str(write_cifar(tmp_path / "cifar")))
    for data in (Digits(name="digits"), cifar, folder):
        opened = open_dataset(data, 10, 1)
        found = counts.Counts(len(opened.train), len(opened.val), opened.shape, opened.classes)
        assert counts.count(data, 10) == found == counts.KNOWN.get(data.name, found), data.name


# What only ranks can find


def resumable(folder: Path) -> dict[str, bytes]:
    """The files of a run that has ended, but for its checkpoints and logs."""
    files = {"config.yaml": b"name: before\n", "result.json": b"{}\n", "metrics.jsonl": b""}
    for name, text in files.items():
        (folder / name).write_bytes(text)
    return files


@pytest.mark.parametrize("trained", [False, True])
def test_a_resumed_run_that_is_refused_stays_as_it_was(
    trained: bool, inside: Hvdkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resumable(tmp_path)

    def refuse(self: Launcher, job: Job, on_tick: Any = None) -> None:
        if trained:
            (tmp_path / "metrics.jsonl").write_text("{}\n")
        raise RequestError("image 7 is none")

    monkeypatch.setattr(Launcher, "run", refuse)
    done = inside("train", "resnet20-digits", "--out", tmp_path, "--resume", "epochs=9")
    assert done.returncode == 2 and done.stderr.endswith("image 7 is none\n")
    after = {name: (tmp_path / name).read_bytes() for name in before if (tmp_path / name).exists()}
    if trained:
        assert "result.json" not in after and b"epochs: 9" in after["config.yaml"]
    else:
        assert after == before
