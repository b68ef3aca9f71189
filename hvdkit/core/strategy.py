"""How the ranks come to one model: the part of a training step that differs between strategies.

`hvdkit/strategies/` has hvdkit's own, `hvdkit/baselines/` those that it is measured against. One strategy is chosen for
a run and passed on as data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.recipe.schema import Optimizer

Tensor = Any
PREFIX = "communication."  # of a strategy's part in a checkpoint's state


class Strategy:
    """Each rank keeps its own gradients, which is right for one rank alone. Subclasses average them.

    The training loop calls the hooks `begin_epoch`, `begin_step` and `end_step`, on all ranks alike.
    """

    overlaps = False  # whether `begin` may send a gradient while backward still computes others

    def bind(self, session: Any, parameters: int) -> None:
        """Work for this session (`core.session.Session`), whose model has so many parameters."""

    def optimizer(self, settings: Optimizer) -> Optimizer:
        """The optimizer's settings without what the strategy does in its place."""
        return settings

    def average(self, session: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over all ranks by name; collective. The gradients may be overwritten.

        Part of the step that a traced framework compiles. Where the loss is scaled and a gradient of any rank is not
        finite, some mean is not finite on all ranks.
        """
        return gradients

    def begin(self, session: Any, name: str, gradient: Tensor) -> None:
        """Send one gradient, which backward has just finished; `average` waits for it."""
        raise NotImplementedError

    @contextmanager
    def peek(self) -> Iterator[None]:
        """What is averaged inside leaves no trace."""
        yield

    def begin_epoch(self, epoch: int) -> None:
        """Epochs count from 0."""

    def begin_step(self, step: int, steps_per_epoch: int) -> None:
        """Before an update; `step` counts those before it."""

    def end_step(self) -> None:
        """After an update."""

    @property
    def diverged(self) -> bool:
        """Whether ranks have weights of their own at this moment."""
        return False

    def synchronize(self) -> None:
        """Make one model of the ranks' models; collective."""

    def settle(self) -> None:
        """As `synchronize`, and the optimizers' slots become their mean too."""

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that a rank has sent for an update, on average over this process; None where nobody counts them."""
        return None

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it, by name; collective, when ranks have one model."""
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from what `state` returned, on any number of ranks."""


def without_strategy(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What of a checkpoint's state is the session's."""
    return {name: value for name, value in state.items() if not name.startswith(PREFIX)}
