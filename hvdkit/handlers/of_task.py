"""The handlers of a task of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.core.loop import Handler, Loop
from hvdkit.core.step_plan import due


class OfTask(Handler):
    """Calls the handlers of a task of the user's own, in their order, and ends the run if one of them asks for it."""

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self._handlers = handlers

    def on_epoch_begin(self, run: Loop) -> None:
        self._call("on_epoch_begin", run)

    def on_step_end(self, run: Loop) -> None:
        self._call("on_step_end", run)
        if due(run.recipe.log_every, run.step):
            self._agree(run)

    def on_epoch_end(self, run: Loop) -> None:
        self._call("on_epoch_end", run)
        self._agree(run)

    def _call(self, name: str, run: Loop) -> None:
        run.phase("handlers of the task")
        run.session.complete()  # they may read weights
        for handler in self._handlers:
            try:
                getattr(handler, name)(run)
            except Exception as error:
                error.add_note(f"in {type(handler).__name__}.{name}")
                raise

    def _agree(self, run: Loop) -> None:
        """Stop all ranks if a handler on any of them has asked for it; collective."""
        reasons = run.adapter.allgather_object(run.stop_reason, run.mesh.world, name="stop_reason")
        why = next((reason for reason in reasons if reason is not None), None)
        if why is not None and not run.finished:
            run.stopped_early = f"stopped early after step {run.step} of {run.total_steps}: {why}"
