r"""The rank of the average Hessian \bar H_{<t} = (1/t) Σ_{o<t} H_o: the dimension of the space in which updates forget
(Theorem 4.1; appendix, Average Hessian rank). What counts as zero is a choice, so there are several definitions:

- the number of |λ| above absolute thresholds, or above parts of the largest |λ|;
- the effective rank exp(−Σ_i p_i log p_i), p_i = |λ_i| / Σ_j |λ_j| (Roy & Vetterli, 2007);
- the participation ratio (Σ_i |λ_i|)² / Σ_i λ_i², which is (tr \bar H)² / ‖\bar H‖_F² where no eigenvalue is negative.

r equal eigenvalues and zeros have rank r by each of them. For small networks all eigenvalues of the dense Hessian are
computed; for larger ones the density is estimated from Hessian-vector products (`curvature.spectrum.density`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from glocal.curvature.hessian import hessian
from glocal.curvature.lanczos import Eigenpairs, lanczos
from glocal.curvature.operators import Operator
from glocal.curvature.spectrum import Density, density, exact_density, random_signs
from glocal.errors import require, require_known
from glocal.lens.trace import MAX_EXAMPLES, TrainingTrace, require_positive

Method: TypeAlias = Literal["auto", "dense", "density"]
METHODS: tuple[Method, ...] = ("auto", "dense", "density")

MAX_DENSE_PARAMS = 20_000
"""Largest P of a dense P × P Hessian; 20,000 need 1.6 GB in single precision, twice that with its eigenvalues."""

ABSOLUTE = (1e-1, 1e-2, 1e-3, 1e-4)
RELATIVE = (1e-1, 1e-2, 1e-3, 1e-4)
MAX_OUTLIERS = 20
MAX_RELATIVE_RESIDUAL = 1e-3


@dataclass(frozen=True)
class Ranks:
    r"""Row t − 1 is of \bar H_{<t}, t = 1 … N: the first row has the Hessian of task 0 only, the last one all."""

    size: int  # P
    absolute_thresholds: tuple[float, ...]
    relative_thresholds: tuple[float, ...]
    top: Tensor  # (N,), the largest |λ|
    absolute: Tensor  # (N, A), the number of |λ| above each threshold
    relative: Tensor  # (N, R), above each threshold times the largest |λ|
    absolute_errors: Tensor  # (N, A); all errors are 0 where all eigenvalues are known
    relative_errors: Tensor  # (N, R)
    effective: Tensor  # (N,), the exponential of the entropy
    participation: Tensor  # (N,)
    effective_errors: Tensor  # (N,)
    participation_errors: Tensor  # (N,)


def rank(
    trace: TrainingTrace,
    absolute: Sequence[float] = ABSOLUTE,
    relative: Sequence[float] = RELATIVE,
    method: Method = "auto",
    steps: int = 100,
    probes: int = 10,
    seed: int = 0,
) -> Ranks:
    """Measure the ranks before every task.

    Args:
        trace: the training.
        absolute: absolute thresholds of |λ|.
        relative: thresholds relative to the largest |λ|.
        method: 'dense', 'density', or 'auto' by the size of the network.
        steps: Lanczos steps of the density.
        probes: random vectors of the density.
        seed: of the random vectors.
    """
    return ranks(spectra(trace, method, steps, probes, seed), trace.num_params, absolute, relative)


def spectra(
    trace: TrainingTrace, method: Method = "auto", steps: int = 100, probes: int = 10, seed: int = 0
) -> list[Density]:
    r"""Return the eigenvalues of \bar H_{<t} for t = 1 … N, all of them or a density."""
    require_known("method", method, METHODS)
    require_positive(steps=steps, probes=probes)
    size = trace.num_params
    if method == "auto":
        method = "dense" if size <= MAX_DENSE_PARAMS else "density"
    require(
        method == "density" or size <= MAX_DENSE_PARAMS,
        f"method = 'dense' allows up to {MAX_DENSE_PARAMS:,} parameters; the network has {size:,}. Use 'density'.",
    )
    return _dense(trace) if method == "dense" else _estimated(trace, steps, probes, seed)


def ranks(
    densities: Sequence[Density], size: int, absolute: Sequence[float] = ABSOLUTE, relative: Sequence[float] = RELATIVE
) -> Ranks:
    """Compute the ranks of spectra by all definitions."""
    tops = torch.stack([density.radius for density in densities]).cpu()
    fixed = [[density.count_above(threshold) for threshold in absolute] for density in densities]
    parts = [
        [density.count_above(r * float(top)) for r in relative] for density, top in zip(densities, tops, strict=True)
    ]
    tables = [
        torch.tensor([[float(cell[which]) for cell in row] for row in table], dtype=torch.float64)
        for which in (0, 1)
        for table in (fixed, parts)
    ]
    measures = (effective_rank, participation_ratio)
    each = [torch.stack([measure(density) for density in densities]).cpu() for measure in measures]
    each += [torch.stack([_error(measure, density) for density in densities]).cpu() for measure in measures]
    return Ranks(size, tuple(absolute), tuple(relative), tops, *tables, *each)


def effective_rank(spectrum: Density) -> Tensor:
    """exp(−Σ p log p), p = |λ| / Σ|λ|; 0 for a matrix of zeros."""
    scaled = _scaled(spectrum)
    mass = scaled.sum(torch.abs).value
    entropy = mass.log() - scaled.sum(lambda nodes: torch.xlogy(nodes.abs(), nodes.abs())).value / mass
    return torch.where(mass == 0, 0.0, entropy.exp())


def participation_ratio(spectrum: Density) -> Tensor:
    """(Σ|λ|)² / Σλ²; 0 for a matrix of zeros."""
    scaled = _scaled(spectrum)
    mass = scaled.sum(torch.abs).value
    return torch.where(mass == 0, 0.0, mass.square() / scaled.sum(torch.square).value)


def _error(measure: Callable[[Density], Tensor], spectrum: Density) -> Tensor:
    """Return the jackknife standard error over the random vectors."""
    count = len(spectrum.nodes)
    if spectrum.exact:
        return spectrum.sum(torch.zeros_like).error
    if count == 1:
        return measure(spectrum) * torch.nan
    others = [[i for i in range(count) if i != left] for left in range(count)]
    parts = torch.stack([measure(Density(spectrum.nodes[kept], spectrum.weights[kept])) for kept in others])
    return parts.std(correction=0) * (count - 1) ** 0.5


def _scaled(spectrum: Density) -> Density:
    """Scale the largest |λ| to 1: ranks do not depend on the scale, but squares of small numbers underflow."""
    scale = torch.where(spectrum.radius == 0, 1.0, spectrum.radius)
    return Density(spectrum.nodes / scale, spectrum.weights, spectrum.exact)


def _dense(trace: TrainingTrace) -> list[Density]:
    """Compute all eigenvalues. The sum is accumulated in place, to hold at most two matrices at a time."""
    block = 64 if trace.device.type == "cpu" else 512
    chunk = 500 if trace.device.type == "cpu" else MAX_EXAMPLES
    total: Tensor | None = None
    densities = []
    for o in range(trace.num_learned):
        part = hessian(replace(trace.risk(o), chunk_size=chunk), block)
        total = part if total is None else total.add_(part)
        del part
        densities.append(exact_density(_eigenvalues(total) / (o + 2)))
    return densities


def _eigenvalues(matrix: Tensor) -> Tensor:
    """Return the eigenvalues, or NaN if the matrix is not finite."""
    if not matrix.isfinite().all():
        return torch.full_like(matrix[0], torch.nan)
    return torch.linalg.eigvalsh(matrix)


def _estimated(trace: TrainingTrace, steps: int, probes: int, seed: int) -> list[Density]:
    like = trace.theta(0)
    signs = random_signs(probes, trace.num_params, torch.Generator().manual_seed(seed), like.dtype).to(like.device)
    densities = []
    for t in range(1, trace.num_learned + 1):
        average = trace.average_hessian(t)
        known = _outliers(average, trace.random_start(seed), steps)
        densities.append(density(average, signs, steps, trace.hvp_batch_size, known))
    return densities


def _outliers(hessian: Operator, start: Tensor, steps: int) -> Eigenpairs | None:
    """Return the largest |λ| that Lanczos finds precisely; removing them lowers the variance of the other estimates."""
    top = lanczos(hessian, start, min(MAX_OUTLIERS, steps, len(start)), min(steps, len(start)))
    converged = top.residuals <= MAX_RELATIVE_RESIDUAL * top.values.abs()
    count = int(converged.long().cumprod(0).sum())  # the leading ones
    return Eigenpairs(*(part[:count] for part in top)) if count else None
