"""Numbers and words that no command can make sense of, as options and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.results import profile as profiles
from tests.attacks import HVDKIT, attack, refused
from tests.conftest import Hvdkit
from tests.simulating import profile

pytestmark = pytest.mark.check

DIGITS = "9" * 400
ADVISE = "advise profile.json --cluster p100-roce25 -n 8 --out out"
REFUSED = [
    (
        f"{ADVISE} --epoch-images {DIGITS} --epochs {DIGITS}",
        ["--epoch-images: expected", "--epochs: expected", "400 digits"],
    ),
    (f"{ADVISE} --price nan", ["--price: expected a number", "nan"]),
    (f"{ADVISE} --price 1e400", ["--price: expected a number", "inf"]),
    (f"predict profile.json --cluster p100-roce25 -n {DIGITS}", ["-n: expected a number of at most 2^53"]),
    (f"train resnet20-digits -np {DIGITS}", ["-np: expected a number of at most 2^53, got a number of 400 digits"]),
    (f"train resnet20-digits -np -{DIGITS}", ["-np: expected a number"]),
    (f"compare resnet20-digits --rounds {DIGITS} -np 1 -np {DIGITS}", ["--rounds: expected", "-np: expected"]),
    ("compare resnet20-digits --margin nan", ["--margin: expected"]),
    ("train resnet20-digits --stall-timeout nan", ["--stall-timeout: expected"]),
    ("bench allreduce -np 1", ["-np 1: expected 2 or more ranks"]),
    (f"bench allreduce --max-bytes {DIGITS} --factor inf", ["--max-bytes: expected", "--factor: expected"]),
    (
        "profile resnet20-digits --steps 9007199254740992",
        ["--steps 9007199254740992: expected at least 8, at most"],
    ),
    (
        "parity resnet20-digits --steps 9007199254740992",
        ["--steps 9007199254740992: expected at least 1, at most"],
    ),
]


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_number_beyond_all_bounds(command: str, words: list[str], inside: Hvdkit, tmp_path: Path) -> None:
    profiles.save(profile(), tmp_path / "profile.json")
    done = inside(*command.split())
    refused(done, *words)
    assert {path.name for path in tmp_path.iterdir()} == {"profile.json"}


def test_the_largest_numbers_that_are_taken_make_an_answer(inside: Hvdkit, tmp_path: Path) -> None:
    profiles.save(profile(), tmp_path / "profile.json")
    most = "--epoch-images 9007199254740992 --epochs 9007199254740992 --price 999999999"
    done = inside(*f"{ADVISE} {most}".split())
    assert done.returncode == 0 and (tmp_path / "out" / "advise.json").exists(), done.stderr


def test_a_path_that_is_no_utf_8_is_shown_as_it_is(tmp_path: Path) -> None:
    profiles.save(profile(), tmp_path / "profile.json")
    advise = f"{HVDKIT} {ADVISE.replace('--out out', '')} --out $'a\\xff'"
    done = attack(tmp_path, f"{advise} | od -An -v -w1 -c | tr -d ' \\n' | grep -o a377")
    assert done.stdout.strip() == "a377", done.stdout + done.stderr
    refused(attack(tmp_path, f"{HVDKIT} report $'\\xff\\xfe'"), "no such folder")
