"""Recipes and command lines made to break: 1,000 of them, none may end in a traceback, each must be told by its key."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdkit.cli import app
from hvdkit.commands import parity, train
from hvdkit.errors import RequestError
from hvdkit.launch.hosts import parse_hosts
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe

pytestmark = pytest.mark.check

EXAMPLES = 250  # each of the four attacks below; 1,000 in all
attack = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)

GOOD: dict[str, Any] = {
    "name": "a",
    "model": {"name": "resnet20", "classes": 10},
    "data": {"name": "digits"},
    "batch_size": 32,
    "epochs": 8,
    "seed": 1,
    "optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 1e-4},
    "schedule": {"scale": "linear", "base_batch_size": 32, "warmup_epochs": 1, "decay": "cosine"},
    "loss": {"label_smoothing": 0.1},
    "compression": "none",
    "device": "cpu",
    "threads": 1,
}
KEYS = [(key,) for key in GOOD]
KEYS += [(key, inner) for key, value in GOOD.items() if isinstance(value, dict) for inner in value]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.dates(),
    st.binary(max_size=8),
    st.sampled_from(
        ["", "1e9", "-0", "nan", "$(id)", "`id`", "; id", "../..", "\x00", "%s%n", "auto", "ResNet20", "١"]
    ),
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def told(text: str, where: str) -> None:
    """Each line of a refusal is about something: a key of the recipe, an option, or a place in the file."""
    assert text and "Traceback" not in text
    for line in text.splitlines():
        assert re.search(r"expected|unknown|required|damaged|no such|known keys|cannot|holds|there twice|not ", line), (
            line
        )
        assert where in line or line.startswith("override"), line


@attack
@given(key=st.sampled_from(KEYS), value=junk)
def test_any_value_under_any_key(key: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    document = yaml.safe_load(yaml.safe_dump(GOOD))
    place = document
    for part in key[:-1]:
        place = place[part]
    place[key[-1]] = value
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    try:
        recipe = schema.load(path)
    except RequestError as refusal:
        assert refusal.exit_status == 2
        told(str(refusal), "recipe.yaml")
        assert key[0] in str(refusal) or "damaged YAML" in str(refusal), "the key at fault must be named"
    else:
        assert isinstance(recipe, Recipe)  # the value was a right one by chance


@attack
@given(
    content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
)
def test_any_bytes_as_a_recipe(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RequestError) as refusal:
        schema.load(path)
    told(str(refusal.value), "recipe.yaml")


@attack
@given(st.text(max_size=60), st.integers(-3, 10**7))
def test_any_hosts(text: str, np: int) -> None:
    try:
        hosts = parse_hosts(text, np)
    except RequestError as refusal:
        assert refusal.exit_status == 2 and ("-H" in str(refusal) or "-np" in str(refusal))
    else:
        for host in hosts:
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", host.name), "nothing that a shell would read"


WORDS = [
    "train", "compare", "runtime", "list", "recipes", "doctr", "--framework", "pytorch", "keras", "-np", "2", "0", "-1",
    "-H", "localhost:2", "a:;id", "--out", "/dev/null/x", "/proc/nowhere", "--launcher", "direct", "ssh", "--overwrite",
    "epochs=0", "model.name=x", "=", "a.b.c=1", "--stall-timeout", "nan", "--help", "recipe.yaml", "missing.yaml", ".",
]  # fmt: skip
beginnings = st.sampled_from([[], [], ["train", "recipe.yaml"], ["train", "recipe.yaml"], ["compare", "recipe.yaml"]])
words = st.sampled_from(WORDS) | st.text(
    alphabet=st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=15
)


@settings(attack, max_examples=EXAMPLES // 2)  # each builds the whole command line
@example(beginning=[], rest=["train", "-np"])
@example(beginning=[], rest=["runtime", "add", "--python"])
@given(beginning=beginnings, rest=st.lists(words, max_size=8))
def test_any_command_line(beginning: list[str], rest: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(GOOD))
    out, err = io.StringIO(), io.StringIO()
    started = mock.Mock(side_effect=RequestError("would have started"))
    with (
        contextlib.chdir(tmp_path),
        mock.patch.object(sys, "argv", ["hvdkit", *beginning, *rest]),
        mock.patch.object(train, "trained", started),
        mock.patch.object(parity, "proved", started),
        mock.patch("hvdkit.commands.runtime_build.run", started),
        mock.patch("hvdkit.commands.runtime_add.run", started),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        app.main()
    assert end.value.code in (0, 1, 2, None), end.value.code
    assert "Traceback" not in err.getvalue()
    if end.value.code == 2:
        assert (out.getvalue() + err.getvalue()).strip(), "a refusal must say why"


@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "ended by SIGTERM\n")])
def test_an_interrupt_is_told_in_a_word(
    number: signal.Signals, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hvdkit", "recipes", "list"])
    monkeypatch.setattr("hvdkit.recipe.registry.entries", lambda: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            app.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 128 + number and capsys.readouterr().err == told
