"""Stages with dropout: which masks ranks draw, and with faults."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hvdkit.core import pipeline as of_core
from hvdkit.core.group import Mesh
from hvdkit.core.pipeline import divided
from hvdkit.core.state import digest
from hvdkit.data.dataset import Batch
from hvdkit.tasks.parts import bounds
from hvdkit.worker.setup import seed_of
from tests.pipeline.pair import MICROBATCHES, Arrays, Pair, batch
from tests.tensor.rank import build_of, errors, most


class Seeded:
    """All that `seed_of` reads of a recipe."""

    seed = 11


class Dropped(Pair):
    """Models with dropout after each MLP, in PyTorch. The whole one draws for each stage, and for the samples of each
    rank of the data axis, what the ranks draw that have this stage and read these samples."""

    def __init__(self, mesh: Mesh, schedule: str, stream: int | None = None, **more: Any) -> None:
        super().__init__("pytorch", mesh, schedule, **more)
        import torch

        stages, data = mesh.pipeline.size, mesh.data.size
        self._states: dict[tuple[int, int], Any] = {}
        for place in ((rank, stage) for rank in range(data) for stage in range(stages)):
            torch.manual_seed(seed_of(Seeded, place[1] * data + place[0]))  # type: ignore[arg-type]
            self._states[place] = torch.get_rng_state()
        for session in (self.stages, self.whole):
            for block in session.trainable.model.transformer["h"]:
                block.mlp.register_forward_hook(_dropped)
        blocks, self._passed = list(self.whole.trainable.model.transformer["h"]), 0
        for stage in range(stages):
            first, stop = bounds(len(blocks), stage, stages)
            blocks[first].register_forward_pre_hook(partial(self._enter, stage))
            blocks[stop - 1].register_forward_hook(partial(self._leave, stage))
        torch.manual_seed(seed_of(Seeded, mesh.stream if stream is None else stream))  # type: ignore[arg-type]

    def _enter(self, stage: int, *_: Any) -> None:
        import torch

        if stage == 0:
            self._ours, self._passed = torch.get_rng_state(), self._passed + 1
        self._rank = (self._passed - 1) // MICROBATCHES % self.mesh.data.size
        torch.set_rng_state(self._states[self._rank, stage])

    def _leave(self, stage: int, *_: Any) -> None:
        import torch

        self._states[self._rank, stage] = torch.get_rng_state()
        if stage == self.mesh.pipeline.size - 1:
            torch.set_rng_state(self._ours)


def _dropped(layer: Any, inputs: Any, outputs: Any) -> Any:
    from torch.nn import functional

    return functional.dropout(outputs, 0.25, layer.training)


def swapped_order(batch: Batch, parts: int) -> Iterator[Batch]:
    first, second, *rest = divided(batch, parts)
    yield from (second, first, *rest)


def dropped_out(mesh: Mesh, in_parts: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients in two steps with dropout, and with faults."""

    def steps(pair: Pair) -> dict[str, float]:
        return most([pair.step(number) for number in range(2)])

    found = {
        "gpipe": steps(Dropped(mesh, "gpipe")),
        "1f1b": steps(Dropped(mesh, "1f1b", recompute=True)),
        "in parts": steps(Dropped(in_parts, "1f1b")),
        "other masks in each part": steps(Dropped(in_parts, "1f1b", stream=in_parts.topology.rank)),
    }
    of_core.divided = swapped_order  # type: ignore[attr-defined]
    found["another order"] = steps(Dropped(mesh, "1f1b"))
    found["another order without dropout"] = steps(Pair("pytorch", mesh, "1f1b"))
    of_core.divided = divided  # type: ignore[attr-defined]
    return found


class Masked(Pair):
    """Stages with dropout after each block, in the frameworks whose generators have no state that can be read."""

    @staticmethod
    def build_of(framework: str, script: str = "gpt") -> Any:
        build = build_of(framework, script)
        names = (build.__init__ if isinstance(build, type) else build).__globals__
        names["Block"] = globals()[f"_{framework}_dropping"](names["Block"])
        return build

    def __init__(self, framework: str, mesh: Mesh, schedule: str, stream: int | None = None) -> None:
        super().__init__(framework, mesh, schedule)
        self.stages.adapter.seed(seed_of(Seeded, mesh.stream if stream is None else stream))  # type: ignore[arg-type]

    def gradients(self) -> Arrays:
        """Those of the second of two steps."""
        for number in range(2):
            self.stages.train_step([batch(number, self.mesh.data.index)])
        return self._arrays(self.recorded[0])

    def outputs(self) -> str:
        """A digest of what the first stage computes of the same samples on all ranks, in training."""
        stage: Any = self.stages.pipeline._chunks[0]  # type: ignore[union-attr]
        inputs, _ = self.stages.trainable.inputs(batch(0, 0))
        return digest([("outputs", self.stages.array(stage.forward(inputs, None, False).outputs))])


def _mxnet_dropping(block: Any) -> Any:
    class Block(block):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return F.Dropout(super().hybrid_forward(F, x), p=0.25)

    return Block


def _tensorflow_dropping(block: Any) -> Any:
    import tensorflow as tf

    class Block(block):  # type: ignore[misc]
        def compute(self, x: Any) -> Any:
            return tf.nn.dropout(super().compute(x), 0.25)

    return Block


def _keras_dropping(block: Any) -> Any:
    import keras

    class Block(block):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.drop = keras.layers.Dropout(0.25, dtype=given[-1])

        def compute(self, x: Any) -> Any:
            return self.drop(super().compute(x), training=True)

    return Block


def masked(framework: str, mesh: Mesh, in_parts: Mesh) -> dict[str, Any]:
    """Errors of gradients with dropout against those of the schedule `gpipe`, and what first stages compute."""
    wanted = Masked(framework, mesh, "gpipe").gradients()
    found: dict[str, Any] = {"1f1b": errors(Masked(framework, mesh, "1f1b").gradients(), wanted)}
    of_core.divided = swapped_order  # type: ignore[attr-defined]
    found["another order"] = errors(Masked(framework, mesh, "1f1b").gradients(), wanted)
    of_core.divided = divided  # type: ignore[attr-defined]
    wanted = Masked(framework, in_parts, "gpipe").gradients()
    found["1f1b in parts"] = errors(Masked(framework, in_parts, "1f1b").gradients(), wanted)
    for name, on, stream in (
        ("data", mesh, None),
        ("parts", in_parts, None),
        ("wrong", in_parts, in_parts.topology.rank),
    ):
        pair = Masked(framework, on, "1f1b", stream)
        found[name] = pair.outputs() if on.before is None else None
    return found
