"""Collectives drawn at random, each compared with what NumPy makes of all ranks' inputs:

    drawn_collectives.py FRAMEWORK SEED ROUNDS MOST_BYTES

Each round starts up to six of them at once: any kind, type, reduction and length, grouped or in place, in the world or
in a process set. PyTorch's ranks start them in orders of their own. In some rounds one rank has another shape or type,
and all of the set must be told. Between rounds ranks may come late, process sets come and go, and Horovod starts anew.
Values are small whole numbers, so that each sum is exact in each type. Prints a digest of all that came.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FLOATS, WHOLE = ("float16", "bfloat16", "float32", "float64"), ("uint8", "int8", "int32", "int64")
EDGES = (0, 1, 16_384, 524_288)  # bytes at which shared memory goes another way
KINDS = ("allreduce", "allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
FOLDS: dict[str, Callable[..., np.ndarray]] = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}


@dataclass
class Drawn:
    """A collective, and the input of each of its ranks: for each tensor of a group an array of small numbers."""

    kind: str
    name: str
    members: list[int]
    process_set: Any
    dtype: str
    op: str = "Sum"
    before: float = 1.0
    after: float = 1.0
    grouped: bool = False
    in_place: bool = False
    root: int = 0
    odd: tuple[int, str] = (-1, "")  # the rank that differs, and in what
    inputs: dict[int, list[np.ndarray]] = field(default_factory=dict)
    splits: dict[int, list[int]] = field(default_factory=dict)

    @property
    def adds(self) -> bool:
        return self.kind in ("allreduce", "reducescatter")

    def dtype_of(self, rank: int) -> str:
        return self.odd[1] if self.odd[0] == rank and self.odd[1] != "shape" else self.dtype

    def words(self, hvd: Any) -> dict[str, Any]:
        """The arguments that all front ends call alike."""
        words: dict[str, Any] = {"name": self.name, "process_set": self.process_set}
        if self.adds:
            words |= {"op": getattr(hvd, self.op), "prescale_factor": self.before, "postscale_factor": self.after}
        if self.kind == "broadcast":
            words["root_rank"] = self.root
        return words

    def expected(self, rank: int) -> list[np.ndarray]:
        """What that rank is to have."""
        place = self.members.index(rank)
        if self.kind == "broadcast":
            return self.inputs[self.root]
        if self.kind == "alltoall":
            cuts = [np.split(self.inputs[of][0], np.cumsum(self.splits[of])[:-1])[place] for of in self.members]
            return [np.concatenate(cuts)]
        all_parts = zip(*(self.inputs[of] for of in self.members), strict=True)
        return [self._made(parts, place) for parts in all_parts]

    def _made(self, parts: tuple[np.ndarray, ...], place: int) -> np.ndarray:
        if self.kind == "allgather":
            return np.concatenate(parts)
        total, fold = parts[0].astype(np.uint16), FOLDS.get(self.op, np.add)
        for part in parts[1:]:
            fold(total, part, out=total)
        if self.kind == "reducescatter":
            total = np.array_split(total, len(parts))[place]
        factor = self.before * self.after / (len(parts) if self.op == "Average" else 1)
        return total if factor == 1 else total * factor


def draw(chance: random.Random, name: str, among: tuple[list[int], Any], front: Front, most: int) -> Drawn:
    """A collective, the same one on all ranks."""
    kind = chance.choice(KINDS)
    dtypes = (*front.added, *({"allreduce": front.summed, "reducescatter": ()}.get(kind, front.moved)))
    new = Drawn(kind, name, *among, chance.choice(dtypes), root=chance.choice(among[0]))
    new.in_place = kind in front.in_place and chance.random() < 0.4
    new.grouped = kind in ("allreduce", "allgather", "reducescatter") and chance.random() < 0.4
    if new.adds:
        real, reduces = new.dtype in FLOATS, kind == "allreduce"
        new.op = chance.choice(("Sum", *["Average"] * real, *["Min", "Max", "Product"] * reduces))
        if real and new.op in ("Sum", "Average") and chance.random() < 0.3:
            new.before, new.after = chance.choice((0.5, 2.0)), chance.choice((0.25, 1.0))
    element = int(new.dtype.lstrip("abdefilnotu") or 8) // 8  # its bytes
    for _ in range(chance.randint(1, 5) if new.grouped else 1):
        width = chance.choice(((), (1,), (3,), (2, 2)))
        if chance.random() < 0.4:
            longest = chance.choice(EDGES) // element + chance.choice((-1, 0, 1))
        elif chance.random() < 0.1 and not new.grouped:
            longest = most // element
        else:
            longest = int(np.exp(chance.uniform(0, np.log(most / element))))
        longest = max(0, longest) // int(np.prod(width))
        for rank in new.members:
            rows = longest
            if kind in ("allgather", "alltoall"):
                rows = chance.choice((0, longest, chance.randint(0, longest)))
            # A prime period: what lies in a wrong place is seen.
            block = np.random.default_rng([longest, rank]).integers(0, 2 if new.dtype == "bool" else 3, 65_521)
            whole = np.resize(block.astype(np.uint8), (rows, *width))
            new.inputs.setdefault(rank, []).append(whole)
    if kind == "alltoall":
        for rank in new.members:
            rows = len(new.inputs[rank][0])
            cuts = sorted(chance.randint(0, rows) for _ in new.members[1:])
            new.splits[rank] = np.diff([0, *cuts, rows]).tolist()
    return new


class Front:
    """A front end; one whose calls return when they are done."""

    added: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()  # by an allreduce, beside these
    moved: tuple[str, ...] = ()  # by others
    in_place: tuple[str, ...] = ()
    own_order = joins = False

    def __init__(self, name: str) -> None:
        self.library, self.hvd = importlib.import_module(name), importlib.import_module(f"horovod.{name}")

    def begin(self, drawn: Drawn, tensors: list[Any]) -> Callable[[], Any]:
        function = getattr(self.hvd, f"{'grouped_' * drawn.grouped}{drawn.kind}{'_' * drawn.in_place}")
        more = [drawn.splits[self.hvd.rank()]] if drawn.kind == "alltoall" else []
        words = drawn.words(self.hvd)
        if "name" not in inspect.signature(function).parameters:
            del words["name"]
        come = function(tensors if drawn.grouped else tensors[0], *more, **words)
        return lambda: come

    def run(self, all_drawn: list[Drawn], tensors: list[list[Any]]) -> list[Any]:
        """What each gives, or the error that it raises."""
        order = list(range(len(all_drawn)))
        if self.own_order:
            random.shuffle(order)
        results: list[Any] = [None] * len(all_drawn)
        begun = {}
        for at in order:
            try:
                begun[at] = self.begin(all_drawn[at], tensors[at])
            except Exception as error:
                results[at] = error
        for at, done in begun.items():
            try:
                results[at] = self.arrays(all_drawn[at], done())
            except Exception as error:
                results[at] = error
        return results

    def arrays(self, drawn: Drawn, come: Any) -> list[np.ndarray]:
        come = come[:1] if drawn.kind == "alltoall" else come if drawn.grouped else [come]
        return [self.array(each) for each in come]

    def tensor(self, array: np.ndarray, dtype: str) -> Any:
        raise NotImplementedError

    def array(self, tensor: Any) -> np.ndarray:
        raise NotImplementedError


class PyTorch(Front):
    added, moved = ("int32", "int64", *FLOATS), ("uint8", "int8", "int16")
    in_place, own_order, joins = ("allreduce", "broadcast"), True, True

    def begin(self, drawn: Drawn, tensors: list[Any]) -> Callable[[], Any]:
        name = f"{'grouped_' * drawn.grouped}{drawn.kind}_async{'_' * drawn.in_place}"
        more = []
        if drawn.kind == "alltoall":
            more = [self.library.tensor(drawn.splits[self.hvd.rank()], dtype=self.library.int32)]
        given = tensors if drawn.grouped else tensors[0]
        handle = getattr(self.hvd, name)(given, *more, **drawn.words(self.hvd))
        return lambda: self.hvd.synchronize(handle)

    def tensor(self, array: np.ndarray, dtype: str) -> Any:
        return self.library.from_numpy(array.copy()).to(getattr(self.library, dtype))

    def array(self, tensor: Any) -> np.ndarray:
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


class TensorFlow(Front):
    """All of a round in one function, whose operations start in any order."""

    added, moved, joins = ("int32", "int64", *FLOATS), ("uint8", "int8", "uint16", "int16", "bool"), True
    summed = ("uint8", "int8")

    def run(self, all_drawn: list[Drawn], tensors: list[list[Any]]) -> list[Any]:
        tf, begin = self.library, super().begin

        @tf.function(jit_compile=False)
        def all_at_once(given: list[list[Any]]) -> list[Any]:
            return [begin(drawn, mine)() for drawn, mine in zip(all_drawn, given, strict=True)]

        try:
            results = all_at_once(tensors)
        except Exception as error:
            return [error] * len(all_drawn)
        return [self.arrays(drawn, come) for drawn, come in zip(all_drawn, results, strict=True)]

    def tensor(self, array: np.ndarray, dtype: str) -> Any:
        return self.library.cast(self.library.constant(array), dtype)

    def array(self, tensor: Any) -> np.ndarray:
        return (self.library.cast(tensor, "float64") if tensor.dtype.is_floating else tensor).numpy()


class MXNet(Front):
    added, in_place = (*WHOLE, "float16", "float32", "float64"), ("allreduce", "broadcast")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.library.util.set_np_shape(True)  # empty tensors

    def tensor(self, array: np.ndarray, dtype: str) -> Any:
        return self.library.nd.array(array, dtype=dtype)

    def array(self, tensor: Any) -> np.ndarray:
        return tensor.asnumpy()


FRONTS = {"pytorch": ("torch", PyTorch), "tensorflow": ("tensorflow", TensorFlow), "mxnet": ("mxnet", MXNet)}


def made_odd(drawn: Drawn, chance: random.Random) -> None:
    """Has one rank come with another shape, or type."""
    rank = chance.choice(drawn.members)
    if len(drawn.members) == 1:
        return
    if drawn.grouped or chance.random() < 0.5:
        drawn.odd, at = (rank, "shape"), chance.randrange(len(drawn.inputs[rank]))
        drawn.inputs[rank][at] = drawn.inputs[rank][at][..., None]
    else:
        drawn.odd = (rank, "float64" if drawn.dtype != "float64" else "float32")


def check(drawn: Drawn, come: Any, rank: int) -> bytes:
    """A digest of what came. Raises AssertionError where it is not what NumPy has, or an error that was due."""
    what = f"{drawn.kind} {drawn.name}, {drawn.dtype} {drawn.op}, grouped {drawn.grouped}, in place {drawn.in_place}"
    if drawn.odd[0] >= 0:
        assert isinstance(come, Exception) and "ismatched" in str(come), (what, drawn.odd, come)
        return b"told"
    assert not isinstance(come, Exception), (what, come)
    digest = hashlib.sha256()
    for got, wanted in zip(come, drawn.expected(rank), strict=True):
        assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
        if drawn.op == "Average":
            assert np.allclose(got, wanted, 1e-2 if "16" in drawn.dtype else 1e-6), what
        else:
            wrong = np.flatnonzero(got != wanted)
            assert not wrong.size, (what, wanted.shape, wrong[:3], got.ravel()[wrong[:3]], wanted.ravel()[wrong[:3]])
        digest.update(got.tobytes())
    return digest.digest()


def main(framework: str, seed: str, rounds: str, most: str) -> None:
    name, kind = FRONTS[framework]
    front, chance, total = kind(name), random.Random(seed), hashlib.sha256()
    hvd = front.hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert hvd.mpi_ops._basics.shared_memory_ranks() or "sockets" in sys.argv, "no memory is shared"
    everyone = (list(range(size)), hvd.global_process_set)

    def meet() -> None:
        front.array(hvd.allreduce(front.tensor(np.ones(1), "float32"), name="meet"))  # who leaves early ends the others

    sets = [everyone]
    for turn in range(int(rounds)):
        odd = chance.random() < 0.15
        count = 1 if odd and framework != "pytorch" else chance.randint(1, 6)
        all_drawn = [draw(chance, f"drawn.{number}", chance.choice(sets), front, int(most)) for number in range(count)]
        if odd:
            made_odd(all_drawn[0], chance)
        late = chance.random() < 0.1, chance.randrange(size)
        if late == (True, rank):
            time.sleep(0.3)
        mine = [drawn for drawn in all_drawn if rank in drawn.members]
        tensors = [[front.tensor(each, drawn.dtype_of(rank)) for each in drawn.inputs[rank]] for drawn in mine]
        for drawn, come in zip(mine, front.run(mine, tensors) if mine else [], strict=True):
            total.update(check(drawn, come, rank))
        print(f"round {turn}: {len(mine)}", flush=True)
        what = chance.random()
        if what < 0.1 and size > 2 and len(sets) < 4:
            members = sorted(chance.sample(range(size), chance.randint(1, size - 1)))
            if members not in [among for among, _ in sets]:
                sets.append((members, hvd.add_process_set(members)))
        elif what < 0.15 and len(sets) > 1:
            assert hvd.remove_process_set(sets.pop()[1])
        elif what < 0.2:
            meet()
            hvd.shutdown()
            hvd.init()
            sets = [everyone]
    if front.joins:  # the first rank has less to do than the others
        for turn in range(3 * rank):
            there = sum(3 * of > turn for of in range(size))
            come = hvd.allreduce(front.tensor(np.ones(200_000), "float32"), op=hvd.Sum, name=f"late.{turn}")
            assert (front.array(come) == there).all(), turn
        hvd.join()
    meet()
    print("digest", total.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:5])
