"""`hvdkit profile --from MODEL`: a profile from a published figure."""

from __future__ import annotations

from typing import Annotated

import typer

from hvdkit.errors import RequestError

From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="MODEL", help="measure nothing: a ResNet or GPT-2 whose speed on one device is published"
    ),
]
ImagesPerSecond = Annotated[float | None, typer.Option(help="the published figure, of one device, for --from")]
TokensPerSecond = Annotated[float | None, typer.Option(help="the same for a GPT")]
BatchSize = Annotated[
    int | None, typer.Option(help="images, or windows of 1,024 tokens, of the device in a step, for --from")
]
Device = Annotated[str | None, typer.Option(help="the device of the figure, such as a100 or cpu, for --from")]
_NEEDED = {
    "from_": "--from",
    "images_per_second": "--images-per-second",
    "tokens_per_second": "--tokens-per-second",
    "batch_size": "--batch-size",
    "device": "--device",
}


def asked(context: typer.Context) -> bool:
    """Whether one of the options of a published figure was given."""
    return any(context.params[name] is not None for name in _NEEDED)


def profile(context: typer.Context) -> None:
    """Make the profile, and say what was assumed. Raises RequestError."""
    from hvdkit import api
    from hvdkit.profiling.published import lines

    given = context.params
    speeds = ["images_per_second", "tokens_per_second"]
    second = speeds[not str(given["from_"]).startswith("gpt")]  # one speed is enough
    known = any(given[name] is not None for name in speeds)
    left_out = speeds if known else [second]
    missing = [option for name, option in _NEEDED.items() if given[name] is None and name not in left_out]
    other = [
        {"recipe": "RECIPE.yaml", "overrides": "key=value"}.get(str(parameter.name), parameter.opts[0])
        for parameter in context.command.params
        if parameter.name not in (*_NEEDED, "out", "overwrite")
        and getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    ]
    faults = [f"{', '.join(missing)}: needed too, for a profile from a published figure"] if missing else []
    faults += [f"{', '.join(other)}: leave it out; --from measures nothing"] if other else []
    if faults:
        raise RequestError("\n".join(faults))
    profiled = api.published_profile(
        given["from_"], images_per_second=given["images_per_second"], tokens_per_second=given["tokens_per_second"],
        batch_size=given["batch_size"], device=given["device"], out=given["out"], overwrite=given["overwrite"],
    )  # fmt: skip
    typer.echo("\n".join([*lines(profiled), f"written to {profiled.folder / 'profile.json'}"]))
