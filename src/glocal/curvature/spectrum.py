r"""The spectral density and the trace of a symmetric matrix A that is given by its products with vectors.

**Density**, by stochastic Lanczos quadrature (Golub & Welsch, 1969; Ubaru, Chen & Saad, 2017). For a unit vector z, m
steps of Lanczos's method from z give the Gauss quadrature of A's spectrum as weighted by z,

    zᵀ f(A) z ≈ Σ_j s_{1j}² f(λ_j),   (λ_j, s_j) the eigenpairs of the tridiagonal matrix T,

exact for every f if m = P, and for polynomials of degree up to 2m − 1 otherwise. For random z its mean is tr f(A) / P,
so the λ_j, each with the weight of P s_{1j}² eigenvalues, approximate their density. Eigenvalues much closer to each
other than 1/m of the spectrum are not resolved. A few large eigenvalues are better found one by one: if their pairs are
known, the random vectors sample only the rest.

**Trace**, by Hutch++ (Meyer, Musco, Musco & Woodruff, 2021). Half of the random vectors find the range in which most of
A lies, Q = orth(A S). There the trace is computed exactly, and the rest is estimated from the other half,

    tr A = tr QᵀAQ + tr (I − QQᵀ) A (I − QQᵀ) ≈ tr QᵀAQ + mean_i g_iᵀ (I − QQᵀ) A (I − QQᵀ) g_i.

With k vectors in each half it takes 3k products. The trace of a matrix of rank up to k is exact; otherwise the estimate
is unbiased, and the spread of its terms gives the standard error. A matrix of 3k rows or fewer is multiplied with the
unit vectors instead, which is exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from glocal.curvature.lanczos import Eigenpairs, eigh_or_nan, tridiagonalize
from glocal.curvature.network import takes_network
from glocal.curvature.operators import SymmetricMatrix, as_matrix, vector_like
from glocal.precision import full_precision
from glocal.risk import Risk


class Estimate(NamedTuple):
    """An estimate and its standard error: 0 if it is exact, NaN for one random vector; both NaN if A is not finite."""

    value: Tensor
    error: Tensor


@dataclass(frozen=True)
class Density:
    """Nodes on the axis of eigenvalues, ascending, and the number of eigenvalues that each represents.

    Both have a row for each random vector, (n, m), in double precision; a row's weights sum to P.
    """

    nodes: Tensor
    weights: Tensor
    exact: bool = False

    def sum(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Return Σ_i f(λ_i) = tr f(A) and its standard error over the random vectors; NaN if A is not finite."""
        values = torch.where(self.nodes.isnan(), torch.nan, f(self.nodes).to(self.nodes.dtype))
        sums = (self.weights * values).sum(-1)
        if self.exact:
            return Estimate(sums.mean(), torch.where(sums.isnan(), torch.nan, 0.0).mean())
        return Estimate(sums.mean(), sums.std() / len(sums) ** 0.5 if len(sums) > 1 else sums.mean() * torch.nan)

    def count_above(self, threshold: float) -> Estimate:
        """Return the number of |λ| above a threshold: the numerical rank.

        A node represents eigenvalues on both sides of it. The quadrature is therefore uncertain by about the weight of
        the lighter of the two nodes around the threshold; if no node is below the threshold, by all that the nodes next
        to it represent. The error adds this to the standard error, and P ε for the rounding of weights that sum to P.
        """
        count = self.sum(lambda nodes: nodes.abs() > threshold)
        all_resolved = self.nodes.shape[-1] >= float(self.weights[0].sum()) - 0.5  # as many nodes as eigenvalues
        if self.exact or all_resolved:
            return count
        rounding = torch.finfo(self.weights.dtype).eps * self.weights.sum(-1).mean()
        weights = functional.pad(self.weights, (1, 1))  # no weight outside the outermost nodes
        below, within = (self.nodes < -threshold).sum(1, keepdim=True), (self.nodes <= threshold).sum(1, keepdim=True)
        edges = [(below, below + 1), (within + 1, within)]  # at −threshold and threshold: the outer and the inner node
        outer, inner = ([weights.gather(1, edge[k]) for edge in edges] for k in (0, 1))
        lighter = sum(torch.minimum(a, b) for a, b in zip(outer, inner, strict=True))
        unresolved = torch.where(below == within, sum(outer), lighter)
        return count._replace(error=count.error + rounding + unresolved.mean())

    @property
    def radius(self) -> Tensor:
        """The largest |λ|."""
        return self.nodes.abs().max()


