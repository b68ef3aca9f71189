"""Fields that the requests of several commands have."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

from hvdkit import paths
from hvdkit.commands.request import Accepts, Argument, Option, Request, as_path
from hvdkit.defaults import LAUNCHER, STALL_TIMEOUT_S
from hvdkit.errors import RequestError

RIVALS = (
    "plain, ddp, zero_redundancy, fsdp, deepspeed, deepspeed_offload, pipelining, fsdp-tp, multiworker, kvstore or "
    "independent"
)
LAUNCHERS = "auto, direct (this machine), horovodrun, mpirun, slurm or ray"
FRAMEWORKS_HELP = "pytorch, tensorflow, keras or mxnet"


def texts(name: str, given: Any) -> list[str]:
    """Settings as `key=value`, with values in JSON, which is YAML. Raises RequestError for what has no JSON."""
    if isinstance(given, str):
        raise RequestError(f"{name}: expected a dictionary, or a list such as [{given!r}], got a text")
    if not isinstance(given, Mapping):
        if not isinstance(given, Iterable):
            raise RequestError(f"{name}: expected a dictionary, or a list of key=value, got {given!r}")
        words = list(given)
        if wrong := [word for word in words if not isinstance(word, str)]:
            raise RequestError(f'{name}: expected words such as "epochs=2", got {wrong[0]!r}')
        return words
    texts = []
    for key, value in given.items():
        try:
            texts.append(f"{key}={json.dumps(value, ensure_ascii=False, default=_plain)}")
        except (TypeError, ValueError) as error:
            raise RequestError(f"{name}: {key}: expected a number, text, list or dictionary ({error})") from None
    return texts


def _plain(value: Any) -> Any:
    """A path as text, NumPy's numbers and arrays as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"got {type(value).__name__}")


def _recipe(name: str, given: Any) -> Any:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    return as_path(given) if isinstance(given, str | os.PathLike) else given


def profile_file(name: str, given: Any) -> Any:
    """The file of a profile that is given as a path or as the result of `profile`."""
    if hasattr(given, "folder"):
        return given.folder / "profile.json"
    return as_path(given) if isinstance(given, str | os.PathLike) else given


def _hosts(name: str, given: Any) -> Any:
    """Hosts as the command line has them."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return given
    several = list(given)
    return (",".join(several) or None) if all(isinstance(one, str) for one in several) else several


OF_RECIPES = Accepts("AnyRecipe", "a recipe's name, file or content", _recipe)
SETTINGS = Accepts("Settings", "a dictionary, or a list of key=value", texts)
RecipeFile = Annotated[
    Path | dict[str, Any],
    OF_RECIPES,
    Argument(
        "the recipe: a file, or a name from `hvdkit recipes list`",
        metavar="RECIPE.yaml",
    ),
]
Overrides = Annotated[
    list[str] | None,
    SETTINGS,
    Argument("such as epochs=2", metavar="[key=value]..."),
]
CheckpointFolder = Annotated[Path, Argument("a run's folder, or that of a checkpoint of it", metavar="RUN")]
Average = Annotated[
    bool, Option("the weights themselves, where the checkpoint has an average of them", ("--no-average",))
]
Framework = Annotated[str, Option(FRAMEWORKS_HELP)]
WritersFramework = Annotated[str | None, Option(FRAMEWORKS_HELP, shown="that of the checkpoint")]
Frameworks = Annotated[
    list[str] | None,
    Option("may be repeated", ("--framework",), shown="all four"),
]
Ranks = Annotated[int, Option("number of ranks", ("-np", "--np", "-n"))]
OF_HOSTS = Accepts("Names", "a text, or a list of texts", _hosts, str)
Hosts = Annotated[
    str | None,
    OF_HOSTS,
    Option("host:slots,..., or ./FILE of hosts", ("-H", "--hosts"), shown="this machine"),
]
Rivals = Annotated[list[str] | None, Option(f"{RIVALS}; may be repeated", ("--rival",))]
Debug = Annotated[bool, Option("collect Horovod's and NCCL's own logs in RUN/debug, by rank")]
Log = Annotated[
    list[str] | None,
    Option("wandb, mlflow or tensorboard; may be repeated", ("--log",)),
]


class WritesFolder(Request):
    """A command that writes files into a folder."""

    out: Annotated[Path | None, Option("the folder to write into", shown="in runs, by name and time")] = None
    overwrite: Annotated[bool, Option("replace the results of an earlier run in the folder")] = False


class MayWrite(WritesFolder):
    """A command whose result is written only where a folder is named."""

    out: Annotated[Path | None, Option("a folder for the result, as JSON", shown="none")] = None

    def claimed(self, inputs: Iterable[Path] = ()) -> AbstractContextManager[Path | None]:
        """The folder, as `paths.claimed`; None without one."""
        return paths.claimed(self.out, self.overwrite, inputs=inputs) if self.out else nullcontext()


class StartsRanks(WritesFolder):
    """A command that starts ranks; `Placement.of` takes where and how from it."""

    hosts: Hosts = None
    launcher: Annotated[str, Option(LAUNCHERS)] = LAUNCHER
    stall_timeout: Annotated[float, Option("seconds after which a rank that hangs ends the run; 0: never")] = (
        STALL_TIMEOUT_S
    )
