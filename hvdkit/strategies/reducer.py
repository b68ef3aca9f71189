"""What stands between gradients and their mean where more is to be done than Horovod's own reduction does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdkit.recipe.communication import Compression
from hvdkit.strategies.codecs import Call, State, make
from hvdkit.strategies.codecs.base import OWN, QUERY
from hvdkit.strategies.transports import Ring

Tensor = Any
_STEP = "step"


class Reducer:
    """Makes means over all ranks of named tensors by a method of compression and a transport.

    Names, layouts and so all that is sent are the same in every framework: tensors are in torchvision's layouts
    (`Adapter.state`), and go in the order of their names. `momentum` and `clip_norm` are of the optimizer that takes
    the means; a method with momentum correction does their work. `epoch` is set by the loop.
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
        self._loaded: dict[str, np.ndarray] = {}  # waits for the first call, which tells shapes and dtype

    def __call__(self, tensors: Mapping[str, Tensor], scale: float | None = None) -> dict[str, Tensor]:
        """The means by name; collective.

        `scale` is a factor that the tensors have and the means will have too, None where there is none. With one, an
        infinity or NaN on any rank makes all means NaN on all ranks, and is not kept.
        """
        ops = self.transport.adapter.tensors
        shapes = self._shapes or {name: tuple(int(size) for size in tensors[name].shape) for name in sorted(tensors)}
        mean = self.packed(ops.join([tensors[name] for name in shapes]), shapes, scale)
        return dict(zip(shapes, ops.part(mean, list(shapes.values())), strict=True))

    def packed(self, vector: Tensor, shapes: Mapping[str, tuple[int, ...]], scale: float | None = None) -> Tensor:
        """As `__call__`, of all tensors as one vector: one behind the other in the order of `shapes`, by name."""
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
        """What is called inside leaves no trace."""
        held = self._state, self._step, self.transport.sent, self._loaded
        try:
            yield
        finally:
            self._state, self._step, self.transport.sent, self._loaded = held

    def reset(self) -> None:
        """Forget what is left of earlier calls."""
        self._state, self._loaded = {}, {}

    def state(self) -> dict[str, np.ndarray]:
        """All that a later call depends on; collective, and the same on every rank.

        `step`; `SLOT.NAME` in the tensor's shape; where each rank has its own, with an axis of ranks before it.
        """
        if self._loaded:
            return dict(self._loaded)
        if not self._step:
            return {}
        adapter = self.transport.adapter
        found: dict[str, np.ndarray] = {_STEP: np.asarray(self._step, np.int64)}
        for key, tensor in self._state.items():
            slot = key.partition(".")[0]
            if slot == QUERY:
                found[key] = adapter.to_numpy(tensor)
                continue
            whole = adapter.to_numpy(tensor)[np.newaxis]
            if slot in OWN:
                ranks = adapter.allgather(adapter.from_numpy(whole), name=f"reducer.state.{key}")
                whole = adapter.to_numpy(ranks)
            start = 0
            for name, shape in self._shapes.items():
                size = int(np.prod(shape))
                part = whole[:, start : start + size].reshape(-1, *shape)
                found[f"{slot}.{name}"] = part if slot in OWN else part[0]
                start += size
        return found

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` has returned, on any number of ranks; an empty one is a beginning.

        As many ranks as there were each get their own back, bit by bit. Otherwise each gets the ranks' mean: so nothing
        is lost of what was still owed to the mean. What belongs to another method is left out.
        """
        self._state, self._loaded = {}, dict(state)
        self._step = int(state.get(_STEP, 0))

    def _bind(self, vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = self._shapes or dict(shapes)
        if self._loaded:
            loaded, self._loaded = self._loaded, {}
            self._state = self._installed(loaded, self.transport.adapter.dtype(vector))

    def _installed(self, loaded: Mapping[str, np.ndarray], dtype: str) -> State:
        adapter, topology = self.transport.adapter, self.transport.topology
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
                    part = part[topology.rank] if len(part) == topology.size else part.mean(axis=0)
                parts.append(part.reshape(-1))
            if parts:
                state[slot] = adapter.from_numpy(np.concatenate(parts).astype(dtype))
        return state

    def _finite_everywhere(self, vector: Tensor) -> bool:
        adapter = self.transport.adapter
        with np.errstate(invalid="ignore"):  # infinity times 0, where NumPy computes
            mine = float(np.isfinite(adapter.to_numpy(adapter.tensors.norm(vector * 0)).sum()))
        flag = adapter.from_numpy(np.array([mine], np.float32))
        return bool(adapter.to_numpy(adapter.allreduce([flag], op="min", name="reducer.finite")[0])[0])
