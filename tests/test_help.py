"""`-h` of every command: it has an example, and each example is a command line that its command takes."""

from __future__ import annotations

import functools
import json
import shlex
from importlib import import_module
from typing import Any

import pytest
from typer.testing import CliRunner

from hvdkit.cli.app import app
from hvdkit.cli.generated import printable
from hvdkit.commands import COMMANDS, EXAMPLES, GROUPS
from hvdkit.commands.request import Request

pytestmark = pytest.mark.check
TERMINAL = {"COLUMNS": "200", "NO_COLOR": "1"}


def module(command: str) -> Any:
    return import_module(f"hvdkit.commands.{command.replace(' ', '_').replace('-', '_')}")


@pytest.mark.parametrize("command", ["", *GROUPS, *COMMANDS])
def test_help_has_examples_that_can_be_copied(command: str) -> None:
    short, long = (CliRunner().invoke(app, [*command.split(), option], env=TERMINAL) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0 and short.output == long.output
    lines = [line.strip() for line in short.output.splitlines()]
    assert any(line.startswith(f"Usage: {'root' if not command else ''}") for line in lines)
    assert [example for example in EXAMPLES.get(command, ()) if example not in lines] == []


@pytest.mark.parametrize(("command", "example"), [(name, line) for name in COMMANDS for line in EXAMPLES[name]])
def test_examples_are_what_the_command_takes(command: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(example)
    assert words[: 1 + len(command.split())] == ["hvdkit", *command.split()]
    assert asked(command, words[1:], monkeypatch).typed or not words[1 + len(command.split()) :]


def asked(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Request:
    """What `run` of a command gets from these words: all options, values and ranges are checked by then."""
    requests: list[Request] = []
    asks = module(command)
    for runs in {asks, import_module(f"hvdkit.commands.{asks.INSTEAD}") if hasattr(asks, "INSTEAD") else asks}:
        monkeypatch.setattr(runs, "run", stand_in(runs.run, requests))
        monkeypatch.setattr(runs, "lines", lambda *_: ())
        monkeypatch.setattr(runs, "status", lambda _: 0, raising=False)
    done = CliRunner().invoke(app, words, standalone_mode=False)
    assert done.exception is None and len(requests) == 1, f"{words}: {done.exception} {done.output}"
    return requests[0]


def stand_in(run: Any, requests: list[Request]) -> Any:
    @functools.wraps(run)
    def only_asked(request: Request) -> None:
        requests.append(request)

    return only_asked


@pytest.mark.parametrize(
    ("command", "before", "now"),
    [
        ("submit", "resnet20-digits --run a", "resnet20-digits --out a"),
        ("bench", "allreduce --device=cpu", "allreduce --on=cpu"),
        ("generate", "run --prompt a --tokens=2", "run --prompt a --new-tokens=2"),
        ("advise", "p.json --tokens=9 --apply n.yaml", "p.json --epoch-tokens=9 --new-recipe n.yaml"),
        ("advise", "p.json --images 9", "p.json --epoch-images 9"),
        ("plan", "gpt2 --cluster c -n 8 --apply n.yaml", "gpt2 --cluster c -n 8 --new-recipe n.yaml"),
        ("compare", "gpt-tiny --baseline old.json", "gpt-tiny --earlier old.json"),
    ],
)
def test_old_names_of_options_still_work(command: str, before: str, now: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (asked(command, [command, *words.split()], monkeypatch) for words in (before, now))
    assert old == new
    name = next(word for word in before.split() if word not in now.split() and word.startswith("--"))
    assert f" {name.partition('=')[0]} " not in CliRunner().invoke(app, [command, "-h"], env=TERMINAL).output


def test_json_prints_the_result_of_each_command_that_has_one() -> None:
    without = {name for name in COMMANDS if not printable(module(name))}
    assert without == {
        "launch", "hosts", "export", "report", "runtime build", "horovod wheel", "recipes copy", "tokenizer train",
    }  # fmt: skip
    recipes = CliRunner().invoke(app, ["recipes", "list", "--json"])
    assert "gpt-tiny" in [entry["name"] for entry in json.loads(recipes.stdout)]
    needed = CliRunner().invoke(app, ["memory", "gpt-tiny", "--json"])
    assert json.loads(needed.stdout)["model"] == "gpt"
