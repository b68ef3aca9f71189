"""Canonical state: torchvision's names and layouts, whatever the framework's own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from hvdkit.errors import RequestError

# Other frameworks' names of a layer's tensors, and torchvision's names for them.
_LEAVES = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}

_MOST_LISTED = 5  # tensors that do not fit; another model's state has hundreds of them
_MOST_NAMED = 3  # tensors in a line that is about many

_FLOATING = {"float16", "bfloat16", "float32", "float64"}
_WHOLE = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_KNOWN = _FLOATING | _WHOLE | {"bool", "complex64", "complex128"}
# What NumPy or its safetensors cannot hold, and what a state has in its place, without loss: complex128 as pairs of
# real and imaginary parts, in a last axis.
_HELD_AS = {"bfloat16": "float32", "complex128": "float64"}
COUNT = "num_batches_tracked"  # batch norm's count of batches, which checkpoints of earlier versions lack


def canonical_name(name: str) -> str:
    """torchvision's name of a tensor such as `layer1.0.conv1/kernel` or `bn1.gamma`."""
    *path, leaf = name.replace("/", ".").split(".")
    return ".".join([*path, _LEAVES.get(leaf, leaf)])


def layer_of(tensor: str) -> str:
    """The layer of a tensor: `layer1.0.conv1` for `layer1.0.conv1.weight`."""
    return tensor.rpartition(".")[0] or tensor


def check_distinct(names: list[str]) -> None:
    """Check that no two tensors of a model share a name. Raises RequestError naming those that do."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise RequestError(
            f"model: expected a name of its own for each variable, got {', '.join(twice)} more than once; "
            "give each variable a `name`"
        )


AVERAGE = "average"  # the slot of the averaged weights (`core.averaged_weights`)


def slot_name(slot: str, name: str) -> str:
    """The name of the optimizer's `slot` of parameter `name` in a state."""
    return f"optimizer.{slot}.{name}"


def is_statistic(name: str) -> bool:
    """Whether a tensor of a state is one of batch norm's running statistics."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def listed(names: Iterable[str]) -> str:
    """The first few names, and the number of the others."""
    every = list(names)
    more = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_kinds(dtypes: Mapping[str, str], trained: Collection[str]) -> None:
    """Check the dtypes of a model's tensors by name, of which some are trained. Raises RequestError naming a tensor."""
    for name, dtype in dtypes.items():
        if dtype not in _KNOWN:
            raise RequestError(f"model: {name}: tensors of the dtype {dtype} can be neither sent nor saved")
        if name in trained and dtype not in _FLOATING:
            remedy = (
                "store its real and imaginary parts as a real parameter, and combine them in the forward pass"
                if dtype.startswith("complex")
                else "use a floating dtype"
            )
            raise RequestError(
                f"model: expected floating parameters to train, got {dtype} in {name}; {remedy}, or do not train it"
            )


def cast_lines(dtypes: Mapping[str, str], precision: str, wanted: str) -> list[str]:
    """A line for each floating dtype, by tensor, that a model's tensors lose in this precision.

    That float32 becomes the dtype of the precision, `wanted`, is what the recipe asks for.
    """
    return [
        f"model: {listed(name for name, own in dtypes.items() if own == dtype)}: cast from {dtype} to {wanted}, the "
        f"dtype of precision: {precision}"
        for dtype in sorted(set(dtypes.values()) - {"float32", wanted})
        if "float" in dtype
    ]


def held(array: np.ndarray) -> np.ndarray:
    """An array as a state has it: in a dtype that NumPy and safetensors have."""
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return np.stack([array.real, array.imag], axis=-1) if array.dtype == np.complex128 else array


