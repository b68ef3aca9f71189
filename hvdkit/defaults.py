"""Defaults of options that several commands have, and what the command line makes different."""

from contextvars import ContextVar

FRAMEWORK = "pytorch"
LAUNCHER = "auto"
STALL_TIMEOUT_S = 60.0
PROFILED_RANKS = 2  # of `hvdkit profile`, `parity` and `advise`
STEPS = 20  # of `hvdkit profile`, `parity` and `advise`
COMPARED_RANKS = (1, 2)  # of `hvdkit compare`
MARGIN = 0.05  # of `hvdkit compare`

# Where changes to a recipe come from, as messages name it: the argument of a Python function, or the command line.
OVERRIDES_FROM: ContextVar[str] = ContextVar("overrides_from", default="overrides")
# When the command began whose start-up time is measured, in `time.time` seconds; None for a function's call.
BEGAN: ContextVar[float | None] = ContextVar("began", default=None)
