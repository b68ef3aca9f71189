"""`hvdkit profile` over real ranks under every framework, and over two hosts; a rank that was made slow is found."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.results.pipeline import PipelineStep
from hvdkit.results.profile import Profile, load
from hvdkit.runtimes import store
from hvdkit.tasks import resnet
from tests import hygiene
from tests.cluster import starving
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit, rest_thorough
from tests.divided import SMALL

pytestmark = pytest.mark.long

SLOWER_S = 0.3  # more than what a busy machine does to the other rank
SLOW_INPUT = f"""
import time
import numpy as np
from hvdkit.data.user_pipeline import NativePipeline

def open_pipeline(job):
    def train(epoch):
        for step in range(100):
            if job.topology.rank == job.topology.size - 1:
                time.sleep({SLOWER_S})
            yield np.full((job.batch_size, 8, 8, 1), step, np.float32), np.arange(job.batch_size) % 10
    return NativePipeline((8, 8, 1), train, 100 * job.batch_size * job.topology.size)
"""
QUICK = ("-np", 2, "--steps", 8, "--out", "run", "batch_size=4", "warmup_steps=2")


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_two_ranks(framework: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    own = ["--torch-profiler"] if "own-profile" in CAPABILITIES[framework] else []
    # Eight steps in detail, four on each rank, instead of four.
    done = hvdkit("profile", recipe, "--framework", framework, *QUICK, "--steps", 15, *own)
    assert done.returncode == 0, done.stderr
    made = load(tmp_path / "run" / "profile.json")
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)
    assert made.step.gaps_ms.median < 0.4 * made.step.step_ms.median, "most of a step is told by name"
    for split in (made.step, *(rank.split for rank in made.ranks)):
        assert split.forward_ms and split.backward_ms and split.update_ms
        assert split.forward_ms.mean > 0 and split.backward_ms.mean > 0 and split.exposed_communication_ms.mean > 0
    _check_tensors(made, framework)
    reduced = [each for each in made.communications if each.operation == "allreduce"]
    assert sum(each.bytes for each in reduced) == sum(tensor.bytes for tensor in made.tensors)
    joined = framework == "pytorch"  # which reduces a group as one tensor
    assert sum(each.tensors for each in reduced) == (1 if joined else len(made.tensors))
    assert made.bytes_per_step == sum(tensor.bytes for tensor in made.tensors)
    assert made.link.measured_mbit_per_s and made.link.achieved_mbit_per_s and made.cost and made.slowest
    assert made.latencies[0].bytes == 4 and made.latencies[-1].ms.median > 0
    assert "bounds the step" in done.stdout and "Tracing overhead" in done.stdout

    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} >= {100, 101}
    assert (tmp_path / "run" / "profile.png").read_bytes().startswith(b"\x89PNG")
    for rank in (0, 1) if own else ():
        assert json.loads((tmp_path / "run" / "own-profile" / f"rank-{rank}.json").read_text())["traceEvents"]


def _check_tensors(made: Profile, framework: str) -> None:
    shapes = resnet.architecture("resnet20", 10).parameter_shapes()
    assert {tensor.name: tuple(tensor.shape) for tensor in made.tensors} == shapes
    assert made.step.backward_ms
    assert 0.6 * made.step.backward_ms.median < made.tensors[-1].ready_ms <= made.step.backward_ms.median * 1.001
    assert _in_backwards_order({tensor.name: tensor.ready_ms for tensor in made.tensors}) > 0.8
    backward = sum(layer.backward_ms or 0 for layer in made.layers)
    assert backward == pytest.approx(made.tensors[-1].ready_ms)
    forward = [layer.forward_ms for layer in made.layers if layer.forward_ms is not None]
    if "layer-times" not in CAPABILITIES[framework]:
        assert forward == []
        return
    assert made.step.forward_ms and len(forward) == len(made.layers)
    # Medians of each layer's share, which are exact in test_profile.py, come to little of the whole on a busy machine.
    assert min(forward) >= 0 and 0 < sum(forward) < 1.1 * made.step.forward_ms.median
    names = [layer.name for layer in made.layers]
    assert names.index("conv1") < names.index("layer2.0.conv1") < names.index("fc"), "from the input to the output"


def _in_backwards_order(ready: dict[str, float]) -> float:
    """The share of pairs of gradients that come in backward's order, of those in which nobody is free to change it.

    An executor may leave to the end what backward does not go on with: weights of convolutions and of the classifier.
    But the operation that makes a normalization's gradient makes what backward goes on with, so nothing nearer to the
    input comes before it. In draws from the steps of one run of each, under some eight runnable processes a core,
    TensorFlow, Keras (400 draws of four steps) and PyTorch (800) gave 1; MXNet, whose marks wait for a thread, gave
    0.947 or more in 1,000 draws of eight steps. Shuffled names have a median of 0.50.
    """

    def stage(name: str) -> int:
        return int(name[5]) if name.startswith("layer") else 0

    norms = [name for name in ready if name.endswith(("bn1.weight", "bn2.weight"))]
    pairs = [(a, b) for a in norms for b in ready if stage(a) > stage(b) and not b.startswith("fc.")]
    assert len(pairs) == 396
    return sum(ready[a] <= ready[b] for a, b in pairs) / len(pairs)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "framework",
    ["pytorch", "mxnet", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tensorflow", "keras"))],
)
def test_two_stages(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """What each rank does in a step follows each other without gaps, and is drawn."""
    divided = "parallel.pipeline=2", "parallel.microbatches=4", "threads=1"
    done = hvdkit("profile", "gpt-tiny", "--framework", framework, *QUICK, *divided, *SMALL)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    step, made = PipelineStep.read(folder / PipelineStep.FILE), load(folder / "profile.json")
    assert {path.name for path in folder.glob("pipeline.*")} == {"pipeline.json", "pipeline.png", "pipeline.svg"}
    assert [rank.stage for rank in step.ranks] == [0, 1] and step.measured_steps == 8
    for rank in step.ranks:
        kinds = Counter(span.doing for span in rank.measured if span.microbatch is not None)
        assert kinds == {"forward": 4, "backward": 4, "send": 4, "wait": 4}
        ends = [0.0, *(span.end_ms for span in sorted(rank.measured, key=lambda span: span.start_ms))]
        begins = [span.start_ms for span in sorted(rank.measured, key=lambda span: span.start_ms)]
        assert begins[1:] == pytest.approx(ends[1:-1], abs=1e-3)
        assert len(rank.predicted) == 8
    forward, backward = step.forward_ms, step.backward_ms
    assert step.predicted_ms >= 4 * max(map(sum, zip(forward, backward, strict=True)))
    assert step.equal_bubble == 0.2 and 0.2 < step.bubble < 1
    split = made.step
    assert split.forward_ms and 0 < split.forward_ms.mean <= 4 * sum(forward) / 2 + 1e-3, "samples count to input"
    assert split.backward_ms and split.backward_ms.mean == pytest.approx(4 * sum(backward) / 2)
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)
    assert f"bubble {100 * step.bubble:.0f} %, the mean of 8 steps" in done.stdout


@pytest.mark.usefixtures("warm")
def test_a_rank_that_was_made_slow_is_named(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """Where gradients are compressed too, whose bytes and time are told."""
    (tmp_path / "slow.py").write_text(SLOW_INPUT)
    native = f"data={{name: native, module: {tmp_path / 'slow.py'}}}"
    done = hvdkit("profile", recipe, "--framework", "pytorch", *QUICK, native, "name=slow", "compression=topk")
    assert done.returncode == 0, done.stderr
    made = load(tmp_path / "run" / "profile.json")
    assert made.slowest and made.slowest.rank == 1 and made.slowest.behind_ms > 75
    assert made.ranks[1].split.input_ms.mean > 995 * SLOWER_S and made.ranks[0].split.waiting_ms.mean > 75
    assert "Rank 1 on localhost is the slowest" in done.stdout and "most of it input" in done.stdout
    (one,) = made.communications
    chosen = 8 * 2722  # of 272,186 gradients (images of one channel) 1 %, each with its place
    assert (one.operation, one.bytes, made.bytes_per_step) == ("allgather", chosen, chosen)
    assert made.compression == "topk" and made.step.compression_ms and made.step.compression_ms.mean > 0
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)


@pytest.mark.usefixtures("warm")
def test_ranks_that_meet_now_and_then(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    done = hvdkit("profile", recipe, "--framework", "mxnet", *QUICK, "sync={every: 3, start: 1}")
    assert done.returncode == 0, done.stderr
    assert "sync.start: profiled are steps after epoch 1" in done.stderr
    assert "--steps 8: measured are whole rounds of sync.every 3, 9 steps" in done.stderr
    made = load(tmp_path / "run" / "profile.json")
    assert made.settings["sync"]["start"] == 1 and made.measured_steps == 9
    gradients = sum(tensor.bytes for tensor in made.tensors)
    (one,) = made.communications
    assert (one.operation, one.bytes) == ("allreduce", gradients)
    assert made.bytes_per_step == pytest.approx(gradients / 3, rel=0.1), "of a run whose warm-up is no whole round"
    assert "1 collective every 3 steps" in done.stdout
    exposed, compression = made.step.exposed_communication_ms, made.step.compression_ms
    assert exposed.mean > 0 and exposed.median == 0, "two steps of three send nothing"
    assert compression and compression.mean > 0
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)


MBIT_PER_S, AHEAD_S = 200.0, 5000
# Python on h2, a computer that has been up for longer.
AHEAD = f"""#!/bin/sh
[ "$HOROVOD_HOSTNAME" = h2 ] && exec unshare --time --monotonic {AHEAD_S} %s "$@"
exec %s "$@"
"""


@pytest.fixture
def clocks_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet's runtime, whose ranks on a host h2 have another clock."""
    found = store.find("mxnet")
    python = tmp_path / "python"
    python.write_text(AHEAD % (found.python, found.python))
    python.chmod(0o755)
    folder = tmp_path / "runtimes" / "mxnet"
    folder.mkdir(parents=True)
    made = found.model_copy(update={"python": python, "added": True})
    (folder / "runtime.json").write_text(made.model_dump_json())
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_two_hosts_with_clocks_of_their_own(clocks_apart: None, recipe: Path, tmp_path: Path) -> None:
    """Two ranks on each, which add up hierarchically; the slow one is on the other host."""
    (tmp_path / "slow.py").write_text(SLOW_INPUT)
    with starving.network(2, MBIT_PER_S) as network:
        if network.run(["unshare", "--time", "true"], "h2").returncode:
            pytest.skip("needs time namespaces: the kernel has none")
        options = ["-np", "4", "-H", network.hosts_option(2), "--steps", "8", "--out", str(tmp_path / "run")]
        keys = [f"data={{name: native, module: {tmp_path / 'slow.py'}}}", "batch_size=4", "warmup_steps=2"]
        command = [sys.executable, "-m", "hvdkit", "profile", str(recipe), "--framework", "mxnet", *options, *keys]
        told = network.run(
            [*command, "name=two", "allreduce=hierarchical"], capture_output=True, text=True, env=os.environ,
            cwd=tmp_path, timeout=hygiene.patience(240),
        )  # fmt: skip
    assert told.returncode == 0, told.stderr
    made = load(tmp_path / "run" / "profile.json")
    assert [rank.host for rank in made.ranks] == ["h1", "h1", "h2", "h2"]
    assert [rank.clock_offset_ms for rank in made.ranks[:2]] == [0, 0], "one machine, one clock"
    for rank in made.ranks[2:]:
        assert abs(rank.clock_offset_ms - 1000 * AHEAD_S) < rank.clock_error_ms + 0.01 and rank.clock_error_ms < 75
    for split in (made.step, *(rank.split for rank in made.ranks)):
        whole = sum(part.mean for part in split.parts().values())
        assert whole == pytest.approx(split.step_ms.mean, rel=0.05)
    assert made.slowest and (made.slowest.rank, made.slowest.host) == (3, "h2") and made.slowest.behind_ms > 75
    assert "Rank 3 on h2 is the slowest" in told.stdout and "most of it input" in told.stdout
    gradients = sum(tensor.bytes for tensor in made.tensors)
    crossing = [(each.operation, each.bytes, each.link_bytes) for each in made.communications]
    assert crossing == [
        ("allreduce", gradients, 0),
        ("allreduce", gradients, gradients),
        ("broadcast", gradients, 0),
    ]
    assert made.link.rated_mbit_per_s == MBIT_PER_S and made.link.achieved_mbit_per_s
    # Never faster than the link; slower on a busy machine, but not by the eight that are between bits and bytes.
    assert MBIT_PER_S / 8 < made.link.achieved_mbit_per_s < MBIT_PER_S
    assert made.link.measured_mbit_per_s and MBIT_PER_S / 8 < made.link.measured_mbit_per_s < MBIT_PER_S
    _check_trace(tmp_path / "run" / "trace.json", made)


def _check_trace(path: Path, made: Profile) -> None:
    """All ranks are in the same step at some time: while they reduce."""
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for number in range(made.measured_steps):
        steps = [span for span in spans if span["name"] == f"step {number + 1}, with trace events"]
        assert [span["pid"] for span in steps] == [100, 101, 102, 103]
        assert max(span["ts"] for span in steps) < min(span["ts"] + span["dur"] for span in steps)
