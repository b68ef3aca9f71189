"""A model's weights as one safetensors file with torchvision's names and layouts: saving and loading."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from hvdkit.checkpoint import tensor_files
from hvdkit.checkpoint.tensor_files import Stored
from hvdkit.core.state import check_fits, listed, model_state
from hvdkit.errors import Faults, RequestError
from hvdkit.files import unwritable, write_atomic

if TYPE_CHECKING:
    from hvdkit.tasks.task import Architecture

_HEAD = "fc"  # the last layer of a model that has classes
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def save_weights(state: Mapping[str, np.ndarray], path: Path | str, metadata: Mapping[str, str] | None = None) -> Path:
    """Write the parameters and running statistics of `Session.state` to `path`, and return `path`.

    `metadata` goes into the file's header. The folder is created. Raises RunError if the file cannot be written; an
    existing file then stays as it was.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error, "or choose another path") from error
    header = {"format": "pt", **(metadata or {})}  # readers of PyTorch files ask for the format
    write_atomic(path, save(model_state(state), metadata=header))
    return path


@dataclass(frozen=True)
class Weights:
    """The tensors of a file that fit a model, by the model's names, not yet read; and lines about what was changed."""

    tensors: dict[str, np.ndarray]
    notes: list[str]
    stored: Stored

    def onto(self, initial: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The model's `initial` state with its tensors replaced by the file's, which are float32, or float64."""
        return {
            name: self.stored.floats(name, self.tensors[name]) if name in self.tensors else value
            for name, value in initial.items()
        }


def read_fitting(path: Path, shapes: Mapping[str, tuple[int, ...]], new_head: bool, table: Architecture) -> Weights:
    """The file's tensors for a model whose tensors have these shapes; with `new_head` without those of its last layer.

    Names may have any prefix in front of all that the model has, such as `module.`, and modules around layers that
    PyTorch names itself; the `table` knows how other libraries name its tensors. Nothing but the header is read.
    Raises RequestError, naming the file and the tensor, if the file cannot be read or does not fit.
    """
    try:
        stored = tensor_files.read(path)
    except RequestError as error:
        raise RequestError(f"model.weights: {error}") from None
    wanted = {name: shape for name, shape in shapes.items() if not (new_head and _of_head(name))}
    try:
        named, notes = _fitting(stored, wanted, new_head, table)
        kinds = {name: stored.kinds[id(named[name])] for name in wanted}
        for name, kind in kinds.items():
            if kind not in tensor_files.FLOATS:
                raise RequestError(tensor_files.wrong_kind(name, kind))
    except RequestError as error:
        raise RequestError("\n".join(f"model.weights: {path}: {line}" for line in str(error).splitlines())) from None
    rounded = [name for name, kind in kinds.items() if kind == "F64"]
    if rounded and table.dtype == "float32":
        notes.append(f"{len(rounded)} tensors are float64 and are rounded to float32")
    return Weights({name: named[name] for name in wanted}, [f"model.weights: {path}: {line}" for line in notes], stored)


def _fitting(
    stored: Stored, wanted: Mapping[str, tuple[int, ...]], new_head: bool, table: Architecture
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The tensors by the model's names, and notes. Raises RequestError where they do not fit."""
    given, notes = _without_wrappers(model_state(stored.tensors))
    if len(given) < len(stored.tensors):
        notes.append("the state of the optimizer is left out")
    tried, errors = [], Faults()
    for prefix in _prefixes(given, len(wanted)):
        with errors.collected():
            tried.append(_Try.of(prefix, given, wanted, new_head, table, stored.config))
    fitting: dict[frozenset[int], _Try] = {}  # by the tensors that the model would get
    for candidate in tried:
        if not candidate.lacking:
            fitting.setdefault(frozenset(id(candidate.named[name]) for name in wanted), candidate)
    if len(fitting) > 1:
        places = " and ".join(repr(fits.prefix) if fits.prefix else "no prefix" for fits in fitting.values())
        raise RequestError(f"the model's tensors are there more than once, with {places}; save those to start from")
    if not fitting and errors:
        raise RequestError(errors[0])
    best = min(tried, key=lambda candidate: (len(candidate.lacking), len(candidate.prefix)))
    if best.lacking or best.unknown:
        raise RequestError("\n".join(best.faults(wanted)))
    if best.prefix:
        notes.append(f"{best.prefix!r} is removed from the names of its tensors")
    if best.outside:
        notes.append(f"tensors without {best.prefix!r} are left out: {listed(best.outside)}")
    return best.named, notes


@dataclass(frozen=True)
class _Try:
    """A file's tensors by the model's names, without a prefix; `lacking` are missing or have another shape.

    `unknown` begin with the prefix and are none of the model's, `outside` do not begin with it.
    """

    prefix: str
    named: dict[str, np.ndarray]
    lacking: list[str]
    unknown: list[str]
    outside: list[str]

    @classmethod
    def of(
        cls,
        prefix: str,
        given: Mapping[str, np.ndarray],
        wanted: Mapping[str, tuple[int, ...]],
        new_head: bool,
        table: Architecture,
        config: Mapping[str, Any],
    ) -> _Try:
        """Try one prefix. Raises RequestError for tensors that the table knows to be another model's."""
        below = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        outside = {name: value for name, value in given.items() if not name.startswith(prefix)}
        named = table.from_file(outside | below, config)  # a model's last layer may lie outside
        if new_head:
            named = {name: value for name, value in named.items() if not _of_head(name)}
        ids = {id(value) for value in outside.values()}
        extra = {name: id(value) in ids for name, value in named.items() if name not in wanted}
        return cls(
            prefix,
            named,
            [name for name, shape in wanted.items() if name not in named or named[name].shape != shape],
            [name for name, is_outside in extra.items() if not is_outside],
            [name for name, is_outside in extra.items() if is_outside],
        )

    def faults(self, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
        """A line for each tensor that does not fit, at most the first few, and what to do if it is the last layer."""
        inside = {name: value for name, value in self.named.items() if name not in self.outside}
        lines = Faults()
        with lines.collected():
            check_fits(wanted, inside)
        if all(_of_head(name) for name in (*self.lacking, *self.unknown)):
            weight = inside.get(f"{_HEAD}.weight")
            classes = f", model.classes={len(weight)} keeps it" if weight is not None and weight.ndim == 2 else ""
            lines.append(f"only the last layer does not fit: model.new_head=true draws it anew{classes}")
        return lines


def _of_head(name: str) -> bool:
    return name.partition(".")[0] == _HEAD


def _prefixes(given: Mapping[str, np.ndarray], size: int) -> list[str]:
    """The beginnings, with a dot at their end, that at least half as many names as `size` share; the shortest first."""
    counts = Counter(name[: dot.end()] for name in given for dot in re.finditer(r"\.", name))
    return ["", *sorted((prefix for prefix, count in counts.items() if 2 * count >= size), key=len)]


def _without_wrappers(given: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The tensors without the modules that torch.compile, FSDP and recomputation put around layers; with a note."""
    unwrapped = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): value for name, value in given.items()
    }
    if unwrapped.keys() == given.keys():
        return dict(given), []
    there = [wrapper for wrapper in _WRAPPERS if any(wrapper in name.split(".") for name in given)]
    if len(unwrapped) < len(given):
        raise RequestError(f"tensors are there twice, with and without {' or '.join(there)} in their names")
    return unwrapped, [f"{' and '.join(repr(wrapper) for wrapper in there)} is removed from the names of its tensors"]
