"""The schema of what `--dry-run --json` prints: what a command would start."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hvdkit.results.json_files import Figures
from hvdkit.results.memory import Parts
from hvdkit.results.train import PlannedStage


class PlannedRank(Figures):
    """Where a rank runs: `slot` counts the ranks of its host from 0."""

    rank: int
    host: str
    slot: int


class PlannedRun(Figures):
    """Ranks that are started together, `times` times.

    `environment` has the variables that hvdkit adds. `tuning` has `value` and `why` by setting. `train` and `val` count
    samples, `global_batch` those of all ranks in a batch, 0 where that is found when the run starts; `steps` counts
    updates, of which `first_step` are made already. `within_hosts` says how ranks of one host will exchange tensors on
    CPUs, and why. `stages` are those of a model that is divided over ranks. `seconds` is the time of one run, estimated
    from what `seconds_from` says. What is not known is None.
    """

    title: str
    framework: str
    rival: str | None
    times: int = 1
    launcher: str
    ranks: list[PlannedRank]
    within_hosts: str | None = None
    interpreter: str
    versions: dict[str, str]
    script: str
    threads: int | None
    environment: dict[str, str]
    tuning: dict[str, dict[str, Any]]
    train: int | None
    val: int | None
    shape: list[int] | None
    global_batch: int
    steps_per_epoch: int | None
    epochs: int | None
    steps: int | None
    first_step: int = 0
    stages: list[PlannedStage] | None = None
    memory: Parts | None
    seconds: float | None
    seconds_from: str


class DryRun(Figures):
    """`recipe` is the resolved recipe, `out` the folder that would be written; `notes` are lines about the whole."""

    command: str
    recipe: dict[str, Any]
    out: str
    runs: list[PlannedRun]
    notes: list[str] = Field(default_factory=list)
