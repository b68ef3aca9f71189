"""A model's weights as one safetensors file with torchvision's names and layouts: saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hvdkit.core.state import check_fits, model_state
from hvdkit.errors import RequestError, RunError
from hvdkit.files import open_regular, write_atomic

HEAD = ("fc.weight", "fc.bias")


def save_weights(state: Mapping[str, np.ndarray], path: Path | str, metadata: Mapping[str, str] | None = None) -> Path:
    """Write the parameters and running statistics of `Session.state` to `path`, and return `path`.

    `metadata` goes into the file's header. The folder is created. Raises RunError if the file cannot be written; an
    existing file then stays as it was.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another path") from error
    header = {"format": "pt", **(metadata or {})}  # readers of PyTorch files ask for the format
    write_atomic(path, save(model_state(state), metadata=header))
    return path


Rename = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]  # such as `Architecture.from_file`


def start_from(
    path: Path, initial: Mapping[str, np.ndarray], new_head: bool, rename: Rename = dict
) -> dict[str, np.ndarray]:
    """The model's `initial` state with its tensors replaced by those of the file, in the initial state's dtypes.

    With `new_head` the last layer keeps its initial values. `rename` gives the file's tensors the model's names.
    Raises RequestError, naming the file and the tensor, if the file cannot be read or does not fit.
    """
    given = read_fitting(path, {name: value.shape for name, value in initial.items()}, new_head, rename)
    return {name: given.get(name, value).astype(value.dtype) for name, value in initial.items()}


def read_fitting(
    path: Path, shapes: Mapping[str, tuple[int, ...]], new_head: bool, rename: Rename = dict
) -> dict[str, np.ndarray]:
    """The file's tensors for a model whose tensors have these shapes, without those that `start_from` leaves out.

    Raises RequestError as that does.
    """
    try:
        open_regular(path).close()  # a pipe would be waited for
        given = load_file(path)
    except OSError as error:
        raise RequestError(
            f"model.weights: {path}: cannot be read ({error.strerror}); expected a safetensors file"
        ) from None
    except SafetensorError as error:
        raise RequestError(
            f"model.weights: {path}: no safetensors file ({error}); "
            "save a PyTorch state dict by safetensors.torch.save_file"
        ) from None
    left_out = HEAD if new_head else ()
    wanted = {name: shape for name, shape in shapes.items() if name not in left_out}
    try:
        given = {name: value for name, value in rename(given).items() if name not in left_out}
        check_fits(wanted, given)
    except RequestError as error:
        hint = (
            ""
            if new_head or not set(HEAD) & shapes.keys()
            else "\nfor another number of classes say model.new_head=true"
        )
        raise RequestError(
            "\n".join(f"model.weights: {path}: {line}" for line in str(error).splitlines()) + hint
        ) from None
    return given
