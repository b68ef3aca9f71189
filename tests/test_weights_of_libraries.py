"""Weights as timm, transformers and the hub write them: their names, configurations and kinds of models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit.errors import RequestError
from hvdkit.tasks import resnet, resnet_files
from hvdkit.tasks.task import state_shapes
from tests.test_weights import HEAD_ONLY, TABLE, TINY, State, drawn, read, refused, same, stored, write

pytestmark = pytest.mark.check


def _deep_stem(state: State) -> State:
    return {re.sub(r"^conv1\.", "conv1.0.", name): value for name, value in state.items()}


def _excited(state: State) -> State:
    return state | {"layer1.0.se.fc1.weight": np.ones((1, 16, 1, 1), np.float32)}


def _pooled(state: State) -> State:
    return {name.replace("downsample.1", "downsample.2").replace("downsample.0", "downsample.1"): value
            for name, value in state.items()}  # fmt: skip


def _group_norms(state: State) -> State:
    return {name: value for name, value in state.items() if "running" not in name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_deep_stem, "a deep stem, as resnet50d has"),
        (_excited, "squeeze and excitation"),
        (_pooled, "average pooling in its shortcuts"),
        (_group_norms, "without running statistics"),
    ],
)
def test_other_kinds_of_resnet_are_refused_by_name(change: Callable[[State], State], told: str, tmp_path: Path) -> None:
    assert told in refused(write(tmp_path / "a.safetensors", change(drawn())))
    wrapped = {f"module.{name}": value for name, value in change(drawn()).items()}
    assert told in refused(write(tmp_path / "b.safetensors", wrapped))


@pytest.mark.parametrize(("widths", "told"), [((128, 4), "grouped convolutions"), ((128, 128), "other widths")])
def test_wide_and_grouped_resnets_are_refused_by_name(widths: tuple[int, int], told: str) -> None:
    table = resnet.architecture("resnet50", 10)
    shapes = state_shapes(table)
    shapes["layer1.0.conv1.weight"], shapes["layer1.0.conv2.weight"] = (128, 64, 1, 1), (128, widths[1], 3, 3)
    with pytest.raises(RequestError, match=told):
        table.from_file({name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}, {})


def of_transformers(depths: tuple[int, ...], layers: int) -> dict[str, str]:
    """The names of transformers' ResNetForImageClassification, with torchvision's, as its modules are nested."""
    leaves = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

    def pair(inner: str, conv: str, norm: str) -> dict[str, str]:
        return {f"{inner}.convolution.weight": f"{conv}.weight"} | {
            f"{inner}.normalization.{leaf}": f"{norm}.{leaf}" for leaf in leaves
        }

    names = pair("resnet.embedder.embedder", "conv1", "bn1")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            at, there = f"resnet.encoder.stages.{stage}.layers.{block}", f"layer{stage + 1}.{block}"
            for number in range(layers):
                names |= pair(f"{at}.layer.{number}", f"{there}.conv{number + 1}", f"{there}.bn{number + 1}")
            if block == 0 and (layers == 3 or stage > 0):
                names |= pair(f"{at}.shortcut", f"{there}.downsample.0", f"{there}.downsample.1")
    return names | {f"classifier.1.{leaf}": f"fc.{leaf}" for leaf in ("weight", "bias")}


@pytest.mark.parametrize(
    ("name", "depths", "layers"),
    [("resnet18", (2, 2, 2, 2), 2), ("resnet34", (3, 4, 6, 3), 2), ("resnet50", (3, 4, 6, 3), 3),
     ("resnet101", (3, 4, 23, 3), 3), ("resnet152", (3, 8, 36, 3), 3)],
)  # fmt: skip
def test_transformers_names_of_resnets(name: str, depths: tuple[int, ...], layers: int) -> None:
    """microsoft/resnet-50 has 320 of them."""
    names = of_transformers(depths, layers)
    assert len(names) == {"resnet18": 122, "resnet50": 320}.get(name, len(names))
    assert {each: resnet_files.renamed(each) for each in names} == names
    assert {each: resnet_files.renamed(each.removeprefix("resnet.")) for each in names} == names
    known = {each for each in names.values() if not each.endswith("num_batches_tracked")}
    assert known == state_shapes(resnet.architecture(name, 10)).keys()


@pytest.mark.parametrize("prefix", ["", "module.", "model.resnet."])
def test_a_resnet_of_transformers_is_read(prefix: str, tmp_path: Path) -> None:
    theirs = {ours: name for name, ours in of_transformers((1, 1, 1), 2).items()}
    state = {prefix + theirs[name]: value for name, value in drawn().items()}
    more = {prefix + theirs["bn1.num_batches_tracked"]: stored(np.ones(()), "I64")}
    assert same(read(write(tmp_path / "a.safetensors", state, **more)), drawn())
    body = {name.removeprefix("resnet."): value for name, value in state.items() if "classifier" not in name}
    path = write(tmp_path / "b.safetensors", body)
    assert refused(path).endswith(HEAD_ONLY) and len(read(path, new_head=True).tensors) == len(drawn()) - 2


CONFIGS: list[tuple[Any, dict[str, Any], str]] = [
    (TABLE, {"architecture": "resnetaa50.a1h_in1k"}, "expected a resnet8, as the recipe's model, got a resnetaa50"),
    (TABLE, {"model_type": "resnet", "downsample_in_bottleneck": True}, "downsample_in_bottleneck is True"),
    (TABLE, {"model_type": "resnet", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (TINY, {"model_type": "gpt2", "n_head": 4}, "n_head is 4 in config.json, and 2 in the recipe's model"),
    (TINY, {"model_type": "gpt2", "activation_function": "relu"}, "activation_function is 'relu'"),
    (TINY, {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    (TINY, {"model_type": "gpt2", "layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
]


@pytest.mark.parametrize(("table", "config", "told"), CONFIGS)
def test_what_only_the_configuration_shows_is_refused(
    table: Any, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.safetensors", drawn(table))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert told in refused(path, table) and told in refused(tmp_path, table)
    path.rename(tmp_path / "mine.safetensors")  # is of another model, perhaps
    assert same(read(tmp_path / "mine.safetensors", table), drawn(table), table)
    own = TINY.transformers_config() if table is TINY else {"model_type": "resnet", "architecture": "resnet8.a1_in1k"}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert same(read(write(path, drawn(table)), table), drawn(table), table)


def test_gpt2_of_the_hub_with_its_masks(tmp_path: Path) -> None:
    state = {name.removeprefix("transformer."): value for name, value in drawn(TINY).items()}
    masks = {f"h.{block}.attn.bias": stored(np.tril(np.ones((1, 1, 4, 4)))) for block in range(2)}
    masks |= {f"h.{block}.attn.masked_bias": stored(np.array(-1e4)) for block in range(2)}
    assert same(read(write(tmp_path / "a.safetensors", state, "BF16", **masks), TINY), drawn(TINY), TINY)
    head = {"lm_head.weight": stored(state["wte.weight"], "BF16")}
    assert same(read(write(tmp_path / "b.safetensors", state, "BF16", **head), TINY), drawn(TINY), TINY)
    for prefix in ("", "module.", "module.transformer."):  # also where the head lies outside the model's prefix
        named = {f"{prefix}{name}": value for name, value in state.items()}
        place = "module.lm_head.weight" if prefix == "module." else "lm_head.weight"
        named[place] = state["wte.weight"] + 1
        assert "lm_head.weight differs from wte.weight" in refused(write(tmp_path / "c.safetensors", named), TINY)