@takes_network
@full_precision()
def density(
    matrix: Risk | SymmetricMatrix,
    probes: int | Tensor = 8,
    steps: int = 100,
    block_size: int = 1,
    known: Eigenpairs | None = None,
) -> Density:
    """Estimate the spectral density of the Hessian ∇²L, or of another matrix.

    Args:
        model, loss, data: As in `network_risk`; or one `Risk`, or anything that multiplies vectors by `matrix @ v`.
        probes: How many random vectors, always the same ones, or random signs (`random_signs`), (n, P).
        steps: The number of products for each probe.
        block_size: How many probes are processed together by `vmap`.
        known: Eigenpairs that are known; the probes sample the rest.
    """
    matrix = as_matrix(matrix)
    probes = _probes(matrix, probes)
    count, size = probes.shape
    if count < 1 or steps < 1:
        raise ValueError(f"{count} random vectors and {steps} steps were given; at least 1 of each is needed.")
    if known is not None:
        probes = probes - (probes @ known.vectors.mT) @ known.vectors
    rest = size if known is None else size - len(known.values)

    nodes, weights = _map_rows(lambda probe: quadrature(matrix, probe, steps), probes, block_size)
    weights = weights * rest
    if known is None:
        return Density(nodes, weights)
    values = known.values.double().expand(count, -1)
    nodes, order = torch.cat([nodes, values], 1).sort(1)
    return Density(nodes, torch.cat([weights, torch.ones_like(values)], 1).gather(1, order))


def exact_density(values: Tensor) -> Density:
    """Return the density of known eigenvalues, each with weight 1."""
    return Density(values.double()[None], torch.ones_like(values, dtype=torch.float64)[None], exact=True)


def quadrature(matrix: SymmetricMatrix, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the nodes λ, ascending, and weights s₁², which sum to 1, for z = start / ‖start‖, in double precision."""
    with torch.no_grad():
        _, alphas, betas = tridiagonalize(matrix, start, min(steps, start.numel()))
        alphas, betas = alphas.double(), betas[:-1].double()
        values, s = eigh_or_nan(alphas.diag_embed() + betas.diag_embed(1) + betas.diag_embed(-1))
        return values, s[0].square()


@takes_network
@full_precision()
def trace(matrix: Risk | SymmetricMatrix, probes: int | Tensor = 32, block_size: int = 1) -> Estimate:
    """Estimate the trace of the Hessian ∇²L, or of another matrix.

    Args:
        model, loss, data: As in `network_risk`; or one `Risk`, or anything that multiplies vectors by `matrix @ v`.
        probes: How many random vectors, always the same ones, or random signs (`random_signs`), (2k, P) with k ≥ 2.
        block_size: How many products are computed together by `vmap`.
    """
    matrix = as_matrix(matrix)
    probes = _probes(matrix, probes)
    count, size = probes.shape
    if count < 4 or count % 2:
        raise ValueError(f"{count} random vectors were given; the number must be even and at least 4.")
    with torch.no_grad():
        if size <= count // 2 * 3:
            units = torch.eye(size, dtype=probes.dtype, device=probes.device)
            exact = (units * _products(matrix, units, block_size)).sum(dtype=torch.float64)
            return Estimate(exact, 0 * exact.abs())
        sketch, queries = probes.chunk(2)
        q, _ = torch.linalg.qr(_products(matrix, sketch, block_size).mT)
        span_terms = (q.mT * _products(matrix, q.mT, block_size)).sum(1, dtype=torch.float64)
        for _ in range(2):
            queries = queries - (queries @ q) @ q.mT
        rest_terms = (queries * _products(matrix, queries, block_size)).sum(1, dtype=torch.float64)
        return Estimate(span_terms.sum() + rest_terms.mean(), rest_terms.std() / len(rest_terms) ** 0.5)


def random_signs(count: int, size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return vectors of ±1 as rows, on the generator's device."""
    bits = torch.randint(2, (count, size), dtype=torch.int8, device=generator.device, generator=generator)
    return bits.to(dtype).mul_(2).sub_(1)


def _probes(matrix: SymmetricMatrix, probes: int | Tensor) -> Tensor:
    """Return the given random vectors, or that many random signs, the same on every device."""
    if isinstance(probes, Tensor):
        return probes
    vector = vector_like(matrix)
    return random_signs(probes, vector.numel(), torch.Generator().manual_seed(0), vector.dtype).to(vector.device)


def _products(matrix: SymmetricMatrix, rows: Tensor, block_size: int) -> Tensor:
    return _map_rows(lambda row: (matrix @ row,), rows, block_size)[0]


def _map_rows(function: Callable[[Tensor], tuple[Tensor, ...]], rows: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """Apply a function to every row, `block_size` rows at a time by `vmap`; one by one without it."""
    if block_size > 1:
        return vmap(function, chunk_size=block_size)(rows)
    return tuple(torch.stack(parts) for parts in zip(*map(function, rows), strict=True))
