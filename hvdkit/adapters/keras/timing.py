"""Keras's trace events: like TensorFlow's, in the step that Keras compiles for `model.fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdkit.adapters.tensorflow import timing
from hvdkit.core import trace_events

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind


class Observer(timing.Observer):
    """Makes a second version of Keras's train function, with trace events."""

    def __init__(self, hvd: Any, trainable: Any) -> None:
        super().__init__(hvd, trainable)
        self._model = trainable.model
        self._functions: dict[bool, Any] = {}  # the step without (False) and with (True) trace events
        self._marked = False

    def watch(self, kind: Kind) -> None:
        super().watch(kind)
        marked = kind != "plain"
        if marked == self._marked:
            return
        self._functions[self._marked] = self._model.train_function
        if marked not in self._functions:
            self._functions[marked] = self._compiled()
        self._model.train_function, self._marked = self._functions[marked], marked

    def _compiled(self) -> Any:
        own = self._model.train_step

        def train_step(data: Any) -> Any:
            inputs, *rest = data
            (inputs,) = self._stamp((trace_events.INPUTS,), [inputs])
            return own((inputs, *rest))

        self._model.train_step = train_step
        try:
            self._model.make_train_function(force=True)
        finally:
            self._model.train_step = own
        return self._model.train_function
