"""`hvdkit generate`: a checkpoint's language model continues a text, under whichever framework is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hvdkit import paths
from hvdkit.commands import fields
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.commands.question import Asked, ask
from hvdkit.commands.request import Argument, Option, Request
from hvdkit.data.encoding import encoding
from hvdkit.errors import Faults, HvdkitError, RequestError
from hvdkit.recipe.schema import GptModel, Text
from hvdkit.results.generate import Generation
from hvdkit.tasks.gpt import architecture

_MOST = 100_000  # tokens


class GenerateRequest(Request):
    """Continue a text: a run's or a checkpoint's language model adds the most probable token again and again.

    Without `out` nothing is written.
    """

    checkpoint: Annotated[Path, Argument("such as runs/gpt", metavar="RUN")]
    prompt: Annotated[str, Option("the text to continue", positional=True)]
    framework: fields.WritersFramework = None
    tokens: Annotated[
        int, Option("number of tokens to add", ("--new-tokens",), old=("--tokens",)), Field(ge=1, le=_MOST)
    ] = 200
    average: fields.Average = True
    out: Annotated[Path | None, Option("a folder for generate.json", shown="none")] = None
    overwrite: fields.Overwrite = False


@dataclass(frozen=True)
class Prompt:
    """A prompt and a checkpoint that have passed every check that can be made before a rank starts."""

    plan: CheckedRun
    checkpoint: Path
    text: str


def check(given: Path, prompt: str, framework: str | None) -> Prompt:
    """Check a checkpoint's or a run's folder `given`, and the prompt. Without a `framework` it is the one that has
    written the checkpoint. Raises RequestError with all faults."""
    faults = Faults()
    if not prompt:
        faults.append("--prompt: expected a text, got an empty one")
    elif not _is_text(prompt):
        faults.append(f"--prompt: expected UTF-8, got {prompt!a}")
        prompt = ""
    with faults.collected(HvdkitError):
        asked = Asked.of(given)
        if not isinstance(asked.recipe.model, GptModel) or not isinstance(asked.recipe.data, Text):
            raise RequestError(
                f"{given}: expected a language model that was trained on text, got {asked.recipe.model.name} on "
                f"{asked.recipe.data.name}"
            )
        if prompt:
            given_tokens = len(encoding(asked.recipe.data.tokens).encode(prompt))
            context = architecture(asked.recipe.model).context
            if given_tokens > context:
                raise RequestError(
                    f"--prompt: expected at most {context} tokens, model.context, got {given_tokens}; shorten it"
                )
        plan = asked.plan(framework, batch_size=1)
    faults.report()
    return Prompt(plan, asked.checkpoint, prompt)


def _is_text(prompt: str) -> bool:
    """Whether it has none of the bytes that a command line may have and UTF-8 has not."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def run(request: GenerateRequest) -> Generation:
    """Ask the model. Raises what the launcher raises."""
    prompt = check(paths.settled(request.checkpoint), request.prompt, request.framework)
    out = request.out
    with paths.claimed(out, request.overwrite, inputs=[request.checkpoint]) if out else nullcontext() as folder:
        answer = continued(prompt, request.tokens, request.average, folder)
        return answer.at(folder) if folder else answer


def lines(request: GenerateRequest, result: Generation) -> Iterator[str]:
    """The whole text."""
    yield result.prompt + result.text


def continued(prompt: Prompt, count: int, average: bool, folder: Path | None) -> Generation:
    """The text with `count` more tokens, which is also written into `folder` if there is one."""
    data = prompt.plan.recipe.data
    assert isinstance(data, Text)
    used = encoding(data.tokens)
    given = used.encode(prompt.text)
    document = {"checkpoint": str(prompt.checkpoint), "tokens": given, "count": count, "average": average}
    answer = ask(prompt.plan, "--generate", document, Generation, folder)
    # a decoder may drop a space at a text's start, so the tokens are decoded after those of the prompt
    start, decoded = used.decode(given), used.decode(given + answer.tokens)
    text = decoded[len(start) :] if decoded.startswith(start) else used.decode(answer.tokens)
    return answer.model_copy(update={"prompt": prompt.text, "text": text})
