"""The commands that foresee: `hvdkit predict` and `hvdkit advise`. They load nothing before they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Cluster = Annotated[Path, typer.Option(metavar="CLUSTER.yaml", help="a cluster file, or the name of one of hvdkit's")]
Policy = Annotated[str | None, typer.Option(help="when gradients go, such as horovod, ddp or mg-wfbp")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a what-if, such as batch_size=64")]
Out = Annotated[Path | None, typer.Option(help="the folder to write into [default: runs/<model>-<command>-<time>]")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what an earlier run left in the folder")]


def predict(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE.json", help="what `hvdkit profile` has written")],
    cluster: Cluster,
    ranks: Annotated[list[int], typer.Option("-n", help="number of ranks; may be repeated")],
    policy: Policy = None,
    set_: Set = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict step time, images/s and what bounds them, at any number of ranks, from a profile and a cluster file."""
    from hvdkit import foresee, paths
    from hvdkit.report.foresee import prediction_lines

    plan = foresee.plan(profile, cluster, ranks, set_ or [], policy)
    with paths.claimed(out or paths.default_out(plan.profile.recipe, "predict"), overwrite) as folder:
        prediction = foresee.predict(plan, folder)
        typer.echo("\n".join(prediction_lines(prediction)))
        typer.echo(f"written to {folder / 'predict.json'}, predict.png and predict-trace.json")


def advise(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE.json", help="what `hvdkit profile` has written")],
    cluster: Cluster,
    ranks: Annotated[int, typer.Option("-n", help="number of ranks")],
    price: Annotated[float | None, typer.Option(help="of a GPU for an hour [default: the cluster file's]")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="in an epoch [default: the recipe's data]")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="of training [default: the recipe's]")] = None,
    apply: Annotated[
        Path | None, typer.Option(metavar="NEW.yaml", help="write the recipe with the best sure gain")
    ] = None,
    policy: Policy = None,
    set_: Set = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Rank what would make training faster or cheaper, in software and hardware, each by its predicted gain."""
    from hvdkit import foresee, paths
    from hvdkit.report.foresee import advice_lines

    plan = foresee.plan(profile, cluster, [ranks], set_ or [], policy)
    request = foresee.request(plan, price, images, epochs, apply)
    with paths.claimed(out or paths.default_out(plan.profile.recipe, "advise"), overwrite) as folder:
        advice, applied = foresee.advise(request, folder)
        typer.echo("\n".join(advice_lines(advice)))
        typer.echo(f"written to {folder / 'advise.json'} and advise.md")
        if applied is not None:
            typer.echo(f"{apply}: the recipe with {applied}")


def add(app: typer.Typer) -> None:
    """Put the commands into the command line."""
    app.command()(predict)
    app.command()(advise)
