r"""The rank of the average Hessian \bar H_{<t} = (1/t) Σ_{o<t} H_o: the dimension of the space in which updates forget
(Theorem 4.1; appendix, Average Hessian rank). What counts as zero is a choice, so there are several definitions:

- the number of |λ| above absolute thresholds, or above parts of the largest |λ|;
- the effective rank exp(−Σ_i p_i log p_i), p_i = |λ_i| / Σ_j |λ_j| (Roy & Vetterli, 2007);
- the participation ratio (Σ_i |λ_i|)² / Σ_i λ_i², which is (tr \bar H)² / ‖\bar H‖_F² where no eigenvalue is negative.

r equal eigenvalues and zeros have rank r by each of them. For small networks all eigenvalues of the dense Hessian are
computed; for larger ones the density is estimated from Hessian-vector products (`curvature.spectrum.density`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glocal.curvature.hessian import hessian
from glocal.curvature.lanczos import Eigenpairs, lanczos
from glocal.curvature.spectrum import Density, Estimate, density, exact_density
from glocal.lens.training_trace import MAX_EXAMPLES, TrainingTrace, require_positive

MAX_DENSE_PARAMS = 20_000
"""Largest P of a dense P × P Hessian; 20,000 need 1.6 GB in single precision, twice that with its eigenvalues."""
THRESHOLDS = (1e-1, 1e-2, 1e-3, 1e-4)
MAX_OUTLIERS = 20
MAX_RELATIVE_RESIDUAL = 1e-3


@dataclass(frozen=True)
class Ranks:
    r"""Ranks with standard errors, which are 0 if all eigenvalues are known, each (N,).

    Entry t − 1 is of \bar H_{<t}, t = 1 … N: the first one has the Hessian of the first task only, the last one all.
    """

    top: Tensor  # the largest |λ|
    absolute: dict[float, Estimate]  # the number of |λ| above each threshold
    relative: dict[float, Estimate]  # above each threshold times the largest |λ|
    effective: Estimate  # the exponential of the entropy
    participation: Estimate


def rank(
    trace: TrainingTrace,
    absolute: Sequence[float] = THRESHOLDS,
    relative: Sequence[float] = THRESHOLDS,
    *,
    max_dense: int = MAX_DENSE_PARAMS,
    steps: int = 100,
    probes: int = 10,
    seed: int = 0,
) -> Ranks:
    """Measure the ranks before every task.

    Args:
        trace: the training.
        absolute: absolute thresholds of |λ|.
        relative: thresholds relative to the largest |λ|.
        max_dense: the largest number of parameters for which all eigenvalues are computed; above it, their density.
        steps: Lanczos steps of the density.
        probes: random vectors of the density.
        seed: of the random vectors.
    """
    return ranks(spectra(trace, max_dense, steps, probes, seed), absolute, relative)


def spectra(
    trace: TrainingTrace, max_dense: int = MAX_DENSE_PARAMS, steps: int = 100, probes: int = 10, seed: int = 0
) -> list[Density]:
    r"""Return the eigenvalues of \bar H_{<t} for t = 1 … N, all of them or a density."""
    require_positive(steps=steps, probes=probes)
    return _dense(trace) if trace.num_params <= max_dense else _estimate(trace, steps, probes, seed)


def ranks(
    densities: Sequence[Density], absolute: Sequence[float] = THRESHOLDS, relative: Sequence[float] = THRESHOLDS
) -> Ranks:
    """Compute the ranks of spectra by all definitions."""

    def stack(estimates: Iterable[Estimate]) -> Estimate:
        return Estimate(*(torch.stack(part).double().cpu() for part in zip(*estimates, strict=True)))

    return Ranks(
        torch.stack([d.radius for d in densities]).cpu(),
        {x: stack(d.count_above(x) for d in densities) for x in absolute},
        {x: stack(d.count_above(x * float(d.radius)) for d in densities) for x in relative},
        stack(Estimate(effective_rank(d), _error(effective_rank, d)) for d in densities),
        stack(Estimate(participation_ratio(d), _error(participation_ratio, d)) for d in densities),
    )


def effective_rank(spectrum: Density) -> Tensor:
    """exp(−Σ p log p), p = |λ| / Σ|λ|; 0 for a matrix of zeros."""
    scaled = _scaled_density(spectrum)
    mass = scaled.sum(torch.abs).value
    entropy = mass.log() - scaled.sum(lambda nodes: torch.xlogy(nodes.abs(), nodes.abs())).value / mass
    return torch.where(mass == 0, 0.0, entropy.exp())


def participation_ratio(spectrum: Density) -> Tensor:
    """(Σ|λ|)² / Σλ²; 0 for a matrix of zeros."""
    scaled = _scaled_density(spectrum)
    mass = scaled.sum(torch.abs).value
    return torch.where(mass == 0, 0.0, mass.square() / scaled.sum(torch.square).value)


def _error(measure: Callable[[Density], Tensor], spectrum: Density) -> Tensor:
    """Return the jackknife standard error of `measure` over the random vectors; 0 for an exact spectrum."""
    count = len(spectrum.nodes)
    if spectrum.exact:
        return spectrum.sum(torch.zeros_like).error
    if count == 1:
        return measure(spectrum) * torch.nan
    subsets = [[i for i in range(count) if i != j] for j in range(count)]
    parts = torch.stack([measure(Density(spectrum.nodes[subset], spectrum.weights[subset])) for subset in subsets])
    return parts.std(correction=0) * (count - 1) ** 0.5


def _scaled_density(spectrum: Density) -> Density:
    """Scale the largest |λ| to 1: ranks do not depend on the scale, but squares of small numbers underflow."""
    scale = torch.where(spectrum.radius == 0, 1.0, spectrum.radius)
    return Density(spectrum.nodes / scale, spectrum.weights, spectrum.exact)


def _dense(trace: TrainingTrace) -> list[Density]:
    """Compute all eigenvalues. The sum is accumulated in place, to hold at most two matrices at a time."""
    block, chunk = (64, 500) if trace.device.type == "cpu" else (512, MAX_EXAMPLES)
    total: Tensor | None = None
    densities = []
    for o in range(trace.num_learned):
        part = hessian(replace(trace.risk(o), chunk_size=chunk), block)
        total = part if total is None else total.add_(part)
        del part
        finite = bool(total.isfinite().all())
        values = torch.linalg.eigvalsh(total) if finite else torch.full_like(total[0], torch.nan)
        densities.append(exact_density(values / (o + 2)))
    return densities


def _estimate(trace: TrainingTrace, steps: int, probes: int, seed: int) -> list[Density]:
    """Estimate densities; without the largest |λ| that Lanczos finds precisely, the others have a lower variance."""
    start, signs, densities = trace.random_start(seed), trace.random_probes(probes, seed), []
    size = min(steps, len(start))
    for t in range(1, trace.num_learned + 1):
        average = trace.average_hessian(t)
        top = lanczos(average, start, min(MAX_OUTLIERS, size), size)
        converged = top.residuals <= MAX_RELATIVE_RESIDUAL * top.values.abs()
        count = int(converged.long().cumprod(0).sum())  # the leading ones
        outliers = Eigenpairs(*(part[:count] for part in top)) if count else None
        densities.append(density(average, signs, steps, trace.hvp_batch_size, outliers))
    return densities
