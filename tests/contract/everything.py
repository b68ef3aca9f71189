"""All cases: importing this adds those of the other files to `cases.CASES`."""

# ruff: noqa: F401 - importing them adds theirs
from __future__ import annotations

from tests.contract import branches, brought, collectives, counted, dropout, grown, own_losses, sharded, squeezed
