r"""The top eigenpairs of a symmetric matrix A known by its products alone, by Lanczos's method.

From a start q_1 it builds an orthonormal basis Q of m vectors in which A is tridiagonal,

    A q_j = β_{j−1} q_{j−1} + α_j q_j + β_j q_{j+1},

and takes the eigenpairs (λ, s) of that small matrix T: λ and v = Qᵀ s are approximate eigenpairs of A, whose error is
known, ‖A v − λ v‖ = β_m |s_m|. The extreme ones come first. Rounding makes the recurrence forget its past, so what it
yields is made orthogonal to all vectors before it. What rounding leaves in the products themselves no step mends: for a
machine's ε it is taken to be 10 ε max_j ‖A q_j‖, of which T's rows tell a little more, and is a part of the error that
is told. Products of deep networks round more than that: for ResNet-18 in single precision ‖A v − λ v‖ was 3e-5 of the
largest eigenvalue where 1e-6 was told.

Where the basis spans an invariant subspace, β_j = 0 and nothing is left to go on with: the method then goes on from a
vector outside it, with which T decouples. So repeated eigenvalues, matrices of low rank and zero are no special cases.
Mapped over runs with `vmap`, no step asks for the value of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from glocal.curvature.symmetric import eigh

Largest: TypeAlias = Literal["magnitude", "algebraic"]
ROUNDING = 10
"""A product is exact to so many ε of the largest one."""
ROOM = 40
"""Vectors there is room for at first, where it is not known how many steps will do."""
BLOCK = 4_096
"""Numbers that are added up one after the other: sums of sums round less."""


class Eigenpairs(NamedTuple):
    """The largest first; all NaN where the matrix is not finite."""

    values: Tensor  # (k,)
    vectors: Tensor  # (k, P), orthonormal rows
    residuals: Tensor  # (k,), ‖A v − λ v‖ as T tells it, with what products that round as `ROUNDING` says may have left


def lanczos(
    matvec: Callable[[Tensor], Tensor],
    start: Tensor,
    k: int,
    steps: int | None = None,
    largest: Largest = "magnitude",
    tolerance: float = 0.0,
) -> Eigenpairs:
    """The k eigenpairs of largest magnitude, or of largest value (`largest='algebraic'`).

    `matvec` multiplies flat vectors of the shape of `start`. `steps` is the number m of products, the larger of 60
    and 2k + 20 if not said; m = P gives all eigenpairs to rounding. With a `tolerance` fewer are made where all k
    residuals, but for rounding, come to less than that part of the largest eigenvalue (not under `vmap`, where runs
    would differ).
    """
    size = start.numel()
    steps = min(size, max(60, 2 * k + 20) if steps is None else steps)
    if not 1 <= k <= steps:
        raise ValueError(
            f"k = {k} eigenpairs were asked for; a matrix of size {size} in {steps} steps has 1 to {steps}."
        )
    if largest not in ("magnitude", "algebraic"):
        raise ValueError(f"largest = {largest!r} was given; allowed are 'magnitude' and 'algebraic'.")
    with torch.no_grad():

        def top(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The chosen λ, their s as columns, and their β_m |s_m|, from the α and β so far."""
            values, s = eigh(alphas.diag_embed() + betas[:-1].diag_embed(1) + betas[:-1].diag_embed(-1))
            order = (values.abs() if largest == "magnitude" else values).argsort(descending=True)[:k]
            return values[order], s[:, order], (betas[-1] * s[-1, order]).abs()

        def enough(alphas: Tensor, betas: Tensor) -> bool:
            """Asked once in a while: it decomposes T anew."""
            if len(alphas) < 2 * k or len(alphas) % 5 or not (betas > 0).all():
                return False  # from an invariant subspace on, what else there is must be looked for
            values, _, lacking = top(alphas, betas)
            return bool((lacking < tolerance * values.abs().amax()).all())

        basis, alphas, betas = tridiagonal(matvec, start, steps, enough if tolerance else None)
        values, s, lacking = top(alphas, betas)
        return Eigenpairs(values, s.mT @ basis, lacking + _rounding(alphas, betas))


