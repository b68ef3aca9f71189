"""What `hvdkit.adapters.pytorch` keeps of a session, by canonical name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdkit.adapters import pytorch_update
from hvdkit.core.optimizer import counts_steps


def tensors(session: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers; PyTorch alone counts a batch norm's batches, and nothing reads that here."""
    named = session.model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if not name.endswith("num_batches_tracked")}


def slots(session: Any) -> dict[str, torch.Tensor]:
    """The optimizer's slots by canonical name."""
    return dict(pytorch_update.slots(session.optimizer, session.settings, session.model))


def scalars(session: Any) -> dict[str, np.ndarray]:
    """What the state holds beside tensors of a parameter."""
    scalars: dict[str, np.ndarray] = {}
    if counts_steps(session.settings):
        steps = pytorch_update.steps(session.optimizer, session.settings, session.model)
        scalars["optimizer.step"] = np.array(int(steps[0]))
    if session.scaler.is_enabled():
        scaler = session.scaler.state_dict()
        scalars["optimizer.loss_scale"] = np.array(scaler["scale"], np.float64)
        scalars["optimizer.good_steps"] = np.array(scaler["_growth_tracker"], np.int64)
    return scalars


def load_scalars(session: Any, state: dict[str, np.ndarray]) -> None:
    """Set what `state` holds of them."""
    if "optimizer.step" in state:
        for count in pytorch_update.steps(session.optimizer, session.settings, session.model):
            count.fill_(int(state["optimizer.step"]))
    if session.scaler.is_enabled() and "optimizer.loss_scale" in state:
        values = {"scale": float(state["optimizer.loss_scale"]), "_growth_tracker": int(state["optimizer.good_steps"])}
        session.scaler.load_state_dict(session.scaler.state_dict() | values)
