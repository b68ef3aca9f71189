"""Comparisons of the weights of all ranks."""

from __future__ import annotations

from hvdkit.core.group import Mesh
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.core.step_plan import due
from hvdkit.errors import RunError


class RankChecks(Handler):
    """Compares the weights of all ranks each `check_ranks` steps, or as soon after it as they are to be equal."""

    _pending = False

    def on_step_end(self, run: Loop) -> None:
        """Compare them if it is due. Raises RunError if they differ."""
        self._pending |= due(run.recipe.check_ranks, run.step)
        if self._pending and not run.session.strategy.diverged:
            self._pending = False
            run.phase("comparing ranks")
            check_ranks(run.session, run.mesh, run.step)


def check_ranks(session: Session, mesh: Mesh, step: int) -> None:
    """Compare the weights of all ranks, bit by bit; collective. `step` counts finished updates.

    Those that tensor parallelism divides are put together first, so that all ranks of a stage have the same ones.

    Raises RunError, the same on every rank, naming the ranks that differ from rank 0 and the first tensor that does.
    """
    own = session.trainable.parameters
    mine = {name: digest([(name, array)]) for name, array in session.model_arrays() if name in own}
    everyone = session.adapter.allgather_object((mesh.pipeline.index, mine), mesh.world, name="check_ranks")[
        : mesh.world.size
    ]
    stages = [stage for stage, _ in everyone]
    for root in map(stages.index, dict.fromkeys(stages)):  # the first rank of each stage
        for name, expected in everyone[root][1].items():
            others = ((rank, held) for rank, (stage, held) in enumerate(everyone) if stage == stages[root])
            differing = [rank for rank, held in others if held.get(name) != expected]
            if differing:
                ranks = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))}"
                raise RunError(
                    f"check_ranks: after step {step} the weights of {ranks} differ from rank {root}'s, first in "
                    f"{name}; expected the same bits everywhere"
                )
