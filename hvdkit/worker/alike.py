"""Whether all ranks have the same samples and the same model, compared before the first step in one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from operator import ne
from typing import Any

import numpy as np

from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.data.dataset import Fingerprint, own_share
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import OwnData, OwnModel
from hvdkit.worker.setup import Setup

# Of outputs, relative, by the dtype that the model computes in: processors of another kind round otherwise.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1, "float16": 3e-2}
_WEIGHTS = 1e-4  # of initial weights, relative: as drawn by another processor
_PROJECTIONS, _MOST = 8, 2**14  # of an array, and the most of its elements that are taken
Views = dict[str, Any]  # what a rank has, by what is compared
_FILES = "give all hosts the same files"
_DRAW = (
    "draw random numbers only from the generators of Python, NumPy (np.random.…) or the framework, which hvdkit seeds "
    "alike, or with a fixed seed (np.random.default_rng(1))"
)


def check(
    setup: Setup,
    session: Session,
    weights: str,
    outputs: Sequence[np.ndarray] = (),
    held: bool = False,
    warnings: Sequence[str] = (),
) -> list[str]:
    """Compare this rank with the others, of which there are some; collective. Returns the `warnings` of rank 0.

    `weights` is the digest of its parameters and buffers (`core.state.digest`), `outputs` are those of the model in
    evaluation mode on the first samples, if they have been computed. `held` says that the rank has a state in memory,
    from which training continues on all ranks. Raises RequestError, the same on every rank, with what differs first.
    """
    dataset = setup.dataset
    unsaved = {} if session.stages else session.trainable.transient  # other ones on each stage
    mine = {
        "data": {name: asdict(own) for name, own in (dataset.fingerprints or {}).items()},
        "text": dataset.text_sha256,
        "weights": weights,
        "unsaved": {name: _sketch(name, session.array(own)) for name, own in unsaved.items()},
        "outputs": [_projected(own) for own in outputs if own_share(dataset.val) is dataset.val],
        "held": held,
        "warnings": list(warnings),
    }
    everyone = setup.adapter.allgather_object(mine, setup.mesh.world, name="alike")
    fault = _of_data(setup, everyone)
    if fault is None and not any(rank["held"] for rank in everyone):
        fault = _of_model(setup, session, everyone)
    if fault:
        raise RequestError(fault)
    lines: list[str] = everyone[0]["warnings"]
    return lines


def _of_data(setup: Setup, everyone: Sequence[Views]) -> str | None:
    data, own = setup.recipe.data, isinstance(setup.recipe.data, OwnData)
    where = "samples" if own else "data.path" if getattr(data, "path", None) else "data"
    remedy, drawn = _FILES, ""
    if own:
        remedy = (
            "give all ranks the whole data, hvdkit shares it out; if each rank loads a share, give data.shares=true"
        )
        drawn = f"; {_DRAW}"
    if ranks := _differing([rank["text"] for rank in everyone]):
        return (
            f"{where}: expected the same text on all ranks, got another one on {_named(ranks)} than on rank 0; {remedy}"
        )
    for name, what in (("train", "training"), ("val", "validation")):
        fingerprints = [Fingerprint(**rank["data"][name]) for rank in everyone if name in rank["data"]]
        others = enumerate(own.other(fingerprints[0]) for own in fingerprints)
        kinds = {rank: kind for rank, kind in others if kind}
        if not kinds:
            continue
        kind = "number" if "number" in kinds.values() else min(kinds.values())
        ranks = [rank for rank, other in kinds.items() if other == kind]
        expected, samples = "the same samples", fingerprints[0].samples
        got = f"other {kind} of the {samples} {what} samples on {_named(ranks)} than on rank 0"
        if kind == "number":
            expected = f"as many {what} samples"
            got = f"{samples} on rank 0 and {fingerprints[ranks[0]].samples} on {_named(ranks)}"
        return f"{where}: expected {expected} on all ranks, got {got}; {remedy}{drawn}"
    return None


def _of_model(setup: Setup, session: Session, everyone: Sequence[Views]) -> str | None:
    own = isinstance(setup.recipe.model, OwnModel)
    remedy = f"{_DRAW}, and make the model of nothing that only one rank has" if own else _FILES

    def fault(what: str, got: str, ranks: Iterable[int], more: str = "") -> str:
        return f"model: expected the same {what}, got {got} on {_named(ranks)} than on rank 0{more}; {remedy}"

    if ranks := _differing([rank["weights"] for rank in everyone]):
        pieces = session.update.partition.stored.partition.pieces.values()
        if any(piece.divided_over(setup.mesh.data) for piece in pieces):  # shared out, and all of them are rank 0's now
            return fault("weights on all ranks", "others", ranks)
        mine = {name: _sketch(name, array) for name, array in session.model_arrays()}
        tensors = setup.adapter.allgather_object(mine, setup.mesh.world, name="alike.tensors")
        if first := _first_other(tensors):  # else they differ in last bits alone, and all ranks get rank 0's
            return fault("weights on all ranks", "others", ranks, f", first in {first[0]}")
    if first := _first_other([rank["unsaved"] for rank in everyone]):
        return fault("buffers on all ranks", f"another {first[0]}", first[1])
    outputs = [rank["outputs"] for rank in everyone]
    errors = [max(map(_error, mine, outputs[0]), default=0.0) for mine in outputs]
    limit = _TOLERANCES[PRECISIONS[setup.recipe.precision].compute]
    if ranks := [rank for rank, error in enumerate(errors) if not error <= limit]:
        cause = "an attribute of the model that is no parameter and no buffer has another value there"
        what, size = "outputs on all ranks for the same samples and weights", f"{max(errors):.2g} of their size"
        return fault(what, "others", ranks, f", by {size}; {cause}")
    return None


def _first_other(everyone: Sequence[Views]) -> tuple[str, list[int]] | None:
    """The first of the tensors, given by `_sketch`, that differs from rank 0's by more than rounding, and the ranks."""
    for name in sorted({name for rank in everyone for name in rank}):
        if ranks := _differing([rank.get(name) for rank in everyone], _apart):
            return name, ranks
    return None


