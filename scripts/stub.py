"""The functions of hvdkit/__init__.pyi, which type checkers and editors read, as the commands' requests declare them.

`python -m scripts.schemas` writes them, and tests/test_schemas.py compares.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.commands.request import function

FILE = Path(__file__).resolve().parent.parent / "hvdkit" / "__init__.pyi"
MARK = "# Written by scripts/stub.py, as the commands declare it.\n"


def text() -> str:
    """The file, with all functions anew after MARK."""
    functions = [_definition(name, function(name)) for name in sorted(hvdkit._COMMANDS)]  # type: ignore[attr-defined]
    return FILE.read_text().partition(MARK)[0] + MARK + "".join(functions).rstrip() + "\n"


def _definition(name: str, called: Any) -> str:
    signature = inspect.signature(called)
    lines, keywords = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            lines.append("*,")
            keywords = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}".replace("'", '"')
        lines.append(f"{parameter.name}: {parameter.annotation}{default},")
    body = "".join(f"    {line}\n" for line in lines)
    described = textwrap.indent(inspect.getdoc(called) or "", "    ", lambda line: bool(line.strip()))
    end = "\n    " if "\n" in described else ""
    returned = signature.return_annotation
    shown = returned.__name__ if isinstance(returned, type) else str(returned).replace("pathlib.", "")
    head = f"def {name}(\n{body}) -> {shown}:\n"
    return f'{head}    """{described.strip()}{end}"""\n\n'
