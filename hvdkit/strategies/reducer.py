"""Averages tensors over all ranks by a compression method and a transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from hvdkit.core.tensors import Tensor
from hvdkit.recipe.communication import Compression
from hvdkit.strategies.codecs import Call, State, make
from hvdkit.strategies.codecs.base import OWN, QUERY
from hvdkit.strategies.transports import Ring

_STEP = "step"


class Reducer:
    """Averages tensors over all ranks by a compression method and a transport.

    All frameworks send the same data: tensors are in torchvision's layouts (`Session.state`) and sorted by name.
    `momentum` and `clip_norm` are those of the optimizer that takes the means; a method with momentum correction
    applies them in the optimizer's place. The training loop sets `epoch`.
    """

    def __init__(
        self,
        transport: Ring,
        compression: Compression,
        seed: int = 0,
        momentum: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        self.transport, self.compression, self.epoch = transport, compression, 0
        self._method, self._seed = make(compression, momentum, clip_norm), seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._state: State = {}
        self._step = 0
        self._loaded: dict[str, np.ndarray] = {}  # installed at the first call, which has the shapes and the dtype

    def packed(self, vector: Tensor, shapes: Mapping[str, tuple[int, ...]], scale: float | None = None) -> Tensor:
        """The mean of a vector (n,) over all ranks; collective.

        The vector is all tensors joined in the order of `shapes`, which are sorted by name. `scale` is the loss scale
        by which it is multiplied, and the mean too; None if there is none. With a scale, an infinity or NaN on any rank
        makes the whole mean NaN on all ranks, and the state does not change.
        """
        self._bind(vector, shapes)
        if scale is not None:
            vector = vector / scale
            if not self._finite_everywhere(vector):
                return vector * float("nan")
        call = Call(self.transport, self._shapes, self._step, self.epoch, self._seed)
        mean, self._state = self._method.reduce(call, vector, self._state)
        self._step += 1
        return mean if scale is None else mean * scale

    @contextmanager
    def peek(self) -> Iterator[None]:
        """A context in which calls do not change the state."""
        held = self._state, self._step, self.transport.sent, self._loaded
        try:
            yield
        finally:
            self._state, self._step, self.transport.sent, self._loaded = held

    def reset(self) -> None:
        """Discard the state of earlier calls."""
        self._state, self._loaded = {}, {}

    def state(self) -> dict[str, np.ndarray]:
        """The state that later calls depend on; collective, with the same result on every rank.

        It has `step`, and `SLOT.NAME` in the tensor's shape, with a first axis of ranks if each rank has its own.
        """
        if self._loaded:
            return dict(self._loaded)
        if not self._step:
            return {}
        adapter = self.transport.adapter
        arrays: dict[str, np.ndarray] = {_STEP: np.asarray(self._step, np.int64)}
        for key, tensor in self._state.items():
            slot = key.partition(".")[0]
            if slot == QUERY:
                arrays[key] = adapter.to_numpy(tensor)
                continue
            whole = adapter.to_numpy(tensor)[np.newaxis]
            if slot in OWN:
                ranks = adapter.allgather(adapter.from_numpy(whole), self.transport.data, name=f"reducer.state.{key}")
                whole = adapter.to_numpy(ranks)
            start = 0
            for name, shape in self._shapes.items():
                size = int(np.prod(shape))
                part = whole[:, start : start + size].reshape(len(whole), *shape)
                arrays[f"{slot}.{name}"] = part if slot in OWN else part[0]
                start += size
        return arrays

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a result of `state`, on any number of ranks; an empty one starts afresh.

        With the same number of ranks each rank gets its own slots back, bit by bit. Otherwise each gets the mean over
        the ranks, which keeps the mean of error-feedback residuals. Slots of other methods are ignored.
        """
        self._state, self._loaded = {}, dict(state)
        self._step = int(state.get(_STEP, 0))

    def _bind(self, vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = self._shapes or dict(shapes)
        if self._loaded:
            loaded, self._loaded = self._loaded, {}
            self._state = self._installed(loaded, self.transport.adapter.dtype(vector))

    def _installed(self, loaded: Mapping[str, np.ndarray], dtype: str) -> State:
        adapter, data = self.transport.adapter, self.transport.data
        state: State = {}
        for slot in sorted({key.partition(".")[0] for key in loaded} - {_STEP}):
            parts = []
            for name in self._shapes:
                part = loaded.get(f"{slot}.{name}")
                if slot == QUERY:
                    if part is not None:
                        state[f"{slot}.{name}"] = adapter.from_numpy(part.astype(dtype))
                    continue
                assert part is not None, f"{slot}.{name}"
                if slot in OWN:
                    part = part[data.index] if len(part) == data.size else part.mean(axis=0)
                parts.append(part.reshape(-1))
            if parts:
                state[slot] = adapter.from_numpy(np.concatenate(parts).astype(dtype))
        return state

    def _finite_everywhere(self, vector: Tensor) -> bool:
        adapter = self.transport.adapter
        with np.errstate(invalid="ignore"):  # infinity times 0, if the adapter computes with NumPy
            mine = float(np.isfinite(adapter.to_numpy(adapter.norm(vector * 0)).sum()))
        flag = adapter.from_numpy(np.array([mine], np.float32))
        (everywhere,) = adapter.allreduce([flag], self.transport.data, op="min", name="reducer.finite")
        return bool(adapter.to_numpy(everywhere)[0])
