"""Damaged profiles and cluster files: each is refused in lines that a user can read, or is still a sound file.

`make check-simulator` damages 4,000 of them, `make test` 200; they are the same each time.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands import predict as command
from hvdkit.errors import RequestError
from hvdkit.profiling import batch_curves, published
from hvdkit.recipe import grid
from hvdkit.results import profile as profiles
from hvdkit.simulator import advise as advising
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import sweep as sweeping
from hvdkit.simulator.money import Money
from hvdkit.simulator.settings import applied, read
from tests.test_simulator_properties import EXAMPLES

pytestmark = pytest.mark.check

ODD = (
    -1, 0, 1, 0.5, 1e308, -1e308, 5e-324, 1e-300, 10**30, 10**400, 2**63, "", "x", None, [], {}, True, [1], [None],
    {"a": 1},
)  # fmt: skip
ASKED: tuple[list[str], ...] = (
    [], ["batch_size=7"], ["batch_size=1000"], ["speed=3", "compression=fp16"], ["sync.every=4"], ["policy=mg-wfbp"],
    ["jitter=0.2"], ["policy=central", "servers=4"],
)  # fmt: skip


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Each key of a document, and each index up to the third."""
    inside = document.items() if isinstance(document, dict) else enumerate(document[:3])
    for key, value in inside:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def damaged(document: Any, chance: random.Random) -> Any:
    """One to three values removed, cut, scaled or replaced."""
    found = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        *above, key = chance.choice(list(places(found)))
        part = found
        for each in above:
            part = part[each]
        value, how = part[key], chance.random()
        if how < 0.12:
            del part[key]
        elif how < 0.2 and isinstance(value, list):
            part[key] = value[:-1]
        elif how < 0.3 and isinstance(value, int | float):
            part[key] = value * chance.choice((0, -1, 1e-9, 1e9, 1e150))
        else:
            part[key] = chance.choice(ODD)
    return found


def test_damaged_files_are_refused_or_still_sound(tmp_path: Path) -> None:
    own, *others = (published.profile("resnet18", *of, "a100") for of in ((2470, 256), (2200, 64), (2000, 16)))
    sound = batch_curves.combined(own, others).model_dump(mode="json")
    known = [clusters.load(Path(name)).model_dump(mode="json") for name in ("aws-p3-16xlarge", "k80-10gbe")]
    chance, ended = random.Random(0), Counter[str]()
    for number in range(max(EXAMPLES, 200)):
        profile, cluster = sound, chance.choice(known)
        if number % 3:
            profile = damaged(profile, chance)
        if number % 3 != 1:
            cluster = damaged(cluster, chance)
        texts = [json.dumps(profile).encode(), json.dumps(cluster).encode()]
        if number % 4 == 0:  # overwritten as text
            which, odd = chance.randrange(2), chance.randbytes(chance.randrange(4))
            at = chance.randrange(len(texts[which]))
            texts[which] = texts[which][:at] + odd + texts[which][at + 1 :]
        (tmp_path / "p.json").write_bytes(texts[0])
        (tmp_path / "c.yaml").write_bytes(texts[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy's on the terminal are no better than a traceback
            try:
                asked(tmp_path, number, chance.choice(ASKED))
                ended["sound"] += 1
            except RequestError as error:
                assert 0 < len(str(error)) < 2000
                assert all(line.strip() and line.isprintable() for line in str(error).splitlines())
                ended["refused"] += 1
    assert ended["refused"] > ended["sound"] > 0


def asked(folder: Path, number: int, settings: list[str]) -> None:
    """What users ask of two files; advice and grids now and then."""
    profile, what = command.read(folder / "p.json"), read(settings)
    cluster = applied(clusters.load(folder / "c.yaml"), what)
    predicting.predict(profile, cluster, [1, 16], what)
    if number % 5 == 0:
        advising.advise(profile, cluster, 4, what, Money())
    if number % 5 == 1:
        whatifs = sweeping.checked(grid.read(["n=2,8", "batch_size=4,64"], "--sweep"), [], [], None, cluster)
        sweeping.sweep(profile, cluster, whatifs)


@pytest.mark.parametrize(("key", "value"), [("cycle_time_ms", 1e308), ("fusion_threshold_bytes", 10**30)])
def test_horovods_settings_beyond_all_machines_are_refused_by_their_key(tmp_path: Path, key: str, value: float) -> None:
    profile = published.profile("resnet18", 2470, 256, "a100").model_dump(mode="json")
    profile["tuning"][key] = value
    (tmp_path / "p.json").write_text(json.dumps(profile))
    with pytest.raises(RequestError, match=rf"p\.json: .*tuning\.{key}"):
        profiles.load(tmp_path / "p.json")


def test_clocks_of_hosts_that_were_started_weeks_apart_are_no_fault(tmp_path: Path) -> None:
    profile = published.profile("resnet18", 2470, 256, "a100").model_dump(mode="json")
    profile["ranks"][0]["clock_offset_ms"] = 3e9
    (tmp_path / "p.json").write_text(json.dumps(profile))
    assert command.read(tmp_path / "p.json").ranks[0].clock_offset_ms == 3e9
