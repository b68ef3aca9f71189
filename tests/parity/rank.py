"""One rank that follows a parity trace with faults planted one after the other into a model or its training:

    python tests/parity/rank.py FRAMEWORK RECIPE.yaml TRACE [--leads]

Each fault's findings go to TRACE/<fault>.json; with `--leads` the sound model leaves the trace first. Where the recipe
divides the model, the ranks that lead have it whole, and no faults.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hvdkit import adapters
from hvdkit.core import metrics
from hvdkit.data import batches
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe import schema
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import Loss
from hvdkit.tasks import resnet
from hvdkit.tasks.image_classification import cross_entropy
from hvdkit.worker import parity, setup
from tests.parity.divided_faults import OF_IMAGES, OF_PARTS, OF_STAGES
from tests.parity.gpt_faults import FAULTS as OF_GPT
from tests.parity.gpt_faults import Fault, built_otherwise

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
Build = Callable[[resnet.ResNet], Any]


def prepared_otherwise(**changes: dict[str, Any]) -> Fault:
    """Change the settings of the optimizer or the loss behind the recipe's back."""

    @contextmanager
    def fault(adapter: Any, module: Any) -> Iterator[None]:
        sound = setup.Session

        def prepare(adapter: Any, model: Any, optimizer: Any, loss: Loss, *rest: Any) -> Any:
            optimizer = optimizer.model_copy(update=changes.get("optimizer", {}))
            return sound(adapter, model, optimizer, loss.model_copy(update=changes.get("loss", {})), *rest)

        with mock.patch.object(setup, "Session", prepare):
            yield

    return fault


@contextmanager
def average_of_averages(adapter: Any, module: Any) -> Iterator[None]:
    def evaluate(adapter: Any, session: Any, wanted: Any, split: Any, batch_size: int, group: Any) -> dict[str, float]:
        correct, loss, count = 0, 0.0, 0
        for batch, valid in batches.evaluation_batches(split, batch_size, group.index, group.size):
            logits, labels = session.predict(batch.inputs)[:valid], batch.targets[:valid]
            correct += int(np.sum(logits.argmax(axis=1) == labels))
            loss += float(cross_entropy(logits, labels).sum())
            count += valid
        means = metrics.reduce_sums(adapter, group, correct=correct / count, loss=loss / count)
        return {"accuracy": means["correct"] / group.size, "loss": means["loss"] / group.size}

    with mock.patch.object(parity, "evaluate", evaluate):
        yield


def torch_norms(**settings: float) -> Fault:
    def change(model: Any) -> None:
        for layer in model.modules():
            if type(layer).__name__ == "BatchNorm2d":
                for name, value in settings.items():
                    setattr(layer, name, value)

    return built_otherwise(change)


def torch_padding(model: Any) -> None:
    """As TensorFlow's "same" pads: the odd pixel behind."""
    from torch.nn.functional import pad

    for layer in model.modules():
        if type(layer).__name__ == "Conv2d" and layer.stride == (2, 2) and layer.kernel_size == (3, 3):
            layer.padding = (0, 0)
            layer.register_forward_pre_hook(lambda _, inputs: (pad(inputs[0], (0, 1, 0, 1)),))


@contextmanager
def torch_rate_inside(adapter: Any, module: Any) -> Iterator[None]:
    import torch

    from hvdkit.adapters.pytorch import training

    def inside(settings: Any, decays: Any, weights: Any, gradients: Any, slots: Any, rate: float, _: Any) -> None:
        with torch.no_grad():
            for decay, weight, gradient, (velocity,) in zip(decays, weights, gradients, slots, strict=True):
                velocity.mul_(settings.momentum).add_(gradient + decay * weight, alpha=rate)
                weight.sub_(velocity)

    with mock.patch.object(training, "_sgd", inside):
        yield


def tf_padding(model: Any) -> None:
    for block in model.blocks:
        for convolution in block.convolutions:
            if convolution.stride == 2 and convolution.kernel.shape[0] == 3:
                convolution.pad = [[0, 0], [0, 1], [0, 1], [0, 0]]


def keras_momentum(model: Any) -> None:
    for layer in model._flatten_layers():
        if type(layer).__name__ == "BatchNorm":
            layer.momentum = 0.99


@contextmanager
def mxnet_epsilon(adapter: Any, module: Any) -> Iterator[None]:
    with mock.patch.object(resnet, "BN_EPSILON", 1e-3):
        yield


FAULTS: dict[str, dict[str, Fault]] = {
    "pytorch": {
        "bn_epsilon": torch_norms(eps=1e-3),
        "bn_momentum": torch_norms(momentum=0.01),
        "decay_on_biases": prepared_otherwise(optimizer={"decay": "all"}),
        "asymmetric_padding": built_otherwise(torch_padding),
        "average_of_averages": average_of_averages,
        "rate_inside_momentum": torch_rate_inside,
        "label_smoothing": prepared_otherwise(loss={"label_smoothing": 0.2}),
    },
    "tensorflow": {"asymmetric_padding": built_otherwise(tf_padding)},
    "keras": {"bn_momentum": built_otherwise(keras_momentum)},
    "mxnet": {"bn_epsilon": mxnet_epsilon},
}


def main(framework: str, recipe_file: Path, trace: Path, leads: bool) -> None:
    adapter: Any = adapters.load(framework)
    recipe = schema.load(recipe_file)
    script = ROOT / "recipes" / framework / f"{recipe.model.SCRIPT}.py"
    spec = importlib.util.spec_from_file_location("recipe", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    axes, whole = recipe.parallel, {"parallel": Parallel()} if leads else {}
    begun = setup.start(adapter, setup.RankScript(module.build), recipe.model_copy(update=whole | {"threads": 1}))

    def take_part(leads: bool) -> None:
        own = replace(begun, script=setup.RankScript(module.build))
        parity.ComparedRank(own, parity.ParityPart(trace, STEPS, leads), Heartbeat(), axes).take_part()

    if leads:
        take_part(leads=True)
    faults = FAULTS[framework] if recipe.model.SCRIPT == "resnet" else OF_GPT
    if axes.divides:
        faults = {} if leads else OF_STAGES if axes.pipeline > 1 else OF_PARTS
        if recipe.model.SCRIPT == "resnet":
            faults = {name: fault for name, fault in faults.items() if name in OF_IMAGES}
    for name, fault in faults.items():
        with fault(adapter, module):
            take_part(leads=False)
        if begun.mesh.is_root:
            (trace / f"{framework}.json").rename(trace / f"{framework}-{name}.json")
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), "--leads" in sys.argv)
