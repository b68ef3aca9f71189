"""What `hvdkit.adapters.pytorch` keeps of a session, by canonical name, and how it is told, set and shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdkit.adapters.pytorch import tensors as pytorch_tensors
from hvdkit.adapters.pytorch import update
from hvdkit.adapters.pytorch.collectives import broadcast_in_place
from hvdkit.core.state import check_fits
from hvdkit.core.update_rules import counts_steps


def tensors(session: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers; PyTorch alone counts a batch norm's batches, and nothing reads that here."""
    named = session.model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if not name.endswith("num_batches_tracked")}


def slots(session: Any) -> dict[str, torch.Tensor]:
    """The optimizer's slots by canonical name."""
    return dict(update.slots(session.optimizer, session.settings, session.model))


def scalars(session: Any) -> dict[str, np.ndarray]:
    """What the state holds beside tensors of a parameter."""
    scalars: dict[str, np.ndarray] = {}
    if counts_steps(session.settings):
        steps = update.steps(session.optimizer, session.settings, session.model)
        scalars["optimizer.step"] = np.array(int(steps[0]))
    if session.scaler.is_enabled():
        scaler = session.scaler.state_dict()
        scalars["optimizer.loss_scale"] = np.array(scaler["scale"], np.float64)
        scalars["optimizer.good_steps"] = np.array(scaler["_growth_tracker"], np.int64)
    return scalars


def load_scalars(session: Any, state: dict[str, np.ndarray]) -> None:
    """Set what `state` holds of them."""
    if "optimizer.step" in state:
        for count in update.steps(session.optimizer, session.settings, session.model):
            count.fill_(int(state["optimizer.step"]))
    if session.scaler.is_enabled() and "optimizer.loss_scale" in state:
        values = {"scale": float(state["optimizer.loss_scale"]), "_growth_tracker": int(state["optimizer.good_steps"])}
        session.scaler.load_state_dict(session.scaler.state_dict() | values)


def broadcast_state(session: Any, root_rank: int = 0) -> None:
    """The seam's."""
    # Not hvd.broadcast_optimizer_state: to make the slots it takes a step with zero gradients, and weight decay makes
    # that step move the weights.
    counts = {name: torch.from_numpy(value) for name, value in scalars(session).items()}
    broadcast_in_place(session.model.state_dict() | slots(session) | counts, root_rank)
    load_scalars(session, {name: value.numpy() for name, value in counts.items()})


def weights(session: Any) -> torch.Tensor:
    """The seam's."""
    return pytorch_tensors.join([parameter.detach() for parameter in _sorted(session)])


def set_weights(session: Any, weights: torch.Tensor) -> None:
    """The seam's."""
    parameters = _sorted(session)
    values = pytorch_tensors.part(weights, [parameter.shape for parameter in parameters])
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _sorted(session: Any) -> list[torch.nn.Parameter]:
    return [parameter for _, parameter in sorted(session.model.named_parameters())]


def state(session: Any) -> dict[str, np.ndarray]:
    """The seam's."""
    kept = tensors(session) | slots(session)
    return {name: np.array(tensor.detach().cpu()) for name, tensor in kept.items()} | scalars(session)


def load_state(session: Any, state: dict[str, np.ndarray]) -> None:
    """The seam's."""
    kept = tensors(session) | slots(session)
    check_fits({name: tuple(tensor.shape) for name, tensor in kept.items()}, state)
    with torch.no_grad():
        for name, tensor in kept.items():
            if name in state:
                tensor.copy_(torch.from_numpy(state[name]))
    load_scalars(session, state)
