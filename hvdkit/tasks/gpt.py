"""GPT-2 as data: the table from which each framework builds its model, and the initial weights for all of them.

Radford et al. 2019: layer norms in front of attention and MLP and after the last block, learned positions, GELU in its
tanh form, causal attention, and an output layer that is the table of token vectors. Names and layouts are Hugging
Face's (`GPT2LMHeadModel`): matrices are (in, out), the two tables of vectors have a row for each token and position.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdkit.errors import RequestError
from hvdkit.tasks.parts import BlockRange, Cut, block_of, bounds, check_stages
from hvdkit.tasks.task import Activations, Architecture, parameter_count

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.recipe.communication import Parallel
    from hvdkit.recipe.schema import GptModel

# name -> (layers, heads, width); all have 1,024 positions and 50,257 tokens
_PUBLISHED = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
NAMES = tuple(_PUBLISHED)
VOCABULARY = 50_257


@dataclass(frozen=True)
class GPT(Architecture):
    """`layers` blocks of attention with `heads` heads and an MLP, on vectors of size `width`.

    `initializer_range` is the standard deviation of the initial weights. `compute_dtype` is that of everything between
    the vectors of the tokens and the last layer norm, except layer norms. A framework that casts models itself need not
    read it.
    """

    name: str
    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    initializer_range: float = 0.02

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks, in forward order."""
        stage = self.here
        return [f"transformer.h.{number}" for number in range(stage.start, stage.stop)]

    @property
    def here(self) -> BlockRange:
        """The stage that this rank has, which may be all of the model."""
        return self.stage or BlockRange(0, self.layers, self.layers)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the trainable parameters, in forward order."""
        width, here = self.width, self.here
        shapes: dict[str, tuple[int, ...]] = {}
        if here.is_first or here.is_last:
            shapes["transformer.wte.weight"] = (self.vocabulary, width)
        if here.is_first:
            shapes["transformer.wpe.weight"] = (self.context, width)
        layers = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        mlp = {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
        for block in self.blocks:
            for norm, matrices in (("ln_1", layers), ("ln_2", mlp)):
                shapes[f"{block}.{norm}.weight"] = shapes[f"{block}.{norm}.bias"] = (width,)
                for name, shape in matrices.items():
                    shapes[f"{block}.{name}.weight"], shapes[f"{block}.{name}.bias"] = shape, shape[1:]
        if here.is_last:
            shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (width,)
        return shapes

    def check_parallel(self, parallel: Parallel) -> None:
        """Raise RequestError unless each stage has a block, and each part of a layer as many heads and a token."""
        check_stages(parallel, self.layers)
        if self.heads % parallel.tensor or self.vocabulary < parallel.tensor:
            raise RequestError(
                f"parallel.tensor: expected a divisor of model.heads {self.heads}, and at most model.vocabulary "
                f"{self.vocabulary}, got {parallel.tensor}"
            )

    @property
    def vocabulary_part(self) -> tuple[int, int]:
        """The first token of which this rank has a vector, and the first after them."""
        return bounds(self.vocabulary, self.tensor.index, self.tensor.size) if self.tensor else (0, self.vocabulary)

    def cuts(self) -> dict[str, Cut]:
        """Attention is divided by heads, the MLP by its inner values, the table of tokens by tokens.

        The columns of `attn.c_attn` are those of q, k and v, of which each has the heads side by side.
        """
        layers = {
            "attn.c_attn.weight": Cut(1, 3), "attn.c_attn.bias": Cut(0, 3), "attn.c_proj.weight": Cut(0),
            "mlp.c_fc.weight": Cut(1), "mlp.c_fc.bias": Cut(0), "mlp.c_proj.weight": Cut(0),
        }  # fmt: skip
        cuts = {f"{block}.{name}": cut for block in self.blocks for name, cut in layers.items()}
        ends = self.here.is_first or self.here.is_last
        return ({"transformer.wte.weight": Cut(0, equal=False)} if ends else {}) | cuts

    def work_by_layer(self) -> dict[str, int]:
        """Multiply-adds of a token's forward pass by layer, in forward order.

        Attention's own count to the layer after it, `attn.c_proj`, the output layer's to the last layer norm, as its
        weights are those of the first layer.
        """
        shapes = {name.removesuffix(".weight"): shape for name, shape in self.parameter_shapes().items()}
        work = {
            name: math.prod(shape) for name, shape in shapes.items() if name.endswith((".c_attn", ".c_proj", ".c_fc"))
        }
        attention = {f"{block}.attn.c_proj": 2 * self.width * self.context for block in self.blocks}
        return {name: amount + attention.get(name, 0) for name, amount in work.items()} | {
            "transformer.ln_f": self.vocabulary * self.width
        }

    def work_by_block(self) -> dict[str, int]:
        """Of a token; the vectors of tokens and places, which are looked up, count their sum."""
        work = dict.fromkeys(self.blocks, 0)
        work[self.blocks[0]] += self.width
        for layer, amount in self.work_by_layer().items():
            block = block_of(f"{layer}.weight")
            work[block if block in work else self.blocks[-1]] += amount
        return work

    def training_flop(self) -> int:
        """Floating-point operations of training on one token, without those of `recompute`.

        6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B), where H Q is the width.
        """
        return 6 * parameter_count(self) + 12 * self.layers * self.width * self.context

    def activations(self, shape: tuple[int, ...], recompute: bool = False) -> Activations:
        """About what of one sample of `shape` (context,) is kept until backward.

        A block keeps 16 values of the width for each token, the inputs of its layers, and the weights of attention:
        Korthikanti et al. 2022, section 4.1, without dropout. Two of the 16, the inputs of the layer norms, are in the
        parameters' dtype. The end keeps the inputs of the last layer norm and of the output layer, the logits, and
        their logarithmic probabilities in the parameters' dtype. With `recompute` the blocks keep their inputs, and one
        block all. Of the 16, heads and MLP are divided over a tensor group but for the inputs of the layer norms and
        what these give (section 4.2.1). A stage that is not the last keeps what it sends in place of the end.
        """
        (tokens,) = shape
        parts, here, layers, width = self.tensor.size if self.tensor else 1, self.here, len(self.blocks), self.width
        kept = 1 if recompute else layers  # blocks of which all is kept
        classes = -(-self.vocabulary // parts) if here.is_last else 0
        end = width if here.is_last else 0
        return Activations(
            compute=tokens * (kept * (2 * width + 12 * width // parts) + end + classes),
            full=tokens * (kept * 2 * width + (layers - kept) * width + width + classes),
            scores=tokens * kept * self.heads // parts * tokens,
            outputs=tokens * classes,
        )

    def transformers_config(self) -> dict[str, Any]:
        """The `config.json` with which transformers' `GPT2LMHeadModel.from_pretrained` builds this model."""
        end = self.vocabulary - 1 if self.vocabulary == VOCABULARY else None  # of a text, in GPT-2's own vocabulary
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocabulary,
            "n_positions": self.context,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.norm_epsilon,
            "initializer_range": self.initializer_range,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
            "tie_word_embeddings": True,
        }

    def from_file(self, given: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The tensors of a file of Hugging Face's, with or without `transformer.` before their names.

        Masks, which older files have, are left out, and an output layer that is the table of tokens. Raises
        RequestError for another output layer, for a model of another size, and for settings that change what a model
        with the same tensors computes.
        """
        masks = (".attn.bias", ".attn.masked_bias")
        named = {name.removeprefix("transformer."): value for name, value in given.items() if not name.endswith(masks)}
        head, table = named.get("lm_head.weight"), named.get("wte.weight")
        if head is not None and table is not None:
            if head.shape != table.shape or (head != table).any():
                raise RequestError("lm_head.weight differs from wte.weight; expected the output layer to be that table")
            del named["lm_head.weight"]
        self._check_size(named)
        if config.get("model_type") == "gpt2":
            self._check_config(config)
        own = {"wte", "wpe", "h", "ln_f"}
        return {f"transformer.{name}" if name.split(".")[0] in own else name: value for name, value in named.items()}

    def _check_config(self, config: Mapping[str, Any]) -> None:
        gelu = ("gelu_new", "gelu_pytorch_tanh")
        for key, expected in (
            ("n_head", (self.heads,)), ("activation_function", gelu), ("layer_norm_epsilon", (self.norm_epsilon,)),
            ("scale_attn_weights", (True,)), ("scale_attn_by_inverse_layer_idx", (False,)),
        ):  # fmt: skip
            if config.get(key, expected[0]) not in expected:
                raise RequestError(
                    f"{key} is {config[key]!r} in config.json, and {expected[0]!r} in the recipe's model"
                )

    def _check_size(self, named: Mapping[str, np.ndarray]) -> None:
        table, positions = named.get("wte.weight"), named.get("wpe.weight")
        if table is None or positions is None or not table.ndim == positions.ndim == 2:
            return  # which tensors are missing is said later
        layers = sum(name.startswith("h.") and name.endswith(".ln_1.weight") for name in named)
        got = {"layers": layers, "width": table.shape[1], "context": len(positions), "vocabulary": len(table)}
        wrong = [name for name, size in got.items() if size != getattr(self, name)]
        if wrong:
            mine, theirs = (
                ", ".join(f"{name} {size}" for name, size in sizes.items() if name in wrong)
                for sizes in ({name: getattr(self, name) for name in got}, got)
            )
            raise RequestError(f"expected a GPT with {mine}, as the recipe's model, got {theirs}")

    def initial_state(self, seed: int) -> dict[str, np.ndarray]:
        """Initial parameters, float32: the same bits for every framework and rank.

        Weights are normal with standard deviation `initializer_range`, those of the layers that add to the residual
        stream with 1 / sqrt(2 × layers) of it (Radford et al. 2019, section 2.3), biases are 0. Each tensor has its own
        random stream.
        """
        import numpy as np  # imported here because the command line counts parameters and starts without NumPy

        state: dict[str, np.ndarray] = {}
        for name, shape in self.parameter_shapes().items():
            if len(shape) == 2:
                random = np.random.default_rng([seed, zlib.crc32(name.encode())])
                share = math.sqrt(2 * self.layers) if name.endswith("c_proj.weight") else 1.0
                state[name] = random.standard_normal(shape, np.float32) * np.float32(self.initializer_range / share)
            else:
                state[name] = np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
        return state


def published(name: str) -> GPT:
    """GPT-2 in one of its published sizes. Raises KeyError for a name not in NAMES."""
    return GPT(name, *_PUBLISHED[name], 1024, VOCABULARY)


def architecture(model: GptModel) -> GPT:
    """The table of a recipe's model."""
    if model.name in _PUBLISHED:
        sizes = *_PUBLISHED[model.name], 1024
    else:
        assert model.layers and model.heads and model.width and model.context
        sizes = model.layers, model.heads, model.width, model.context
    return GPT(model.name, *sizes, model.classes, model.initializer_range)
