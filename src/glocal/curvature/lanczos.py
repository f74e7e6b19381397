r"""The top eigenpairs of a symmetric matrix A that is given by its products A @ v, by Lanczos's method.

From a start q_1 it builds an orthonormal basis Q of m vectors in which A is tridiagonal,

    A q_j = β_{j−1} q_{j−1} + α_j q_j + β_j q_{j+1},

and takes the eigenpairs (λ, s) of that small matrix T: λ and v = Qᵀ s are approximate eigenpairs of A with the residual
‖A v − λ v‖ = β_m |s_m|. The extreme ones converge first. In floating point the basis loses its orthogonality, so every
new vector is orthogonalized against all previous ones. Rounding errors of the products themselves remain: they are
estimated as 10 ε max_j ‖A q_j‖ for the machine's ε, bounded by T's rows, and added to the reported residuals. Products
of deep networks may round more: for ResNet-18 in single precision ‖A v − λ v‖ was 3e-5 of the largest eigenvalue where
1e-6 was reported.

Where the basis spans an invariant subspace, β_j = 0; the method then continues from a vector outside it, and T
decouples. Matrices of low rank and the zero matrix are therefore no special cases. Of a repeated eigenvalue fewer
copies may be found than there are, unless m = P. Under `vmap` no step depends on the value of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from glocal.curvature.network import takes_network
from glocal.curvature.operators import SymmetricMatrix, as_matrix, vector_like
from glocal.errors import require, require_known
from glocal.precision import full_precision
from glocal.risk import Risk

Largest: TypeAlias = Literal["magnitude", "algebraic"]
ROUNDING = 10
"""Products are assumed exact up to this many ε of the largest one."""
SUM_BLOCK_SIZE = 4_096
"""Terms that are added one after the other; sums of such sums round less."""


class Eigenpairs(NamedTuple):
    """Eigenpairs, the largest first; all NaN if the matrix is not finite."""

    values: Tensor  # (k,)
    vectors: Tensor  # (k, P), orthonormal rows
    residuals: Tensor  # (k,), ‖A v − λ v‖ including the estimated rounding of products


@takes_network
@full_precision()
def eigenpairs(
    matrix: Risk | SymmetricMatrix,
    k: int,
    *,
    steps: int | None = None,
    largest: Largest = "magnitude",
    tolerance: float = 0.0,
    start: Tensor | None = None,
) -> Eigenpairs:
    """Return the top k eigenpairs of the Hessian ∇²L, or of another matrix.

    Args:
        model, loss, data: As in `network_risk`; or one `Risk`, `Operator` or dense matrix in place of all three.
        k: How many eigenpairs. Of a repeated eigenvalue fewer copies may be found than there are.
        steps, largest, tolerance: As in `lanczos`.
        start: The start vector, (P,); by default a random one, always the same.
    """
    matrix = as_matrix(matrix)
    if start is None:
        # A random direction almost surely has a component along every eigenvector.
        vector, generator = vector_like(matrix), torch.Generator().manual_seed(0)
        start = torch.randn(vector.numel(), dtype=vector.dtype, generator=generator).to(vector.device)
    return lanczos(matrix, start, k, steps=steps, largest=largest, tolerance=tolerance)


def lanczos(
    matrix: SymmetricMatrix,
    start: Tensor,
    k: int,
    steps: int | None = None,
    largest: Largest = "magnitude",
    tolerance: float = 0.0,
) -> Eigenpairs:
    """Return the top k eigenpairs of a symmetric matrix.

    Args:
        matrix: The matrix, or anything that multiplies vectors by `matrix @ v`.
        start: The start vector, (P,).
        k: How many eigenpairs.
        steps: The number m of products, by default the larger of 60 and 2k + 20; m = P gives all eigenpairs.
        largest: Return those of largest "magnitude" or of largest ("algebraic") value.
        tolerance: Stop earlier if all k residuals, but for rounding, are below this fraction of the largest eigenvalue.
            Not available under `vmap`, where runs would differ.
    """
    size = start.numel()
    require(isinstance(k, int), f"k = {k!r} was given; it must be a whole number.")
    steps = min(size, max(60, 2 * k + 20) if steps is None else steps)
    message = f"k = {k} was given; a matrix of size {size} allows 1 to {steps} in {steps} steps."
    require(1 <= k <= steps, message)
    require_known("value of largest", largest, ("magnitude", "algebraic"))
    with torch.no_grad():

        def top(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return the selected λ, their s as columns, and β_m |s_m|, from the α and β so far."""
            values, s = eigh_or_nan(alphas.diag_embed() + betas[:-1].diag_embed(1) + betas[:-1].diag_embed(-1))
            order = (values.abs() if largest == "magnitude" else values).argsort(descending=True)[:k]
            return values[order], s[:, order], (betas[-1] * s[-1, order]).abs()

        def converged(alphas: Tensor, betas: Tensor) -> bool:
            """Test only now and then, because it decomposes T."""
            if len(alphas) < 2 * k or len(alphas) % 5 or not (betas > 0).all():
                return False  # after an invariant subspace, larger eigenvalues may still be found outside it
            values, _, residuals = top(alphas, betas)
            return bool((residuals < tolerance * values.abs().amax()).all())

        basis, alphas, betas = tridiagonalize(matrix, start, steps, converged if tolerance else None)
        values, s, residuals = top(alphas, betas)
        rows = alphas.abs() + betas
        rows = torch.cat([rows[:1], rows[1:] + betas[:-1]])  # ‖A q_j‖ ≤ β_{j−1} + |α_j| + β_j, a row of T
        rounding = ROUNDING * torch.finfo(rows.dtype).eps * rows.amax()  # what that of the products adds to a residual
        return Eigenpairs(values, s.mT @ basis, residuals + rounding)


