r"""Flat minima and the forgetting that followed: the top eigenvalue and the trace of every H_o at θ_o, and E_o.

Under a quadratic approximation, the flatter L_o is at θ_o, the larger is the space of updates that forget little
(Section 4). The trace is P times the mean curvature of a random direction, the top eigenvalue the largest curvature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.curvature.lanczos import lanczos
from glocal.curvature.spectrum import random_signs
from glocal.curvature.spectrum import trace as estimate_trace
from glocal.errors import require
from glocal.lens.forgetting import measured_forgetting
from glocal.lens.trace import TrainingTrace, require_positive


@dataclass(frozen=True)
class Flatness:
    """Curvature and forgetting of every learned task o, each (N,); forgetting and distance of the last one are NaN."""

    top: Tensor
    top_error: Tensor  # ‖H v − λ v‖ with a bound on rounding: some eigenvalue is within this distance
    trace: Tensor
    trace_error: Tensor  # its standard error
    after_next: Tensor  # E_o(θ_{o+1})
    at_end: Tensor  # E_o(θ_N)
    moved: Tensor  # ‖θ_N − θ_o‖


def flatness(trace: TrainingTrace, steps: int = 30, probes: int = 20, seed: int = 0) -> Flatness:
    """Measure every task with `steps` products for the top eigenvalue and 1.5 `probes` for the trace (Hutch++)."""
    require_positive(steps=steps)
    require(probes >= 4 and probes % 2 == 0, f"probes = {probes} was given; it must be even and at least 4.")
    n, start = trace.num_learned, trace.random_start(seed)
    signs = random_signs(probes, trace.num_params, torch.Generator().manual_seed(seed), start.dtype).to(start.device)
    curvature = []
    for o in range(n):
        hessian = trace.hessian(o)
        top = lanczos(hessian, start, 1, steps, largest="algebraic")
        total = estimate_trace(hessian, signs, trace.hvp_batch_size)
        curvature.append(torch.stack([top.values[0].double(), top.residuals[0].double(), *total]))
    pairs = measured_forgetting(trace)
    nan = torch.full((1,), torch.nan, dtype=torch.float64)
    end = trace.theta(n - 1)
    moved = torch.stack([(end - trace.theta(o)).double().norm() for o in range(n)]).cpu()
    followed = [torch.cat([part, nan]) for part in (pairs.diagonal(-1), pairs[-1, :-1], moved[:-1])]
    return Flatness(*torch.stack(curvature, 1).cpu(), *followed)
