"""`hvdkit generate`: a checkpoint's language model continues a text, under whichever framework is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands.plan import Plan
from hvdkit.commands.question import Asked, ask
from hvdkit.data.encoding import encoding
from hvdkit.errors import Faults, HvdkitError, RequestError
from hvdkit.recipe.schema import GPT, Text
from hvdkit.results.generate import Generation, read_generation
from hvdkit.tasks.gpt import architecture

FILE = "generate.json"
_MOST = 100_000  # tokens


@dataclass(frozen=True)
class Request:
    """A prompt and a checkpoint that have passed every check that can be made before a rank starts."""

    plan: Plan
    checkpoint: Path
    prompt: str
    count: int


def check(given: Path, prompt: str, framework: str | None, count: int) -> Request:
    """Check a checkpoint's or a run's folder `given`, and the prompt. Without a `framework` it is the one that has
    written the checkpoint. Raises RequestError with all faults."""
    faults = Faults([] if 1 <= count <= _MOST else [f"--tokens {count}: expected 1 to {_MOST}"])
    if not prompt:
        faults.append("--prompt: expected a text, got an empty one")
    elif not _is_text(prompt):
        faults.append(f"--prompt: expected UTF-8, got {prompt!a}")
        prompt = ""
    with faults.collected(HvdkitError):
        asked = Asked.of(given)
        if not isinstance(asked.recipe.model, GPT) or not isinstance(asked.recipe.data, Text):
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
    return Request(plan, asked.checkpoint, prompt, count)


def _is_text(prompt: str) -> bool:
    """Whether it has none of the bytes that a command line may have and UTF-8 has not."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def run(request: Request, folder: Path | None, average: bool = True) -> Generation:
    """The text, which is also written into `folder` (absolute, there and empty) if there is one.

    With `average` it is that of the averaged weights, where the checkpoint has any. Raises what the launcher raises.
    """
    data = request.plan.recipe.data
    assert isinstance(data, Text)
    used = encoding(data.tokens)
    prompt = used.encode(request.prompt)
    document = {
        "checkpoint": str(request.checkpoint),
        "tokens": prompt,
        "count": request.count,
        "average": average,
    }
    answer = ask(request.plan, "--generate", document, FILE, read_generation, folder)
    # a decoder may drop a space at a text's start, so the tokens are decoded after those of the prompt
    start, decoded = used.decode(prompt), used.decode(prompt + answer.tokens)
    text = decoded[len(start) :] if decoded.startswith(start) else used.decode(answer.tokens)
    return answer.model_copy(update={"prompt": request.prompt, "text": text})