def eigh_or_nan(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors as columns; all NaN if the matrix is not finite.

    `torch.linalg.eigh` would raise, and under `vmap` one diverged run would stop all others.
    """
    finite = matrix.isfinite().all()
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))
    nan_or_zero = torch.where(finite, 0.0, torch.nan).to(matrix.dtype)
    return values + nan_or_zero, vectors + nan_or_zero


def tridiagonalize(
    matrix: SymmetricMatrix,
    start: Tensor,
    steps: int,
    converged: Callable[[Tensor, Tensor], bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the basis (m, P), α and β (m,); the last β belongs to no vector of the basis, but tells the residual.

    `converged` is called with α and β after every step and ends the iteration.
    """
    q = torch.where(start.square().sum() == 0, _restart_vector(start, 0), start)
    q = q / _norm(q)
    w = matrix @ q
    basis = w.new_empty(steps, start.numel())  # batched under `vmap` as the products are
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    scale = q.new_zeros(())
    for j in range(steps):
        basis[j] = q
        if j > 0:
            w = matrix @ q
        alphas.append(_dot(q, w))
        row = alphas[-1].abs()
        w = torch.addcmul(w, alphas[-1], q, value=-1)
        if j > 0:
            row = row + betas[-1]
            w = torch.addcmul(w, betas[-1], basis[j - 1], value=-1)
        w, length = _orthogonalize(w, basis[: j + 1])
        scale = torch.maximum(scale, row + length)  # at least ‖A q_j‖
        invariant = length <= ROUNDING * torch.finfo(w.dtype).eps * scale  # zero up to rounding
        betas.append(torch.where(invariant, 0.0, length))
        if converged is not None and converged(torch.stack(alphas), torch.stack(betas)):
            break
        if j + 1 < steps:
            if not _known_false(invariant):
                fresh, fresh_length = _orthogonalize(_restart_vector(start, j + 1), basis[: j + 1])
                w, length = torch.where(invariant, fresh, w), torch.where(invariant, fresh_length, length)
            q = w / length.clamp(min=torch.finfo(w.dtype).tiny)
    return basis[: len(alphas)], torch.stack(alphas), torch.stack(betas)


def _known_false(condition: Tensor) -> bool:
    """Whether the condition can be read and is false; it cannot be read under `vmap` or in a CUDA graph."""
    if condition.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    try:
        return not bool(condition)
    except RuntimeError:
        return False


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀb, summed pairwise: `@` and `norm` on a CPU add one by one and lose digits in long vectors."""
    return (a * b).sum()


def _norm(a: Tensor) -> Tensor:
    return _dot(a, a).sqrt()


def _coefficients(basis: Tensor, w: Tensor) -> Tensor:
    """Return basis @ w, on a CPU a block of columns at a time, for the same reason."""
    if w.is_cuda:
        return basis @ w
    parts = zip(basis.split(SUM_BLOCK_SIZE, 1), w.split(SUM_BLOCK_SIZE), strict=True)
    return torch.stack([columns @ part for columns, part in parts]).sum(0)


def _orthogonalize(w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of w orthogonal to the basis, and its norm.

    Where more was removed than is left, rounding is a large part of the rest, and a second pass removes it.
    """
    removed = _coefficients(basis, w)
    rest = torch.addmv(w, basis.mT, removed, alpha=-1)
    length = _norm(rest)
    if _known_false(length < _norm(removed)):
        return rest, length
    rest = torch.addmv(rest, basis.mT, _coefficients(basis, rest), alpha=-1)
    return rest, _norm(rest)


def _restart_vector(vector: Tensor, j: int) -> Tensor:
    """Return a fixed vector for every j with a component in any subspace: a wave of increasing frequency."""
    i = torch.arange(1, vector.numel() + 1, dtype=torch.float64, device=vector.device)
    return (i.square() * (2**0.5 * (j + 1) % 1) + i * 3**0.5).cos().to(vector.dtype)
