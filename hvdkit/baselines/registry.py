"""The baselines that hvdkit is compared with. This module loads no framework."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdkit.errors import RequestError, nearest

if TYPE_CHECKING:
    from hvdkit.recipe.communication import Parallel
    from hvdkit.recipe.schema import Recipe


@dataclass(frozen=True)
class Rival:
    """A baseline: the frameworks that have it, its description, and the smallest number of ranks.

    Without `averaging`, each process trains on its own, so its results cannot be checked for parity. Without
    `travels`, it runs on this machine only. `compresses`, `accumulates` and `synchronizes` (batch norms) say whether it
    supports these recipe keys, `counts` whether a loss may be (sum, count), as with `loss.ignored_label` and
    `loss.class_weights`.
    `sharding` has the values of that key with which it trains. One that has others than `none` shards in its own way,
    has the optimizers of its framework only, and no loss scaling; its results have `state_bytes`. `precisions` are
    those that it can train in, `runtime` is the one of `runtimes.pins.BASELINES` that it needs, if not the framework's.
    `divides` are the axes of `parallel` along which it divides models, all of which it needs.
    """

    frameworks: tuple[str, ...]
    what: str
    least_np: int = 2
    averaging: bool = True
    travels: bool = False
    compresses: bool = False
    accumulates: bool = True
    counts: bool = False
    synchronizes: bool = False
    sharding: tuple[str, ...] = ("none",)
    precisions: tuple[str, ...] = ("fp32", "fp64", "bf16", "fp16")
    runtime: str | None = None
    divides: tuple[str, ...] = ()

    @property
    def shards(self) -> bool:
        """Whether each rank holds only a share of something."""
        return self.sharding != ("none",)

    @property
    def torch_optim(self) -> bool:
        """Whether it has its framework's optimizers alone, and no loss scaling."""
        return self.shards or bool(self.divides)


_NOT_SYNCHRONIZED = "does not synchronize batch norms"
_STAGES = ("optimizer", "gradients", "parameters")

RIVALS = {
    "plain": Rival(
        ("pytorch", "tensorflow", "keras", "mxnet"),
        "Horovod as its documentation shows it, in its default settings",
        least_np=1,
        travels=True,
        compresses=True,
        counts=True,
        synchronizes=True,
    ),
    "ddp": Rival(("pytorch",), "torch.nn.parallel.DistributedDataParallel", counts=True),
    "zero_redundancy": Rival(
        ("pytorch",),
        "DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer",
        sharding=("none", "optimizer"),
    ),
    "fsdp": Rival(
        ("pytorch",), "FSDP2: torch.distributed.fsdp.fully_shard", sharding=("none", "gradients", "parameters")
    ),
    "deepspeed": Rival(
        ("pytorch",),
        "DeepSpeed's ZeRO, of the stage that the recipe's `sharding` names",
        sharding=_STAGES,
        precisions=("fp32",),
        runtime="deepspeed",
    ),
    "deepspeed_offload": Rival(
        ("pytorch",),
        "the same, with the optimizer's state offloaded to main memory",
        sharding=_STAGES,
        precisions=("fp32",),
        runtime="deepspeed",
    ),
    "pipelining": Rival(
        ("pytorch",), "torch.distributed.pipelining, on the stages of the recipe's `parallel`", divides=("pipeline",)
    ),
    "fsdp-tp": Rival(
        ("pytorch",), "DTensor's parts of layers, on those of the recipe's `parallel`, with FSDP2", divides=("tensor",)
    ),
    "multiworker": Rival(("tensorflow", "keras"), "tf.distribute.MultiWorkerMirroredStrategy", accumulates=False),
    "kvstore": Rival(("mxnet",), "MXNet's parameter server, kvstore dist_sync"),
    "independent": Rival(
        ("pytorch", "tensorflow", "keras", "mxnet"),
        "as many processes at once without a word between them: the limit",
        averaging=False,
        compresses=True,
        counts=True,
    ),
}


def label(framework: str, rival: str | None) -> str:
    """The name of a framework with or without a baseline: `pytorch`, `pytorch-ddp`."""
    return f"{framework}-{rival}" if rival else framework


def runtime_of(name: str | None) -> str | None:
    """The runtime that a baseline needs, None for that of its framework."""
    return RIVALS[name].runtime if name in RIVALS else None


