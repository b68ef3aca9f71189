"""The commands for text: `hvdkit generate` and `hvdkit tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import App, NoAverage, Overwrite

tokenizer_app = App(no_args_is_help=True, help="Tokenizers for text: which pieces of it a language model sees.")


def generate(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT_DIR", help="such as runs/gpt")],
    prompt: Annotated[str, typer.Option(help="the text to continue")],
    framework: Annotated[
        str | None, typer.Option(help="pytorch, tensorflow, keras or mxnet", show_default="that of the checkpoint")
    ] = None,
    tokens: Annotated[int, typer.Option(help="number of tokens to add")] = 200,
    no_average: NoAverage = False,
    out: Annotated[Path | None, typer.Option(help="a folder for generate.json", show_default="none")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Go on with a text: a trained language model adds the most probable token again and again."""
    from hvdkit import api

    result = api.generate(
        checkpoint, prompt, framework=framework, tokens=tokens, average=not no_average, out=out, overwrite=overwrite
    )
    typer.echo(result.prompt + result.text)


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
