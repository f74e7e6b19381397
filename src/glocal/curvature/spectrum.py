r"""The spectral density of a symmetric matrix A known by its products alone, by stochastic Lanczos quadrature.

For a unit vector z, m steps of Lanczos's method from z give the Gauss quadrature of A's spectrum as z sees it,

    zᵀ f(A) z ≈ Σ_j s_{1j}² f(λ_j),   (λ_j, s_j) the eigenpairs of the tridiagonal matrix T,

exact for every f where m = P, and for polynomials of degree up to 2m − 1 otherwise. For random z its mean is
tr f(A) / P, so the λ_j, each standing for P s_{1j}² eigenvalues, are a density of them (Golub & Welsch, 1969; Ubaru,
Chen & Saad, 2017). Eigenvalues much closer to each other than the m-th part of the spectrum are not told apart.

Few large eigenvalues are found better one by one: where their pairs are known, the random vectors see the rest alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from glocal.curvature.lanczos import Eigenpairs, tridiagonal
from glocal.curvature.symmetric import eigh


class Estimate(NamedTuple):
    """A number and its error: NaN for one random vector, 0 where all eigenvalues are known."""

    value: Tensor
    error: Tensor


@dataclass(frozen=True)
class Density:
    """For every random vector, nodes on the axis of eigenvalues, rising, and how many eigenvalues each stands for.

    Both (n, m), in double precision; a vector's weights sum to P.
    """

    nodes: Tensor
    weights: Tensor
    exact: bool = False

    def sum(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Σ_i f(λ_i) = tr f(A), and the standard error over the random vectors. NaN where the matrix is not finite."""
        values = torch.where(self.nodes.isnan(), torch.nan, f(self.nodes).to(self.nodes.dtype))
        sums = (self.weights * values).sum(-1)
        if self.exact:
            return Estimate(sums.mean(), torch.where(sums.isnan(), torch.nan, 0.0).mean())
        return Estimate(sums.mean(), sums.std() / len(sums) ** 0.5 if len(sums) > 1 else sums.mean() * torch.nan)

    def above(self, threshold: float) -> Estimate:
        """How many |λ| are above a threshold: the rank, as far as what is below counts as zero.

        A node stands for eigenvalues on both sides of it. So what the quadrature cannot tell is about the weight of the
        lighter of the two nodes that the threshold lies between; and where no node is below the threshold, all that the
        nodes next to it stand for. The error has it beside the standard error, with what rounding leaves of weights
        that sum to P, P ε.
        """
        count = self.sum(lambda nodes: nodes.abs() > threshold)
        fewer = self.nodes.shape[-1] < float(self.weights[0].sum()) - 0.5  # nodes than eigenvalues
        if self.exact or not fewer:
            return count
        rounding = torch.finfo(self.weights.dtype).eps * self.weights.sum(-1).mean()
        weights = functional.pad(self.weights, (1, 1))  # beyond the outermost nodes there is nothing
        below, within = (self.nodes < -threshold).sum(1, keepdim=True), (self.nodes <= threshold).sum(1, keepdim=True)
        outside = [(below, below + 1), (within + 1, within)]  # of either edge, the node before it and the one behind it
        far, near = ([weights.gather(1, pair[k]) for pair in outside] for k in (0, 1))
        lighter = sum(torch.minimum(a, b) for a, b in zip(far, near, strict=True))
        untold = torch.where(below == within, sum(far), lighter)
        return count._replace(error=count.error + rounding + untold.mean())

    @property
    def radius(self) -> Tensor:
        """The largest |λ|."""
        return self.nodes.abs().max()

    def at(self, points: Tensor, width: float) -> Tensor:
        """Eigenvalues per unit of the axis at the given points, each node a Gaussian of this standard deviation."""
        points = points.to(self.nodes)
        apart = (points.unsqueeze(-1) - self.nodes.reshape(-1)) / width
        bells = (-apart.square() / 2).exp() / (width * math.sqrt(2 * math.pi))
        return bells @ self.weights.reshape(-1) / len(self.nodes)


def density(
    matvec: Callable[[Tensor], Tensor],
    probes: Tensor,
    steps: int = 100,
    block: int = 1,
    known: Eigenpairs | None = None,
) -> Density:
    """The density from `probes` (n, P), rows of random signs (`trace.random_signs`), with `steps` products for each.

    `matvec` multiplies flat vectors; `block` of them at a time, mapped, if more than one. `known` eigenpairs stand for
    themselves.
    """
    count, size = probes.shape
    if count < 1 or steps < 1:
        raise ValueError(f"{count} random vectors and {steps} steps were given; allowed: 1 and more of both.")
    if known is not None:
        probes = probes - (probes @ known.vectors.mT) @ known.vectors
    rest = size if known is None else size - len(known.values)

    def one(probe: Tensor) -> tuple[Tensor, Tensor]:
        nodes, weights = quadrature(matvec, probe, steps)
        return nodes, weights * rest

    if block == 1:
        found = [one(probe) for probe in probes]
        nodes, weights = (torch.stack(parts) for parts in zip(*found, strict=True))
    else:
        nodes, weights = vmap(one, chunk_size=block)(probes)
    if known is None:
        return Density(nodes, weights)
    values = known.values.double().expand(count, -1)
    nodes, order = torch.cat([nodes, values], 1).sort(1)
    return Density(nodes, torch.cat([weights, torch.ones_like(values)], 1).gather(1, order))


def of_eigenvalues(values: Tensor) -> Density:
    """The density where all eigenvalues are known: each stands for itself."""
    return Density(values.double()[None], torch.ones_like(values, dtype=torch.float64)[None], exact=True)


def quadrature(matvec: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes λ, rising, and weights s₁², which sum to 1, for the start z = `start` / ‖`start`‖; in double precision."""
    with torch.no_grad():
        _, alphas, betas = tridiagonal(matvec, start, min(steps, start.numel()))
        alphas, betas = alphas.double(), betas[:-1].double()
        values, s = eigh(alphas.diag_embed() + betas.diag_embed(1) + betas.diag_embed(-1))
        return values, s[0].square()
