"""The adapter for PyTorch (`hvdkit/core/seam.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.adapters import capabilities
from hvdkit.adapters.pytorch import training
from hvdkit.adapters.pytorch.collectives import TorchCollectives
from hvdkit.adapters.pytorch.tensors import TorchTensors
from hvdkit.core import trace_events
from hvdkit.core.group import Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, Observer
from hvdkit.core.trainable import Trainable
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.core.passes import Chain, Stage


class PyTorch(TorchTensors, TorchCollectives):
    """PyTorch, with Horovod."""

    NAME = "pytorch"
    CAPABILITIES = capabilities.CAPABILITIES[NAME]
    CHOSEN = capabilities.CHOSEN[NAME]
    batch_norms, layer_parts = "hvdkit.adapters.pytorch.synchronized", "hvdkit.adapters.pytorch.parts"

    counted_cross_entropy = staticmethod(training.counted_cross_entropy)
    trainable_class = training.TrainableModel
    layout: torch.memory_format | None = None  # of images; None: that in which the model's step is fastest

    def bind_device(self, topology: Topology, device: str, threads: int | None) -> Topology:
        torch.set_num_threads(threads_per_rank(threads, topology.local_size))
        if wants_gpu(device, torch.cuda.device_count(), topology.local_size, "PyTorch"):
            torch.cuda.set_device(topology.local_rank)
            self.device = torch.device("cuda", topology.local_rank)
        return replace(topology, device="gpu" if self.device.type == "cuda" else "cpu")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            if trace_events.recording():
                from hvdkit.adapters.pytorch import timing  # `hvdkit profile` alone needs it

                timing.settle()

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def random_states(self) -> dict[str, np.ndarray]:
        states = {"torch": torch.get_rng_state().numpy()}
        on_gpu = self.device.type == "cuda"
        return states | ({"torch.cuda": torch.cuda.get_rng_state(self.device).numpy()} if on_gpu else {})

    def load_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        if "torch" in states:
            torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
        if "torch.cuda" in states and self.device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(states["torch.cuda"].copy()), self.device)

    def bind(self, model: torch.nn.Module, loss: AnyLoss, precision: str) -> training.TrainableModel:
        if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            wrapper = type(model).__name__
            raise RequestError(f"model: expected the model itself, got a {wrapper} around it; return its `module`")
        kind, modules = torch.nn.SyncBatchNorm, model.named_modules()
        self.check_synchronized(name for name, m in modules if isinstance(m, kind) and "statistics" not in vars(m))
        layout = self.layout or training.fastest_layout(model, self.device)
        return self.trainable_class(model, loss, precision, self.device, layout)

    def stage(self, trainable: Trainable) -> Stage:
        from hvdkit.adapters.pytorch.stages import TorchStage

        assert isinstance(trainable, training.TrainableModel)
        return TorchStage(trainable)

    def chain(self, model: torch.nn.Module, blocks: Sequence[Any] | None) -> Chain:
        from hvdkit.adapters.pytorch.chains import ModuleChain

        return ModuleChain(model, blocks)

    def observer(self, trainable: Trainable) -> Observer:
        from hvdkit.adapters.pytorch import timing

        assert isinstance(trainable, training.TrainableModel)
        return timing.Observer(hvd, trainable.model, self.device)


adapter = PyTorch()
