r"""How far from a solution the curvature describes the loss: the perturbation score, Eq. score-ptb (§6.2, appendix).

    s_i(r) = E_μ | ( L_t(θ_t + r v_i) − L_t(θ_t) ) / ( L_t(θ_t + r μ) − L_t(θ_t) ) |,

v_i the i-th eigenvector of the task's Hessian at its solution, μ uniform on the unit sphere. Where the second-order
expansion holds, moving along v_i raises the loss more than other directions do, and the score is large; where it does
not hold, v_i is a direction like any other, and the score is about 1.

The paper uses ten eigenvectors by Lanczos' method on 2,000 examples, ten random directions, r = 10⁻³, …, 10⁶, and the
losses on training and test data. In its code the 2,000 examples are the task's first ones, and the test loss is its sum
over batches divided by the number of training batches. Here they are drawn at random, and both losses are means.

Losses are computed in float64 whatever the network's dtype: at r = 10⁻³ a random direction changes the loss by less
than float32 resolves, and at 10⁶ the outputs of a deep network overflow float32. A loss above float64's range is inf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from glocal.challenges.challenge import Data
from glocal.curvature.lanczos import Eigenpairs, eigenpairs
from glocal.engine.loader import evenly_spaced
from glocal.errors import GlocalError, require, require_known
from glocal.lens.approximation_error import map_rays
from glocal.lens.training_trace import MAX_EXAMPLES, Checkpoint, TrainingTrace, as_double, require_positive
from glocal.risk import Risk
from glocal.rng import generator
from glocal.tree import from_vector, to_vector

Split: TypeAlias = Literal["train", "test"]
Kind: TypeAlias = Literal["eigen", "random"]
RADII = tuple(10.0**exponent for exponent in range(-3, 7))
CHUNK_SIZE = 500
"""Examples that pass through the network at once; with batch statistics, the batch."""


@dataclass(frozen=True)
class Perturbation:
    """Losses around a solution, and the scores that follow from them.

    eigenvalues (k,) are those of largest magnitude, with residuals ‖H v − λ v‖. losses[split][kind] is (directions,
    radii); base[split] is the loss at the solution.
    """

    radii: tuple[float, ...]
    eigenvalues: Tensor
    residuals: Tensor
    base: Mapping[Split, float]
    losses: Mapping[Split, Mapping[Kind, Tensor]]

    def score(self, split: Split = "train", kind: Kind = "eigen") -> Tensor:
        """Return s_i(r), (directions, radii); a random direction is compared with the other random ones.

        NaN where no ratio is defined (`num_ratios` is 0); inf where an infinite change is divided by a finite one, or
        any change by 0.
        """
        return self._ratios(split, kind).nanmean(1)

    def num_ratios(self, split: Split = "train", kind: Kind = "eigen") -> Tensor:
        """Return how many random directions each score averages: those where not both changes are 0 or inf."""
        return (~self._ratios(split, kind).isnan()).sum(1)

    def _ratios(self, split: Split, kind: Kind) -> Tensor:
        """Return (directions, random directions, radii); NaN where undefined."""
        require_known("split", split, self.losses)
        changes = {k: (losses - self.base[split]).abs() for k, losses in self.losses[split].items()}
        ratios = changes[kind].unsqueeze(1) / changes["random"]
        if kind == "random":
            ratios = ratios.masked_fill(torch.eye(len(ratios), dtype=torch.bool).unsqueeze(-1), torch.nan)
        return ratios


def perturbation(
    trace: TrainingTrace,
    task: int,
    test: Data | None = None,
    *,
    eigenvectors: int = 10,
    directions: int = 10,
    radii: Sequence[float] = RADII,
    samples: int = MAX_EXAMPLES,
    examples: int | None = None,
    seed: int = 0,
) -> Perturbation:
    """Measure a task's losses around its solution.

    Args:
        trace: the training.
        task: counted from 0.
        test: test data as the network takes them; the training data are those of the trace.
        eigenvectors: how many eigenvectors of the Hessian.
        directions: how many random directions.
        radii: the radii r.
        samples: examples, drawn at random, of which the Hessian is made.
        examples: losses are means over at most this many evenly spaced examples; all if None.
        seed: of the random numbers.
    """
    point, size, radii = trace.solution(task), trace.num_params, tuple(map(float, radii))
    message = f"eigenvectors = {eigenvectors} was given; a network of {size} parameters has 1 to {size}."
    require(1 <= eigenvectors <= size, message)
    require(directions >= 2, f"directions = {directions} was given; at least 2 random directions are needed.")
    require_positive(samples=samples, examples=examples)
    positive = bool(radii) and all(0 < radius < torch.inf for radius in radii)
    require(positive, f"radii = {radii} was given; they must be positive and finite.")
    splits: dict[Split, Data] = {"train": trace.tasks[task], **({} if test is None else {"test": test})}
    if examples is not None:
        splits = {split: evenly_spaced(data, examples) for split, data in splits.items()}
    zero = torch.zeros(1, size, device=trace.device)
    try:
        base = {split: float(_float64_losses(trace, point, data, zero, (0.0,))) for split, data in splits.items()}
    except RuntimeError as error:  # for example a network that creates float32 tensors itself
        raise GlocalError(f"perturbed losses are computed in float64, where the network fails: {error}") from error
    problem = f"of task {task + 1} is not finite at its solution: training diverged. Use a lower learning rate."
    for split, value in base.items():
        require(value < torch.inf, f"the {split} loss {problem}")
    top = top_eigenpairs(trace, task, eigenvectors, samples, seed, CHUNK_SIZE)
    require(bool(top.values.isfinite().all()), f"the Hessian {problem}")
    vectors: dict[Kind, Tensor] = {"eigen": top.vectors, "random": unit_directions(trace, task, directions, seed)}
    losses = {
        split: {kind: _float64_losses(trace, point, data, rows, radii) for kind, rows in vectors.items()}
        for split, data in splits.items()
    }
    return Perturbation(radii, top.values.cpu(), top.residuals.cpu(), base, losses)


def top_eigenpairs(
    trace: TrainingTrace,
    task: int,
    count: int,
    samples: int = MAX_EXAMPLES,
    seed: int = 0,
    chunk_size: int | None = None,
) -> Eigenpairs:
    """Return the eigenpairs of the task's Hessian at its solution, the largest magnitude first.

    The sign of an eigenvector is such that its entry of largest magnitude is positive.
    """
    (params, buffers), data = trace.solution(task), trace.tasks[task]
    rows = torch.randperm(len(data.y), generator=generator(seed, "perturbation", "samples", task))[:samples]
    x, y = (part[rows.to(part.device)] for part in data)
    draw = generator(seed, "perturbation", "lanczos", task)
    start = torch.randn(trace.num_params, generator=draw).to(trace.theta(task))
    top = eigenpairs(Risk(trace.module, params, buffers, x, y, trace.loss, chunk_size), count, start=start)
    largest = top.vectors.gather(1, top.vectors.abs().argmax(1, keepdim=True))
    return top._replace(vectors=top.vectors * torch.where(largest < 0, -1, 1))


def unit_directions(trace: TrainingTrace, task: int, count: int, seed: int = 0) -> Tensor:
    """Return random directions μ, uniform on the unit sphere, (count, P)."""
    theta, stream = trace.theta(task), generator(seed, "perturbation", "directions", task)
    rows = torch.stack([torch.randn(len(theta), dtype=torch.float64, generator=stream) for _ in range(count)])
    return (rows / rows.norm(dim=1, keepdim=True)).to(theta)


def _float64_losses(
    trace: TrainingTrace, checkpoint: Checkpoint, data: Data, directions: Tensor, radii: Sequence[float]
) -> Tensor:
    """Return L(θ + r v) in float64, (directions, radii), on the CPU; inf where outputs are not finite."""
    params, buffers = ({k: as_double(t) for k, t in part.items()} for part in checkpoint)
    module = deepcopy(trace.module).double()

    def loss(theta: Tensor) -> tuple[Tensor]:
        total = theta.new_zeros(())
        point = {**from_vector(theta, params), **buffers}
        for x, y in zip(data.x.split(CHUNK_SIZE), data.y.split(CHUNK_SIZE), strict=True):
            outputs = functional_call(module, point, (as_double(x),))
            total = total + trace.loss.per_sample(outputs, as_double(y)).sum()
        return (total / len(data.y),)

    (losses,) = map_rays(loss, to_vector(params), directions, torch.tensor(radii, dtype=torch.float64))
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)


def with_batch_statistics(module: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm normalizes by the batch in eval mode too, instead of by running statistics.

    The two are different functions of θ: with running statistics, which do not follow θ, outputs grow without bound
    with every layer's weights; with batch statistics, a layer before BatchNorm may have any scale.
    """
    module = deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.forward = MethodType(_normalize_by_batch, layer)  # type: ignore[method-assign]
    return module


def _normalize_by_batch(norm: _BatchNorm, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return γ (x − μ) / √(σ² + ε) + β in operations that can be differentiated twice, as `networks.batchnorm` does."""
    dims = [0, *range(2, x.dim())]
    centered = x - x.mean(dims, keepdim=True)
    z = centered * (centered.square().mean(dims, keepdim=True) + norm.eps).rsqrt()
    if norm.affine:
        shape = (-1, *[1] * (x.dim() - 2))
        z = z * norm.weight.view(shape) + norm.bias.view(shape)
    z = z if residual is None else z + residual
    return z.relu() if relu else z
