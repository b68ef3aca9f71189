"""`hvdkit profile --from MODEL`: a profile from a published figure; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from hvdkit import paths
from hvdkit.commands import profile
from hvdkit.commands.fields import WritesFolder
from hvdkit.commands.request import Option
from hvdkit.profiling import published
from hvdkit.results.profile import Profile


class PublishedProfileRequest(WritesFolder):
    """Make a profile for `predict` and `advise` from a published figure of one device; nothing is measured.

    `model` is one of hvdkit's, such as `resnet50` or `gpt2`, or `bert-base`, `vit-b-16`, `t5-base` and their sizes;
    `device` is a GPU's name, or `cpu`. `batch_size` counts images, or windows of `sequence_length` tokens.
    """

    model: Annotated[
        str,
        Option(
            "measure nothing: a ResNet, ViT, GPT-2, BERT or T5 whose speed on one device is published",
            ("--from",),
            metavar="MODEL",
            positional=True,
        ),
    ]
    images_per_second: Annotated[float | None, Option("the published figure, of one device, for --from")] = None
    tokens_per_second: Annotated[float | None, Option("the same for a GPT, BERT or T5")] = None
    sequences_per_second: Annotated[float | None, Option("the same, in windows of --sequence-length tokens")] = None
    sequence_length: Annotated[
        int | None, Option("tokens of a window, for --from", shown="1024 of a GPT, 128 of BERT, 512 of T5")
    ] = None
    batch_size: Annotated[int, Option("images, or windows of tokens, of the device in a step, for --from")]
    precision: Annotated[
        published.Precision | None, Option("the figure's (fp32): mixed precision loses more on full hosts, for --from")
    ] = None
    gradients: Annotated[
        published.Precision | None, Option("the precision in which gradients are sent (fp32), for --from")
    ] = None
    device: Annotated[str, Option("the device of the figure, such as a100 or cpu, for --from")]


def run(request: PublishedProfileRequest) -> Profile:
    """Make the profile. Raises RequestError with all that is wrong with the figure."""
    made = published.profile(
        request.model,
        request.images_per_second,
        request.batch_size,
        request.device,
        request.tokens_per_second,
        request.precision or "fp32",
        request.sequences_per_second,
        request.sequence_length,
        request.gradients or "fp32",
    )
    with paths.claimed(request.out or paths.default_out(made.recipe, "profile"), request.overwrite) as folder:
        return profile.write(made, folder).at(folder)


def lines(request: PublishedProfileRequest, result: Profile) -> Iterator[str]:
    """What was assumed."""
    yield from published.lines(result)
    yield f"written to {result.folder / profile.FILE}"
