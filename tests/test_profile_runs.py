"""`hvdkit profile` over two real ranks under every framework; a rank that was made slow is found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from conftest import FRAMEWORKS, Hvdkit

from hvdkit.adapters.declared import CAPABILITIES
from hvdkit.core import resnet
from hvdkit.profiling.profile import Profile, load

# Rank 1's input takes 60 ms longer.
SLOW_INPUT = """
import time
import numpy as np
from hvdkit.core.native import NativePipeline

def open_pipeline(job):
    def train(epoch):
        for step in range(100):
            if job.topology.rank == 1:
                time.sleep(0.06)
            yield np.full((job.batch_size, 8, 8, 1), step, np.float32), np.arange(job.batch_size) % 10
    return NativePipeline((8, 8, 1), train, 100 * job.batch_size * job.topology.size)
"""
QUICK = ("-np", 2, "--steps", 8, "--out", "run", "batch_size=4", "warmup_steps=2")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks(framework: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    own = ["--torch-profiler"] if "own-profile" in CAPABILITIES[framework] else []
    done = hvdkit("profile", recipe, "--framework", framework, *QUICK, *own)
    assert done.returncode == 0, done.stderr
    made = load(tmp_path / "run" / "profile.json")
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)
    assert whole - made.step.gaps_ms.mean > 0.6 * made.step.step_ms.mean, "most of a step is told by name"
    for split in (made.step, *(rank.split for rank in made.ranks)):
        assert split.forward_ms and split.backward_ms and split.update_ms
        assert split.forward_ms.mean > 0 and split.backward_ms.mean > 0 and split.exposed_communication_ms.mean > 0
    _check_tensors(made, framework)
    reduced = [each for each in made.communications if each.operation == "allreduce"]
    assert sum(each.bytes for each in reduced) == sum(tensor.bytes for tensor in made.tensors)
    assert sum(each.tensors for each in reduced) == len(made.tensors)
    assert made.bytes_per_step == sum(tensor.bytes for tensor in made.tensors)
    assert made.link.measured_mbit_per_s and made.link.achieved_mbit_per_s and made.cost and made.slowest
    assert made.latencies[0].bytes == 4 and made.latencies[-1].ms.median > 0
    assert "bounds the step" in done.stdout and "Profiling cost" in done.stdout

    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} >= {0, 1}
    assert (tmp_path / "run" / "profile.png").read_bytes().startswith(b"\x89PNG")
    for rank in (0, 1) if own else ():
        assert json.loads((tmp_path / "run" / "own-profile" / f"rank-{rank}.json").read_text())["traceEvents"]


def _check_tensors(made: Profile, framework: str) -> None:
    shapes = resnet.parameter_shapes(resnet.architecture("resnet20", 10))
    assert {tensor.name: tuple(tensor.shape) for tensor in made.tensors} == shapes
    assert made.step.backward_ms
    assert 0.8 * made.step.backward_ms.median < made.tensors[-1].ready_ms <= made.step.backward_ms.median * 1.001
    ready = {tensor.name: tensor.ready_ms for tensor in made.tensors}
    # From the output to the input; the last layer's takes less than marks are sure to. That of a norm is there before
    # backward goes on to the convolution below it, but this one's need not come at once: TensorFlow's executor has one
    # thread and nothing that waits for it, so it does those that backward does not go on with at the end. MXNet has
    # those of a segment of backward together, in any order.
    path = [f"{norm}.weight" for norm in ("layer3.2.bn2", "layer3.0.bn1", "layer2.0.bn1", "layer1.0.bn1", "bn1")]
    between = [after - before for before, after in itertools.pairwise(ready[name] for name in path)]
    instant = 0.1 * made.step.backward_ms.median
    assert ready[path[0]] > 0 and all(ms > -instant for ms in between), (path, ready)
    assert ready["layer3.2.bn2.weight"] + instant < ready["layer2.0.bn1.weight"] < ready["bn1.weight"] - instant
    for name in (name for name in ready if "conv" in name):
        assert ready[name] > ready[name.replace("conv", "bn")] - instant, name
    backward = sum(layer.backward_ms or 0 for layer in made.layers)
    assert backward == pytest.approx(made.tensors[-1].ready_ms)
    forward = [layer.forward_ms for layer in made.layers if layer.forward_ms is not None]
    if "layer-times" not in CAPABILITIES[framework]:
        assert forward == []
        return
    assert made.step.forward_ms and len(forward) == len(made.layers)
    assert 0.3 * made.step.forward_ms.median < sum(forward) < 1.1 * made.step.forward_ms.median
    names = [layer.name for layer in made.layers]
    assert names.index("conv1") < names.index("layer2.0.conv1") < names.index("fc"), "from the input to the output"


def test_a_rank_that_was_made_slow_is_named(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """Where gradients are compressed too, whose bytes and time are told."""
    (tmp_path / "slow.py").write_text(SLOW_INPUT)
    native = f"data={{name: native, module: {tmp_path / 'slow.py'}}}"
    done = hvdkit("profile", recipe, "--framework", "pytorch", *QUICK, native, "name=slow", "compression=topk")
    assert done.returncode == 0, done.stderr
    made = load(tmp_path / "run" / "profile.json")
    assert made.slowest and made.slowest.rank == 1 and made.slowest.behind_ms > 40
    assert made.ranks[1].split.input_ms.mean > 55 and made.ranks[0].split.waiting_ms.mean > 40
    assert "Rank 1 on localhost is the slowest" in done.stdout and "most of it input" in done.stdout
    (one,) = made.communications
    chosen = 8 * 2722  # of 272,186 gradients (images of one channel) 1 %, each with its place
    assert (one.operation, one.bytes, made.bytes_per_step) == ("allgather", chosen, chosen)
    assert made.compression == "topk" and made.step.compression_ms and made.step.compression_ms.mean > 0
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)


def test_ranks_that_meet_now_and_then(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    done = hvdkit("profile", recipe, "--framework", "mxnet", *QUICK, "sync={every: 3, start: 1}")
    assert done.returncode == 0, done.stderr
    assert "sync.start: profiled are steps behind epoch 1" in done.stderr
    assert "--steps 8: measured are whole rounds of sync.every 3, 9 steps" in done.stderr
    made = load(tmp_path / "run" / "profile.json")
    assert made.settings["sync"]["start"] == 1 and made.measured_steps == 9
    gradients = sum(tensor.bytes for tensor in made.tensors)
    (one,) = made.communications
    assert (one.operation, one.bytes) == ("allreduce", gradients)
    assert made.bytes_per_step == pytest.approx(gradients / 3, rel=0.1), "of a run whose warm-up is no whole round"
    assert "1 communication every 3 steps" in done.stdout
    exposed, compression = made.step.exposed_communication_ms, made.step.compression_ms
    assert exposed.mean > 0 and exposed.median == 0, "two steps of three send nothing"
    assert compression and compression.mean > compression.median
    whole = sum(part.mean for part in made.step.parts().values())
    assert whole == pytest.approx(made.step.step_ms.mean, rel=0.05)
