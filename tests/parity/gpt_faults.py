"""What may be wrong in a GPT: faults to plant into PyTorch's, and what they share with those of rank.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any
from unittest import mock

Fault = Callable[[Any, Any], AbstractContextManager[None]]  # (adapter, recipe module)


def built_otherwise(change: Callable[[Any], None]) -> Fault:
    """Change the model after it has been built."""

    @contextmanager
    def fault(adapter: Any, module: Any) -> Iterator[None]:
        sound = module.build

        def build(table: Any) -> Any:
            model = sound(table)
            change(model)
            return model

        with mock.patch.object(module, "build", build):
            yield

    return fault


def post_norm(model: Any) -> None:
    def compute(block: Any, x: Any) -> Any:
        x = block.ln_1(x + block.attn(x))
        return block.ln_2(x + block.mlp(x))

    for block in model.transformer["h"]:
        block.compute = MethodType(compute, block)


def untied_head(model: Any) -> None:
    """A head that starts as the table of tokens, as a copy: only the gradient tells."""
    import torch

    def forward(model: Any, tokens: Any) -> Any:
        parts = model.transformer
        x, _ = parts["wte"](tokens)
        x = x + parts["wpe"].weight[: tokens.shape[1]]
        for block in parts["h"]:
            x = block(x)
        return torch.nn.functional.linear(parts["ln_f"](x), parts["wte"].weight.detach())

    model.forward = MethodType(forward, model)


def position_off_by_one(model: Any) -> None:
    table = model.transformer["wpe"]
    sound = type(table).__getattr__

    class Shifted(type(table)):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            found = sound(self, name)
            return found.roll(1, 0) if name == "weight" else found

    table.__class__ = Shifted


def in_functions(**changed: Callable[[Any], Callable[..., Any]]) -> Fault:
    """Other functions of `torch.nn.functional`, each made of the sound one."""

    @contextmanager
    def fault(adapter: Any, module: Any) -> Iterator[None]:
        sound = {name: getattr(module.F, name) for name in changed}
        with mock.patch.multiple(module.F, **{name: make(sound[name]) for name, make in changed.items()}):
            yield

    return fault


def attention(sound: Any, scale: float | None = None, sees_next: bool = False) -> Callable[..., Any]:
    def changed(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        if not sees_next:
            return sound(q, k, v, is_causal=is_causal, scale=scale)
        size = q.shape[-2]
        return sound(q, k, v, attn_mask=q.new_ones((size, size)).tril(1).bool())

    return changed


@contextmanager
def decay_on_norms(adapter: Any, module: Any) -> Iterator[None]:
    from hvdkit.adapters.pytorch import training

    with mock.patch.object(training, "decay_of", lambda settings, shape: settings.weight_decay):
        yield


FAULTS: dict[str, Fault] = {
    "post_norm": built_otherwise(post_norm),
    "exact_gelu": in_functions(gelu=lambda sound: lambda x, approximate: sound(x)),
    "untied_head": built_otherwise(untied_head),
    "mask_off_by_one": in_functions(scaled_dot_product_attention=lambda sound: attention(sound, sees_next=True)),
    "position_off_by_one": built_otherwise(position_off_by_one),
    "decay_on_norms": decay_on_norms,
    "no_scale": in_functions(scaled_dot_product_attention=lambda sound: attention(sound, scale=1.0)),
}
