"""The command line at odd terminals: closed, full and ASCII streams, and signals at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit.cli import terminal
from hvdkit.errors import RequestError
from tests import hygiene
from tests.attacks import HVDKIT, attack, sound

pytestmark = pytest.mark.check

ADVISE = "advise profile.json --cluster p100-roce25 -n 8 --out out"


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii:strict"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_output_that_is_not_utf_8(here: Path, environment: dict[str, str]) -> None:
    """Tables are printed by `show`, lines by `typer.echo`."""
    table = "from hvdkit.cli import terminal; terminal.prepare(); from hvdkit.cli.generated import show; "
    table += "from hvdkit.report.tabular import Cell, Table, terminal as drawn; "
    table += "show([drawn(Table('', ['\\u00d7', '\\u2013'], [[Cell('\\u00b5'), Cell('\\u2026')]]), 'a \\u00f7 b')])"
    done = attack(here, [sys.executable, "-c", table], **environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    done = attack(here, f"{HVDKIT} {ADVISE}", **environment)
    assert done.returncode == 0 and "images/s" in done.stdout, done.stderr


def test_letters_that_an_encoding_has_not_are_replaced_by_plain_ones() -> None:
    terminal.prepare()
    assert "a ÷ b × c – …".encode("ascii", "hvdkit") == b"a / b x c - ..."
    assert "ü 🙂".encode("ascii", "hvdkit") == rb"\xfc \U0001f642"
    assert "a\udcffb".encode("utf-8", "hvdkit") == b"a\xffb"  # a path that is no UTF-8, byte by byte


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_lose_nothing_but_what_is_printed(here: Path, closed: str) -> None:
    done = attack(here, f"{HVDKIT} {ADVISE} {closed}")
    assert done.returncode == 0, done.stderr
    sound(done)
    assert {path.name for path in (here / "out").iterdir()} == {"advise.csv", "advise.json", "advise.md"}
    refused = attack(here, f"{HVDKIT} report nowhere {closed}")
    assert refused.returncode == 2
    sound(refused)


def test_what_is_opened_never_gets_a_closed_streams_number(here: Path) -> None:
    code = "from hvdkit.cli import terminal; terminal.prepare(); import os; file = open('profile.json'); "
    code += "os.write(2, str(file.fileno()).encode()); print('lost')"
    done = attack(here, f'{sys.executable} -c "{code}" <&- >&- 2>err; cat err')
    assert int(done.stdout) > 2


@pytest.mark.parametrize(("command", "status"), [("recipes list", 1), ("--help", 1), ("report nowhere", 2)])
def test_a_full_standard_output_is_a_failure_that_is_said(here: Path, command: str, status: int) -> None:
    done = attack(here, f"{HVDKIT} {command} >/dev/full")
    assert done.returncode == status and len(done.stderr.splitlines()) == 1
    sound(done)
    sound(attack(here, f"{HVDKIT} {command} >/dev/full 2>&1"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_loading_and_the_end_makes_no_fuss(here: Path, number: signal.Signals) -> None:
    """At many moments, by a clock that counts imports: from the first that a statement of hvdkit's begins to the last.

    Before that the process is Python's alone, which answers Ctrl-C in its own way.
    """
    (here / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Clock:\n"
        "    ticks = 0\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hvdkit.cli.app' or Clock.ticks:\n"
        "            Clock.ticks += 1\n"
        f"            if Clock.ticks == int(os.environ['AT']): os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Clock())\n"
    )
    reached = set()
    for at in [1, 4, 20, 120, 400]:
        path = f"{here}:{os.environ['PYTHONPATH']}"
        done = attack(here, f"exec {HVDKIT} {ADVISE} --overwrite", AT=str(at), PYTHONPATH=path)
        sound(done)
        assert done.returncode in (-number, 128 + number, 0), (at, done.returncode, done.stderr)
        reached.add(done.returncode)
        assert done.stderr.strip() in ("", "interrupted", "ended by SIGTERM"), done.stderr
        assert not list((here / "out").glob(".*"))
    assert 128 + number in reached and -number in reached


def test_a_fault_of_hvdkits_own_is_one_line_and_its_traceback_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> str:
        try:
            raise KeyError("why")
        except KeyError as error:
            assert terminal.ended(error) == 1
        return capsys.readouterr().err

    assert told().startswith("a fault of hvdkit's own: KeyError: 'why' (test_attack_streams.py, line ")
    monkeypatch.setenv(terminal.TRACEBACK, "1")
    assert told().startswith("Traceback")
    monkeypatch.delenv(terminal.TRACEBACK)
    assert terminal.ended(MemoryError()) == 1 and "out of memory" in capsys.readouterr().err
    assert terminal.ended(RequestError("a\x1b[2J\x07\u202e\tb\nc")) == 2
    assert capsys.readouterr().err == "a\\x1b[2J\\x07\\u202e\tb\nc\n", "no character that a terminal obeys"


def test_a_reader_that_goes_away_ends_a_command_in_silence(here: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdkit", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=here
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    deadline = time.monotonic() + hygiene.patience(60)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.returncode == 1 and process.stderr.read() == b""
    process.stderr.close()
