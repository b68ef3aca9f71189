"""What `hvdkit.adapters.mxnet` keeps of a session, by canonical name, and how it is told, set and shared."""

from __future__ import annotations

from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np

from hvdkit.adapters.mxnet import tensors as mxnet_tensors
from hvdkit.core.state import canonical_name, check_fits, slot_name
from hvdkit.core.update_rules import counts_steps, slot_names


def parameters(session: Any) -> dict[str, mx.gluon.Parameter]:
    """By canonical name; Gluon's own names depend on how many networks a process has made."""
    named = session.model._collect_params_with_prefix()
    return {canonical_name(name): parameter for name, parameter in named.items()}


def trained(session: Any) -> dict[str, mx.gluon.Parameter]:
    """Those that learn."""
    return {name: one for name, one in parameters(session).items() if one.grad_req != "null"}


def slots(session: Any) -> dict[str, mx.nd.NDArray]:
    """The optimizer's slots by canonical name."""
    return {
        slot_name(slot, name): tensor
        for name, parameter in trained(session).items()
        for slot, tensor in zip(slot_names(session.settings), session.optimizer.slots(parameter), strict=True)
    }


def tensors(session: Any) -> dict[str, mx.nd.NDArray]:
    """Parameters, buffers and slots."""
    return {name: parameter.data() for name, parameter in parameters(session).items()} | slots(session)


def gradients(session: Any) -> dict[str, np.ndarray]:
    """As arrays."""
    return {name: np.asarray(parameter.grad().asnumpy()) for name, parameter in trained(session).items()}


def broadcast_state(session: Any, root_rank: int = 0) -> None:
    """The seam's."""
    hvd.broadcast_parameters(tensors(session), root_rank=root_rank)
    session.optimizer.steps = hvd.broadcast_object(session.optimizer.steps, root_rank, name="steps")


def weights(session: Any) -> mx.nd.NDArray:
    """The seam's."""
    return mxnet_tensors.join([parameter.data() for _, parameter in sorted(trained(session).items())])


def set_weights(session: Any, weights: mx.nd.NDArray) -> None:
    """The seam's."""
    kept = [parameter.data() for _, parameter in sorted(trained(session).items())]
    for tensor, value in zip(kept, mxnet_tensors.part(weights, [tensor.shape for tensor in kept]), strict=True):
        tensor[:] = value


def state(session: Any) -> dict[str, np.ndarray]:
    """The seam's."""
    values = {name: np.asarray(tensor.asnumpy()) for name, tensor in tensors(session).items()}
    if counts_steps(session.settings):
        values["optimizer.step"] = np.array(session.optimizer.steps, np.int64)
    return values


def load_state(session: Any, state: dict[str, np.ndarray]) -> None:
    """The seam's."""
    kept = tensors(session)
    check_fits({name: tensor.shape for name, tensor in kept.items()}, state)
    for name, tensor in kept.items():
        if name in state:
            array = state[name].astype(tensor.dtype)
            tensor[:] = mx.nd.array(array, ctx=tensor.context, dtype=array.dtype)
    session.optimizer.steps = int(state.get("optimizer.step", session.optimizer.steps))
