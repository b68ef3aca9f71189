"""The Dockerfile as data: stages, their instructions, and what they need from each other.

Reads what this repository's Dockerfile uses: no heredocs, no options of RUN, no ONBUILD. What it does not know is a
ValueError, so that no step is passed over in silence.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

_KNOWN = {"ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, and its text with continued lines joined and no variables replaced."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name} {self.text}"


@dataclass(frozen=True)
class Copy:
    """COPY: from the build context, or from another stage; `sources` as written."""

    sources: list[str]
    target: str
    stage: str | None


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows; `base` has its build arguments replaced: an image, or another stage's name."""

    name: str
    base: str
    instructions: list[Instruction]

    def last(self, name: str) -> str | None:
        """The text of the last instruction of that name."""
        return next((one.text for one in reversed(self.instructions) if one.name == name), None)


def read(path: Path, build_args: dict[str, str] | None = None) -> dict[str, Stage]:
    """All stages of the file, in order; `build_args` replace the defaults of the ARGs before the first FROM.

    Raises ValueError where the file holds what this reader does not know, or a stage has no name or one twice.
    """
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    stages: dict[str, Stage] = {}
    given: dict[str, str] = {}
    current: Stage | None = None
    for item in parser.structure:
        name, text = item["instruction"], item["value"]
        if name == "COMMENT":
            continue
        if name == "FROM":
            match = re.fullmatch(r"(\S+) AS ([\w-]+)", text)
            if not match or match[2] in stages:
                raise ValueError(f"{path}: FROM {text}: expected FROM IMAGE AS NAME, each name once")
            current = Stage(match[2], replace(match[1], given), [])
            stages[current.name] = current
        elif current is None and name == "ARG":
            key, value = argument(text)
            given[key] = (build_args or {}).get(key, value)
        elif current is None or name not in _KNOWN or (name == "RUN" and text.startswith("--")) or "<<" in text:
            raise ValueError(f"{path}: {name} {text}: this reader does not know it here")
        else:
            # Declared again without a default, an ARG has its value from before the first FROM.
            known = name == "ARG" and text in given
            current.instructions.append(Instruction(name, f"{text}={shlex.quote(given[text])}" if known else text))
    return stages


def argument(text: str) -> tuple[str, str]:
    """Name and default of an ARG, or name and value of an ENV; an ARG without a default has an empty one."""
    name, _, value = text.partition("=")
    words = shlex.split(value)
    if len(words) > 1 or not re.fullmatch(r"\w+", name):
        raise ValueError(f"{text}: expected one NAME=VALUE")
    return name, "".join(words)


def copied(text: str) -> Copy:
    """What a COPY says."""
    words = shlex.split(text)
    stage = None
    while words[0].startswith("--"):
        option, _, value = words.pop(0).partition("=")
        if option != "--from":
            raise ValueError(f"COPY {text}: this reader knows --from only")
        stage = value
    return Copy(words[:-1], words[-1], stage)


def command(text: str) -> list[str]:
    """The words of a CMD in its JSON form."""
    words = json.loads(text)
    if not isinstance(words, list):
        raise ValueError(f"CMD {text}: expected a list")
    return [str(word) for word in words]


def replace(text: str, values: dict[str, str]) -> str:
    """`text` with `$NAME` and `${NAME}` replaced; a name that is not there becomes empty, as in Docker."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def needed(stages: dict[str, Stage], target: str) -> list[Stage]:
    """The stages that `target` is built from, itself last, in the order of the file."""
    found, todo = set(), [target]
    while todo:
        stage = stages[todo.pop()]
        if stage.name in found:
            continue
        found.add(stage.name)
        sources = [copied(one.text).stage for one in stage.instructions if one.name == "COPY"]
        todo += [name for name in (stage.base, *sources) if name in stages]
    return [stage for name, stage in stages.items() if name in found]
