"""What a task and its architecture are, which every task in this folder extends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hvdkit.errors import RequestError, RunError

if TYPE_CHECKING:  # the command line counts parameters and starts without NumPy
    import numpy as np

    from hvdkit.data import Shard
    from hvdkit.data.counts import Counts
    from hvdkit.data.dataset import Dataset
    from hvdkit.recipe.communication import Parallel
    from hvdkit.recipe.schema import Recipe
    from hvdkit.tasks.parts import BlockRange, Cut, Place


class NormalizedLayer(NamedTuple):
    """A layer whose output the batch norm `norm` normalizes."""

    name: str
    norm: str


class Activations(NamedTuple):
    """How many values of one sample are kept until backward, by the dtype that they have.

    `compute` are in the dtype of the activations, `full` in that of the parameters. `scores` are the weights of
    attention, in the dtype of the activations; a fused kernel keeps none and computes them again. `outputs` of the
    `compute` ones are the model's outputs: where several microbatches are kept, only one's are there at once.
    """

    compute: int
    full: int
    scores: int = 0
    outputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model as data: the table from which a recipe's script builds it. Here it is one of which nothing is known.

    `dtype` is that of the parameters, `compute_dtype` that of the activations. With `recompute` blocks compute their
    activations again in backward. `norm_momentum` is the share of a batch norm's old running statistic that is kept.
    With `tensor` the script builds this rank's part of the model, as `cuts` has it, with `stage` that stage of it.
    """

    dtype: str = "float32"
    compute_dtype: str = "float32"
    recompute: bool = False
    norm_momentum: float = 0.0
    norm_epsilon: float = 1e-5
    tensor: Place | None = None
    stage: BlockRange | None = None

    @property
    def is_first(self) -> bool:
        """Whether it has what comes before the blocks, and gets the samples."""
        return self.stage is None or self.stage.is_first

    @property
    def is_last(self) -> bool:
        """Whether it has what comes after the blocks, and computes the loss."""
        return self.stage is None or self.stage.is_last

    def cuts(self) -> dict[str, Cut]:
        """How tensor parallelism divides parameters, by name. The others are whole on each rank."""
        return {}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the trainable parameters, in forward order, as checkpoints have them."""
        return {}

    def work_by_block(self) -> dict[str, int]:
        """Multiply-adds of a sample's forward pass by block, in the order of the chain; with the first that of what
        comes before it, with the last that of what comes after. Empty where it is unknown."""
        return {}

    def cost_by_block(self) -> Mapping[str, float]:
        """About the time of each block, in multiply-adds; empty where it is unknown."""
        return self.work_by_block()

    def staged(self, parallel: Parallel, index: int) -> Self:
        """The table of run `index` of those into which a pipeline's chain of blocks is cut (`Parallel.runs`)."""
        from hvdkit.tasks.parts import stage_of  # most models are whole

        return replace(self, stage=stage_of(parallel, index, list(self.cost_by_block().values())))

    def check_parallel(self, parallel: Parallel) -> None:
        """Raise RequestError if the model cannot be divided over ranks so."""

    def activations(self, shape: tuple[int, ...], recompute: bool = False) -> Activations | None:
        """About what of one sample of `shape` a rank keeps until backward, of its part; None if that is unknown."""
        return None

    def from_file(self, given: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The tensors of a file of weights under the names of `parameter_shapes`, where others name them otherwise.

        `config` is the content of the library's `config.json` beside the file, empty without one. Raises RequestError
        for tensors or settings that the architecture cannot have.
        """
        return dict(given)

    def initial_state(self, seed: int) -> dict[str, np.ndarray]:
        """Initial parameters and buffers, float32: the same bits for every framework and rank.

        Without any the framework initializes the weights, after the seed has been set.
        """
        return {}

    def normalized_layers(self) -> Iterator[NormalizedLayer]:
        """The layers that a batch norm follows, in forward order; none without batch norms."""
        return iter(())


Sums = dict[str, tuple[float, float]]  # by metric: its sum, and what it is divided by


@dataclass(frozen=True)
class Metrics:
    """What evaluation measures: for each name the mean of a value over all samples.

    `sums(outputs, targets)` returns the sum of each value over a batch, in the order of `names`, or a pair (sum, count)
    for a mean over something else than samples. `outputs` are the model's in evaluation mode. Without `sums` the only
    name is `loss`, the cross-entropy, which the framework computes on its device; large outputs then stay there.
    `derived` returns more metrics that follow from the means. With an `ignored` label metrics are means over the
    targets that are not it: `sums` then takes those, (targets, classes) and (targets,).
    """

    names: tuple[str, ...]
    sums: Callable[[np.ndarray, np.ndarray], tuple[Any, ...]] | None
    derived: Callable[[dict[str, float]], dict[str, float]] = lambda means: {}
    ignored: int | None = None

    def of_batch(self, outputs: np.ndarray, targets: np.ndarray) -> list[tuple[float, float]]:
        """The sum of each metric over a batch, and its count. Raises RequestError unless both are finite numbers."""
        import numpy as np  # `hvdkit train` does without it

        assert self.sums
        count = len(targets)
        if self.ignored is not None:
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
            counts = targets != self.ignored
            outputs, targets, count = outputs[counts], targets[counts], int(counts.sum())
        got, names = self.sums(outputs, targets), self.names
        listed = got if isinstance(got, tuple | list) else np.asarray(got).reshape(-1).tolist()
        parts = [np.asarray(part, float).reshape(-1) for part in ([listed] if len(names) == 1 else listed)]
        whole = len(parts) == len(names) and all(part.size in (1, 2) for part in parts)
        if not whole or (np.isfinite(outputs).all() and not all(np.isfinite(part).all() for part in parts)):
            expected = f"a finite sum over the batch, or (sum, count), for each of {', '.join(names)}"
            raise RequestError(f"metrics: expected {expected}, got {np.asarray(got, object).tolist()}")
        return [(float(part[0]), float(part[1]) if part.size == 2 else float(count)) for part in parts]

    def means(self, sums: Sums, total: int) -> dict[str, float]:
        """All metrics by name, of their sums over `total` samples; empty without samples.

        Raises RunError if samples have nothing that counts.
        """
        if none := [name for name, (_, count) in sums.items() if total and count == 0]:
            raise RunError(
                f"validation: expected targets that count for {', '.join(none)}, got none in {total} samples"
            )
        means = {name: value / count for name, (value, count) in sums.items()} if total else {}
        return means | (self.derived(means) if means else {})


NO_METRICS = Metrics((), lambda outputs, targets: ())


class Task:
    """What a recipe trains: samples, a model, and metrics.

    `unit` names in the plural what speeds count, such as images, and a sample has `units` of them; `flop` is the
    arithmetic of training on one of them, None if that is not reported. The checkpoint with the highest metric
    `best` is kept as the best one; with a minus sign before its name, the one with the lowest. `loss` is a function
    (outputs, targets) -> mean loss, or (sum, count), in the framework's operations; None: the recipe's loss.
    """

    own = False  # whether its code is the user's
    unit = "samples"
    units = 1
    flop: int | None = None
    metrics: Metrics
    best = ""
    loss: Callable[[Any, Any], Any] | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def count(self) -> Counts | None:
        """The counts of the recipe's data set on this machine; None if only a rank can know them.

        Raises RequestError if its files are missing or wrong.
        """
        from hvdkit.data import counts

        return counts.count(self.recipe.data, int(self.recipe.model.classes))

    def open_data(self, shard: Shard) -> Dataset:
        """The recipe's data set. Raises RequestError if it cannot be opened or does not fit the model."""
        from hvdkit.data.batches import open_dataset

        recipe = self.recipe
        return open_dataset(recipe.data, int(recipe.model.classes), recipe.seed, shard, recipe.batch_size)

    def architecture(self, shape: tuple[int, ...] | None = None) -> Architecture:
        """The architecture of the recipe's model, for samples of `shape`; None for the task's usual ones."""
        raise NotImplementedError

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise RequestError if the model cannot be trained on the recipe's batches of samples of `shape`."""


NOT_COUNTED = "only its script knows the model; expected a ResNet or a GPT (docs/planner.md#your-own-model)"


def parameter_count(architecture: Architecture) -> int:
    """The number of trainable parameters."""
    return sum(prod(shape) for shape in architecture.parameter_shapes().values())


def state_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters and of batch norms' running statistics; empty where the table has none."""
    shapes = architecture.parameter_shapes()
    norms = [layer.norm for layer in architecture.normalized_layers()]
    statistics = [(norm, name) for norm in norms for name in ("running_mean", "running_var")]
    return shapes | {f"{norm}.{name}": shapes[f"{norm}.weight"] for norm, name in statistics}
