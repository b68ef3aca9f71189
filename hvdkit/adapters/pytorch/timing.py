"""PyTorch's trace events: by the CPU's clock, or CUDA events on a GPU. Hooks record the details."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from hvdkit.core import seam, trace_events

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind

_events: list[tuple[str, Any]] = []  # trace events whose time is only known on the device


def mark(name: str, device: torch.device) -> None:
    """Record a trace event after all operations that have been queued on the device so far."""
    if not trace_events.recording():
        return
    if device.type != "cuda":
        trace_events.mark(name)
        return
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    _events.append((name, event))


def stamp(device: torch.device, names: tuple[str, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Call `mark` for each of several names; returns the tensors."""
    for name in names:
        mark(name, device)
    return tensors


def settle() -> None:
    """Read the times of this step's CUDA events. The device must be idle."""
    if not _events:
        return
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    now.synchronize()
    at = perf_counter_ns()
    for name, event in _events:
        trace_events.note(name, at - round(1e6 * event.elapsed_time(now)))
    _events.clear()


class Observer(seam.Observer):
    """In detailed steps, hooks record when each gradient is ready and when each layer's forward pass has ended."""

    def __init__(self, hvd: Any, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(hvd)
        self._model, self._device = model, device
        self._hooks: list[Any] = []
        self._profiler: Any = None
        self._profile = Path()

    def watch(self, kind: Kind) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if kind != "detailed":
            return
        for name, module in self._model.named_modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_hook(self._recorder(trace_events.LAYER + name)))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._recorder(trace_events.READY + name))
                self._hooks.append(hook)

    def _recorder(self, name: str) -> Callable[..., None]:
        return lambda *_: mark(name, self._device)

    def own_profile(self, path: Path | None) -> None:
        if path is None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._profile))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile = path
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def device(self) -> tuple[str, float | None]:
        if self._device.type != "cuda":
            return super().device()
        peak = float(torch.cuda.max_memory_allocated(self._device)) / 2**20
        return str(torch.cuda.get_device_name(self._device)), peak
