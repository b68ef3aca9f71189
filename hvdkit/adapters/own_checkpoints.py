"""Checkpoints of a training loop of the user's own, in one framework: `hvdkit.checkpoints`.

A checkpoint is one safetensors file. Its metadata has the tree of dictionaries and lists in which the tensors lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hvdkit.adapters.own_loop import as_array, horovod
from hvdkit.errors import RequestError, RunError
from hvdkit.files import write_atomic

_KEY = "hvdkit"  # of the file's metadata
_PLAIN = (bool, int, float, str, type(None))
Tree = Any  # dictionaries, lists and tuples of tensors and plain values


def checkpoints(folder: str | Path, *, keep: int = 2, **parts: Any) -> OwnCheckpoints:
    """The checkpoints of a loop's `parts`, by names of your own, such as `model=model, optimizer=optimizer`.

    A part has `state_dict()` and `load_state_dict()` (PyTorch's modules, optimizers, schedulers, scalers), is a model
    or an optimizer of Keras, a `tf.Module`, or a block or a trainer of Gluon. The newest `keep` files stay.
    Raises RequestError for other parts.
    """
    return OwnCheckpoints(Path(folder), keep, {name: _access(name, part) for name, part in parts.items()})


class OwnCheckpoints:
    """What `checkpoints` returns."""

    def __init__(self, folder: Path, keep: int, parts: Mapping[str, Access]) -> None:
        if keep < 1:
            raise RequestError(f"hvdkit.checkpoints: keep: expected 1 or more, got {keep}")
        self._hvd, self._folder, self._keep, self._parts = horovod("checkpoints"), folder, keep, parts

    def restore(self) -> dict[str, Any]:
        """Have all ranks go on from the newest checkpoint, and return the values that `save` was given with it.

        Collective. Without a checkpoint, all ranks start from what rank 0 has, and there are no values. Rank 0 alone
        reads files. Raises RequestError on all ranks for a file that is damaged or has other parts.
        """
        newest: tuple[dict[str, Tree], dict[str, Any]] | str
        try:
            newest = self._newest() if self._hvd.rank() == 0 else ""
        except RequestError as error:
            newest = str(error)
        newest = self._hvd.broadcast_object(newest, root_rank=0, name="hvdkit.checkpoints")
        if isinstance(newest, str):
            raise RequestError(newest)
        trees, values = newest
        for name, (_, put) in self._parts.items():
            put(trees[name])
        return values

    def save(self, **values: Any) -> None:
        """Rank 0 writes a checkpoint of the parts with `values`, such as `epoch=3`; other ranks do nothing.

        A file is there whole or not at all. Raises RunError if it cannot be written.
        """
        if self._hvd.rank() != 0:
            return
        tensors: dict[str, np.ndarray] = {}
        trees = {name: _pack(get(), name, tensors) for name, (get, _) in self._parts.items()}
        tree = json.dumps({"parts": trees, "values": _pack(values, "values", tensors)})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self._folder}: cannot make the folder of checkpoints: {error.strerror}") from error
        files = self._files()
        number = int(files[-1].stem.rpartition("-")[2]) + 1 if files else 1
        path = self._folder / f"checkpoint-{number:06}.safetensors"
        write_atomic(path, save(tensors, {_KEY: tree}), elsewhere="choose another folder")
        for old in [*files, path][: -self._keep]:
            old.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("checkpoint-[0-9]*.safetensors"))

    def _newest(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """The parts' trees and the values of the newest file, else what the parts have now."""
        if not (files := self._files()):
            tensors: dict[str, np.ndarray] = {}
            return {name: _unpack(_pack(get(), name, tensors), tensors) for name, (get, _) in self._parts.items()}, {}
        path = files[-1]
        try:
            with safe_open(path, framework="numpy") as file:
                tree = json.loads((file.metadata() or {})[_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            parts, values = tree["parts"], _unpack(tree["values"], tensors)
            trees = {name: _unpack(part, tensors) for name, part in parts.items()}
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"{path}: expected a checkpoint of hvdkit.checkpoints; remove it ({error})") from error
        if trees.keys() != self._parts.keys():
            theirs, mine = (", ".join(sorted(names)) for names in (trees, self._parts))
            raise RequestError(f"{path}: expected the parts {mine}, got {theirs}; choose another folder")
        return trees, values


Access = tuple[Callable[[], Tree], Callable[[Tree], None]]  # how a part's state is read, and how it is set


def _access(name: str, part: Any) -> Access:
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict, lambda tree: part.load_state_dict(_to_torch(tree))
    if hasattr(part, "collect_params"):
        return _gluon_block(part)
    if hasattr(part, "_updaters"):
        return _gluon_trainer(part)
    if hasattr(part, "variables"):
        return lambda: list(part.variables), lambda values: _assign(name, part.variables, values)
    raise RequestError(
        f"hvdkit.checkpoints: {name}: expected a module, optimizer or scheduler of PyTorch, a model or optimizer "
        f"of Keras, a tf.Module, or a block or trainer of Gluon; got {type(part).__name__}"
    )


def _assign(name: str, variables: Any, values: list[np.ndarray]) -> None:
    """Set variables of TensorFlow or Keras. Raises RequestError unless they fit."""
    shapes = [[tuple(array.shape) for array in arrays] for arrays in (variables, values)]
    if shapes[0] != shapes[1]:
        raise RequestError(
            f"hvdkit.checkpoints: {name}: expected {len(values)} variables of the checkpoint's shapes, "
            f"got {len(shapes[0])}; build it before: call the model once, optimizer.build(model.trainable_variables)"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _gluon_block(block: Any) -> Access:
    """By names as `save_parameters` has them: those of `collect_params` depend on the blocks that were made before."""

    def get() -> Tree:
        parameters = block._collect_params_with_prefix()
        if later := [name for name, each in parameters.items() if each.shape is None or 0 in each.shape]:
            why = "has no shape yet; call the block once on a batch before"
            raise RequestError(f"hvdkit.checkpoints: {later[0]}: {why}")
        return {name: parameter.data() for name, parameter in parameters.items()}

    def put(tree: Tree) -> None:
        parameters = block._collect_params_with_prefix()
        if {name: parameter.shape for name, parameter in parameters.items()} != {n: a.shape for n, a in tree.items()}:
            raise RequestError(
                "hvdkit.checkpoints: the block's parameters have other names or shapes than the checkpoint's"
            )
        for name, parameter in parameters.items():
            parameter.set_data(tree[name])

    return get, put


def _gluon_trainer(trainer: Any) -> Access:
    """MXNet has no public function that reads the state of a trainer but as a pickle."""
    updater, optimizer = trainer._updaters[0], trainer._optimizer

    def get() -> Tree:
        return {"states": updater.states, "updates": optimizer.num_update, "counts": optimizer._index_update_count}

    def put(tree: Tree) -> None:
        from mxnet import nd

        def arrays(state: Any) -> Any:
            if isinstance(state, tuple | list):
                return type(state)(arrays(part) for part in state)
            return nd.array(state, dtype=state.dtype) if isinstance(state, np.ndarray) else state

        updater.states = {index: arrays(state) for index, state in tree["states"].items()}
        updater.states_synced = dict.fromkeys(updater.states, False)  # moved to the parameter's device when it is used
        optimizer.num_update = tree["updates"]
        optimizer._index_update_count.clear()
        optimizer._index_update_count.update(tree["counts"])

    return get, put


def _to_torch(tree: Tree) -> Tree:
    from torch import from_numpy

    if isinstance(tree, Mapping):
        return {key: _to_torch(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_to_torch, tree))
    return from_numpy(tree) if isinstance(tree, np.ndarray) else tree


def _pack(tree: Tree, path: str, tensors: dict[str, np.ndarray]) -> Any:
    """A tree as JSON knows it; its tensors go to `tensors`. Keys may be numbers, as in PyTorch's optimizers."""
    if isinstance(tree, Mapping):
        items = [[key, _pack(value, f"{path}.{key}", tensors)] for key, value in tree.items()]
        if all(isinstance(key, _PLAIN) for key, _ in items):
            return {"dict": items}
    elif isinstance(tree, list | tuple):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_pack(value, f"{path}.{i}", tensors) for i, value in enumerate(tree)]}
    elif (array := as_array(tree)) is not None:
        tensors[path] = array
        return {"tensor": path}
    elif isinstance(tree, _PLAIN):
        return tree
    kind = type(tree).__name__
    raise RequestError(
        f"hvdkit.checkpoints: {path}: expected tensors, numbers, texts, or lists and dictionaries of them, got {kind}"
    )


def _unpack(packed: Any, tensors: Mapping[str, np.ndarray]) -> Tree:
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpack(part, tensors) for key, part in value}
    return {"list": list, "tuple": tuple}[kind](_unpack(part, tensors) for part in value)
