"""Gradients as products of two thin matrices (Vogels et al. 2019)."""

from __future__ import annotations

import math

import numpy as np

from hvdkit.core.tensors import Tensor, Tensors
from hvdkit.recipe.communication import PowerSgd
from hvdkit.strategies.codecs.base import QUERY, RESIDUAL, Call, State, corrected


class LowRank:
    """Algorithm 1 of the paper: P = mean of M Q, orthogonalised; Q = mean of Mᵀ P; the mean gradient is P Qᵀ.

    M is a gradient (out, in, …) reshaped to out × the rest, plus the residual of earlier updates (error feedback,
    algorithm 2). Q is kept for the next update, which makes this a power iteration. M itself is sent if P and Q are no
    smaller. The code stores Pᵀ and Qᵀ, so that columns are rows. All P are sent as one vector, and all Q as another.
    """

    def __init__(self, settings: PowerSgd) -> None:
        self._settings = settings
        self._starts: dict[str, Tensor] = {}

    def rank(self, shape: tuple[int, ...]) -> int:
        """The rank of the approximation for a gradient of this shape; 0 if the gradient is sent as it is."""
        if len(shape) < 2:
            return 0
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(self._settings.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def reduce(self, call: Call, vector: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Method.reduce`."""
        ops = call.ops
        if self._settings.error_feedback:
            vector = corrected(vector, state)
        pieces = dict(zip(call.shapes, ops.part(vector, list(call.shapes.values())), strict=True))
        ranks = {name: self.rank(shape) for name, shape in call.shapes.items()}
        matrices = {name: ops.reshape(pieces[name], (call.shapes[name][0], -1)) for name, rank in ranks.items() if rank}
        whole = {name: piece for name, piece in pieces.items() if not ranks[name]}
        starts = {name: self._start(call, name, matrix, ranks[name]) for name, matrix in matrices.items()}
        queries = {name: state.get(f"{QUERY}.{name}", starts[name]) for name in matrices}

        left = {name: ops.matmul(queries[name], _turned(ops, matrix)) for name, matrix in matrices.items()}
        means = _mean_of(call, left | whole)
        left = {name: orthonormal(ops, means[name], call.ops.dtype(vector)) for name in matrices}
        own = {name: ops.matmul(left[name], matrix) for name, matrix in matrices.items()}
        right = _mean_of(call, own)

        state = dict(state)
        products = {name: ops.matmul(_turned(ops, left[name]), right[name]) for name in matrices}
        for name in matrices:
            state[f"{QUERY}.{name}"] = _restart_zero_rows(ops, right[name], starts[name])
        if self._settings.error_feedback:
            kept = {
                name: matrices[name] - ops.matmul(_turned(ops, left[name]), own[name])
                if name in matrices
                else piece * 0.0
                for name, piece in pieces.items()
            }
            state[RESIDUAL] = ops.join([kept[name] for name in call.shapes])
        return ops.join([(products if name in products else means)[name] for name in call.shapes]), state

    def _start(self, call: Call, name: str, matrix: Tensor, rank: int) -> Tensor:
        """Qᵀ for the first update: random, the same on every rank."""
        if name not in self._starts:
            number = list(call.shapes).index(name)
            random = np.random.default_rng((call.seed, number)).standard_normal((rank, int(matrix.shape[1])))
            self._starts[name] = call.ops.from_numpy(random.astype(call.ops.dtype(matrix)))
        return self._starts[name]


def orthonormal(ops: Tensors, matrix: Tensor, dtype: str) -> Tensor:
    """Orthonormalize the rows by the Gram-Schmidt process, applied twice (Giraud et al. 2005).

    A row whose remainder after projection is only rounding error becomes zero; the rank is then lower.
    """
    negligible = 1e3 * float(np.finfo(dtype).eps)
    rows: list[Tensor] = []
    for index in range(int(matrix.shape[0])):
        row = matrix[index : index + 1]
        length = ops.norm(row)
        for _ in range(2):
            for other in rows:
                row = row - ops.matmul(row, _turned(ops, other)) * other
        rest = ops.norm(row)
        keeps = rest > negligible * length
        row = row * ops.where(keeps, 1.0 / ops.where(rest > 0, rest, rest * 0 + 1), rest * 0)
        rows.append(row)
    return ops.concat(rows)


def _turned(ops: Tensors, matrix: Tensor) -> Tensor:
    return ops.transpose(matrix, (1, 0))


def _restart_zero_rows(ops: Tensors, query: Tensor, start: Tensor) -> Tensor:
    """Replace rows of zeros, which the power iteration would keep at zero, by rows of `start`."""
    rows = []
    for index in range(int(query.shape[0])):
        row = query[index : index + 1]
        size = ops.norm(row)
        rows.append(row + start[index : index + 1] * ops.where(size > 0, size * 0, size * 0 + 1))
    return ops.concat(rows)


def _mean_of(call: Call, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The means of all tensors over the ranks, sent as one vector."""
    if not tensors:
        return {}
    ops = call.ops
    mean = call.transport.mean(ops.join(list(tensors.values())))
    return dict(zip(tensors, ops.part(mean, [tuple(tensor.shape) for tensor in tensors.values()]), strict=True))
