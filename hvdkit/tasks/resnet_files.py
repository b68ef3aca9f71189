"""ResNets in others' files: transformers' names of their tensors, and kinds of ResNet that hvdkit does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hvdkit.errors import RequestError

Shapes = Mapping[str, tuple[int, ...]]

# Of transformers' ResNetForImageClassification, and of ResNetModel, whose names begin with `embedder` and `encoder`.
_LAYERS = {"convolution": "conv", "normalization": "bn"}
_SHORTCUT = {"convolution": "downsample.0", "normalization": "downsample.1"}
_STEM = re.compile(r"(?:resnet\.)?embedder\.embedder\.(convolution|normalization)\.(\w+)")
_LAYER = re.compile(
    r"(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)\.(?:layer\.(\d+)|shortcut)\.(convolution|normalization)\.(\w+)"
)
# Names of tensors that torchvision's ResNets do not have, and what they are of.
_OTHERS = {
    r"conv1\.0\.weight": "a deep stem, as resnet50d has",
    r"layer1\.0\.(se|attn)\..*": "squeeze and excitation or attention, as seresnet50 and ecaresnet50 have",
    r"layer\d\.0\.downsample\.2\..*": "average pooling in its shortcuts",
    r"(stem|stages\.0\.blocks\.0)\..*": "the layers of timm's resnetv2",
    r"layer1\.0\.conv1\.bias": "biases in its convolutions",
}
# Settings of transformers' ResNets as hvdkit's are; the names of the tensors do not show them.
_SETTINGS = {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}


def renamed(name: str) -> str:
    """torchvision's name of a tensor of transformers' ResNets; other names as they are."""
    if stem := _STEM.fullmatch(name):
        return f"{_LAYERS[stem[1]]}1.{stem[2]}"
    if layer := _LAYER.fullmatch(name):
        stage, block, number, kind, leaf = layer.groups()
        inner = _SHORTCUT[kind] if number is None else f"{_LAYERS[kind]}{int(number) + 1}"
        return f"layer{int(stage) + 1}.{block}.{inner}.{leaf}"
    return re.sub(r"^classifier\.1\.", "fc.", name)


def check_kind(model: str, shapes: Shapes, config: Mapping[str, Any], known: Mapping[str, Shapes]) -> None:
    """Raise RequestError if tensors of these names and shapes, or the configuration, are of another kind of ResNet.

    `known` are the parameters of all of hvdkit's ResNets by their names, of which `model` is one.
    """
    expected = f"expected a {model}, as the recipe's model"
    timm = str(config.get("architecture", model)).partition(".")[0]  # after the dot is how it was trained
    if timm != model:
        raise RequestError(f"{expected}, got a {timm}, by the config.json beside it")
    if config.get("model_type") == "resnet":
        for key, value in _SETTINGS.items():
            if (got := config.get(key, value)) != value:
                raise RequestError(f"{key} is {got!r} in the config.json beside it, and {value!r} in hvdkit's ResNets")
    body = _body(shapes)
    if not any(re.match(r"(layer1|stages)\.", name) for name in body):
        return  # these are no names of a ResNet's
    if not any(name.endswith(".running_mean") for name in shapes):
        raise RequestError(f"{expected}, got a ResNet without running statistics, as resnet50_gn is")
    if body == _body(known[model]):
        return  # it fits, but perhaps for the last layer
    for other, theirs in known.items():
        if body == _body(theirs):
            raise RequestError(f"{expected}, got a {other}")
    for pattern, what in _OTHERS.items():
        if any(re.fullmatch(pattern, name) for name in body):
            raise RequestError(f"{expected}, got a ResNet with {what}; hvdkit's are those of torchvision")
    first, second = (shapes.get(f"layer1.0.conv{number}.weight", ()) for number in (1, 2))
    if len(first) == len(second) == 4 and "layer1.0.conv3.weight" in shapes:
        if second[1] != second[0]:
            raise RequestError(f"{expected}, got a ResNet with grouped convolutions, as resnext50_32x4d has")
        if first[0] != known[model]["layer1.0.conv1.weight"][0]:
            raise RequestError(f"{expected}, got a ResNet of other widths, as wide_resnet50_2 has")


def _body(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The parameters without those of the last layer."""
    kept = (name for name in shapes if name.endswith((".weight", ".bias")) and not name.startswith("fc."))
    return {name: shapes[name] for name in kept}
