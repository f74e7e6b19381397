r"""Theorems 4.1 and 5.1, measured on a training.

**Theorem 4.1** (prop:1). If every θ_o is a local minimum of L_o, third powers of the distances between solutions are
negligible, and nothing was forgotten before, E(1) = … = E(t−1) = 0, then (Eq. forgetting-lowerbound)

    E(t) = ½ Δ_tᵀ \bar H_{<t} Δ_t ≥ 0,   \bar H_{<t} = (1/t) Σ_{o<t} H_o,

and E(t) = 0 exactly if \bar H_{<t} Δ_t = 0, since \bar H is positive semi-definite at minima. This is E(t) averaged
over t tasks; averaged over t − 1, as in the base case of the proof, both have 1/(t−1) instead of 1/t. If something was
forgotten before, the right side is no bound: an update back to the old solution has E(t) = 0 and a positive quadratic.

**Theorem 5.1** (prop:ogd). Updates orthogonal to the gradients of old outputs meet this constraint, with

    Δ_tᵀ H_o Δ_t = Δ_tᵀ G_o Δ_t + Δ_tᵀ F_o Δ_t,   G_o = (1/n) Σ_i J_iᵀ [∇²_f ℓ_i] J_i.

The proof drops the functional part F_o, which is small at a minimum, and takes Δ_tᵀ G_o Δ_t = 0 from J_i Δ_t = 0
(Eq. eqt:opt-cond-revisited). `theorem2` measures all three for any updates.

OGD-GTL stores the gradient of the true label's output only. The appendix justifies this by the entry of ∇²_f ℓ at the
true label y, for cross-entropy the largest entry of diag(p) − p pᵀ if K ≫ 1. `ground_truth` measures it on a network's
outputs, and `equal_split` computes it if the other labels share 1 − p_y equally. The entry of a confident network is
K − 1 times the next largest one, as the appendix says. But there are K − 1 of those, with the same sum: the entry is
p_y (1 − p_y) / (1 − Σ_k p_k²) of the trace, which is at most one half for any K and p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from glocal.curvature.lanczos import lanczos
from glocal.curvature.operators import functional_operator, ggn_operator
from glocal.curvature.spectrum import quadrature
from glocal.errors import require
from glocal.lens.forgetting import average, measured_forgetting, task_counts
from glocal.lens.training_trace import TrainingTrace, dot, require_positive
from glocal.losses import AutogradLoss, Loss
from glocal.metrics import Over


@dataclass(frozen=True)
class Theorem1:
    r"""Both sides of the theorem and its premises, after every task t, each (N,).

    Under the premises the last four are 0, except the smallest eigenvalue, which is at least 0.
    """

    measured: Tensor  # E(t)
    quadratic: Tensor  # ½ Δ_tᵀ \bar H Δ_t
    condition: Tensor  # ‖\bar H Δ_t‖
    relative: Tensor  # ‖Σ_o H_o Δ_t‖ / (Σ_o ‖H_o‖ ‖Δ_t‖), from 0 to 1 up to the precision of ‖H_o‖
    max_forgetting: Tensor  # max_{τ<t} |E(τ)|
    max_gradient: Tensor  # max_{o<t} ‖∇L_o(θ_o)‖
    min_eigenvalue: Tensor  # min_{o<t} of the smallest eigenvalue of H_o
    max_distance_cubed: Tensor  # max_{i,k≤t} ‖θ_i − θ_k‖³


def theorem1(trace: TrainingTrace, over: Over = "t", steps: int = 30, seed: int = 0) -> Theorem1:
    """Measure both sides and the premises.

    Args:
        trace: the training.
        over: whether E(t) is averaged over 't' or 't-1' tasks.
        steps: Lanczos steps per task for the extreme eigenvalues; every pair o < t costs one more product.
        seed: of the start vector.
    """
    n, count = trace.num_learned, task_counts(trace.num_learned, over)
    require_positive(steps=steps)
    forgetting = average(measured_forgetting(trace), over)
    start = trace.random_start(seed)
    updates = [trace.update(t) for t in range(n)]
    products = [torch.zeros_like(start) for _ in range(n)]  # Σ_{o<t} H_o Δ_t
    premises = []
    farthest = torch.zeros(n, dtype=torch.float64, device=trace.device)  # the largest ‖θ_o − θ_i‖ of i < o
    for o in range(n):
        hessian = trace.hessian(o)
        nodes, _ = quadrature(hessian, start, steps)
        premises.append(torch.stack([trace.gradient(o).double().norm(), nodes[0], nodes.abs().max()]))
        for t in range(o + 1, n):
            products[t] += hessian @ updates[t]
        for i in range(o):
            farthest[o] = torch.maximum(farthest[o], (trace.theta(o) - trace.theta(i)).double().norm())
    gradients, smallest, norms = torch.stack(premises, 1).cpu()
    quadratic = torch.stack([dot(a, b) for a, b in zip(updates, products, strict=True)]).cpu()
    product_norms, lengths = (torch.stack([v.double().norm() for v in part]).cpu() for part in (products, updates))
    norm_sums = pad(norms.cumsum(0)[:-1], (1, 0))
    past = pad(forgetting[1:].abs(), (1, 0))  # E(1) = 0 by both definitions
    return Theorem1(
        forgetting,
        quadratic / 2 / count,
        product_norms / count,
        product_norms / (norm_sums * lengths),
        _previous_values(past.cummax(0).values),
        _previous_values(gradients.cummax(0).values),
        _previous_values(smallest.cummin(0).values),
        farthest.cpu().cummax(0).values ** 3,
    )


def _previous_values(values: Tensor) -> Tensor:
    """Return the values before each task; NaN before the first."""
    return pad(values[:-1], (1, 0), value=torch.nan)


@dataclass(frozen=True)
class Theorem2:
    """(N, N) matrices [t, o] of tasks o < t, counted from 0, NaN elsewhere; and vectors (N,)."""

    outer: Tensor  # Δ_tᵀ G_o Δ_t
    functional: Tensor  # Δ_tᵀ F_o Δ_t
    lengths: Tensor  # ‖Δ_t‖
    norms: Tensor  # ‖H_o‖, the largest |eigenvalue|

    @property
    def hessian(self) -> Tensor:
        """Δ_tᵀ H_o Δ_t."""
        return self.outer + self.functional

    @property
    def functional_share(self) -> Tensor:
        """The share of the functional part, by magnitude; NaN if both parts are 0."""
        return self.functional.abs() / (self.outer.abs() + self.functional.abs())

    @property
    def rayleigh(self) -> Tensor:
        """Δ_tᵀ H_o Δ_t / ‖Δ_t‖²: the curvature along the update, between H_o's lowest and highest eigenvalue."""
        return self.hessian / self.lengths.unsqueeze(1).square()

    @property
    def relative(self) -> Tensor:
        """The Rayleigh quotient divided by ‖H_o‖, between −1 and 1."""
        return self.rayleigh / self.norms


