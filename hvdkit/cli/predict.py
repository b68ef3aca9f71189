"""The commands `hvdkit predict` and `hvdkit advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvdkit.cli import completion
from hvdkit.cli.options import LAUNCHER_HELP, Overwrite, show

if TYPE_CHECKING:
    from hvdkit.simulator.sweep import Sweep

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
    ranks: Annotated[
        list[int] | None,
        typer.Option("-n", "-np", "--np", help="number of ranks; may be repeated", show_default="--sweep n=…"),
    ] = None,
    policy: Policy = None,
    set_: Set = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V,...", help="a grid of what-ifs, such as n=8,16,...,1024; may be repeated"),
    ] = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict step time, speed and what bounds them, at any number of ranks, from a profile and a cluster file."""
    from hvdkit import api
    from hvdkit.errors import RequestError
    from hvdkit.report.predict import prediction_lines

    if sweep:
        return _sweep(
            api.sweep(
                profile, sweep, cluster=cluster, ranks=ranks, policy=policy, settings=set_, out=out, overwrite=overwrite
            )
        )
    if not ranks:
        raise RequestError("-n: expected the number of ranks, such as -n 8, or --sweep n=8,16")
    prediction = api.predict(
        profile, cluster=cluster, ranks=ranks, policy=policy, settings=set_, out=out, overwrite=overwrite
    )
    typer.echo("\n".join(prediction_lines(prediction)))
    typer.echo(f"written to {prediction.folder / 'predict.json'}, predict.png and predict-trace.json")


def _sweep(swept: Sweep) -> None:
    from hvdkit.report import sweep as report
    from hvdkit.report.tabular import terminal

    show([terminal(report.table(swept), "")], 120)
    typer.echo("\n".join([*report.lines(swept), f"written to {swept.folder / 'sweep.json'}, sweep.csv and sweep.png"]))


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
    tokens: Annotated[
        int | None, typer.Option(min=1, help="a text's tokens in an epoch", show_default="the recipe's data")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="epochs of training", show_default="the recipe's")] = None,
    budget: Annotated[
        float | None, typer.Option(help="find the fastest way to train for this much, in the cluster file's currency")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="find the cheapest way to train until then: 36h, 2d, friday, 2026-11-27")
    ] = None,
    spot_interruption: Annotated[
        float | None, typer.Option(help="how often a host is taken away in an hour, such as 0.05")
    ] = None,
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
            help=f"launcher to profile a recipe with: {LAUNCHER_HELP}",
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
    from hvdkit import api
    from hvdkit.report.predict import advice_lines

    advice = api.advise(
        subject, overrides, cluster=cluster, ranks=ranks, price=price, images=images, tokens=tokens, epochs=epochs,
        budget=budget, deadline=deadline, spot_interruption=spot_interruption, apply=apply,
        policy=policy, settings=set_, framework=framework, np=np, hosts=hosts, steps=steps, launcher=launcher,
        stall_timeout=stall_timeout, out=out, overwrite=overwrite, resume=resume,
    )  # fmt: skip
    typer.echo("\n".join(advice_lines(advice)))
    typer.echo(f"written to {advice.folder / 'advise.json'} and advise.md")
