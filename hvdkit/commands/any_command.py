"""A command of hvdkit, or a user's own script, that `hvdkit submit` hands to a scheduler in place of training."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from hvdkit import paths, programs
from hvdkit.commands import COMMANDS, loading, own_script, recipe_paths
from hvdkit.commands.request import Option, Request, plain, say
from hvdkit.commands.submit_request import SubmitRequest
from hvdkit.errors import Faults, RequestError, nearest
from hvdkit.recipe import registry
from hvdkit.recipe.schema import Recipe

_LAUNCH = "launch"
_PARSED_S = 60.0


@dataclass(frozen=True)
class AnyCommand:
    """A command that has passed every check that can be made here: its name and the `words` after it.

    `options` are those that its request takes. `file` is what it has written at its end, and `resumes` whether it
    continues what is in its folder. `recipe` is the one that it is about, `words[0]`.
    """

    command: str
    words: list[str]
    options: Mapping[str, Option]
    file: str
    recipe: Recipe | None

    @property
    def resumes(self) -> bool:
        """Whether it continues what is in its folder."""
        return "resume" in self.options

    @property
    def name(self) -> str:
        """What the job is called."""
        first = self.words[0]
        return self.recipe.name if self.recipe else self.command if first.startswith("-") else Path(first).stem

    def line(self, request: SubmitRequest, folder: str, recipe: str | None = None) -> list[str]:
        """Its words after `hvdkit`, with what the job knows: the ranks, the framework, the run's folder.

        `recipe` is the file that the job has of the recipe.
        """
        words = list(self.words)
        if recipe is not None:
            words[0] = recipe
        given: dict[str, str | None] = {"framework": request.framework, "rival": request.rival, "out": folder}
        typed = {word.partition("=")[0] for word in words}
        if (np := self.options.get("np")) and not {*np.names} & typed:
            given["np"] = str(request.np)
        if request.to == "ray" and "--launcher" not in typed:  # in a job of the others it is found by itself
            given["launcher"] = "ray"
        added = []
        for field, value in given.items():
            if value is not None and field in self.options:
                added += [self.options[field].option(field), value]
        return [*self.command.split(), *added, "--resume" if self.resumes else "--overwrite", *words]


def asked(request: SubmitRequest) -> AnyCommand | None:
    """The command of a request; None where it is a recipe to train.

    Raises RequestError for what would only fail once it has queued: options that the command does not have, a script
    that is not here, a recipe with faults.
    """
    if not isinstance(request.recipe, Path):
        return None
    words = [str(request.recipe), *(request.overrides or [])]
    if request.recipe.suffix == ".py":
        command = _LAUNCH
    else:
        command = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), "")
        words = words[len(command.split()) :]
    if not command:
        known = request.recipe.suffix in (".yaml", ".yml") or words[0] in {entry.name for entry in registry.entries()}
        if not known and shutil.which(words[0]):
            raise RequestError(f"{words[0]}: a program; give -- launch --runtime NAME -- {shlex.join(words)}")
        names = [*(entry.name for entry in registry.entries()), *COMMANDS]
        if not known and "/" not in words[0] and not nearest(words[0], names):
            raise RequestError(
                f"{words[0]}: no recipe, command or program; expected a recipe of `hvdkit recipes list` or its file, a "
                "command such as compare RECIPE, or a script"
            )
        return None
    module = import_module(f"hvdkit.commands.{command.replace(' ', '_').replace('-', '_')}")
    hints = get_type_hints(module.run)
    kind: type[Request] = hints["request"]
    options = {name: option for name, (_, option) in kind.declared().items()}
    if not {"launcher", "out"} <= options.keys() or not words:
        raise RequestError(f"{command}: expected a command that starts ranks, with its words, such as compare RECIPE")
    faults = Faults()
    if command != _LAUNCH and words[0].startswith("-"):
        faults.append(f"{command}: expected what it is about first, then its options; got {words[0]}")
    if request.array:
        faults.append("--array: expected a recipe to train; a command is one task")
    if command != _LAUNCH and any(word.partition("=")[0] in ("--out", "--resume", "--overwrite") for word in words):
        faults.append("--out, --resume, --overwrite: leave them out of the command; submit's --out names the folder")
    if request.recipe.suffix != ".py" and any(word.startswith("-") for word in words):
        with faults.collected():
            _check_words(command, words)
    faults.report()
    recipe = None
    if "recipe" in options:
        file = registry.locate(Path(words[0]))
        recipe = recipe_paths.absolute(loading.load(file, [])[0])
        words[0] = str(file.resolve())
    elif request.to != "kubernetes" and "collective" not in options and Path(words[0]).exists():
        words[0] = str(Path(words[0]).resolve())
    if command == _LAUNCH and words[0].endswith(".py"):
        _check_script(Path(words[0]), request)
    if request.to != "ray" and not isinstance(plain(kind.declared()["np"][0]), type):
        del options["np"]  # several numbers: the command chooses them by the hosts
    file = getattr(hints["return"], "FILE", None) or module.FILE
    return AnyCommand(command, words, options, str(file), recipe)


def _check_words(command: str, words: Sequence[str]) -> None:
    """Raise RequestError for options that the command does not have. With --help, what parses starts nothing."""
    try:
        done = programs.answer([sys.executable, "-m", "hvdkit", *command.split(), "--help", *words], _PARSED_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{command}: cannot be checked ({error})") from None
    if done.returncode != 0:
        raise RequestError(done.stderr.strip())


def _check_script(script: Path, request: SubmitRequest) -> None:
    if request.to != "kubernetes" and not script.is_file():  # a pod has its own
        raise RequestError(f"{script}: no such file; expected a script that all nodes see")
    own_script.framework_under(script if script.is_file() else None, str(script), request.framework, "--framework")
    say(own_script.train_apart(script, request.np))
    mounts = [volume.partition(":")[2] for volume in request.volumes or []]
    if request.to == "kubernetes" and not any(script.is_relative_to(mount) for mount in mounts):
        say([f"{script}: is not copied; pods read it from their image, or give its path on a --volume"])


def folder(request: SubmitRequest, command: AnyCommand) -> Path:
    """The folder of its results, which nothing else has written. Raises RequestError."""
    run = (request.out or paths.default_out(command.name, command.command.replace(" ", "-"))).absolute()
    paths.check_free(run, request.overwrite and not command.resumes, command.resumes)
    return run
