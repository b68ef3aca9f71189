"""The commands `hvdkit predict` and `hvdkit advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import completion
from hvdkit.cli.options import Overwrite, loaded
from hvdkit.errors import RequestError

Cluster = Annotated[
    Path,
    typer.Option(
        metavar="CLUSTER.yaml",
        help="a cluster file, or the name of one of hvdkit's",
        autocompletion=completion.clusters,
    ),
]
Policy = Annotated[str | None, typer.Option(help="when gradients are sent, such as horovod, ddp or mg-wfbp")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a what-if, such as batch_size=64")]
Out = Annotated[
    Path | None, typer.Option(help="the folder to write into", show_default="runs/<model>-<command>-<time>")
]


def predict(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE.json", help="the profile.json of `hvdkit profile`")],
    cluster: Cluster,
    ranks: Annotated[list[int], typer.Option("-n", "-np", "--np", help="number of ranks; may be repeated")],
    policy: Policy = None,
    set_: Set = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict step time, images/s and what bounds them, at any number of ranks, from a profile and a cluster file."""
    from hvdkit import paths
    from hvdkit.commands import predict as predict_
    from hvdkit.report.predict import prediction_lines

    plan = predict_.plan(profile, cluster, ranks, set_ or [], policy)
    out = out or paths.default_out(plan.profile.recipe, "predict")
    with paths.claimed(out, overwrite, inputs=[profile, cluster]) as folder:
        prediction = predict_.predict(plan, folder)
        typer.echo("\n".join(prediction_lines(prediction)))
        typer.echo(f"written to {folder / 'predict.json'}, predict.png and predict-trace.json")


def advise(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="PROFILE.json|RECIPE",
            help="a profile, or a recipe (file or name) to profile first",
            autocompletion=completion.recipes,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...",
            help="changes to the recipe, such as epochs=2",
            autocompletion=completion.overrides,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="CLUSTER.yaml",
            help="a file, or one of hvdkit's",
            show_default="the links of the profile",
            autocompletion=completion.clusters,
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("-n", help="number of ranks", show_default="the profile's")] = None,
    price: Annotated[float | None, typer.Option(help="price of a GPU hour", show_default="the cluster file's")] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="images in an epoch", show_default="the recipe's data")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="epochs of training", show_default="the recipe's")] = None,
    apply: Annotated[
        Path | None, typer.Option(metavar="NEW.yaml", help="write the recipe with the largest certain gain")
    ] = None,
    policy: Policy = None,
    set_: Set = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="framework to profile a recipe with: pytorch (default), tensorflow, keras or mxnet",
            autocompletion=completion.frameworks,
        ),
    ] = None,
    np: Annotated[
        int | None, typer.Option("-np", "--np", help="ranks to profile a recipe with", show_default="2")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", help="hosts to profile a recipe on", show_default="this machine")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="steps to measure of a recipe", show_default="20")] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="launcher to profile a recipe with: direct (default) or horovodrun",
            autocompletion=completion.launchers,
        ),
    ] = None,
    stall_timeout: Annotated[
        float | None, typer.Option(help="seconds after which a rank that hangs ends the run", show_default="60")
    ] = None,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="use the profile of the recipe in --out")] = False,
) -> None:
    """Rank what would make training faster or cheaper, in software and hardware, each by its predicted gain."""
    from hvdkit import paths
    from hvdkit.commands import advise as advise_
    from hvdkit.commands import predict as predict_
    from hvdkit.report.predict import advice_lines

    of_recipes = {
        "key=value": overrides, "--framework": framework, "-np": np, "-H": hosts, "--steps": steps,
        "--launcher": launcher, "--stall-timeout": stall_timeout, "--resume": resume,
    }  # fmt: skip
    predict_.check(price, apply)
    given = [name for name, value in of_recipes.items() if value not in (None, False)]
    if subject.suffix == ".json" and given == ["-np"] and ranks is None:
        ranks, of_recipes = np, {}  # there is nothing to profile, so it can only mean -n
    question = predict_.question(cluster, [] if ranks is None else [ranks], set_ or [], policy)
    if subject.suffix == ".json":
        request = advise_.of_profile(subject, question, of_recipes)
    else:
        if resume and out is None:
            raise RequestError("--resume: expected --out with the folder of an earlier hvdkit advise")
        recipe = loaded(subject, overrides)
        request = advise_.of_recipe(recipe, question, framework, np, hosts, steps, launcher, stall_timeout)
    folder = out or paths.default_out(request.name, "advise")
    with paths.claimed(folder, overwrite, resume, [subject, cluster]) as folder:
        plan = request.plan(folder)
        advice = predict_.advise(plan, predict_.money(plan, price, images, epochs), folder)
        typer.echo("\n".join(advice_lines(advice)))
        typer.echo(f"written to {folder / 'advise.json'} and advise.md")
        if apply is not None:
            typer.echo(f"{apply}: the recipe with {predict_.apply(advice, request.settings, apply)}")
