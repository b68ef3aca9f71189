"""What `hvdkit.adapters.tensorflow` and `keras` keep of a session, by canonical name: told, set and shared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.core.precision import LOSS_SCALING, PRECISIONS
from hvdkit.core.state import check_distinct, check_fits, from_canonical, slot_name, to_canonical
from hvdkit.core.update_rules import counts_steps, slot_names
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Optimizer


class Kept:
    """A network's variables, and those that its optimizer needs beside them.

    `network` are the former by canonical name, `trained` those of them that learn, in the order in which gradients
    come, `slots` the optimizer's by the latter's names, and `scalars` its counts, by their names in a state. All but
    the network's are made here, in float64 where they are no tensor of a parameter. Raises RequestError where two
    variables share a name, or where those that learn are not in the dtype of `precision`.
    """

    def __init__(
        self, variables: list[tuple[str, tf.Variable]], trained: list[str], settings: Optimizer, precision: str
    ) -> None:
        check_distinct([name for name, _ in variables])
        self.network = dict(variables)
        self.trained = {name: self.network[name] for name in trained}
        _check_dtypes(self.trained, precision)
        self._settings = settings
        self.slots = {
            name: tuple(tf.Variable(tf.zeros_like(variable), trainable=False) for _ in slot_names(settings))
            for name, variable in self.trained.items()
        }
        self.scalars: dict[str, tf.Variable] = {}
        if counts_steps(settings):
            self.scalars["optimizer.step"] = scalar(0, tf.int64)
        if PRECISIONS[precision].scales_loss:
            self.scalars["optimizer.loss_scale"] = scalar(LOSS_SCALING.initial, tf.float64)
            self.scalars["optimizer.good_steps"] = scalar(0, tf.int64)

    def broadcast(self, root_rank: int) -> None:
        """Give every rank the root's network, slots and counts."""
        variables = [*self._tensors().values(), *self.scalars.values()]
        hvd.broadcast_variables(variables, root_rank=root_rank)

    @tf.function(autograph=False)
    def weights(self) -> tf.Tensor:
        """The seam's `weights`."""
        return self.packed(self.trained)

    @tf.function(autograph=False)
    def set_weights(self, weights: tf.Tensor) -> None:
        """The seam's `set_weights`."""
        for name, value in self.unpacked(weights).items():
            self.trained[name].assign(value)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those that learn, sorted by name, in the layouts of a state."""
        return {name: _turned_shape(tuple(self.trained[name].shape)) for name in sorted(self.trained)}

    def packed(self, tensors: Mapping[str, Any]) -> tf.Tensor:
        """Tensors of those that learn, such as gradients, as one vector, as `Adapter.weights` has it. For a graph."""
        turned = [_turned(tf.convert_to_tensor(tensors[name])) for name in self.shapes]
        return tf.concat([tf.reshape(tensor, (-1,)) for tensor in turned], 0)

    def unpacked(self, vector: tf.Tensor) -> dict[str, tf.Tensor]:
        """The inverse of `packed`."""
        shapes = self.shapes
        parts = tf.split(vector, [math.prod(shape) for shape in shapes.values()])
        named = zip(shapes.items(), parts, strict=True)
        return {name: _turned_back(tf.reshape(part, shape)) for (name, shape), part in named}

    def state(self) -> dict[str, np.ndarray]:
        """The seam's `state`."""
        scalars = {name: np.array(variable.numpy()) for name, variable in self.scalars.items()}
        return {name: to_canonical(variable.numpy()) for name, variable in self._tensors().items()} | scalars

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """The seam's `load_state`."""
        named = self._tensors()
        check_fits({name: _turned_shape(tuple(variable.shape)) for name, variable in named.items()}, state)
        for name, variable in named.items():
            if name in state:
                variable.assign(from_canonical(state[name]).astype(variable.dtype.as_numpy_dtype))
        for name, variable in self.scalars.items():
            if name in state:
                variable.assign(state[name])

    def _tensors(self) -> dict[str, tf.Variable]:
        """The network's and the slots, by their names in a state."""
        return self.network | {
            slot_name(slot, name): variable
            for name, slots in self.slots.items()
            for slot, variable in zip(slot_names(self._settings), slots, strict=True)
        }


def scalar(value: float, dtype: tf.DType) -> tf.Variable:
    """A variable without dimensions that gradients know nothing of."""
    return tf.Variable(value, trainable=False, dtype=dtype)


def _turned(tensor: tf.Tensor) -> tf.Tensor:
    """`hvdkit.core.state.to_canonical`, of a tensor."""
    return tf.transpose(tensor, {4: (3, 2, 0, 1), 2: (1, 0)}[tensor.ndim]) if tensor.ndim in (2, 4) else tensor


def _turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return to_canonical(np.empty(shape, bool)).shape


def _turned_back(tensor: tf.Tensor) -> tf.Tensor:
    """`hvdkit.core.state.from_canonical`, of a tensor."""
    return tf.transpose(tensor, {4: (2, 3, 1, 0), 2: (1, 0)}[tensor.ndim]) if tensor.ndim in (2, 4) else tensor


def _check_dtypes(trained: dict[str, tf.Variable], precision: str) -> None:
    """Check that the network has been built for `precision`. Raises RequestError naming a variable that has not."""
    wanted = PRECISIONS[precision].parameters
    for name, variable in trained.items():
        if variable.dtype.name != wanted:
            raise RequestError(
                f"precision: {precision} expects a network whose variables are {wanted}, got {variable.dtype.name} in "
                f"{name}; build the network in {wanted} or choose another precision"
            )
