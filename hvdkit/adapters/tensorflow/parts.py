"""Tensor parallelism in TensorFlow: both functions of Megatron-LM, and cross-entropy of divided outputs.

Shoeybi et al. 2019, section 3. Gradients of Horovod's own functions do not serve: that of a sum is a sum again.
"""

from __future__ import annotations

import tensorflow as tf

from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter


def use(adapter: Adapter, x: tf.Tensor, group: Group, name: str, forward: bool) -> tf.Tensor:
    """A tensor summed over ranks, with the identity as its gradient (g), or the other way round (f)."""

    def summed(tensor: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(adapter.allreduce([tensor], group, "sum", name)[0], tensor.shape)

    here, back = (summed, tf.identity) if forward else (tf.identity, summed)
    return tf.custom_gradient(lambda x: (here(x), back))(x)


class DividedOutputs:
    """Outputs (…, classes) of which each rank of a group has those from class `start` on; labels are the whole's."""

    def __init__(self, adapter: Adapter, group: Group, start: int, classes: int) -> None:
        self._adapter, self._group, self._start, self._classes = adapter, group, start, classes

    def losses(self, logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0) -> tf.Tensor:
        """The cross-entropy of each label, the same on all ranks; collective.

        The largest logit, which keeps exponentials finite, and three sums over the classes come from all ranks.
        """
        largest = tf.stop_gradient(tf.reduce_max(logits, -1))
        (top,) = self._adapter.allreduce([largest], self._group, "max", "tensor.loss.largest")
        logits = logits - tf.stop_gradient(top)[..., None]
        hot = tf.one_hot(labels - self._start, logits.shape[-1], dtype=logits.dtype)  # zeros for another rank's label
        sums = [tf.reduce_sum(each, -1) for each in (tf.exp(logits), logits * hot, logits)]
        total, label, every = tf.unstack(self._adapter.leave_parts(tf.stack(sums), self._group, "tensor.loss.sums"))
        return tf.math.log(total) - (1 - label_smoothing) * label - label_smoothing / self._classes * every

    def whole(self, logits: tf.Tensor) -> tf.Tensor:
        """The outputs of all ranks; collective."""
        rows = tf.transpose(tf.reshape(logits, [-1, logits.shape[-1]]))
        every = self._adapter.allgather(rows, self._group, "tensor.outputs")
        return tf.reshape(tf.transpose(every), [*tf.unstack(tf.shape(logits)[:-1]), self._classes])