def theorem2(trace: TrainingTrace, steps: int = 30, seed: int = 0) -> Theorem2:
    """Measure all pairs, with two products per pair and `steps` products per task for ‖H_o‖.

    The functional part is computed by its own products: as a difference of the others it would be lost in rounding.
    """
    n = trace.num_learned
    require_positive(steps=steps)
    start = trace.random_start(seed)
    pairs = torch.full((2, n, n), torch.nan, dtype=torch.float64, device=trace.device)
    norms = []
    for o in range(n):
        norms.append(lanczos(trace.hessian(o), start, 1, steps).values[0].abs().double())
        if o + 1 < n:
            operators = ggn_operator(trace.risk(o)), functional_operator(trace.risk(o))
        for t in range(o + 1, n):
            update = trace.update(t)
            pairs[:, t, o] = torch.stack([dot(update, operator @ update) for operator in operators])
    lengths = torch.stack([trace.update(t).double().norm() for t in range(n)])
    outer, functional = pairs.cpu()
    return Theorem2(outer, functional, lengths.cpu(), torch.stack(norms).cpu())


@dataclass(frozen=True)
class GroundTruth:
    """∇²_f ℓ of every sample and its entry at the true label y, each (n,); 0 where ∇²_f ℓ underflows."""

    confidence: Tensor  # p(y | x)
    entry: Tensor  # [∇²_f ℓ]_yy
    trace: Tensor
    frobenius: Tensor  # √ of the sum of all squared entries
    largest_other: Tensor  # the largest magnitude among the other entries

    @property
    def of_trace(self) -> Tensor:
        """The entry's share of the trace; for cross-entropy also the share of its row in the sum of all magnitudes."""
        return self.entry / self.trace

    @property
    def of_squares(self) -> Tensor:
        """The entry's share of all squared entries."""
        return (self.entry / self.frobenius).square()

    @property
    def dominance(self) -> Tensor:
        """The entry divided by the next largest one."""
        return self.entry / self.largest_other

    def medians(self) -> dict[str, float]:
        """Return medians over the samples whose matrix does not underflow.

        `of_total_trace` is the share of the trace summed over samples, to which confident ones contribute little.
        """
        values = {k: getattr(self, k).nanmedian() for k in ("confidence", "dominance", "of_trace", "of_squares")}
        return {k: float(v) for k, v in values.items()} | {"of_total_trace": float(self.entry.sum() / self.trace.sum())}


