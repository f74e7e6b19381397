r"""Flat minima, and the forgetting that followed: the top eigenvalue and the trace of every H_o at θ_o, beside E_o.

Under a quadratic approximation the flatter L_o is at θ_o, the larger the space of updates that forget little
(Section 4). The trace is P times the mean curvature along a random direction, the top eigenvalue that of the worst one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.curvature.lanczos import lanczos
from glocal.curvature.trace import random_signs
from glocal.curvature.trace import trace as estimate_trace
from glocal.errors import require
from glocal.lens.forgetting import measured
from glocal.lens.trace import TrainingTrace, require_positive


@dataclass(frozen=True)
class Flatness:
    """Of every learnt task o, each (N,); nothing followed the last one, whose forgetting and distance are NaN."""

    top: Tensor
    top_error: Tensor  # ‖H v − λ v‖, with what rounding may have left: some eigenvalue is as near as that
    trace: Tensor
    trace_error: Tensor  # its standard error
    after_next: Tensor  # E_o(θ_{o+1})
    at_end: Tensor  # E_o(θ_N)
    moved: Tensor  # ‖θ_N − θ_o‖


def flatness(trace: TrainingTrace, steps: int = 30, probes: int = 20, seed: int = 0) -> Flatness:
    """`steps` products a task for the top eigenvalue, and one and a half times `probes` for the trace (Hutch++)."""
    require_positive(steps=steps)
    require(probes >= 4 and probes % 2 == 0, f"probes = {probes} was given; allowed: even numbers from 4 on.")
    n, begin = trace.num_learned, trace.random_start(seed)
    generator = torch.Generator().manual_seed(seed)
    signs = random_signs(probes, trace.num_params, generator, begin.dtype).to(begin.device)
    found = []
    for o in range(n):
        times = trace.hessian(o)
        top = lanczos(times, begin, 1, steps, largest="algebraic")
        spread = estimate_trace(times, signs, trace.hvp_batch_size)
        found.append(torch.stack([top.values[0].double(), top.residuals[0].double(), *spread]))
    pairs = measured(trace)
    last = torch.full((1,), torch.nan, dtype=torch.float64)
    end = trace.theta(n - 1)
    moved = torch.stack([(end - trace.theta(o)).double().norm() for o in range(n)]).cpu()
    followed = [torch.cat([part, last]) for part in (pairs.diagonal(-1), pairs[-1, :-1], moved[:-1])]
    return Flatness(*torch.stack(found, 1).cpu(), *followed)