def sharding_in_parity(name: str, sharding: str) -> str:
    """The recipe's `sharding` with which a baseline is compared: `none` for one that shards in no way."""
    return sharding if name in RIVALS and RIVALS[name].shards else "none"


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


def check_synchronized(name: str, layers: list[str]) -> None:
    """Raise RequestError if a baseline does not synchronize batch norms, and the model's `layers` are to be."""
    if not RIVALS[name].synchronizes:
        raise RequestError(f"--rival {name}: {_NOT_SYNCHRONIZED}; the model has {', '.join(layers[:3])}")


def check_recipe(name: str, recipe: Recipe, hosts_are_here: bool) -> None:
    """Check that a baseline supports the recipe and the hosts. Raises RequestError with everything it does not."""
    from hvdkit.core.precision import PRECISIONS
    from hvdkit.recipe.schema import AdamW, GptModel, Sgd

    rival = RIVALS[name]
    able = ("none", "fp16") if rival.compresses else ("none",)
    optimizer = recipe.optimizer
    faults = {
        f"does not support optimizer.name={optimizer.name}; choose sgd or adamw": rival.torch_optim
        and not isinstance(optimizer, Sgd | AdamW),
        "does not support SGD without momentum; choose optimizer.momentum=0.9": rival.torch_optim
        and isinstance(optimizer, Sgd)
        and not optimizer.momentum,
        "does not support decoupled decay of SGD; choose optimizer.decoupled=false": rival.torch_optim
        and isinstance(optimizer, Sgd)
        and optimizer.decoupled,
        "does not support loss scaling; choose precision=bf16 or fp32": rival.torch_optim
        and PRECISIONS[recipe.precision].scales_loss,
        f"does not support compression {recipe.compression}; choose compression=none": recipe.compression.method
        not in able,
        "does not support Local SGD; leave out the recipe's `sync`": recipe.sync is not None,
        "does not support other allreduce algorithms; choose allreduce=ring": recipe.allreduce != "ring",
        f"{_NOT_SYNCHRONIZED}; choose model.batch_norm=local": recipe.model.batch_norm == "synchronized"
        and not rival.synchronizes,
        "does not support accumulation; choose accumulate=1": recipe.accumulate > 1 and not rival.accumulates,
        "does not support loss.ignored_label and loss.class_weights; leave them out": recipe.loss.counts
        and not rival.counts,
        f"does not have sharding={recipe.sharding}; choose {' or '.join(rival.sharding)}": recipe.sharding
        not in rival.sharding,
        f"does not support precision={recipe.precision}; choose {' or '.join(rival.precisions)}": recipe.precision
        not in rival.precisions,
        "does not support data.name=native, of which ranks may evaluate unequal numbers of batches; choose another": (
            "parameters" in rival.sharding and recipe.data.name == "native"
        ),
        "divides GPTs alone; choose model.name=gpt": bool(rival.divides) and not isinstance(recipe.model, GptModel),
        "does not divide a vocabulary unequally; choose model.vocabulary as a multiple of parallel.tensor": (
            "tensor" in rival.divides
            and isinstance(recipe.model, GptModel)
            and recipe.model.classes % recipe.parallel.tensor
        ),
        "does not support loss.label_smoothing; leave it out": "tensor" in rival.divides
        and recipe.loss.label_smoothing > 0,
        "does not average weights; leave out the recipe's `average_weights`": recipe.average_weights is not None,
        "does not support elastic training; leave out the recipe's `elastic`": recipe.elastic is not None,
        "runs on this machine only; leave out -H": not (rival.travels or hosts_are_here),
    }
    told = [*_of_axes(rival, recipe.parallel), *(text for text, is_so in faults.items() if is_so)]
    if told:
        raise RequestError("\n".join(f"--rival {name}: {text}" for text in told))


def _of_axes(rival: Rival, axes: Parallel) -> Iterator[str]:
    """What a baseline cannot do of the axes along which a recipe divides its model."""
    if axes.divides and not rival.divides:
        yield "does not divide models over ranks; leave out the recipe's `parallel`"
        return
    for axis in ("pipeline", "tensor"):
        size = getattr(axes, axis)
        if axis in rival.divides and size == 1:
            yield f"needs a model that is divided; choose parallel.{axis}=2 or more"
        elif axis not in rival.divides and size > 1:
            yield f"does not divide models along this axis; choose parallel.{axis}=1"
    if axes.schedule == "interleaved":
        yield "has one stage on each rank; choose parallel.schedule=gpipe or 1f1b"