def held_layout(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of `held` for an array of this dtype, by NumPy's name, and shape."""
    return _HELD_AS.get(dtype, dtype), ((*shape, 2) if dtype == "complex128" else shape)


def unheld(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """The array that `held` had for tensor `name` of this dtype; bfloat16 stays float32.

    Floating values are rounded to the dtype. Raises RequestError if others would change.
    """
    wanted = np.dtype(_HELD_AS.get(dtype, dtype))
    if array.dtype != wanted:
        floating = array.dtype.kind == wanted.kind == "f"
        real = array.dtype.kind != "c" or wanted.kind == "c"
        cast = array.astype(wanted) if real else array
        if cast.dtype != wanted or not (floating or np.array_equal(cast, array)):
            raise RequestError(f"tensor {name}: expected {dtype}, got {array.dtype} with values that it cannot hold")
        array = cast
    return array[..., 0] + 1j * array[..., 1] if dtype == "complex128" else array


def parameters_of(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The trainable parameters: the tensors for which the optimizer has a slot."""
    trained = {".".join(name.split(".")[2:]) for name in state if name.startswith("optimizer.")}
    return {name: value for name, value in state.items() if name in trained and not is_statistic(name)}


def model_state(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters and running statistics, without the state of the optimizer and of communication."""
    return {name: value for name, value in state.items() if not name.startswith(("optimizer.", "communication."))}


def averaged_state(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `model_state`, with the averaged weights and statistics where the state has them."""
    return {name: state.get(slot_name(AVERAGE, name), value) for name, value in model_state(state).items()}


def is_averaged(name: str) -> bool:
    """Whether a tensor of a state is one of the averaged weights or statistics."""
    return name.startswith(slot_name(AVERAGE, ""))


def has_average(state: Iterable[str]) -> bool:
    """Whether a state, or its names, has averaged weights."""
    return any(map(is_averaged, state))


TURNED = {4: (3, 2, 0, 1), 2: (1, 0)}  # by dimensions: HWIO kernels to OIHW, (in, out) matrices to (out, in)
TURNED_BACK = {4: (2, 3, 1, 0), 2: (1, 0)}


def from_canonical(array: np.ndarray) -> np.ndarray:
    """OIHW kernels to HWIO, (out, in) matrices to (in, out); other arrays stay as they are."""
    return np.asarray(array.transpose(TURNED_BACK.get(array.ndim, tuple(range(array.ndim)))), order="C")


def check_fits(wanted: Mapping[str, tuple[int, ...]], state: Mapping[str, np.ndarray]) -> None:
    """Check that `state` has each wanted tensor in its shape and no unknown one.

    Either all slots (`slot_name`) are present or none; the optimizer's scalars are not checked, and a `COUNT` may be
    missing.
    Raises RequestError naming the tensors that do not fit, at most the first few.
    """
    given = [name for name in state if not name.startswith("optimizer.") or name.count(".") > 1]
    slots = any(name.startswith("optimizer.") for name in given)
    needed = [name for name in wanted if slots or not name.startswith("optimizer.")]
    faults = [f"tensor {name} is missing" for name in needed if name not in state and not name.endswith(COUNT)]
    faults += [f"tensor {name} is unknown to this model and optimizer" for name in given if name not in wanted]
    faults += [
        f"tensor {name}: expected shape {wanted[name]}, got {state[name].shape}"
        for name in needed
        if name in state and state[name].shape != wanted[name]
    ]
    if len(faults) > _MOST_LISTED:
        more = len(faults) - _MOST_LISTED
        faults[_MOST_LISTED:] = [f"and {more} more tensors that do not fit; is it another model's state?"]
    if faults:
        raise RequestError("\n".join(faults))


def digest(state: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, sorted by name: equal if and only if the states are equal.

    Items that are no mapping must come in that order.
    """
    total = hashlib.sha256()
    for name, value in sorted(state.items()) if isinstance(state, Mapping) else state:
        array = np.ascontiguousarray(value)
        total.update(f"{name} {array.dtype.str} {array.shape}".encode())
        total.update(array.data)
    return total.hexdigest()
