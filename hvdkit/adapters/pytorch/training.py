"""A PyTorch module in training (`hvdkit/core/trainable.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from hvdkit.adapters.pytorch.collectives import dense
from hvdkit.core import trace_events
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import AnyLoss, class_weights
from hvdkit.core.state import COUNT, cast_lines, check_kinds
from hvdkit.core.tensors import Scalar, Shape
from hvdkit.core.trainable import Block, Divisible, Hooks, Slots, Trainable, UpdateKernel, Uses, one_tensor
from hvdkit.core.update_rules import decay_of
from hvdkit.data.dataset import Batch, arguments, mapped, on_device
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AdamW, Loss, Optimizer, Sgd

if TYPE_CHECKING:
    from hvdkit.adapters.pytorch.gradients import JoinedGradients

# A GPU computes while Horovod sends, so each gradient is sent there as soon as it is ready. On a CPU, sending during
# backward would only take cores from it.
OVERLAPPED_ON = {"cuda"}
WIDE = 64  # channels


def fastest_layout(model: torch.nn.Module, device: torch.device) -> torch.memory_format:
    """The layout of images in which a step takes least: channels-last, which tensor cores prefer, but for convolutions
    of many channels alone on a CPU.

    Those are computed in blocks of channels anyway, and channels-last images would have their large weights and
    gradients converted at each step (benchmarks/notes.md has the CPU time of both).
    """
    convolutions = [module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    wide = device.type == "cpu" and min(convolutions, default=0) >= WIDE
    return torch.contiguous_format if wide else torch.channels_last


class TrainableModel(Trainable, Hooks, Divisible):
    """A module in training. Images have the layout given; weights stay contiguous, as Horovod requires. A baseline may
    set `forward` to a wrapper.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: AnyLoss,
        precision: str,
        device: torch.device,
        layout: torch.memory_format,
    ) -> None:
        self._precision = PRECISIONS[precision]
        self._dtype = getattr(torch, self._precision.parameters)
        self.warnings = _move(model, device, precision, self._dtype) + _unregistered(model)
        self.model = model
        self.forward: Any = self.model
        # Layers that the user has put into evaluation mode, such as a frozen batch norm, stay in it. A model that is in
        # it as one, as libraries of trained models return theirs, is trained as one.
        self._frozen = [module for module in model.modules() if model.training and not module.training]
        self.device, self._layout = device, layout
        self._divided = getattr(model, "divided_outputs", None)  # `parts.DividedOutputs`, if ranks have parts of them
        self._cross_entropy = self._divided.cross_entropy if self._divided else cross_entropy
        self.criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
            partial(self._cross_entropy, label_smoothing=loss.label_smoothing) if isinstance(loss, Loss) else loss
        )
        # Without frozen ones, which weight decay would change.
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = {name: parameter.detach() for name, parameter in self.trained.items()}
        self.overlaps = device.type in OVERLAPPED_ON
        self.stamp = partial(_stamp, device)
        self._taken: set[str] = set()  # gradients of the last backward that `on_ready` has handed over
        self._joined: JoinedGradients | None = None
        self._whole = True  # whether all parameters are there all the time
        self._pools: dict[int, torch.Tensor] = {}  # of inputs that stay on the device

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers, frozen parameters, and further names of trained ones."""
        return {name: tensor for name, tensor, saved in self._untrained() if saved}

    @property
    def transient(self) -> dict[str, torch.Tensor]:
        """The buffers that are not persistent."""
        return {name: tensor for name, tensor, saved in self._untrained() if not saved}

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """The tensors that are not trained now, as modules may replace them, and whether checkpoints have them.

        Batch norm's count of batches is among them only where the norm reads it.
        """
        for path, module in self.model.named_modules(remove_duplicate=False):
            unread = isinstance(module, _NormBase) and module.momentum is not None
            for leaf, tensor in chain(module._parameters.items(), module._buffers.items()):
                name = f"{path}.{leaf}" if path else leaf
                if tensor is not None and name not in self.trained and not (unread and leaf == COUNT):
                    yield name, tensor.detach(), leaf not in module._non_persistent_buffers_set

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        def pick(pool: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
            return pool[torch.from_numpy(indices).to(self.device)].contiguous(memory_format=self._layout)

        inputs = on_device(batch, self._pools, self._put, pick)
        return inputs, self._as_dtype(torch.from_numpy(batch.targets).to(self.device))

    def backward(
        self, inputs: torch.Tensor, targets: torch.Tensor, scale: Scalar | None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        for parameter in self.trained.values():
            parameter.grad = None
        self._taken.clear()
        if self._joined is not None:
            self._joined.begin()
        try:
            logits, loss = self.loss_of(inputs, targets)
        except (RuntimeError, IndexError) as error:
            if not self._whole:
                error.add_note("with sharding: parameters, a block's parameters are empty outside of its forward")
            raise
        self.stamp((trace_events.FORWARD,), [loss])
        (loss if scale is None else loss * scale).backward()
        return logits.detach(), loss.detach(), self.gradients()

    def loss_of(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and mean loss of a batch in training mode."""
        logits = self.outputs_of(inputs)
        return logits, self.criterion(logits, targets)

    def outputs_of(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs in training mode."""
        self._enter_training()
        with self._autocast():
            outputs = self.forward(*arguments(inputs))
        return one_tensor(outputs).to(self._dtype)

    def observe(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.no_grad():
            self.outputs_of(inputs)

    def _enter_training(self) -> None:
        """Training mode, but for the layers that the user has put into evaluation mode."""
        self.model.train()
        for module in self._frozen:
            module.training = False

    def gradients(self) -> dict[str, torch.Tensor]:
        """Every parameter's gradient that is not taken; zeros if it is unused on this rank, as others may use it."""
        if self._joined is not None:
            return self._joined.gradients()
        return {
            name: torch.zeros_like(self.parameters[name]) if parameter.grad is None else dense(parameter.grad)
            for name, parameter in self.trained.items()
            if name not in self._taken
        }

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        outputs = self.evaluated(mapped(self._put, inputs))
        return np.array((self._divided.whole(outputs) if self._divided else outputs).cpu().numpy())

    def losses(self, batch: Batch) -> np.ndarray:
        return np.array(self.losses_of(*self.inputs(batch)).cpu().numpy())

    def losses_of(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Each target's cross-entropy in evaluation mode."""
        return self._cross_entropy(self.evaluated(inputs), targets, reduction="none").reshape(targets.shape)

    def evaluated(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs in evaluation mode."""
        self.model.eval()
        # not inference_mode, whose tensors a model that keeps them cannot train on
        with torch.no_grad(), self._autocast():
            outputs = self.model(*arguments(inputs))
        return one_tensor(outputs).to(self._dtype)

    def unchanged(self) -> AbstractContextManager[None]:
        from hvdkit.adapters.pytorch.unchanged import unchanged  # only models of the user's own need it

        return unchanged(self.model, self.device)

    def update_kernel(
        self, settings: Optimizer, shapes: Sequence[Shape], like: Sequence[torch.Tensor]
    ) -> UpdateKernel | None:
        decays = [decay_of(settings, shape) for shape in shapes]
        if isinstance(settings, Sgd) and settings.momentum and not settings.decoupled:
            return partial(_sgd, settings, decays)
        if not isinstance(settings, AdamW) or not all(tensor.is_contiguous() for tensor in like):
            return None
        from hvdkit.adapters.pytorch.adamw import adamw

        return partial(adamw, settings, decays)

    def on_ready(self, ready: Callable[[str, torch.Tensor], bool]) -> None:
        def take(parameter: Any, name: str) -> None:
            if self._joined is not None:
                ready(name, self._joined.parts[name])
            elif ready(name, dense(parameter.grad)):
                parameter.grad = None
                self._taken.add(name)

        for name, parameter in self.trained.items():
            parameter.register_post_accumulate_grad_hook(partial(take, name=name))

    def on_use(self, use: Callable[[Collection[str]], None]) -> None:
        from hvdkit.adapters.pytorch.uses import watch_uses  # only `order: priority` needs it

        watch_uses(self.model, self.trained, use)

    def join_gradients(self, groups: Sequence[tuple[Sequence[str], int]]) -> JoinedGradients:
        from hvdkit.adapters.pytorch.gradients import JoinedGradients  # one rank does not need it

        self._joined = JoinedGradients(self.trained, groups)
        return self._joined

    def blocks(self) -> dict[str, list[str]]:
        from hvdkit.adapters.pytorch.blocks import blocks_of  # only this stage of sharding needs it

        return blocks_of(self.model, self.trained)

    def divide(self, blocks: Mapping[str, tuple[Sequence[str], int]], uses: Uses | None = None) -> Mapping[str, Block]:
        from hvdkit.adapters.pytorch.blocks import divided

        memories = divided(self.model, self.trained, blocks, uses)
        self._whole = uses is None
        views = {name: view for memory in memories.values() for name, view in memory.views.items()}
        self.parameters = {name: views[name] for name in self.trained}
        return memories

    def _autocast(self) -> torch.autocast:
        mixed = self._precision.compute != self._precision.parameters
        dtype = getattr(torch, self._precision.compute)
        return torch.autocast(self.device.type, dtype, enabled=mixed, cache_enabled=self._whole)

    def _put(self, inputs: np.ndarray) -> torch.Tensor:
        """Inputs on the device; images (n, height, width, channels) as (n, channels, height, width)."""
        tensor = torch.from_numpy(np.ascontiguousarray(inputs))
        if inputs.ndim == 4:
            tensor = self.in_layout(tensor.permute(0, 3, 1, 2))
        return self._as_dtype(tensor.to(self.device))

    def in_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Images (n, channels, height, width) in the layout of the model's; other tensors as they are."""
        return tensor.contiguous(memory_format=self._layout) if tensor.ndim == 4 else tensor

    def _as_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _stamp(device: torch.device, names: tuple[str, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not trace_events.recording():
        return tensors
    from hvdkit.adapters.pytorch import timing  # `hvdkit profile` alone needs it

    return timing.stamp(device, names, tensors)


def _move(model: torch.nn.Module, device: torch.device, precision: str, dtype: torch.dtype) -> list[str]:
    """Move a module to a device, its floating tensors in `dtype`, that of the precision.

    Returns a line for each dtype that they lose, and for what no checkpoint has. Raises RequestError naming a tensor
    that cannot be trained or kept.
    """
    tensors = _tensors(model)
    for name, tensor in tensors.items():
        if fault := _fault(tensor):
            raise RequestError(f"model: {name}: {fault}")
    lines = cast_lines({name: _name(tensor.dtype) for name, tensor in tensors.items()}, precision, _name(dtype))
    # The module's `to` would keep only the real parts of complex tensors.
    model._apply(lambda tensor: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device))
    placed = _tensors(model)
    trained = [
        name for name, tensor in placed.items() if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    ]
    check_kinds({name: _name(tensor.dtype) for name, tensor in placed.items()}, trained)
    return lines + [
        f"model: {path or type(module).__name__}: no checkpoint has the extra state of its get_extra_state"
        for path, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]


def _unregistered(model: torch.nn.Module) -> list[str]:
    """A line for each attribute of a module, such as a list of layers, whose parameters PyTorch does not know of."""
    known = set(map(id, model.parameters()))
    return [
        f"model: {path}{'.' * bool(path)}{name}: its parameters are not registered and not trained; use nn.ModuleList"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and any(leaf.requires_grad and id(leaf) not in known for leaf in _leaves(value))
    ]


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters()
        elif isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            yield leaf


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fault(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "it has no shape yet; call the model once in model(), with inputs such as a batch's"
    if tensor.is_meta:
        return "it has no values, as it is on the device meta; initialize it in model()"
    if tensor.is_quantized:
        return "quantized tensors cannot be trained; quantize the model after training"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "sparse and nested tensors can be neither sent nor saved; keep a dense tensor, or indices and values"
    return None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
    """Softmax cross-entropy of `logits` (…, classes) and `labels` (…), by `torch.nn.functional.cross_entropy`."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **how)


def counted_cross_entropy(loss: Loss, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `cross_entropy`, with ignored labels and class weights, and its count (`Adapter.cross_entropy`)."""
    ignored = torch.iinfo(torch.int64).min if loss.ignored_label is None else loss.ignored_label
    counts = labels != ignored
    weights = None if loss.class_weights is None else logits.new_tensor(class_weights(loss, logits.shape))
    total = cross_entropy(
        logits, labels, weight=weights, ignore_index=ignored, label_smoothing=loss.label_smoothing, reduction="sum"
    )
    return total, counts.sum() if weights is None else weights[labels[counts]].sum()


Weights = list[torch.Tensor]


def _as_it_lies(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    same = tensor.stride() == like.stride() and tensor.dtype == like.dtype
    return tensor if same else torch.empty_like(like).copy_(tensor)


def _sgd(
    settings: Sgd, decays: list[float], weights: Weights, gradients: Weights, slots: list[Slots], rate: float, _: object
) -> Weights:
    """SGD with momentum and coupled decay by PyTorch's fused kernel. (Importing torch.optim takes a second.)"""
    velocities = [velocity for (velocity,) in slots]
    rows = list(zip(weights, map(_as_it_lies, gradients, weights), velocities, strict=True))
    for decay in dict.fromkeys(decays):
        some = zip(*[row for row, own in zip(rows, decays, strict=True) if own == decay], strict=True)
        torch._fused_sgd_(*map(list, some), weight_decay=decay, momentum=settings.momentum, lr=rate, dampening=0.0,
                          nesterov=settings.nesterov, maximize=False, is_first_step=False)  # fmt: skip
    return weights
