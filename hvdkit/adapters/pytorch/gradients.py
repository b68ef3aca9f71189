"""Gradients as parts of vectors that stay in memory, so that each vector is sent without another copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from hvdkit.adapters.pytorch.collectives import dense
from hvdkit.adapters.pytorch.pages import Pages


class JoinedGradients:
    """`core.trainable.Joined` in main memory: a hook copies each gradient into its part as soon as it is computed, from
    the processor's cache, and frees the original.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: Sequence[tuple[Sequence[str], int]]) -> None:
        first = next(iter(parameters.values()))
        self.vectors: list[torch.Tensor] = []
        self.parts: dict[str, torch.Tensor] = {}
        self._copied: set[str] = set()  # by the last backward
        for names, size in groups:
            vector = Pages(size, first.dtype).vector
            self.vectors.append(vector)
            sizes = [parameters[name].numel() for name in names]
            for name, part in zip(names, vector[: sum(sizes)].split(sizes), strict=True):
                self.parts[name] = part.view(parameters[name].shape)
                parameters[name].register_post_accumulate_grad_hook(partial(self._copy, name))

    def _copy(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient = dense(parameter.grad)
        if name in self._copied:
            self.parts[name].add_(gradient)
        else:
            self.parts[name].copy_(gradient)
            self._copied.add(name)
        parameter.grad = None

    def begin(self) -> None:
        """Before a backward pass."""
        self._copied.clear()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the last backward pass; zeros for parameters that it has not used."""
        for name in self.parts.keys() - self._copied:
            self.parts[name].zero_()
        return dict(self.parts)

    def holds(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        return all(gradients.get(name) is part for name, part in self.parts.items())
