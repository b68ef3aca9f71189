"""Scripts and manifests from Jinja templates: those of templates/, or one of the user's own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from hvdkit.errors import RequestError

FOLDER = Path(__file__).with_name("templates")
TASK = "\0"  # stands for the number of an array's task; no word of a command has it


def render(template: str, own: Path | None, values: Mapping[str, Any]) -> str:
    """The text of a template of `FOLDER`, or of the user's `own` in its place, which may include and import them.

    Raises RequestError, one line with file and place, where the own template cannot be read or has a fault.
    """
    folders = [FOLDER] if own is None else [own.parent, FOLDER]
    environment = SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"word": _word, "quoted": json.dumps, "block": _block}
    try:
        return environment.get_template(template if own is None else own.name).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"--template {error.filename}: line {error.lineno}: {error.message}") from None
    except jinja2.TemplateNotFound as error:
        raise RequestError(f"--template {own}: {error.name}: no such file; copy one of those in {FOLDER}") from None
    except Exception as error:
        if own is None:
            raise
        names = ", ".join(sorted(values))
        raise RequestError(f"--template {own}: {' '.join(str(error).split())}; a template has {names}") from None


def _word(text: str) -> str:
    """A word for a shell, which fills in the number of an array's task and nothing else."""
    pieces = [shlex.quote(piece) if piece else "" for piece in text.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(pieces) or "''"


def _block(text: str, indent: int) -> str:
    """A text as a YAML block, whose lines are indented; on one line where YAML would not read it back from a block."""
    lines = text.split("\n")
    if not all(map(str.isprintable, lines)) or lines[0][:1] in ("", " ") or lines[-1] or lines[-2:-1] in ([], [""]):
        return json.dumps(text)
    return "\n".join(["|", *(f"{' ' * indent}{line}" for line in lines[:-1])])
