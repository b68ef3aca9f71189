"""The mesh: which ranks share data, layers and parts of layers."""

from __future__ import annotations

import pytest

from hvdkit.core.group import Mesh, Topology, coordinates, sets
from hvdkit.errors import RequestError

pytestmark = pytest.mark.check


def test_each_axis_divides_the_ranks_into_groups() -> None:
    """12 ranks as 2 parts of each layer × 2 replicas × 3 stages."""
    meshes = [Mesh(Topology(rank, 12), pipeline_size=3, tensor_size=2) for rank in range(12)]
    axes = {"data": 2, "pipeline": 3, "tensor": 2}
    for name, size in axes.items():
        found = [getattr(mesh, name) for mesh in meshes]
        assert all(axis.size == size and axis.ranks[axis.index] == rank for rank, axis in enumerate(found))
        groups = {axis.ranks for axis in found}
        assert sorted(rank for group in groups for rank in group) == list(range(12)), "each rank is in one group"
    assert meshes[0].tensor.ranks == (0, 1) and meshes[0].data.ranks == (0, 2) and meshes[0].pipeline.ranks == (0, 4, 8)
    places = [tuple(getattr(mesh, name).index for name in axes) for mesh in meshes]
    assert len(set(places)) == 12 and places == [coordinates(rank, 12, 3, 2) for rank in range(12)]
    around = [[group and group.ranks for group in (mesh.before, mesh.after, mesh.ends)] for mesh in meshes]
    assert [around[rank] for rank in (0, 4, 8)] == [
        [None, (0, 4), (0, 8)],
        [(0, 4), (4, 8), None],
        [(4, 8), None, (0, 8)],
    ]
    told = {group.ranks for mesh in meshes for group in (mesh.data, mesh.pipeline, mesh.tensor, mesh.model)}
    told |= {pair for of_rank in around for pair in of_rank if pair}
    assert told == set(sets(12, 3, 2)), "Horovod starts with a process set for each"
    assert {(mesh.shard.rank, mesh.shard.size) for mesh in meshes} == {(0, 2), (1, 2)}


def test_by_default_all_ranks_are_on_the_data_axis() -> None:
    mesh = Mesh(Topology(2, 5))
    assert mesh.data.ranks == (0, 1, 2, 3, 4) and mesh.data.index == 2
    assert mesh.pipeline.ranks == mesh.tensor.ranks == mesh.model.ranks == (2,)
    assert mesh.data.handle is mesh.world.handle is None and mesh.tensor.handle is not None, "None is the whole world"


def test_ranks_that_do_not_fill_the_mesh_are_refused() -> None:
    with pytest.raises(RequestError, match=r"-np: expected a multiple of 6 ranks .* got 8"):
        Mesh(Topology(0, 8), pipeline_size=3, tensor_size=2)
