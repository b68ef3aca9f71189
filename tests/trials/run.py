"""Try attacks on running jobs, write down what was seen, and print the table of all: tests/trials/README.md.

usage: python -m tests.trials.run [--list] [GROUP | GROUP.NAME]...

Without names all are tried; each takes 10 to 120 seconds. Each runs in a process of its own, in a new folder of the
system's temporary files. seen.json keeps what was seen at first and what was seen last.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.trials.trial import DECLARED, ROOT, Unexpected

HERE = Path(__file__).resolve().parent

SEEN = HERE / "seen.json"
PAGE = HERE / "README.md"
LIMIT_S = 900
HEAD = """# Attacks on running jobs

Each row is an attack on a job that runs, or on what one has left: a function of the module that the name begins with.
What was expected was written down before the first try. To try one again, or all of a group:

```
.venv/bin/python -m tests.trials.run disks.read_only_in_the_middle
```

`--list` prints what each does. "First" and "now" say whether it was as expected; the words are what was seen last, or,
where something was mended, what was seen first.

"""


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    for module in sorted(HERE.glob("*.py")):
        if module.stem not in ("run", "trial"):
            importlib.import_module(f"tests.trials.{module.stem}")
    chosen = [name for name in DECLARED if not names or name in names or name.split(".")[0] in names]
    if "--one" in sys.argv:
        return _try_here(chosen[0])
    if not chosen:
        sys.exit(f"{' '.join(names)}: no such attack; --list prints all")
    failed = 0
    for name in chosen:
        done, expected, _ = DECLARED[name]
        print(f"{name}: {done}\n  expected: {expected}", flush=True)
        if "--list" not in sys.argv:
            seen = _try(name)
            failed += not seen["held"]
            print(f"  {'as expected' if seen['held'] else 'NOT AS EXPECTED'}: {seen['seen']}", flush=True)
            _record(name, seen)
    sys.exit(1 if failed else 0)


def _try_here(name: str) -> None:
    """Try an attack in this process; the last line printed is what was seen, as JSON."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-trial-", ignore_cleanup_errors=True) as folder:
        try:
            seen = {"held": True, "seen": DECLARED[name][2](Path(folder))}
        except Unexpected as unexpected:
            seen = {"held": False, "seen": str(unexpected)}
    print(json.dumps(seen))


def _try(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.trials.run", "--one", name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as trial:
        try:
            printed, errors = trial.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(trial.pid, signal.SIGKILL)
            return {"held": False, "seen": f"the attack itself did not end within {LIMIT_S} s"}
    if trial.returncode:
        return {"held": False, "seen": f"the attack itself failed: {errors[-1500:]}"}
    return dict(json.loads(printed.splitlines()[-1]))


def _record(name: str, seen: dict[str, Any]) -> None:
    """Write down what was seen; several processes may do so at once."""
    with (HERE / "run.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = json.loads(SEEN.read_text()) if SEEN.exists() else {}
        short = " ".join(seen["seen"].replace(f"{ROOT}/", "").split())[:300]
        row = rows.setdefault(name, {"first": seen["held"], "first_seen": short})
        row |= {"now": seen["held"], "seen": short, "date": datetime.date.today().isoformat()}
        SEEN.write_text(json.dumps(dict(sorted(rows.items())), indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(rows))


def page(rows: dict[str, Any]) -> str:
    """The table of all attacks that were tried."""
    held = sum(row["first"] for row in rows.values()), sum(row["now"] for row in rows.values())
    lines = [f"{len(rows)} attacks: {held[0]} as expected when first tried, {held[1]} now.", ""]
    lines += ["| attack | what is done | expected | first | now | seen |", "|:--|:--|:--|:--|:--|:--|"]
    for name, row in sorted(rows.items()):
        done, expected, _ = DECLARED.get(name, ("", "", None))
        words = row["seen"] if row["first"] or not row["now"] else row["first_seen"]
        cells = [f"`{name}`", done, expected, *("yes" if row[when] else "**no**" for when in ("first", "now")), words]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