def ground_truth(loss: Loss, outputs: Tensor, y: Tensor) -> GroundTruth:
    """Measure outputs (n, K); y are classes (n,), or (n, K): probabilities, or ±1 with 1 for the label."""
    message = f"outputs have the shape {tuple(outputs.shape)}; they must be (n, K) with n ≥ 1 and K ≥ 2."
    require(outputs.dim() == 2 and len(outputs) > 0 and outputs.shape[1] > 1, message)
    require(
        _is_label(y, outputs),
        f"y of shape {tuple(y.shape)} and {y.dtype} has no true label; give classes (n,), probabilities (n, K) that "
        "sum to 1, or 1 for the true label and −1 for the others.",
    )
    k = outputs.shape[1]
    parts = zip(*(part.split(max(1, (1 << 22) // k**2)) for part in (outputs.detach().double(), y)), strict=True)
    chunks = [_entries(loss, f, labels) for f, labels in parts]
    entries = (torch.cat(columns).cpu() for columns in zip(*chunks, strict=True))
    return GroundTruth(_confidence(loss, outputs.detach().double(), y).cpu(), *entries)


def ground_truth_of(trace: TrainingTrace, task: int) -> GroundTruth:
    """Measure a task's data at its solution θ_o."""
    x, y = trace.tasks[task]
    with torch.no_grad():
        outputs = trace.outputs(trace.solution(task), x)
    return ground_truth(trace.loss, outputs, y)


def equal_split(confidence: Tensor, classes: int) -> GroundTruth:
    """Return the closed form of cross-entropy if p_y = `confidence` and every other label has (1 − p_y) / (K − 1)."""
    require(classes > 1, f"classes = {classes} was given; it must be at least 2.")
    p = confidence.double()
    q, others = (1 - p) / (classes - 1), classes - 1
    entry, diagonal = p * (1 - p), q * (1 - q)
    squares = entry**2 + others * diagonal**2 + 2 * others * (p * q) ** 2 + others * (others - 1) * q**4
    return GroundTruth(p, entry, entry + others * diagonal, squares.sqrt(), torch.maximum(diagonal, p * q))


def _entries(loss: Loss, outputs: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    root = loss.output_hessian_sqrt(outputs)
    matrix = root.mT @ root  # a sum of small positive terms, where 1 − p would round to 0
    label = y.argmax(-1) if y.dim() == 2 else y
    truth = torch.arange(outputs.shape[1], device=outputs.device) == label.unsqueeze(-1)
    both = truth.unsqueeze(-1) & truth.unsqueeze(-2)
    entry = torch.where(both, matrix, 0.0).sum((1, 2))
    others = torch.where(both, 0.0, matrix.abs()).amax((1, 2))
    trace = matrix.diagonal(dim1=1, dim2=2).sum(1)
    return entry, trace, matrix.flatten(1).norm(dim=1), others


def _is_label(y: Tensor, outputs: Tensor) -> bool:
    if y.dim() == 1:
        return not y.is_floating_point() and len(y) == len(outputs)
    if y.shape != outputs.shape:
        return False
    shares = (y >= 0).all() & ((y.sum(-1) - 1).abs() < 1e-3).all()
    signs = (y.abs() == 1).all() & ((y > 0).sum(-1) == 1).all()
    return bool(shares | signs)


def _confidence(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return p(y | x); NaN for a user's loss that is not cross-entropy of logits or of log-probabilities."""
    if not isinstance(loss, AutogradLoss):
        return loss.likelihood(outputs, y)
    if y.dim() == 1:
        sample_losses = loss.per_sample(outputs, y)
        for logarithms in (outputs.log_softmax(-1), outputs):
            label_logs = logarithms.gather(-1, y.unsqueeze(-1)).squeeze(-1)
            normalized = bool(((logarithms.exp().sum(-1) - 1).abs() < 1e-3).all())
            if normalized and torch.allclose(-label_logs, sample_losses, rtol=1e-4, atol=1e-6):
                return label_logs.exp()
    return torch.full_like(outputs[:, 0], torch.nan)
