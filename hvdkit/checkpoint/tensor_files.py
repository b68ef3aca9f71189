"""The tensors of safetensors files of any dtype, whole or in shards, as other tools and the hub write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hvdkit.checkpoint import snapshots
from hvdkit.errors import RequestError
from hvdkit.files import open_regular, read_bounded

INDEX = ".safetensors.index.json"  # the end of the name of the file that says which tensor is in which shard
_SHARD = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_PICKLES = (".pth", ".pt", ".ckpt", ".bin", ".tar")
# Dtypes of safetensors as NumPy reads them. BF16 is the upper half of a float32. Others, such as F8_E4M3, are not read.
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Stored:
    """The tensors of one or several files by name, mapped and not yet read, as their files have them.

    `kinds` are the dtypes in safetensors' words, by the `id` of an array. `config` is the `config.json` that libraries
    write beside a file `model.safetensors`, empty if there is none.
    """

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def floats(self, name: str, stored: np.ndarray) -> np.ndarray:
        """A copy of a tensor, float64 if it is stored so, else float32: exact for float16 and bfloat16.

        `name` is the model's. Raises RequestError for other dtypes.
        """
        kind = self.kinds[id(stored)]
        if kind == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if kind not in FLOATS:
            raise RequestError(wrong_kind(name, kind))
        return np.array(stored, np.float64 if kind == "F64" else np.float32)


def read(path: Path) -> Stored:
    """The tensors of a file, of the shards that belong to it or to an index, or of a folder's file.

    A folder may be a run's or a checkpoint's of hvdkit, too. Raises RequestError, which names the file that is missing
    or no safetensors file.
    """
    files = _files(path)
    stored = Stored(config=_config(files[0]))
    for file in files:
        _add(stored, file)
    return stored


def _files(path: Path) -> list[Path]:
    """The safetensors files that `path` means."""
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(INDEX):
        try:
            index = json.loads(read_bounded(path))
            mapped = set(index["weight_map"].values())
            return [_shard(path.with_name(name), path) for name in sorted(mapped)]
        except OSError as error:
            raise RequestError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            raise RequestError(f"{path}: no index of shards; expected a JSON file with a weight_map") from None
    shard = _SHARD.fullmatch(path.name)
    if shard is None or not path.exists():
        return [path]
    beginning, width, count = shard[1], len(shard[3]), int(shard[3])
    names = (f"{beginning}-{number:0{width}}-of-{shard[3]}.safetensors" for number in range(1, count + 1))
    return [_shard(path.with_name(name), path) for name in names]


def _shard(file: Path, of: Path) -> Path:
    if not file.exists():
        raise RequestError(f"{file}: no such file; it is a shard of the weights that {of.name} belongs to")
    return file


def _in_folder(folder: Path) -> Path:
    """The file of weights in a folder."""
    checkpoint = snapshots.locate(folder)
    if (checkpoint / snapshots.RECORD).exists():
        expected = snapshots.read_record(checkpoint).files[snapshots.MODEL]
        snapshots.check_digest(checkpoint / snapshots.MODEL, expected)
        return checkpoint / snapshots.MODEL
    inside = sorted(path.name for path in folder.iterdir())
    for names in (
        [name for name in inside if name.endswith(INDEX)],
        [name for name in inside if name == snapshots.MODEL],
        [name for name in inside if name.endswith(".safetensors") and not _later_shard(name)],
        [name for name in inside if name.endswith(_PICKLES)],
    ):
        if len(names) > 1:
            raise RequestError(
                f"{folder}: expected one file of weights, found {', '.join(names[:5])}; name one of them"
            )
        if names:
            return folder / names[0]
    raise RequestError(f"{folder}: no weights are in this folder; expected a safetensors file, or a run of hvdkit")


def _later_shard(name: str) -> bool:
    shard = _SHARD.fullmatch(name)
    return shard is not None and int(shard[2]) > 1


def _config(file: Path) -> Mapping[str, Any]:
    """The `config.json` beside a file that libraries name so."""
    if not file.name.startswith("model"):
        return {}
    try:
        config = json.loads(read_bounded(file.with_name("config.json")))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _add(stored: Stored, path: Path) -> None:
    """Map the tensors of one file."""
    try:
        with open_regular(path) as file:  # a pipe would be waited for
            beginning = file.read(4)
        with safe_open(path, framework="np"):  # checks the header, and that all bytes are there
            pass
        content = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); expected a safetensors file") from None
    except SafetensorError as error:
        if beginning[:2] in (b"PK", b"\x80\x02"):
            raise RequestError(_converted(path)) from None
        raise RequestError(
            f"{path}: no safetensors file ({error}); save a PyTorch state dict by safetensors.torch.save_file"
        ) from None
    end = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:end].tobytes())
    header.pop("__metadata__", None)
    if twice := stored.tensors.keys() & header.keys():
        raise RequestError(f"{path}: tensor {min(twice)} is in another shard, too")
    for name, about in header.items():
        first, last = about["data_offsets"]
        if about["dtype"] in _DTYPES:
            array = content[end + first : end + last].view(_DTYPES[about["dtype"]]).reshape(about["shape"])
        else:
            array = np.broadcast_to(np.zeros((), np.uint8), about["shape"])  # only its shape is of use
        stored.tensors[name] = array
        stored.kinds[id(array)] = about["dtype"]


def _converted(path: Path) -> str:
    """The message for a file of `torch.save`."""
    new = path.with_suffix(".safetensors").name
    return (
        f"{path}: a file of torch.save, which can run any code when it is read; expected a safetensors file. "
        "These lines write one:\n"
        "import torch, safetensors.torch as st; "
        f'w = torch.load({json.dumps(str(path))}, "cpu", weights_only=True); '
        'w = w.get("state_dict", w.get("model", w))\n'
        f"st.save_file({{k: v.clone().contiguous() for k, v in w.items() if torch.is_tensor(v)}}, {json.dumps(new)})"
    )


def wrong_kind(name: str, kind: str) -> str:
    """The message for a tensor of the model that is stored in another dtype."""
    return f"tensor {name} is stored as {kind}; expected float32, float16, bfloat16 or float64"
