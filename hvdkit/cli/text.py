"""The command `hvdkit tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import App

tokenizer_app = App(no_args_is_help=True, help="Tokenizers for text: which pieces of it a language model sees.")


@tokenizer_app.command("train")
def tokenizer_train(
    text: Annotated[Path, typer.Argument(metavar="FILE_OR_FOLDER", help="UTF-8 text")],
    out: Annotated[Path, typer.Option(help="the file to write, for data.tokens", metavar="FILE.json")],
    vocabulary: Annotated[int, typer.Option(help="number of tokens, at most")] = 50_257,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file")] = False,
) -> None:
    """Train a byte-level BPE tokenizer on a text, as GPT-2 has one."""
    from hvdkit.commands.tokenizer import train

    count = train(text, out, vocabulary, overwrite)
    typer.echo(f"written to {out}: {count:,} tokens; give data.tokens={out}, with a model whose vocabulary is as large")