def _differing(values: Sequence[Any], differs: Callable[[Any, Any], bool] = ne) -> list[int]:
    """The ranks whose value is not rank 0's."""
    return [rank for rank, value in enumerate(values) if differs(value, values[0])]


def _apart(mine: Any, root: Any) -> bool:
    if isinstance(mine, list) and isinstance(root, list):
        return _error(mine, root) > _WEIGHTS
    return bool(mine != root)


def _sketch(name: str, array: np.ndarray) -> str | list[float]:
    """The digest of whole numbers; of others, which other processors round otherwise, what `_error` takes."""
    return _projected(array) if array.dtype.kind in "fc" else digest([(name, array)])


def _projected(array: np.ndarray) -> list[float]:
    """The size of an array, projections of it on random signs, and how many elements are not finite.

    For two arrays the mean square of the differences of projections is the square of the norm of their difference, up
    to chance (Johnson and Lindenstrauss 1984). Of a large array they are of some elements drawn by chance.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat
    random = np.random.default_rng(0)
    taken = (flat if flat.size <= _MOST else flat[random.integers(0, flat.size, _MOST)]).astype(np.float64)
    finite = np.isfinite(taken)
    taken = np.where(finite, taken, 0)
    signs = random.integers(0, 2, (_PROJECTIONS, taken.size)) * 2.0 - 1
    return [float(np.linalg.norm(taken)), *(signs @ taken).tolist(), float(np.count_nonzero(~finite)), float(flat.size)]


def _error(mine: Sequence[float], roots: Sequence[float]) -> float:
    """The norm of the difference of two arrays, relative to the larger one's, by `_projected`."""
    if mine[-2:] != roots[-2:]:
        return float("inf")
    difference = np.subtract(mine[1:-2], roots[1:-2])
    size = max(mine[0], roots[0])
    return float(np.sqrt(np.mean(difference**2)) / size) if size else 0.0


def _named(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"
