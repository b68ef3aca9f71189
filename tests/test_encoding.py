"""Tokenizers as people save them: nothing of the text is lost or added, and none of it by chance."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from hvdkit.commands import generate
from hvdkit.data import encoding, tokens
from hvdkit.data.tokens import Tokens
from hvdkit.errors import RequestError
from hvdkit.recipe.data import Text
from hvdkit.results.generate import Generation
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check
TEXT = "".join(f"the {number} quick brown foxes\n\n  jump over <|endoftext|> the lazy dog\n" for number in range(400))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(TEXT)
    tokens.open_tokens.cache_clear()
    yield
    tokens.open_tokens.cache_clear()


def opened(path: Path, by: Path) -> Tokens:
    tokens.open_tokens.cache_clear()
    return tokens.open_tokens(Text(name="text", path=str(path), tokens=str(by)))


SAVED: dict[str, dict[str, Any]] = {
    "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    },
    "post_processor": {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
}  # fmt: skip


def test_what_a_tokenizers_file_has_besides_is_not_used() -> None:
    plain = {"model": {"type": "BPE", "dropout": None, "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "Fuse"}}
    saved = {"model": plain["model"] | {"dropout": 0.1}, "decoder": {"type": "Fuse"}} | SAVED
    found, unused = encoding.bare(json.dumps(saved).encode())
    assert {key: value for key, value in found.items() if value is not None} == plain
    assert unused == ("truncation", "padding", "template", "dropout")
    byte_level = {"post_processor": {"type": "ByteLevel", "trim_offsets": True}}
    assert encoding.bare(json.dumps(plain | byte_level).encode())[1] == ()
    for content in (b'{"a": 0, "b": 1}', b"#version: 0.2\na b\n", b"[]", b'{"model": 3}', b"\xff"):
        with pytest.raises(ValueError):
            encoding.bare(content)


def test_pieces_have_the_tokens_of_the_whole() -> None:
    """By a tokenizer that is a regular expression as GPT-2's, and marks a text's start as Llama 2's does."""
    pattern = re.compile(r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")

    def encode(text: str) -> list[int]:
        return [hash(word) for word in ("_", *pattern.findall(text))] if text else []

    for text in (TEXT, "a" + (" " * 9000 + "b\n\n\n  c ") * 9, TEXT.replace("\n", "\r"), "x" * 50_000, "no"):
        parts = [text[start : start + 16_384] for start in range(0, len(text), 16_384)]
        found = list(encoding.pieces(parts, encode))
        assert [token for piece in found for token in piece] == encode(text)
        assert len(found) > 1 or " " not in text


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A tokenizer of bytes, with two special tokens."""
    kind: Any = tokenizers
    made = kind.Tokenizer(kind.models.BPE())
    made.pre_tokenizer = kind.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = kind.decoders.ByteLevel()
    trainer = kind.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<|endoftext|>"], show_progress=False,
        initial_alphabet=kind.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([TEXT.replace("<|endoftext|>", "")], trainer)
    made.save(str(tmp_path / "plain.json"))
    return tmp_path / "plain.json"


def test_all_of_the_text_becomes_tokens(plain: Path, tmp_path: Path) -> None:
    saved = json.loads(plain.read_text()) | SAVED
    saved["model"]["dropout"] = 0.5
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    used = encoding.encoding(str(tmp_path / "saved.json"))
    first, second = opened(tmp_path / "a.txt", plain), opened(tmp_path / "a.txt", tmp_path / "saved.json")
    assert np.array_equal(first.train, second.train) and np.array_equal(first.val, second.val)
    assert used.decode([*second.train.tolist(), *second.val.tolist()]) == TEXT
    assert (np.concatenate([first.train, first.val]) == 1).sum() == 400, "the text's own markup is the special token"
    assert used.encode("<|endoftext|>") == [1]
    assert first.left_out == ()
    (line,) = second.left_out
    assert "not used: its truncation and padding and template and dropout" in line


def test_tokens_that_are_made_need_no_package(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path / "a.txt", plain)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert np.array_equal(opened(tmp_path / "a.txt", plain).train, first.train)


def test_text_without_a_token_is_counted_or_refused(tmp_path: Path) -> None:
    kind: Any = tokenizers
    (tmp_path / "b.txt").write_text("ab é ab\n" * 50)
    letters = {"a": 0, "b": 1, " ": 2, "\n": 3}
    kind.Tokenizer(kind.models.BPE(letters, [])).save(str(tmp_path / "none.json"))
    with pytest.raises(RequestError, match=r"none\.json: it has no token for 'é' and would leave it out"):
        opened(tmp_path / "b.txt", tmp_path / "none.json")
    kind.Tokenizer(kind.models.BPE(letters | {"<unk>": 4}, [], unk_token="<unk>")).save(str(tmp_path / "some.json"))
    found = opened(tmp_path / "b.txt", tmp_path / "some.json")
    assert len(found.train) + len(found.val) == 400
    assert found.left_out[0].endswith("50 of 400 tokens are '<unk>': it has no token for that text")
    kind.Tokenizer(kind.models.WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / "words.json"))
    with pytest.raises(RequestError, match=r"words\.json: it cannot take the text"):
        opened(tmp_path / "b.txt", tmp_path / "words.json")


def test_a_vocabulary_with_gaps_counts_up_to_its_last_token(tmp_path: Path) -> None:
    kind: Any = tokenizers
    letters = {letter: 300 * number for number, letter in enumerate(sorted(set(TEXT)))}
    kind.Tokenizer(kind.models.BPE(letters, [])).save(str(tmp_path / "gaps.json"))
    found = opened(tmp_path / "a.txt", tmp_path / "gaps.json")
    assert found.vocabulary == max(letters.values()) + 1 and found.train.dtype == np.uint16
    assert found.train[:3].tolist() == [letters["t"], letters["h"], letters["e"]]


def test_generated_text_is_all_that_follows_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders such as Llama 2's drop the first space of what they decode; special tokens are text too."""
    kind: Any = tokenizers
    made = kind.Tokenizer(kind.models.BPE({"\u2581": 0, "a": 1, "b": 2}, []))
    made.pre_tokenizer, made.decoder = kind.pre_tokenizers.Metaspace(), kind.decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "spaces.json"))
    asked: dict[str, Any] = {}

    def ask(plan: Any, option: str, given: dict[str, Any], *others: Any) -> Generation:
        asked.update(given)
        return Generation.model_construct(tokens=[0, 2, 3])

    monkeypatch.setattr(generate, "ask", ask)
    plan: Any = SimpleNamespace(recipe=SimpleNamespace(data=Text(name="text", tokens=str(tmp_path / "spaces.json"))))
    found = generate.continued(plan, tmp_path, "ab", 3, True, None)
    assert asked["tokens"] == [0, 1, 2] and found.prompt + found.text == "ab b</s>"


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--prompt: expected UTF-8, got 'ab\\udcff'"):
        generate.checked(tmp_path, "ab\udcff", None)


def test_it_is_said_before_training(plain: Path, tmp_path: Path, inside: Hvdkit) -> None:
    saved = json.loads(plain.read_text()) | {"truncation": SAVED["truncation"]}
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    own = ("data.path=a.txt", "data.tokens=saved.json", "model.vocabulary=300", "model.context=16")
    done = inside("train", "gpt-tiny", "--framework", "pytorch", "--dry-run", *own)
    assert done.returncode == 0, done.stderr
    assert "data.tokens: saved.json: not used: its truncation; a text is tokenized as it is" in done.stdout
