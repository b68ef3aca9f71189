"""Tensor parallelism in MXNet: both functions of Megatron-LM, and cross-entropy of divided outputs.

Shoeybi et al. 2019, section 3. They are custom operators, which can be hybridized; MXNet's collectives of Horovod have
no gradients.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter
from hvdkit.heartbeat import first_line, hidden, say

_OPERATOR = "hvdkit_parts"
_uses: dict[str, tuple[Adapter, Group, str, bool]] = {}  # by key: also whether forward sums, or else backward


def use(adapter: Adapter, x: Any, group: Group, name: str, forward: bool) -> Any:
    """A symbol or an array: summed over ranks, with the identity as its gradient (g), or the other way round (f)."""
    key = f"{name}.{forward}.{'.'.join(map(str, group.ranks))}"
    _uses[key] = adapter, group, name, forward
    return (mx.sym if isinstance(x, mx.sym.Symbol) else mx.nd).Custom(x, key=key, op_type=_OPERATOR)


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):
    """What MXNet asks of the operator. An error in here ends the process."""

    def __init__(self, key: str) -> None:
        super().__init__(need_top_grad=True)
        self._key = key

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Operator:
        return _Operator(*_uses[self._key])


class _Operator(mx.operator.CustomOp):
    def __init__(self, adapter: Adapter, group: Group, name: str, forward: bool) -> None:
        super().__init__()
        self._adapter, self._group, self._name, self._forward = adapter, group, name, forward

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self._put(out_data[0], req[0], in_data[0], self._forward)

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        self._put(in_grad[0], req[0], out_grad[0], not self._forward)

    def _put(self, where: Any, req: Any, tensor: Any, here: bool) -> None:
        """Put the tensor there, or its sum over the ranks if they are to be added up `here`."""
        try:
            if here:
                (tensor,) = self._adapter.allreduce([tensor], self._group, "sum", self._name)
            self.assign(where, req, tensor)
        except Exception as error:  # MXNet says that an operator has failed, and not why
            why = f"{type(error).__name__}: {first_line(error)}"
            say(f"rank {self._group.ranks[self._group.index]}: {self._name}: {why}")
            hidden.append(error)
            raise


class DividedOutputs:
    """Outputs (…, classes) of which each rank of a group has those from class `start` on; labels are the whole's."""

    def __init__(self, adapter: Adapter, group: Group, start: int, classes: int) -> None:
        self._adapter, self._group, self._start, self._classes = adapter, group, start, classes

    def losses(self, logits: mx.nd.NDArray, labels: mx.nd.NDArray, smoothing: float = 0.0) -> mx.nd.NDArray:
        """The cross-entropy of each label, the same on all ranks; collective.

        The largest logit, which keeps exponentials finite, and three sums over the classes come from all ranks.
        """
        with mx.autograd.pause():
            largest = logits.max(axis=-1, keepdims=True)
            (top,) = self._adapter.allreduce([largest], self._group, "max", "tensor.loss.largest")
            # A row of zeros for another rank's label.
            hot = mx.nd.one_hot(labels - self._start, logits.shape[-1], dtype=logits.dtype)
        logits = mx.nd.broadcast_sub(logits, top)
        sums = [values.sum(axis=-1) for values in (logits.exp(), logits * hot, logits)]
        total, label, every = self._adapter.leave_parts(mx.nd.stack(*sums), self._group, "tensor.loss.sums")
        return total.log() - (1 - smoothing) * label - smoothing / self._classes * every

    def whole(self, logits: mx.nd.NDArray) -> mx.nd.NDArray:
        """The outputs of all ranks; collective."""
        rows = logits.reshape((-1, logits.shape[-1])).T
        return self._adapter.allgather(rows, self._group, "tensor.outputs").T.reshape((*logits.shape[:-1], -1))
