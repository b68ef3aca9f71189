"""BERT, ViT and T5 as their published configurations have them: shapes of parameters, and the work of each layer.

hvdkit does not train them; a published speed of one becomes a profile (`hvdkit profile --from`). Names are those of
Hugging Face's `BertModel`, `ViTForImageClassification` and `T5ForConditionalGeneration`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

Shapes = dict[str, tuple[int, ...]]
_BERT_TOKENS, _T5_TOKENS, _SIDE, _PATCH, _CLASSES = 30_522, 32_128, 224, 16, 1000
_OF_INPUT = 4  # T5's target has a quarter of the input's tokens: 114 of 512 in pre-training (Raffel et al. 2020, 3.1.4)


@dataclass(frozen=True)
class PublishedModel:
    """`size` is the usual one of a sample: tokens, or pixels a side; `most` the largest it takes.

    `work` has (layer, multiply-adds of a sample's forward) for a size.
    """

    unit: str
    size: int
    most: int
    shapes: Shapes
    work: Callable[[int], Iterator[tuple[str, int]]]

    def work_by_layer(self, size: int) -> dict[str, int]:
        """Multiply-adds of a sample's forward by layer, in forward order."""
        total = Counter[str]()
        for layer, amount in self.work(size):
            total[layer] += amount
        return dict(total)


def _linear(shapes: Shapes, name: str, outputs: int, inputs: int, bias: bool = True) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs)
    if bias:
        shapes[f"{name}.bias"] = (outputs,)


def _norm(shapes: Shapes, name: str, width: int) -> None:
    shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)


def _matrices(shapes: Shapes, within: str, tokens: int) -> Iterator[tuple[str, int]]:
    """The work of the matrices of layers whose names contain `within`, on so many tokens."""
    for name, shape in shapes.items():
        if within in name and len(shape) == 2 and name.endswith(".weight"):
            yield name.removesuffix(".weight"), prod(shape) * tokens


def _bert(layers: int, width: int) -> PublishedModel:
    """Devlin et al. 2019: with the pooler, without heads."""
    shapes: Shapes = {}
    for name, rows in (("word", _BERT_TOKENS), ("position", 512), ("token_type", 2)):
        shapes[f"embeddings.{name}_embeddings.weight"] = (rows, width)
    _norm(shapes, "embeddings.LayerNorm", width)
    for block in (f"encoder.layer.{number}" for number in range(layers)):
        for name in ("query", "key", "value"):
            _linear(shapes, f"{block}.attention.self.{name}", width, width)
        _linear(shapes, f"{block}.attention.output.dense", width, width)
        _norm(shapes, f"{block}.attention.output.LayerNorm", width)
        _linear(shapes, f"{block}.intermediate.dense", 4 * width, width)
        _linear(shapes, f"{block}.output.dense", width, 4 * width)
        _norm(shapes, f"{block}.output.LayerNorm", width)
    _linear(shapes, "pooler.dense", width, width)

    def work(tokens: int) -> Iterator[tuple[str, int]]:
        yield from _matrices(shapes, "encoder.", tokens)
        for number in range(layers):
            yield f"encoder.layer.{number}.attention.output.dense", 2 * width * tokens**2
        yield "pooler.dense", width**2

    return PublishedModel("tokens", 128, 512, shapes, work)


def _vit(layers: int, width: int) -> PublishedModel:
    """Dosovitskiy et al. 2021: patches of 16 pixels, with the output layer of ImageNet's classes."""
    shapes: Shapes = {
        "embeddings.cls_token": (1, 1, width),
        "embeddings.position_embeddings": (1, (_SIDE // _PATCH) ** 2 + 1, width),
        "embeddings.patch_embeddings.projection.weight": (width, 3, _PATCH, _PATCH),
        "embeddings.patch_embeddings.projection.bias": (width,),
    }
    for block in (f"encoder.layer.{number}" for number in range(layers)):
        _norm(shapes, f"{block}.layernorm_before", width)
        for name in ("query", "key", "value"):
            _linear(shapes, f"{block}.attention.attention.{name}", width, width)
        _linear(shapes, f"{block}.attention.output.dense", width, width)
        _norm(shapes, f"{block}.layernorm_after", width)
        _linear(shapes, f"{block}.intermediate.dense", 4 * width, width)
        _linear(shapes, f"{block}.output.dense", width, 4 * width)
    _norm(shapes, "layernorm", width)
    _linear(shapes, "classifier", _CLASSES, width)

    def work(side: int) -> Iterator[tuple[str, int]]:
        patches = max(1, side // _PATCH) ** 2
        yield "embeddings.patch_embeddings.projection", patches * 3 * _PATCH**2 * width
        yield from _matrices(shapes, "encoder.", patches + 1)
        for number in range(layers):
            yield f"encoder.layer.{number}.attention.output.dense", 2 * width * (patches + 1) ** 2
        yield "classifier", _CLASSES * width

    return PublishedModel("images", _SIDE, 4096, shapes, work)


def _t5(layers: int, width: int, heads: int) -> PublishedModel:
    """Raffel et al. 2020, version 1.0: heads of 64, no biases, the output layer is the table of tokens."""
    inner, shapes = 64 * heads, Shapes()
    shapes["shared.weight"] = (_T5_TOKENS, width)
    for side in ("encoder", "decoder"):
        attentions = ["SelfAttention"] + ["EncDecAttention"] * (side == "decoder")
        for block in (f"{side}.block.{number}.layer" for number in range(layers)):
            for index, name in enumerate(attentions):
                for matrix in "qkv":
                    _linear(shapes, f"{block}.{index}.{name}.{matrix}", inner, width, bias=False)
                _linear(shapes, f"{block}.{index}.{name}.o", width, inner, bias=False)
                if block.endswith("block.0.layer") and name == "SelfAttention":
                    shapes[f"{block}.{index}.{name}.relative_attention_bias.weight"] = (32, heads)
                shapes[f"{block}.{index}.layer_norm.weight"] = (width,)
            last = f"{block}.{len(attentions)}"
            _linear(shapes, f"{last}.DenseReluDense.wi", 4 * width, width, bias=False)
            _linear(shapes, f"{last}.DenseReluDense.wo", width, 4 * width, bias=False)
            shapes[f"{last}.layer_norm.weight"] = (width,)
        shapes[f"{side}.final_layer_norm.weight"] = (width,)

    def work(tokens: int) -> Iterator[tuple[str, int]]:
        target = max(1, tokens // _OF_INPUT)
        for layer, amount in _matrices(shapes, "coder.", 1):
            if not layer.endswith("relative_attention_bias"):
                reads_input = layer.startswith("encoder") or layer.endswith(("EncDecAttention.k", "EncDecAttention.v"))
                yield layer, amount * (tokens if reads_input else target)
        for number in range(layers):
            yield f"encoder.block.{number}.layer.0.SelfAttention.o", 2 * inner * tokens**2
            yield f"decoder.block.{number}.layer.0.SelfAttention.o", 2 * inner * target**2
            yield f"decoder.block.{number}.layer.1.EncDecAttention.o", 2 * inner * target * tokens
        yield "decoder.final_layer_norm", _T5_TOKENS * width * target

    return PublishedModel("tokens", 512, 2**20, shapes, work)


MODELS = {
    "bert-base": _bert(12, 768),
    "bert-large": _bert(24, 1024),
    "vit-b-16": _vit(12, 768),
    "vit-l-16": _vit(24, 1024),
    "t5-small": _t5(6, 512, 8),
    "t5-base": _t5(12, 768, 12),
    "t5-large": _t5(24, 1024, 16),
}
