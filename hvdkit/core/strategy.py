"""The base class of strategies: the part of a training step that makes one model out of the ranks' gradients.

`hvdkit/strategies/` has hvdkit's own strategies, `hvdkit/baselines/` those that it is compared with. A run uses one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from hvdkit.core.pieces import Partition
from hvdkit.core.tensors import Tensor

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.core.group import Group
    from hvdkit.core.stateful import Stateful
    from hvdkit.core.trainable import Trainable
    from hvdkit.recipe.schema import Optimizer

T = TypeVar("T")
GRADIENTS = "gradients"
PREFIX = "communication."  # of the names of a strategy's tensors in a checkpoint's state


class Strategy:
    """Each rank uses its own gradients, which is correct for a single rank. Subclasses average them.

    The training loop calls the hooks `begin_epoch`, `begin_step` and `end_step` on all ranks. `group` has the ranks
    whose gradients `average` takes the mean of. `name` is the prefix of its collectives' names: that of another
    strategy that is used at the same time differs.
    """

    group: Group | None = None
    name = GRADIENTS

    overlaps = False  # whether `begin` may send a gradient while backward still computes others
    linear = True  # whether means of multiples of the gradients are multiples of the means
    by_layer = False  # whether updates happen a layer at a time, by `defer`, when the next forward needs them
    keeps_shares = False  # whether gradients are sent after each batch, and each rank keeps only its share of the means

    session: Stateful
    trainable: Trainable
    _bytes: float | None = None  # that a rank sends per update, where it is always as many

    def bind(self, session: Stateful) -> None:
        """Attach to a session, which has no optimizer yet."""
        self.session, self.trainable = session, session.trainable

    def optimizer(self, settings: Optimizer) -> Optimizer:
        """The optimizer's settings without the parts that the strategy does itself."""
        return settings

    def partition(self, settings: Optimizer) -> Partition:
        """The pieces of the parameters that this rank updates, by the optimizer of these settings."""
        return self.session.held()

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over `group`, `Mesh.data` in a recipe, of what this rank updates; collective.

        The result has the keys of `partition(…).pieces`.

        The gradients are by parameter; they may be overwritten. Those that `begin` has taken are left out.

        Part of the step that a tracing framework compiles. If the loss is scaled and a gradient on any rank is not
        finite, at least one mean is not finite on every rank.
        """
        return gradients

    def mean_count(self, count: Tensor) -> Tensor:
        """The mean of a number (1,), float64, over `group`; collective. Part of the compiled step, as `average` is."""
        if self.group is None or self.group.size == 1:
            return count
        return self.session.adapter.allreduce([count], self.group, "average", f"{self.name}.count")[0]

    def begin(self, name: str, gradient: Tensor) -> bool:
        """Start sending one gradient that backward has just computed; `average` waits for it.

        Returns whether it is taken: backward then lets go of it, and leaves it out of its result. True only where the
        strategy `keeps_shares`.
        """
        raise NotImplementedError

    def defer(self, gradients: dict[str, Tensor]) -> None:
        """Average, and update each layer when forward needs it; collective. Where a strategy goes `by_layer`."""
        raise NotImplementedError

    def complete(self) -> None:
        """Make the updates that `defer` has left; collective. The session calls it before it reads its state."""

    def evaluated(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches of an evaluation, whose number may differ between ranks; taken on all ranks."""
        return batches

    @contextmanager
    def peek(self) -> Iterator[None]:
        """A context in which averaging does not change the strategy's state."""
        yield

    def begin_epoch(self, epoch: int) -> None:
        """Called before an epoch. Epochs count from 0."""

    def begin_step(self, step: int, steps_per_epoch: int) -> None:
        """Called before an update; `step` counts the updates before it."""

    def end_step(self) -> None:
        """Called after an update."""

    @property
    def diverged(self) -> bool:
        """Whether the ranks' weights differ at this moment."""
        return False

    def synchronize(self) -> None:
        """Make the weights of all ranks equal; collective."""

    def settle(self) -> None:
        """As `synchronize`, and also average the optimizers' slots."""

    def settle_weight_average(self) -> None:
        """Average the averaged weights of ranks that update alone; collective."""

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that a rank sends per update, averaged over this process; None if they are not counted."""
        return self._bytes

    def state(self) -> dict[str, np.ndarray]:
        """The strategy's tensors for a checkpoint, by name; collective. Called when the ranks' weights are equal."""
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from what `state` returned, on any number of ranks."""


def without_strategy(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The session's part of a checkpoint's state."""
    return {name: value for name, value in state.items() if not name.startswith(PREFIX)}
