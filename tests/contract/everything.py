"""All cases: importing this adds those of the other files to `cases.CASES`."""

# ruff: noqa: F401 - importing them adds theirs
from __future__ import annotations

import branches
import brought
import collectives
import counted
import dropout
import grown
import own_losses
import sharded
import squeezed
