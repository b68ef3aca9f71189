"""Defaults of options that several commands have."""

FRAMEWORK = "pytorch"
LAUNCHER = "auto"
STALL_TIMEOUT_S = 60.0
PROFILED_RANKS = 2  # of `hvdkit profile`, `parity` and `advise`
STEPS = 20  # of `hvdkit profile`, `parity` and `advise`
COMPARED_RANKS = (1, 2)  # of `hvdkit compare`
MARGIN = 0.05  # of `hvdkit compare`
