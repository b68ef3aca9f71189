"""One of two ranks that prove a Horovod: `python collectives_proof.py MODULE`, with torch, tensorflow or mxnet.

Every collective of the framework's binding runs over the types that it reduces, on all ranks and on a process set, and
every element of the results is checked. All values are small integers, so that sums are exact in any order. A wrong
result ends the rank with status 1 and one line.

It is run as a file by Python 3.9 or later, with the framework, NumPy and Horovod, in any environment.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

RANKS = 2
# The framework's tensor from an array, and the array from a tensor. NumPy has no bfloat16: it is put from float32, and
# read as such.
ARRAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "torch": (
        lambda torch, array, dtype: torch.from_numpy(array.copy()).to(getattr(torch, dtype)),
        lambda torch, tensor: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(),
    ),
    "tensorflow": (
        lambda tf, array, dtype: tf.cast(tf.constant(array), dtype),
        lambda tf, tensor: (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy(),
    ),
    "mxnet": (lambda mx, array, dtype: mx.nd.array(array, dtype=dtype), lambda mx, tensor: tensor.asnumpy()),
}
REDUCED = ("float16", "float32", "float64", "int32", "int64")
BFLOAT16 = {"torch": ("bfloat16",), "tensorflow": ("bfloat16",)}
MOVED = ("uint8",)  # torch's binding reduces no bytes


class WrongResult(Exception):
    """A collective gave another result than expected."""


class Proof:
    """The collectives of one binding, `hvd`, checked on this rank."""

    def __init__(self, framework: Any, hvd: Any) -> None:
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        put, get = ARRAYS[framework.__name__]
        self._put = lambda array, dtype="float32": put(framework, array, dtype)
        self._get = lambda tensor: get(framework, tensor)
        self._reduced = REDUCED + BFLOAT16.get(framework.__name__, ())
        self._right = 0

    def check(self) -> int:
        """Run all collectives; returns how many results were right. Raises WrongResult."""
        for dtype in (*self._reduced, *MOVED):
            own = self._put(self._array(4, dtype, self.rank), dtype)
            every = [self._array(4, dtype, rank) for rank in range(self.size)]
            share = slice(2 * self.rank, 2 * self.rank + 2)
            if dtype in self._reduced:
                self._reduce(dtype, own, every, share)
            self._move(dtype, own, every, share)
        average = self.hvd.allreduce(self._put(np.full(3, 2 * self.rank, np.float32)), name="proof.mean")
        self._same("proof.mean", average, np.full(3, self.size - 1, np.float32))
        self._process_set()
        return self._right

    def _reduce(self, dtype: str, own: Any, every: list[np.ndarray], share: slice) -> None:
        hvd, total = self.hvd, np.sum(every, 0, dtype=every[0].dtype)
        results = {"sum": total, "min": np.minimum(*every), "max": np.maximum(*every), "product": np.prod(every, 0)}
        for op, wanted in results.items():
            name = f"proof.{dtype}.{op}"
            self._same(name, hvd.allreduce(own, op=getattr(hvd, op.capitalize()), name=name), wanted)
        for reduced in hvd.grouped_allreduce([own, own], op=hvd.Sum):
            self._same(f"proof.{dtype}.grouped", reduced, total)
        scattered = hvd.reducescatter(own, op=hvd.Sum, name=f"proof.{dtype}.scatter")
        self._same(f"proof.{dtype}.scatter", scattered, total[share])

    def _move(self, dtype: str, own: Any, every: list[np.ndarray], share: slice) -> None:
        hvd, name = self.hvd, f"proof.{dtype}"
        rows = self._put(self._array(self.rank + 1, dtype, self.rank), dtype)  # unequal lengths
        wanted = np.concatenate([self._array(rank + 1, dtype, rank) for rank in range(self.size)])
        self._same(f"{name}.gather", hvd.allgather(rows, name=f"{name}.gather"), wanted)
        self._same(f"{name}.broadcast", hvd.broadcast(own, self.size - 1, name=f"{name}.broadcast"), every[-1])
        dealt = hvd.alltoall(own, name=f"{name}.alltoall")
        dealt = dealt[0] if isinstance(dealt, (tuple, list)) else dealt
        self._same(f"{name}.alltoall", dealt, np.concatenate([array[share] for array in every]))

    def _process_set(self) -> None:
        """An allreduce on a set of one rank, which is not the global one."""
        one = self.hvd.add_process_set([0])
        if self.rank == 0:
            own = self._array(4, "float32", 0)
            alone = self.hvd.allreduce(self._put(own), op=self.hvd.Sum, name="proof.set", process_set=one)
            self._same("proof.set", alone, own)
        self.hvd.allreduce(self._put(np.zeros(1, np.float32)), name="proof.together")
        self.hvd.remove_process_set(one)

    @staticmethod
    def _array(rows: int, dtype: str, rank: int) -> np.ndarray:
        return (np.arange(3 * rows).reshape(rows, 3) % 5 + rank).astype("float32" if dtype == "bfloat16" else dtype)

    def _same(self, name: str, got: Any, wanted: Any) -> None:
        array, expected = self._get(got), np.asarray(wanted)
        if array.shape != expected.shape or not np.array_equal(array, expected):
            raise WrongResult(f"{name} on rank {self.rank} gave {array.tolist()}, expected {expected.tolist()}")
        self._right += 1


def main(module: str) -> int:
    """Prove the binding of `module` as one rank; returns the exit status."""
    framework, hvd = importlib.import_module(module), importlib.import_module(f"horovod.{module}")
    hvd.init()
    # Asked now: at the end the other rank may have left, and with it the memory.
    shared = getattr(getattr(hvd.rank, "__self__", None), "shared_memory_ranks", int)()
    if hvd.size() != RANKS:
        print(f"Horovod runs {hvd.size()} ranks, expected {RANKS}", file=sys.stderr)
        return 1
    try:
        count = Proof(framework, hvd).check()
    except WrongResult as error:
        print(f"{error}: this Horovod must not be used", file=sys.stderr, flush=True)
        return 1
    way = "memory that ranks share" if shared else "sockets"
    print(f"{module} {framework.__version__}: {count} results right on rank {hvd.rank()}, through {way}", flush=True)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
