"""Text as windows of tokens: the same for every framework, held out at the end, refused where it is no text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdkit.checkpoint import snapshots, weights
from hvdkit.checkpoint.resume import check_text
from hvdkit.commands import tokenizer_train
from hvdkit.core.step_plan import Progress
from hvdkit.data import encoding, text, tokens
from hvdkit.data.tokens import Tokens
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.data import SyntheticText, Text
from hvdkit.tasks import gpt
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens.open_tokens.cache_clear()
    yield tmp_path / "cache"
    tokens.open_tokens.cache_clear()


def opened(path: Path | None, **keys: object) -> Tokens:
    tokens.open_tokens.cache_clear()
    return tokens.open_tokens(Text.model_validate({"name": "text", "path": path and str(path), **keys}))


def test_a_text_is_its_bytes_with_the_end_held_out(tmp_path: Path) -> None:
    lines = [f"line {number} äöü\n" for number in range(100)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    found = opened(tmp_path / "a.txt", validation=0.25)
    whole = "".join(lines).encode()
    assert found.train.tobytes() + found.val.tobytes() == whole and found.vocabulary == 256
    assert found.val_bytes == len(found.val) and found.val.tobytes().startswith(b"line ")
    assert 0 <= len(found.train) - 0.75 * len(whole) < len(lines[-1].encode())


def test_a_text_without_lines_is_read_in_parts(tmp_path: Path) -> None:
    whole = ("ä€😀x" * 60_000).encode()
    (tmp_path / "a.txt").write_bytes(whole)
    found = opened(tmp_path / "a.txt", validation=0.25)
    assert found.train.tobytes() + found.val.tobytes() == whole
    assert 0.1 < len(found.val) / len(whole) <= 0.25 and found.val.tobytes().decode()


def test_tokens_are_made_once_for_a_content(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n" * 50)
    first = opened(file)
    assert isinstance(first.train, np.memmap)
    made = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*.bin")}
    assert len(made) == 2
    opened(file.rename(tmp_path / "b.txt"))
    assert {path: path.stat().st_mtime_ns for path in own_cache.rglob("*.bin")} == made
    (tmp_path / "b.txt").write_text("one\nTwo\n" * 50)
    assert opened(tmp_path / "b.txt").digest != first.digest and len(list(own_cache.rglob("*.bin"))) == 4
    assert not list(own_cache.rglob("making-*"))


def test_a_text_is_read_again_only_if_its_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n" * 50)
    os.utime(file, (1e9, 1e9))  # a file that is just written may change once more at the same time
    first = opened(file)
    read = tokens.blocks
    monkeypatch.setattr(tokens, "blocks", None)
    assert opened(file).digest == first.digest
    monkeypatch.setattr(tokens, "blocks", read)
    file.write_text("one\nTwo\n" * 50)
    os.utime(file, (1e9, 1e9))
    assert opened(file).digest != first.digest


def test_the_text_of_python_is_there_without_a_path() -> None:
    found = opened(None)
    assert len(found.train) > 400_000 and b'The "if" statement' in found.train.tobytes() + found.val.tobytes()


def test_targets_are_the_next_tokens() -> None:
    split = text.WindowSplit(np.arange(25, dtype=np.uint16), 8)
    assert len(split) == 3 and len(text.WindowSplit(np.arange(24), 8)) == 2
    batch = split.batch(np.array([2, 0]))
    assert batch.inputs.tolist() == [list(range(16, 24)), list(range(8))]
    assert (batch.targets == batch.inputs + 1).all() and batch.inputs.dtype == np.int64


def test_synthetic_text_depends_on_the_seed_only() -> None:
    data = SyntheticText(name="synthetic-text", train_windows=100, val_windows=10)
    first, second, other = (text.open_text(data, 16, 50, seed)[0] for seed in (1, 1, 2))
    batches = [each.train.batch(np.arange(70)) for each in (first, second, other)]
    assert (batches[0].inputs == batches[1].inputs).all() and (batches[0].inputs != batches[2].inputs).any()
    assert len(first.val) == 10 and batches[0].inputs.max() < 50
    assert (batches[0].inputs[:, 1:] == batches[0].targets[:, :-1]).all()


@pytest.mark.parametrize(
    ("content", "keys", "told"),
    [
        (None, {}, "no such file or folder"),
        (b"", {}, "no text in it"),
        (b"good\nb\xe4d\n", {}, "a.txt: expected UTF-8, got the byte 0xe4 at offset 6, in"),
        (b"good\n" * 400_000 + b"b\xe4d", {}, "got the byte 0xe4 at offset 2,000,001, in"),
        (b"short\n", {}, "give a longer text or a smaller context"),
    ],
)
def test_what_is_no_text_is_refused(content: bytes | None, keys: dict[str, object], told: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RequestError, match=told):
        text.open_text(Text.model_validate({"name": "text", "path": str(file)}), 128, 256, 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["model.vocabulary=100"], "model.vocabulary: expected at least 256"),
        (["model.width=130"], "width that is a multiple of heads, got 130 and 4"),
        (["model.layers=null"], "expected layers for name gpt"),
        (["model.name=gpt2"], "only for name gpt"),
        (["model.name=gpt3"], "'gpt2'"),
        (["data.name=digits"], "expected text or synthetic-text for model gpt, got digits"),
        (["batch_size=100000"], "batch_size: expected at most"),
        (["data.path=nowhere"], "no such file or folder"),
    ],
)
def test_requests_that_do_not_fit_are_refused(changes: list[str], told: str, inside: Hvdkit) -> None:
    done = inside("train", "gpt-tiny", "--framework", "pytorch", "--out", "run", *changes)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_tokenizer_is_trained_and_used(tmp_path: Path, inside: Hvdkit) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the dog ate the cat; größer\n" * 40, encoding="utf-8")
    done = inside("tokenizer", "train", "a.txt", "--out", "tokens.json", "--vocabulary", 280)
    assert done.returncode == 0, done.stderr
    used = encoding.encoding(str(tmp_path / "tokens.json"))
    ids = used.encode("the cat grows größer")
    assert used.decode(ids) == "the cat grows größer" and len(ids) < 16 and used.vocabulary == 280
    found = opened(tmp_path / "a.txt", tokens=str(tmp_path / "tokens.json"))
    assert found.vocabulary == 280 and found.train.dtype == np.uint16 and found.val_bytes > 2 * len(found.val)
    assert used.decode(found.train.tolist()).startswith("the cat sat")
    (tmp_path / "empty.txt").touch()
    for file, told in (("a", "the file exists"), ("empty", "empty.txt: no pair of letters"), ("no", "no such file")):
        out = "tokens.json" if file == "a" else "none.json"
        done = inside("tokenizer", "train", f"{file}.txt", "--out", out, "--vocabulary", 280)
        assert done.returncode == 2 and told in done.stderr and not (tmp_path / "none.json").exists(), done.stderr
    with pytest.raises(RequestError, match=r"data\.tokens: .*none\.json: cannot be read \(No such file"):
        encoding.encoding(str(tmp_path / "none.json"))
    own = ("data.path=a.txt", "data.tokens=tokens.json", "model.context=16")
    done = inside("train", "gpt-tiny", "--framework", "pytorch", "--out", "run", *own)
    expected = "model.vocabulary: expected at least 280, the different tokens of data.tokens tokens.json, got 256\n"
    assert done.returncode == 2 and done.stderr == expected


def test_a_tokenizers_text_that_is_none_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xe4d\n")
    with pytest.raises(RequestError) as refused:
        list(tokenizer_train.texts(tmp_path / "a.txt"))
    assert str(refused.value).startswith(f"{tmp_path / 'a.txt'}: expected UTF-8, got the byte 0xe4 at offset 6")


def test_a_checkpoint_of_another_text_is_refused(tmp_path: Path) -> None:
    sets = []
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name} line\n" * 40)
        sets.append(text.open_text(Text(name="text", path=str(tmp_path / name)), 16, 256, 1)[0])
    record = snapshots.CheckpointRecord(
        progress=Progress(), np=1, framework="", framework_version="", hvdkit_version="", recipe={},
        text_sha256=sets[0].text_sha256,
    )  # fmt: skip
    check_text(record, sets[0])
    check_text(record.model_copy(update={"text_sha256": None}), sets[1])  # of a version that did not keep it
    with pytest.raises(RequestError, match=r"data\.path: expected the text that the checkpoint was trained on"):
        check_text(record, sets[1])


@pytest.mark.parametrize("content", ["no tokenizer", '{"model": 3}'])
def test_what_is_no_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n" * 100)
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(RequestError, match=r"data\.tokens: .*(no tokenizer|tokenizers is not installed)"):
        opened(tmp_path / "a.txt", tokens=str(tmp_path / "tokens.json"))


def test_the_recipe_of_gpt2_runs_dry(inside: Hvdkit, tmp_path: Path, framework: str = "keras") -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 6000)
    words = ("data.path=text.txt", "data.tokens=bytes", "accumulate=2")
    done = inside("train", "gpt2", "--framework", framework, "-np", 2, "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "parameters 474.7 MiB" in shown and f"recipes/{framework}/gpt.py" in shown, shown


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    table = gpt.architecture(schema.GptModel(name="gpt", layers=1, heads=2, width=8, context=4, vocabulary=5))
    shapes = {name: array.shape for name, array in table.initial_state(3).items()}
    smaller = gpt.architecture(schema.GptModel(name="gpt", layers=2, heads=2, width=8, context=2, vocabulary=5))
    weights.save_weights(smaller.initial_state(3), tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="expected a GPT with layers 1, context 4"):
        weights.read_fitting(tmp_path / "model.safetensors", shapes, False, table)
