"""Whether all ranks have the same samples and the same model, compared before the first step in one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
    mine = {
        "data": {name: asdict(each) for name, each in (dataset.fingerprints or {}).items()},
        "text": dataset.text_sha256,
        "weights": weights,
        "unsaved": {name: _sketch(name, session.array(each)) for name, each in session.trainable.transient.items()},
        "outputs": [_projected(each) for each in outputs if own_share(dataset.val) is dataset.val],
        "held": held,
        "warnings": list(warnings),
    }
    everyone = setup.adapter.allgather_object(mine, setup.mesh.world, name="alike")
    fault = _of_data(setup, everyone)
    if fault is None and not any(each["held"] for each in everyone):
        fault = _of_model(setup, session, everyone)
    if fault:
        raise RequestError(fault)
    found: list[str] = everyone[0]["warnings"]
    return found


def _of_data(setup: Setup, everyone: Sequence[Mapping[str, Any]]) -> str | None:
    data, own = setup.recipe.data, isinstance(setup.recipe.data, OwnData)
    where = "samples" if own else "data.path" if getattr(data, "path", None) else "data"
    remedy, drawn = _FILES, ""
    if own:
        remedy = (
            "give all ranks the whole data, hvdkit shares it out; if each rank loads a share, give data.shares=true"
        )
        drawn = f"; {_DRAW}"
    if texts := _others(everyone, lambda each: each["text"]):
        return f"{where}: expected the same text on all ranks, got another one on {texts} than on rank 0; {remedy}"
    for name, what in (("train", "training"), ("val", "validation")):
        found = [Fingerprint(**each["data"][name]) for each in everyone if name in each["data"]]
        kinds = {rank: kind for rank, each in enumerate(found) if (kind := each.other(found[0]))}
        if not kinds:
            continue
        kind = "number" if "number" in kinds.values() else min(kinds.values())
        ranks = [rank for rank, each in kinds.items() if each == kind]
        if kind == "number":
            got = f"{found[0].samples} on rank 0 and {found[ranks[0]].samples} on {_named(ranks)}"
            return f"{where}: expected as many {what} samples on all ranks, got {got}; {remedy}{drawn}"
        got = f"other {kind} of the {found[0].samples} {what} samples on {_named(ranks)} than on rank 0"
        return f"{where}: expected the same samples on all ranks, got {got}; {remedy}{drawn}"
    return None


def _of_model(setup: Setup, session: Session, everyone: Sequence[Mapping[str, Any]]) -> str | None:
    expected = "model: expected the same"
    own = isinstance(setup.recipe.model, OwnModel)
    remedy = f"{_DRAW}, and make the model of nothing that only one rank has" if own else _FILES
    if others := _others(everyone, lambda each: each["weights"]):
        first = _first_tensor(setup, session)
        if first is not None:  # else they differ in last bits alone, and all ranks get rank 0's
            return f"{expected} weights on all ranks, got others on {others} than on rank 0{first}; {remedy}"
    buffers = [each["unsaved"] for each in everyone]
    if found := _first_other(buffers):
        name, ranks = found
        return f"{expected} buffers on all ranks, got another {name} on {_named(ranks)} than on rank 0; {remedy}"
    outputs = [each["outputs"] for each in everyone]
    errors = [max(map(_error, each, outputs[0]), default=0.0) for each in outputs]
    limit = _TOLERANCES[PRECISIONS[setup.recipe.precision].compute]
    differing = [rank for rank, error in enumerate(errors) if not error <= limit]
    if differing:
        others = f"others on {_named(differing)} than on rank 0, by {max(errors):.2g} of their size"
        cause = "an attribute of the model that is no parameter and no buffer has another value there"
        return f"{expected} outputs on all ranks for the same samples and weights, got {others}; {cause}; {remedy}"
    return None


def _first_tensor(setup: Setup, session: Session) -> str | None:
    """Names the first of the initial tensors that differ by more than rounding; None if none does. Collective."""
    if session.update.partition.stored.partition.groups:
        return ""  # they are shared out, and all of them are rank 0's now
    mine = {name: _sketch(name, array) for name, array in session.model_arrays()}
    found = _first_other(setup.adapter.allgather_object(mine, setup.mesh.world, name="alike.tensors"))
    return f", first in {found[0]}" if found else None


def _first_other(everyone: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]] | None:
    """The first of the tensors, given by `_sketch`, that differs from rank 0's by more than rounding, and the ranks."""
    for name in sorted({name for each in everyone for name in each}):
        root = everyone[0].get(name)
        ranks = [rank for rank, each in enumerate(everyone) if _differs(each.get(name), root)]
        if ranks:
            return name, ranks
    return None


def _differs(mine: Any, root: Any) -> bool:
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


def _others(everyone: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], Any]) -> str:
    """The ranks whose value is not rank 0's; empty if there are none."""
    return _named([rank for rank, each in enumerate(everyone) if value(each) != value(everyone[0])])


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:5])) + (f" and {len(ranks) - 5} more" if len(ranks) > 5 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" if ranks else ""
