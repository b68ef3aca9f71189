"""`hvdkit` in a process that has imported its commands: server.py imports this file, and forks what runs it."""

from __future__ import annotations

import sys
from importlib import import_module

from hvdkit.__main__ import main
from hvdkit.commands import COMMANDS

if __name__ == "__main__":
    sys.argv[0] = "hvdkit"
    main()
else:
    words = [command.replace(" ", "_").replace("-", "_") for command in COMMANDS]
    for name in ("cli.app", *(f"commands.{word}" for word in words)):
        import_module(f"hvdkit.{name}")