def start_vector(size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random direction, on the generator's device: with probability one it has a part along every eigenvector."""
    return torch.randn(size, dtype=dtype, device=generator.device, generator=generator)


def tridiagonal(
    matvec: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    enough: Callable[[Tensor, Tensor], bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The basis (m, P), the α and the β (m,); the last β belongs to no vector of the basis, it tells the error.

    `enough` is asked after every step whether α and β so far will do.
    """
    tiny = torch.finfo(start.dtype).tiny
    zero = start.square().sum() == 0
    q = torch.where(zero, _outside(start, 0), start)
    q = q / _norm(q)
    w = matvec(q)
    room = steps if enough is None else min(steps, ROOM)
    basis = w.new_empty(room, start.numel())  # as many runs as the products have; rows are written before they are read
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    scale = q.new_zeros(())
    for j in range(steps):
        if j == len(basis):
            basis = torch.cat([basis, basis.new_empty(min(j, steps - j), basis.shape[1])])
        basis[j] = q
        if j > 0:
            w = matvec(q)
        alphas.append(_dot(q, w))
        row = alphas[-1].abs()
        w = torch.addcmul(w, alphas[-1], q, value=-1)
        if j > 0:
            row = row + betas[-1]
            w = torch.addcmul(w, betas[-1], basis[j - 1], value=-1)
        w, length = _orthogonal(w, basis[: j + 1])
        scale = torch.maximum(scale, row + length)  # at least ‖A q_j‖
        ends = length <= ROUNDING * torch.finfo(w.dtype).eps * scale  # what rounding leaves of zero
        betas.append(torch.where(ends, 0.0, length))
        if enough is not None and enough(torch.stack(alphas), torch.stack(betas)):
            return basis[: j + 1], torch.stack(alphas), torch.stack(betas)
        if j + 1 < steps:
            if not _surely_not(ends):
                fresh, its = _orthogonal(_outside(start, j + 1), basis[: j + 1])
                w, length = torch.where(ends, fresh, w), torch.where(ends, its, length)
            q = w / length.clamp(min=tiny)
    return basis, torch.stack(alphas), torch.stack(betas)


def _surely_not(condition: Tensor) -> bool:
    """Whether it is known to be false. Of tensors that are mapped over runs, or recorded in a graph, nobody knows."""
    if condition.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    try:
        return not bool(condition)
    except RuntimeError:
        return False


def _rounding(alphas: Tensor, betas: Tensor) -> Tensor:
    """What products in floating point leave of a residual; ‖A q_j‖ is at most β_{j−1} + |α_j| + β_j, a row of T."""
    rows = alphas.abs() + betas
    rows = torch.cat([rows[:1], rows[1:] + betas[:-1]])
    return ROUNDING * torch.finfo(alphas.dtype).eps * rows.amax()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """aᵀb, added up in a tree: `@` and `norm` on a CPU add one by one, and lose digits where there are many."""
    return (a * b).sum()


def _norm(a: Tensor) -> Tensor:
    return _dot(a, a).sqrt()


def _along(basis: Tensor, w: Tensor) -> Tensor:
    """basis @ w, on a CPU a block of columns at a time, for the same reason."""
    if w.is_cuda or w.shape[0] <= BLOCK:
        return basis @ w
    parts = zip(basis.split(BLOCK, 1), w.split(BLOCK), strict=True)
    return torch.stack([columns @ part for columns, part in parts]).sum(0)


def _orthogonal(w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """What of w is orthogonal to the basis, and its norm. Once more where less was left than taken, of which rounding
    is then a large part: twice is enough."""
    taken = _along(basis, w)
    left = torch.addmv(w, basis.mT, taken, alpha=-1)
    length = _norm(left)
    if _surely_not(length < _norm(taken)):
        return left, length
    left = torch.addmv(left, basis.mT, _along(basis, left), alpha=-1)
    return left, _norm(left)


def _outside(like: Tensor, j: int) -> Tensor:
    """A fixed vector for every j with a part in any subspace, without a random draw: a wave of quickening frequency."""
    i = torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device)
    return (i.square() * (2**0.5 * (j + 1) % 1) + i * 3**0.5).cos().to(like.dtype)
