"""A model of the user's own as a chain of blocks, of which each stage of a pipeline has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hvdkit.core.passes import Chain
from hvdkit.errors import RequestError

_OF_A_VALUE = 10  # operations
_APART = 1e-4  # relative: kernels round otherwise

Block = Callable[..., torch.Tensor]


class Chunk(nn.Module):
    """Some of a model's blocks, one after the other, whose tensors keep their names in the model."""

    def __init__(self, blocks: Sequence[Block], paths: Sequence[str]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)
        for block, path in zip(blocks, paths, strict=True):
            if isinstance(block, nn.Module):
                *folders, name = path.split(".")
                reduce(_folder, folders, self).add_module(name, block)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        first, *others = self._blocks
        return reduce(lambda x, block: block(x), others, first(*inputs))


def _folder(module: nn.Module, name: str) -> nn.Module:
    if name not in module._modules:
        module.add_module(name, nn.Module())
    folder = module._modules[name]
    assert folder is not None
    return folder


class ModuleChain(Chain):
    """The blocks of a module: modules, or functions of a tensor between them.

    Raises RequestError unless each of the model's tensors belongs to one block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block] | None) -> None:
        if blocks is None and isinstance(model, nn.Sequential):
            blocks = list(model)
        name = type(model).__name__
        if not isinstance(blocks, list | tuple) or not blocks or not all(map(callable, blocks)):
            got = "none" if blocks is None else f"a {type(blocks).__name__}"
            raise RequestError(
                f"parallel.pipeline: {name}.blocks: expected a method that returns the list of the model's parts, in "
                f"the order in which its forward pass calls them, got {got}"
            )
        self.model, self.blocks = model, blocks
        own = {module: path for path, module in model.named_modules() if path}
        self._paths = [own.get(block, f"block{number}") for number, block in enumerate(blocks)]
        owners: dict[torch.Tensor, list[int]] = {}
        for number, block in enumerate(blocks):
            for tensor in {id(own): own for own in _tensors(block)}.values():
                owners.setdefault(tensor, []).append(number)
        for path, tensor in chain(model.named_parameters(), model.named_buffers()):
            numbers = owners.pop(tensor, [])
            if len(numbers) != 1:
                got = f"{len(numbers)} of them" if numbers else "none"
                raise RequestError(
                    f"parallel.pipeline: {name}.blocks: expected {path} in one of the {len(blocks)} blocks, got {got}"
                )
        if owners:
            number = next(iter(owners.values()))[0]
            raise RequestError(
                f"parallel.pipeline: {name}.blocks: expected parts of the model, got a {type(blocks[number]).__name__} "
                f"with tensors that the model does not have, as number {number}"
            )

    def check(self, inputs: Sequence[np.ndarray]) -> list[int]:
        """Work is floating-point operations in products and convolutions, and a few for each value that comes out."""
        where = f"parallel.pipeline: {type(self.model).__name__}.blocks"
        training = {module: module.training for module in self.model.modules()}
        dtype = next((own.dtype for own in self.model.parameters() if own.is_floating_point()), torch.float32)
        arguments = [_argument(array, dtype) for array in inputs]
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            wanted = self.model(*arguments)
            x, work = arguments, list[int]()
            for number, block in enumerate(self.blocks):
                try:
                    with FlopCounterMode(display=False) as counted:
                        x = [block(*x)]
                    work.append(counted.get_total_flops() + _OF_A_VALUE * x[0].numel())
                except Exception as error:
                    raise RequestError(
                        f"{where}: number {number}, {type(block).__name__}, cannot take what the one before it "
                        f"returns: {type(error).__name__}: {error}"
                    ) from error
        for module, mode in training.items():
            module.training = mode
        (outputs,) = x
        limit = _APART * float(wanted.abs().max())
        if outputs.shape != wanted.shape or not torch.allclose(outputs, wanted, _APART, limit):
            raise RequestError(
                f"{where}: expected blocks that compute the model's outputs one after the other, got others: of shape "
                f"{tuple(outputs.shape)} where the model returns {tuple(wanted.shape)}, or of other values"
            )
        return work

    def chunk(self, start: int, stop: int) -> Chunk:
        return Chunk(self.blocks[start:stop], self._paths[start:stop])


def _tensors(block: Block) -> list[torch.Tensor]:
    return [*block.parameters(), *block.buffers()] if isinstance(block, nn.Module) else []


def _argument(array: np.ndarray, dtype: torch.dtype) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    tensor = tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor  # images, as in training
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
