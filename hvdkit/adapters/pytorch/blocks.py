"""A module's parameters block by block: in memory that can be freed, and calls before and after each use of a block.

A block is an element of an `nn.Sequential` or `nn.ModuleList`, such as a layer of a transformer; in a module without
them, a child. What belongs to no block, or to several, forms one more block, the root, with the name of the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hvdkit.adapters.pytorch.pages import Pages
from hvdkit.core.pieces import ROOT_BLOCK
from hvdkit.core.trainable import Phase, Uses
from hvdkit.errors import RequestError


def blocks_of(model: nn.Module, trained: Iterable[str]) -> dict[str, list[str]]:
    """The names of the trained parameters by block, in the order of the module; the root first."""
    modules = dict(_numbered(model, "")) or dict(model.named_children())
    owners: dict[nn.Parameter, set[str]] = {}
    inside = {parameter for module in modules.values() for parameter in module.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((path for path in modules if name.startswith(f"{path}.")), ROOT_BLOCK)
        owners.setdefault(parameter, set()).add(block if parameter in inside else ROOT_BLOCK)
    named = dict(model.named_parameters())
    by_block: dict[str, list[str]] = {name: [] for name in (ROOT_BLOCK, *modules)}
    for name in trained:
        blocks = owners[named[name]]
        by_block[next(iter(blocks)) if len(blocks) == 1 else ROOT_BLOCK].append(name)
    return {name: parameters for name, parameters in by_block.items() if parameters}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that the module has more than once, with the first name of each."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def _numbered(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost elements of containers that can be called, by their paths."""
    for name, child in module.named_children():
        called = type(child).forward is not nn.Module.forward
        if isinstance(module, nn.Sequential | nn.ModuleList) and called:
            yield path + name, child
        else:
            yield from _numbered(child, f"{path}{name}.")


_TWICE = "sharding: expected none, optimizer or gradients for a model that has a parameter twice; {} is also {}"
_OWN_PAGES_FROM = 16 * 2**20  # bytes of a vector


class BlockMemory:
    """Parameters of one dtype as parts of one `vector`, whose memory is there between `allocate` and `free`.

    In between, the parameters are empty, so that a use raises an error; tensors that autograd has kept of them have
    the vector's storage, and are right again when that is.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], size: int) -> None:
        first = next(iter(parameters.values()))
        self._bytes = size * first.dtype.itemsize
        # Large blocks that come and go would leave holes in the C library's heap.
        own = first.device.type == "cpu" and self._bytes >= _OWN_PAGES_FROM
        self._pages = Pages(size, first.dtype) if own else None
        self.vector = self._pages.vector if self._pages else torch.empty(size, dtype=first.dtype, device=first.device)
        sizes = [parameter.numel() for parameter in parameters.values()]
        parts = self.vector[: sum(sizes)].split(sizes)
        self.views = {
            name: part.view(parameter.shape) for (name, parameter), part in zip(parameters.items(), parts, strict=True)
        }
        self._parameters, self._nothing = parameters, first.detach().new_empty(0)
        self.free()

    def allocate(self) -> None:
        if self._pages is None:
            self.vector.untyped_storage().resize_(self._bytes)
        for name, parameter in self._parameters.items():
            parameter.data = self.views[name]

    def free(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = self._nothing
        if self._pages is None:
            self.vector.untyped_storage().resize_(0)
        else:
            self._pages.free()


def divided(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    blocks: Mapping[str, tuple[Sequence[str], int]],
    uses: Uses | None,
) -> dict[str, BlockMemory]:
    """The memory of each block, with the names and the size of its vector, whose `uses` are reported.

    Raises RequestError for a parameter that a module has twice, as its uses are not those of one block.
    """
    named = {block: {name: trained[name] for name in names} for block, (names, _) in blocks.items()}
    if uses is not None:
        if tied := tied_names(model):
            raise RequestError(_TWICE.format(*next(iter(tied.items()))))
        watch(model, named, uses)
    return {block: BlockMemory(named[block], size) for block, (_, size) in blocks.items()}


def watch(model: nn.Module, blocks: Mapping[str, Mapping[str, nn.Parameter]], uses: Uses) -> None:
    """Report each use of a block's parameters to `uses`. A block's backward begins with the gradient of an output, and
    ends when its parameters have their gradients."""
    modules = dict(model.named_modules())
    for name, parameters in blocks.items():
        _Watch(name, modules[name], list(parameters.values()), uses)


class _Watch:
    def __init__(self, name: str, module: nn.Module, parameters: list[nn.Parameter], uses: Uses) -> None:
        self._name, self._uses, self._all, self._left = name, uses, len(parameters), 0
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._after_gradient)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self._uses.begin(self._name, _phase())

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            given = [
                tensor for tensor in tree_leaves(outputs) if isinstance(tensor, torch.Tensor) and tensor.requires_grad
            ]
            if not given:
                raise RequestError(
                    f"sharding: parameters: expected that {self._name or 'the model'} returns tensors that depend on "
                    f"its parameters, or a tuple, list or dictionary of them; got a {type(outputs).__name__}"
                )
            for tensor in given:
                tensor.register_hook(self._before_backward)
        self._uses.end(self._name, _phase())

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self._left = self._all
        self._uses.begin(self._name, "backward")

    def _after_gradient(self, parameter: nn.Parameter) -> None:
        self._left -= 1
        if not self._left:
            self._uses.end(self._name, "backward")


def _phase() -> Phase:
    return "forward" if torch.is_grad_enabled() else "prediction"
