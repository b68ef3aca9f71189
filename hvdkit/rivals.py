"""What hvdkit is measured against: other ways to train the same recipe. No framework is needed to ask about them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Rival:
    """One way: under which frameworks it exists, what it is, and how many ranks it needs at least.

    One that is not `averaging` trains each process for itself, so nothing can be proved of it. All but those that
    `travel` run on this machine only.
    """

    frameworks: tuple[str, ...]
    what: str
    least_np: int = 2
    averaging: bool = True
    travels: bool = False


RIVALS = {
    "plain": Rival(
        ("pytorch", "tensorflow", "keras", "mxnet"),
        "Horovod as its documentation shows it, in its default settings",
        least_np=1,
        travels=True,
    ),
    "ddp": Rival(("pytorch",), "torch.nn.parallel.DistributedDataParallel"),
    "multiworker": Rival(("tensorflow", "keras"), "tf.distribute.MultiWorkerMirroredStrategy"),
    "kvstore": Rival(("mxnet",), "MXNet's parameter server, kvstore dist_sync"),
    "independent": Rival(
        ("pytorch", "tensorflow", "keras", "mxnet"),
        "as many processes at once without a word between them: the limit",
        averaging=False,
    ),
}


def label(framework: str, rival: str | None) -> str:
    """One name for both: `pytorch`, `pytorch-ddp`."""
    return f"{framework}-{rival}" if rival else framework


def check(names: list[str], frameworks: list[str], nps: list[int]) -> list[str]:
    """What is wrong with asking for these rivals: one line each. One that fits some of the requested runs is right."""
    faults = []
    for name in dict.fromkeys(names):
        rival = RIVALS.get(name)
        if rival is None:
            close = difflib.get_close_matches(name, RIVALS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            faults.append(f"--rival {name}: expected one of {', '.join(RIVALS)}{hint}")
        elif not set(frameworks) & set(rival.frameworks):
            faults.append(
                f"--rival {name}: is there for {', '.join(rival.frameworks)} only, got --framework "
                f"{', '.join(frameworks)}"
            )
        elif nps and max(nps) < rival.least_np:
            faults.append(
                f"--rival {name}: expected -np {rival.least_np} or more, got {', '.join(map(str, nps))}; "
                "one rank has nobody to talk to"
            )
    return faults


def fitting(names: list[str], framework: str, np: int) -> list[str]:
    """Those of the names that are rivals of this framework and number of ranks."""
    rivals = [(name, RIVALS[name]) for name in dict.fromkeys(names) if name in RIVALS]
    return [name for name, rival in rivals if framework in rival.frameworks and np >= rival.least_np]


def check_recipe(name: str, compression: str, elastic: bool, hosts_are_here: bool) -> None:
    """Check what a rival cannot do. Raises RequestError."""
    rival = RIVALS[name]
    if compression != "none" and name not in ("plain", "independent"):
        raise RequestError(f"--rival {name}: knows no compression: {compression}; choose compression=none")
    if elastic:
        raise RequestError(f"--rival {name}: cannot go on without a lost rank; leave out the recipe's `elastic`")
    if not rival.travels and not hosts_are_here:
        raise RequestError(f"--rival {name}: runs on this machine only; leave out -H")
