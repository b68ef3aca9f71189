"""What `hvdkit.adapters.mxnet` keeps of a session, by canonical name."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from hvdkit.core.optimizer import slot_names
from hvdkit.core.state import canonical_name, slot_name


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
