"""What of a model a rank has, where `parallel` divides it over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdkit.core import cuts
from hvdkit.core.group import Mesh
from hvdkit.core.pieces import Piece
from hvdkit.core.pipeline import PipelinePlan
from hvdkit.core.slices import pieces_of
from hvdkit.data.dataset import BatchedSplit, StreamedSplit, arguments, own_share
from hvdkit.errors import RequestError
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.parallel import microbatches_of
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.own import Own, OwnArchitecture
from hvdkit.tasks.parts import check_stages, stage_of
from hvdkit.tasks.task import Architecture

if TYPE_CHECKING:
    from hvdkit.core.passes import Chain
    from hvdkit.core.seam import Adapter, Model
    from hvdkit.data.dataset import Dataset
    from hvdkit.tasks.task import Task


class RankTables(NamedTuple):
    """The tables of this rank's chunks of a pipeline, or of its one model; how they are trained; and the pieces of the
    parameters of which it has only a part."""

    tables: list[Architecture]
    plan: PipelinePlan | None
    pieces: Mapping[str, Piece]


def share_of(whole: Architecture, mesh: Mesh, recipe: Recipe) -> RankTables:
    """This rank's share. Raises RequestError if a parameter cannot be cut as its table says."""
    axes, tables, plan = cuts.resolved(recipe, whole), [whole], None
    if mesh.pipeline.size > 1:
        if not isinstance(whole, OwnArchitecture):
            tables = [whole.staged(axes, number) for number in _numbers(axes, mesh)]
        plan = PipelinePlan(mesh, axes.schedule, microbatches_of(axes, recipe.batch_size), axes.chunks)
    if mesh.tensor.size > 1:
        tables = [replace(table, tensor=mesh.tensor) for table in tables]
    pieces = {name: piece for table in tables for name, piece in pieces_of(table, mesh.tensor).items()}
    return RankTables(tables, plan, pieces)


def own_chunks(adapter: Adapter, task: Task, model: Model, dataset: Dataset, mesh: Mesh, recipe: Recipe) -> list[Model]:
    """This rank's chunks of a model of the user's own, which each rank has built whole.

    Raises RequestError for a model that is no chain of blocks, or of too few.
    """
    axes, (chain, work) = recipe.parallel, chain_of(adapter, task, model, dataset)
    check_stages(axes, len(chain.blocks))
    axes = cuts.cut(recipe, work)
    stages = [stage_of(axes, number, work) for number in _numbers(axes, mesh)]
    return [chain.chunk(stage.start, stage.stop) for stage in stages]


def chain_of(adapter: Adapter, task: Task, model: Model, dataset: Dataset) -> tuple[Chain, list[int]]:
    """A model of the user's own as a chain of blocks, with each one's work.

    Raises RequestError for a model that is no chain, or samples that it cannot be tried on.
    """
    assert isinstance(task, Own)
    chain, train = adapter.chain(model, task.blocks(model)), own_share(dataset.train)
    if isinstance(train, BatchedSplit | StreamedSplit) or not len(train):
        expected = "expected samples that can be read by number, to try the blocks on"
        raise RequestError(f"parallel.pipeline: {expected}, got a {type(train).__name__}")
    return chain, chain.check(arguments(train.batch(np.arange(2) % len(train)).inputs))


def _numbers(axes: Parallel, mesh: Mesh) -> range:
    """Which runs of blocks are this rank's chunks."""
    return range(mesh.pipeline.index, axes.runs, axes.pipeline)
