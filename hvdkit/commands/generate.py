"""`hvdkit generate`: a checkpoint's language model continues a text, under whichever framework is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hvdkit import paths
from hvdkit.commands import fields
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.commands.question import Asked, ask
from hvdkit.commands.request import Argument, Option
from hvdkit.data.encoding import encoding
from hvdkit.errors import Faults, HvdkitError, RequestError
from hvdkit.recipe.schema import GptModel, Text
from hvdkit.results.generate import Generation
from hvdkit.tasks.gpt import architecture

_MOST = 100_000  # tokens
_NO_UTF_8 = re.compile("[\ud800-\udfff]")  # how Python has bytes of a command line that are none


class GenerateRequest(fields.MayWrite):
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


def checked(given: Path, prompt: str, framework: str | None) -> tuple[CheckedRun, Path]:
    """The run that continues the prompt, and the checkpoint: the one `given`, or of a run's folder the best one.

    Without a `framework` it is the one that has written the checkpoint. Raises RequestError with all faults.
    """
    faults = Faults()
    if not prompt:
        faults.append("--prompt: expected a text, got an empty one")
    elif _NO_UTF_8.search(prompt):
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
    return plan, asked.checkpoint


def run(request: GenerateRequest) -> Generation:
    """Ask the model. Raises what the launcher raises."""
    plan, checkpoint = checked(paths.settled(request.checkpoint), request.prompt, request.framework)
    with request.claimed([request.checkpoint]) as folder:
        answer = continued(plan, checkpoint, request.prompt, request.tokens, request.average, folder)
        return answer.at(folder) if folder else answer


def lines(request: GenerateRequest, result: Generation) -> Iterator[str]:
    """The whole text."""
    yield result.prompt + result.text


def continued(
    plan: CheckedRun, checkpoint: Path, prompt: str, count: int, average: bool, folder: Path | None
) -> Generation:
    """The text with `count` more tokens, which is also written into `folder` if there is one."""
    data = plan.recipe.data
    assert isinstance(data, Text)
    used = encoding(data.tokens)
    given = used.encode(prompt)
    document = {"checkpoint": str(checkpoint), "tokens": given, "count": count, "average": average}
    answer = ask(plan, "--generate", document, Generation, folder)
    # a decoder may drop a space at a text's start, so the tokens are decoded after those of the prompt
    start, decoded = used.decode(given), used.decode(given + answer.tokens)
    text = decoded[len(start) :] if decoded.startswith(start) else used.decode(answer.tokens)
    return answer.model_copy(update={"prompt": prompt, "text": text})
