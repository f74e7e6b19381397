r"""The rank of the average Hessian \bar H_{<t} = (1/t) Σ_{o<t} H_o: the size of the space in which updates forget
(Theorem 1; appendix, Average Hessian rank). What counts as zero is a matter of choice, so there are several:

- the number of |λ| above absolute thresholds, or above parts of the largest |λ|;
- the effective rank exp(−Σ_i p_i log p_i), p_i = |λ_i| / Σ_j |λ_j| (Roy & Vetterli, 2007);
- the participation ratio (Σ_i |λ_i|)² / Σ_i λ_i², which is (tr \bar H)² / ‖\bar H‖_F² where no eigenvalue is negative.

r equal eigenvalues and zeros have rank r by each of them. Small networks' Hessians are made as dense matrices and all
their eigenvalues found; those of larger ones are estimated from products (`curvature.density`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from glocal.curvature.hessian import hessian
from glocal.curvature.lanczos import Eigenpairs, lanczos
from glocal.curvature.products import Operator
from glocal.curvature.spectrum import Density, density, exact_density
from glocal.curvature.trace import random_signs
from glocal.errors import require, unknown
from glocal.lens.trace import MAX_EXAMPLES, TrainingTrace, require_positive

Method: TypeAlias = Literal["auto", "dense", "density"]
METHODS: tuple[Method, ...] = ("auto", "dense", "density")

LARGEST_DENSE = 20_000
"""Parameters up to which a P × P matrix is made; 20,000 need 1.6 GB in single precision, twice with its eigenvalues."""

ABSOLUTE = (1e-1, 1e-2, 1e-3, 1e-4)
RELATIVE = (1e-1, 1e-2, 1e-3, 1e-4)
OUTLIERS = 20
CONVERGED = 1e-3


@dataclass(frozen=True)
class Ranks:
    r"""Row t − 1 is of \bar H_{<t}, t = 1 … N counted from 0: the first has task 0's Hessian alone, the last all."""

    size: int  # P
    absolute_thresholds: tuple[float, ...]
    relative_thresholds: tuple[float, ...]
    top: Tensor  # (N,), the largest |λ|
    absolute: Tensor  # (N, A), how many |λ| are above each threshold
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
    """The ranks before every task. `steps` and `probes` are those of the density."""
    return ranks(spectra(trace, method, steps, probes, seed), trace.num_params, absolute, relative)


def spectra(
    trace: TrainingTrace, method: Method = "auto", steps: int = 100, probes: int = 10, seed: int = 0
) -> list[Density]:
    r"""The eigenvalues of \bar H_{<t} for t = 1 … N, all of them or a density."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    require_positive(steps=steps, probes=probes)
    size = trace.num_params
    if method == "auto":
        method = "dense" if size <= LARGEST_DENSE else "density"
    require(
        method == "density" or size <= LARGEST_DENSE,
        f"a dense Hessian of {size:,} parameters was asked for; up to {LARGEST_DENSE:,} are allowed. Choose 'density'.",
    )
    return _dense(trace) if method == "dense" else _estimated(trace, steps, probes, seed)


def ranks(
    found: Sequence[Density], size: int, absolute: Sequence[float] = ABSOLUTE, relative: Sequence[float] = RELATIVE
) -> Ranks:
    """What the spectra say by all definitions."""
    tops = torch.stack([one.radius for one in found]).cpu()
    fixed = [[one.count_above(threshold) for threshold in absolute] for one in found]
    parts = [[one.count_above(r * float(top)) for r in relative] for one, top in zip(found, tops, strict=True)]
    tables = [
        torch.tensor([[float(cell[which]) for cell in row] for row in table], dtype=torch.float64)
        for which in (0, 1)
        for table in (fixed, parts)
    ]
    measures = (effective_rank, participation_ratio)
    each = [torch.stack([measure(one) for one in found]).cpu() for measure in measures]
    each += [torch.stack([_error(measure, one) for one in found]).cpu() for measure in measures]
    return Ranks(size, tuple(absolute), tuple(relative), tops, *tables, *each)


def effective_rank(found: Density) -> Tensor:
    """exp(−Σ p log p), p = |λ| / Σ|λ|; 0 for a matrix of zeros."""
    scaled = _scaled(found)
    mass = scaled.sum(torch.abs).value
    entropy = mass.log() - scaled.sum(lambda nodes: torch.xlogy(nodes.abs(), nodes.abs())).value / mass
    return torch.where(mass == 0, 0.0, entropy.exp())


def participation_ratio(found: Density) -> Tensor:
    """(Σ|λ|)² / Σλ²; 0 for a matrix of zeros."""
    scaled = _scaled(found)
    mass = scaled.sum(torch.abs).value
    return torch.where(mass == 0, 0.0, mass.square() / scaled.sum(torch.square).value)


def _error(measure: Callable[[Density], Tensor], found: Density) -> Tensor:
    """The standard error of what is no mean over random vectors, from leaving out one after the other (jackknife)."""
    count = len(found.nodes)
    if found.exact:
        return found.sum(torch.zeros_like).error
    if count == 1:
        return measure(found) * torch.nan
    others = [[i for i in range(count) if i != left] for left in range(count)]
    parts = torch.stack([measure(Density(found.nodes[kept], found.weights[kept])) for kept in others])
    return parts.std(correction=0) * (count - 1) ** 0.5


def _scaled(found: Density) -> Density:
    """With 1 for the largest |λ|: neither rank depends on the scale, but squares of small numbers underflow."""
    return Density(found.nodes / torch.where(found.radius == 0, 1.0, found.radius), found.weights, found.exact)


def _dense(trace: TrainingTrace) -> list[Density]:
    """The sum grows in place: beside it there is one task's matrix, then the one that eigenvalues are taken from."""
    block = 64 if trace.device.type == "cpu" else 512
    chunk = 500 if trace.device.type == "cpu" else MAX_EXAMPLES
    total: Tensor | None = None
    found = []
    for o in range(trace.num_learned):
        part = hessian(replace(trace.risk(o), chunk_size=chunk), block)
        total = part if total is None else total.add_(part)
        del part
        found.append(exact_density(_eigenvalues(total) / (o + 2)))
    return found


def _eigenvalues(matrix: Tensor) -> Tensor:
    """All NaN where the matrix is not finite."""
    if not matrix.isfinite().all():
        return torch.full_like(matrix[0], torch.nan)
    return torch.linalg.eigvalsh(matrix)


def _estimated(trace: TrainingTrace, steps: int, probes: int, seed: int) -> list[Density]:
    like = trace.theta(0)
    signs = random_signs(probes, trace.num_params, torch.Generator().manual_seed(seed), like.dtype).to(like.device)
    found = []
    for t in range(1, trace.num_learned + 1):
        times = trace.average_hessian(t)
        known = _outliers(times, trace.random_start(seed), steps)
        found.append(density(times, signs, steps, trace.hvp_batch_size, known))
    return found


def _outliers(times: Operator, start: Tensor, steps: int) -> Eigenpairs | None:
    """The largest |λ| that stand out so far that a few steps find them: most of the chance in the others' estimates."""
    top = lanczos(times, start, min(OUTLIERS, steps, len(start)), min(steps, len(start)))
    settled = top.residuals <= CONVERGED * top.values.abs()
    count = int(settled.long().cumprod(0).sum())  # without a gap
    return Eigenpairs(*(part[:count] for part in top)) if count else None
