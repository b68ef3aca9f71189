"""`hvdkit tokenizer train`: a byte-level BPE tokenizer of a text, as GPT-2 has one (Radford et al. 2019, 2.2)."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hvdkit.commands.request import Argument, Option, Request, say
from hvdkit.data import tokens, walk
from hvdkit.errors import Faults, RequestError
from hvdkit.files import write_atomic
from hvdkit.recipe.data import Text

SMALLEST = 257  # all bytes, and one merge


class TokenizerTrainRequest(Request):
    """Train a byte-level BPE tokenizer on a text, as GPT-2 has one, and write it in Hugging Face's format."""

    text: Annotated[Path, Argument("UTF-8 text", metavar="FILE_OR_FOLDER")]
    out: Annotated[Path, Option("the file to write, for data.tokens", metavar="FILE.json")]
    vocabulary: Annotated[int, Option("number of tokens, at most"), Field(ge=SMALLEST, le=1_000_000)] = 50_257
    overwrite: Annotated[bool, Option("replace the file")] = False


def run(request: TokenizerTrainRequest) -> int:
    """Train; returns the number of tokens. Raises RequestError for a text that cannot be read, or if the package
    tokenizers is not installed; RunError if the file cannot be written."""
    path, out = request.text, request.out
    faults = Faults()
    if out.suffix != ".json":
        faults.append(f"--out {out}: expected a file that ends in .json")
    elif out.is_dir() or not out.parent.is_dir():
        faults.append(f"--out {out}: expected a file in a folder that is there")
    elif os.path.lexists(out) and not request.overwrite:
        faults.append(f"--out {out}: the file exists; add --overwrite or choose another one")
    others: Counter[str] = Counter()
    try:
        tokens.files(path, others)
    except RequestError as error:
        faults.append(str(error).removeprefix("data.path: "))
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        faults.append(f"the package tokenizers is not installed; run `{sys.executable} -m pip install tokenizers`")
    faults.report()
    if line := walk.line(path, others):
        say([line])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=request.vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(path), trainer)
    if tokenizer.get_vocab_size() < SMALLEST:
        raise RequestError(f"{path}: no pair of letters in it; expected a UTF-8 text, or a folder of them")
    write_atomic(out, tokenizer.to_str(pretty=True) + "\n")
    return int(tokenizer.get_vocab_size())


def lines(request: TokenizerTrainRequest, result: int) -> Iterator[str]:
    """What is written, and what to do with it."""
    out = request.out
    yield f"written to {out}: {result:,} tokens; give data.tokens={out}, with a model whose vocabulary is as large"


def texts(path: Path) -> Iterator[str]:
    """The text in parts. Raises RequestError, without a recipe's key, where it cannot be read or is no UTF-8."""
    try:
        for block in tokens.blocks(Text(name="text", path=str(path))):
            yield block.decode()
    except RequestError as error:
        raise RequestError(str(error).removeprefix("data.path: ")) from None
