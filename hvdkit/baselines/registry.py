"""The baselines that hvdkit is compared with. This module loads no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdkit.errors import RequestError, nearest

if TYPE_CHECKING:
    from hvdkit.recipe.schema import Recipe


@dataclass(frozen=True)
class Rival:
    """A baseline: the frameworks that have it, its description, and the smallest number of ranks.

    Without `averaging`, each process trains on its own, so its results cannot be checked for parity. Without
    `travels`, it runs on this machine only. `compresses` and `accumulates` say whether it supports these recipe keys.
    One that `shards` has the optimizers of its framework only, and no loss scaling; its results have `state_bytes`.
    """

    frameworks: tuple[str, ...]
    what: str
    least_np: int = 2
    averaging: bool = True
    travels: bool = False
    compresses: bool = False
    accumulates: bool = True
    shards: bool = False


RIVALS = {
    "plain": Rival(
        ("pytorch", "tensorflow", "keras", "mxnet"),
        "Horovod as its documentation shows it, in its default settings",
        least_np=1,
        travels=True,
        compresses=True,
    ),
    "ddp": Rival(("pytorch",), "torch.nn.parallel.DistributedDataParallel"),
    "zero_redundancy": Rival(
        ("pytorch",), "DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer", shards=True
    ),
    "multiworker": Rival(("tensorflow", "keras"), "tf.distribute.MultiWorkerMirroredStrategy", accumulates=False),
    "kvstore": Rival(("mxnet",), "MXNet's parameter server, kvstore dist_sync"),
    "independent": Rival(
        ("pytorch", "tensorflow", "keras", "mxnet"),
        "as many processes at once without a word between them: the limit",
        averaging=False,
        compresses=True,
    ),
}


def label(framework: str, rival: str | None) -> str:
    """The name of a framework with or without a baseline: `pytorch`, `pytorch-ddp`."""
    return f"{framework}-{rival}" if rival else framework


def check(names: list[str], frameworks: list[str], nps: list[int]) -> list[str]:
    """One line for each baseline that fits none of the requested frameworks and numbers of ranks."""
    faults = []
    for name in dict.fromkeys(names):
        rival = RIVALS.get(name)
        if rival is None:
            faults.append(f"--rival {name}: expected one of {', '.join(RIVALS)}{nearest(name, RIVALS)}")
        elif not set(frameworks) & set(rival.frameworks):
            faults.append(
                f"--rival {name}: expected --framework {' or '.join(rival.frameworks)}, got {', '.join(frameworks)}"
            )
        elif nps and max(nps) < rival.least_np:
            faults.append(
                f"--rival {name}: expected -np {rival.least_np} or more, got {', '.join(map(str, nps))}; "
                "it needs several ranks"
            )
    return faults


def fitting(names: list[str], framework: str, np: int) -> list[str]:
    """Those of the names that are baselines of this framework and allow this number of ranks."""
    rivals = [(name, RIVALS[name]) for name in dict.fromkeys(names) if name in RIVALS]
    return [name for name, rival in rivals if framework in rival.frameworks and np >= rival.least_np]


def check_recipe(name: str, recipe: Recipe, hosts_are_here: bool) -> None:
    """Check that a baseline supports the recipe and the hosts. Raises RequestError with everything it does not."""
    from hvdkit.core.precision import PRECISIONS
    from hvdkit.recipe.schema import AdamW, Sgd

    rival = RIVALS[name]
    able = ("none", "fp16") if rival.compresses else ("none",)
    optimizer = recipe.optimizer
    faults = {
        f"does not support optimizer.name={optimizer.name}; choose sgd or adamw": rival.shards
        and not isinstance(optimizer, Sgd | AdamW),
        "does not support SGD without momentum; choose optimizer.momentum=0.9": rival.shards
        and isinstance(optimizer, Sgd)
        and not optimizer.momentum,
        "does not support decoupled decay of SGD; choose optimizer.decoupled=false": rival.shards
        and isinstance(optimizer, Sgd)
        and optimizer.decoupled,
        "does not support loss scaling; choose precision=bf16 or fp32": rival.shards
        and PRECISIONS[recipe.precision].scales_loss,
        f"does not support compression {recipe.compression}; choose compression=none": recipe.compression.method
        not in able,
        "does not support Local SGD; leave out the recipe's `sync`": recipe.sync is not None,
        "does not support other allreduce algorithms; choose allreduce=ring": recipe.allreduce != "ring",
        "does not support accumulation; choose accumulate=1": recipe.accumulate > 1 and not rival.accumulates,
        "does not have hvdkit's sharding; leave out the recipe's `sharding`": recipe.sharding != "none",
        "does not support elastic training; leave out the recipe's `elastic`": recipe.elastic is not None,
        "runs on this machine only; leave out -H": not (rival.travels or hosts_are_here),
    }
    if any(faults.values()):
        raise RequestError("\n".join(f"--rival {name}: {text}" for text, is_so in faults.items() if is_so))
