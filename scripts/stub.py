"""Write the functions of hvdkit/__init__.pyi, which type checkers and editors read, as the commands' requests declare
them. `python -m scripts.schemas` runs this too; tests/test_python.py compares.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.commands.request import function

FILE = Path(__file__).resolve().parent.parent / "hvdkit" / "__init__.pyi"
MARK = "# Written by scripts/stub.py, as the commands declare it.\n"


def text(page: str) -> str:
    """The page with all functions anew after MARK."""
    functions = {name: function(name) for name in sorted(hvdkit._COMMANDS)}  # type: ignore[attr-defined]
    return page.partition(MARK)[0] + MARK + "".join(_definition(*item) for item in functions.items()).rstrip() + "\n"


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


def main() -> None:
    """Write the file."""
    FILE.write_text(text(FILE.read_text()))
    print(FILE.name, file=sys.stderr)


if __name__ == "__main__":
    main()
