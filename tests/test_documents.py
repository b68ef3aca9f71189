"""YAML and JSON that were made to do harm: each ends at once, in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hvdkit.checkpoint import snapshots
from hvdkit.commands import predict
from hvdkit.errors import RequestError
from hvdkit.files import read_bounded
from hvdkit.recipe import registry, schema, yaml_files
from hvdkit.results.compare import read_comparison
from hvdkit.results.parity import read_parity
from hvdkit.results.train import read_result
from hvdkit.simulator import cluster as clusters

RECIPE = "resnet20-digits"
pytestmark = [pytest.mark.check, pytest.mark.timeout(60)]  # what is not bounded takes hours, or all memory


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        schema.load(path)
    text = str(caught.value)
    assert str(path) in text and all(len(line) < 400 for line in text.splitlines())
    return text


def test_aliases_are_welcome(tmp_path: Path) -> None:
    text = registry.locate(Path(RECIPE)).read_text()
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace("\nbatch_size: ", "\nbatch_size: &n ") + "log_every: *n\n")
    recipe = schema.load(path)
    assert recipe.log_every == recipe.batch_size


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("0x" + "f" * 50_000, "a number of more than 300 digits"),
        ("9" * 400, "a number of more than 300 digits"),
        ("9" * 5000, "no int: '9999"),
        ("!!bool maybe", "no bool: 'maybe'"),
        ("!!int ''", "no int: ''"),
        ("!!float ''", "no float: ''"),
        ("!!int 1_000", "no int: '1_000'"),
        ("!!timestamp 2026-12-01", "could not determine a constructor"),
        ("!!binary YQ==", "could not determine a constructor"),
    ],
)
def test_what_does_not_fit_its_kind_is_told_with_its_place(value: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\nepochs: {value}\n")
    assert f"line 2, column 9: damaged YAML: {told}" in refusal(path)


@pytest.mark.parametrize("text", ["x" * 10**5 + "=1", "epochs=" + "9" * 10**5, "name.x=" + "y" * 10**5, "y" * 10**5])
def test_a_long_override_is_told_shortly(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        schema.load(registry.locate(Path(RECIPE)), [text])
    assert all(len(line) < 500 for line in str(caught.value).splitlines())


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    long = tmp_path / "long.yaml"
    long.write_bytes(b"#" * (yaml_files.MOST_BYTES + 1))
    for path, why in ((Path("/dev/zero"), "it is a device, not a file"), (long, "it has more than 1 MiB")):
        assert f"cannot be read ({why})" in refusal(path)
        with pytest.raises(RequestError, match=why):
            clusters.load(path)
    long.write_bytes(b"x" * 11)
    assert len(read_bounded(long, 11)) == 11
    with pytest.raises(OSError, match=r"long\.yaml"):
        read_bounded(long, 10)


@pytest.mark.parametrize("read", [predict.read, read_result, read_parity, read_comparison])
def test_results_too_are_read_with_a_bound(read: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdkit.files.read_bounded.__defaults__", (2**20, 1.0))
    (tmp_path / "long.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(RequestError, match=r"long.json: cannot be read .it has more than 1 MiB"):
        read(tmp_path / "long.json")  # type: ignore[operator]
    with pytest.raises(RequestError, match=r"/dev/zero: cannot be read .it is a device"):
        read(Path("/dev/zero"))  # type: ignore[operator]


def test_a_checkpoints_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdkit.files.read_bounded.__defaults__", (2**20, 1.0))
    (tmp_path / snapshots.RECORD).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(RequestError, match="it has more than 1 MiB"):
        snapshots.read(tmp_path)


def test_a_name_with_a_line_break_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.yaml"
    for _ in range(2):  # not there, then damaged
        for load in (schema.load, clusters.load):
            with pytest.raises(RequestError) as caught:
                load(path)
            assert all("a\\nb.yaml" in line for line in str(caught.value).splitlines())
        path.write_text(yaml.safe_dump({"x": 1}))
