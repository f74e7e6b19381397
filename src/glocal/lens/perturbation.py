r"""How far from a solution curvature tells the loss: the perturbation score, Eq. score-ptb (§6.3 and the appendix).

    s_i(r) = E_μ | ( L_t(θ_t + r v_i) − L_t(θ_t) ) / ( L_t(θ_t + r μ) − L_t(θ_t) ) |,

v_i the i-th eigenvector of the task's Hessian at its solution, μ uniform on the unit sphere. Where the loss is its
second-order expansion, moving along v_i raises it as no other direction does, and the score is large; where it is not,
v_i is a direction like any other, and the score is about 1.

The paper takes ten eigenvectors by Lanczos's method on 2,000 examples, ten random directions, r = 10⁻³, …, 10⁶, and the
losses on training and on test data. Behind its figures the 2,000 are the task's first and not random ones, and the test
loss is its sum over batches divided by the number of training batches. Here they are drawn at random, and both losses
are means over their own examples.

Losses are computed in float64 whatever the network's type. At r = 10⁻³ a random direction changes the loss by less than
float32 can tell, and at 10⁶ a deep network's outputs pass its largest number. A loss that is beyond float64 is inf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from glocal.challenges.challenge import Data
from glocal.curvature.lanczos import Eigenpairs, eigenpairs, start_vector
from glocal.engine.loader import evenly_spaced
from glocal.errors import GlocalError, require, unknown
from glocal.lens.trace import Checkpoint, TrainingTrace
from glocal.risk import Risk
from glocal.rng import generator
from glocal.tree import Params, from_vector, to_vector

Split: TypeAlias = Literal["train", "test"]
Kind: TypeAlias = Literal["eigen", "random"]
RADII = tuple(10.0**exponent for exponent in range(-3, 7))
AT_ONCE = 64 << 20
"""Bytes of parameters that are perturbed side by side: many small networks, large ones one after the other."""


@dataclass(frozen=True)
class Perturbation:
    """Losses around a solution; scores are made of them.

    eigenvalues (k,) are those of largest magnitude, with residuals ‖H v − λ v‖. losses[split][kind] is (directions,
    radii), inf where it is beyond float64; base[split] is the loss at the solution itself.
    """

    radii: tuple[float, ...]
    eigenvalues: Tensor
    residuals: Tensor
    base: Mapping[Split, float]
    losses: Mapping[Split, Mapping[Kind, Tensor]]

    def score(self, split: Split = "train", kind: Kind = "eigen") -> Tensor:
        """s_i(r) of every direction and radius; a random direction is held against the others.

        NaN where no ratio is known, that is where `known` is 0. A change that is infinite beside a finite one, or
        anything beside no change at all, is inf.
        """
        ratios = self._ratios(split, kind)
        defined = ~ratios.isnan()
        return torch.where(defined, ratios, 0).sum(1) / defined.sum(1)

    def known(self, split: Split = "train", kind: Kind = "eigen") -> Tensor:
        """How many random directions each score is the mean over: those where not both changes are 0 or inf."""
        return (~self._ratios(split, kind).isnan()).sum(1)

    def _ratios(self, split: Split, kind: Kind) -> Tensor:
        """(directions, random directions, radii); NaN where there is none."""
        for what, given, held in (("split", split, self.losses), ("kind", kind, ("eigen", "random"))):
            if given not in held:
                raise unknown(what, given, held)
        changes = {k: (losses - self.base[split]).abs() for k, losses in self.losses[split].items()}
        ratios = changes[kind].unsqueeze(1) / changes["random"]
        if kind == "random":
            own = torch.eye(len(ratios), dtype=torch.bool).unsqueeze(-1)
            ratios = ratios.masked_fill(own, torch.nan)
        return ratios


def perturbation(
    trace: TrainingTrace,
    task: int,
    test: Data | None = None,
    *,
    eigenvectors: int = 10,
    directions: int = 10,
    radii: Sequence[float] = RADII,
    samples: int = 2_000,
    examples: int | None = None,
    chunk: int = 500,
    seed: int = 0,
) -> Perturbation:
    """The losses of one task around its solution, on the trace's data and, where they are given, on test data.

    `test` holds inputs as the network takes them. `samples` examples, drawn at random, make the Hessian; losses are
    means over at most `examples`, evenly spaced (all if not said). At most `chunk` go through the network at once, for
    the Hessian as for the losses: where it uses a batch's statistics, these are the batch.
    """
    require(
        0 <= task < len(trace.checkpoints) - 1,
        f"the trace has solutions of {len(trace.checkpoints) - 1} tasks, counted from 0; task {task} was asked for.",
    )
    point = trace.checkpoints[task + 1]
    size = sum(p.numel() for p in point.params.values())
    allowed = 1 <= eigenvectors <= size
    require(allowed, f"a network of {size} parameters has 1 to {size} eigenvectors; {eigenvectors} were asked for.")
    require(directions >= 2, f"at least 2 random directions are compared with; {directions} were asked for.")
    for name, number in (("samples", samples), ("examples", 1 if examples is None else examples), ("chunk", chunk)):
        require(number >= 1, f"{name} is at least 1; {number} was given.")
    radii = tuple(float(r) for r in radii)
    require(bool(radii) and 0 < min(radii) <= max(radii) < torch.inf, f"radii are positive; {radii} were given.")
    splits: dict[Split, Data] = {"train": trace.tasks[task]}
    if test is not None:
        splits["test"] = test
    some = {split: data if examples is None else evenly_spaced(data, examples) for split, data in splits.items()}
    around = {split: _Losses(trace, point, data, chunk) for split, data in some.items()}
    still = torch.zeros(1, size, device=trace.device)
    try:
        base = {split: float(losses(still, (0.0,))) for split, losses in around.items()}
    except RuntimeError as error:  # of a network that makes tensors in single precision itself, say
        raise GlocalError(f"losses around a solution are taken in float64, where the network fails: {error}") from error
    for split, value in base.items():
        finite = f"the {split} loss of task {task} is not finite at its solution: the run has diverged."
        require(value < torch.inf, finite)
    found = principal(trace, task, eigenvectors, samples, seed, chunk)
    require(bool(found.values.isfinite().all()), f"the Hessian of task {task} is not finite at its solution.")
    ways: dict[Kind, Tensor] = {"eigen": found.vectors, "random": unit_directions(trace, task, directions, seed)}
    losses = {split: {kind: at(vectors, radii) for kind, vectors in ways.items()} for split, at in around.items()}
    return Perturbation(radii, found.values.cpu(), found.residuals.cpu(), base, losses)


def principal(
    trace: TrainingTrace, task: int, count: int, samples: int, seed: int, chunk: int | None = None
) -> Eigenpairs:
    """The eigenpairs of the task's Hessian at its solution, the largest magnitude first.

    An eigenvector has two senses; the one whose entry of largest magnitude is positive is taken.
    """
    point, data = trace.checkpoints[task + 1], trace.tasks[task]
    drawn = torch.randperm(len(data.y), generator=generator(seed, "perturbation", "samples", task))[:samples]
    x, y = (part[drawn.to(part.device)] for part in data)
    theta = to_vector(point.params)
    start = start_vector(theta.numel(), generator(seed, "perturbation", "lanczos", task)).to(theta)
    risk = Risk(trace.module, point.params, point.buffers, x, y, trace.loss, chunk)
    found = eigenpairs(risk, count, start=start)
    largest = found.vectors.gather(1, found.vectors.abs().argmax(1, keepdim=True))
    return found._replace(vectors=found.vectors * torch.where(largest < 0, -1, 1))


def unit_directions(trace: TrainingTrace, task: int, count: int, seed: int) -> Tensor:
    """Random directions μ, uniform on the unit sphere, (count, P)."""
    like = to_vector(trace.checkpoints[task + 1].params)
    stream = generator(seed, "perturbation", "directions", task)
    drawn = torch.stack([torch.randn(like.numel(), dtype=torch.float64, generator=stream) for _ in range(count)])
    return (drawn / drawn.norm(dim=1, keepdim=True)).to(like)


class _Losses:
    """L(θ + r v) for many v and r, in float64."""

    def __init__(self, trace: TrainingTrace, point: Checkpoint, data: Data, chunk: int) -> None:
        self.trace, self.params, self.chunk = trace, _doubled(point.params), chunk
        self.theta, self.buffers = to_vector(self.params), _doubled(point.buffers)
        self.data = data
        self.side_by_side = min(32, max(1, AT_ONCE // (8 * self.theta.numel())))

    def __call__(self, vectors: Tensor, radii: Sequence[float]) -> Tensor:
        """(directions, radii), on the CPU. What is not a number is a loss whose outputs are beyond numbers: inf."""
        wanted = [(v, r) for v in range(len(vectors)) for r in radii]
        found: list[Tensor] = []
        while wanted:
            some, wanted = wanted[: self.side_by_side], wanted[self.side_by_side :]
            found.append(self._mean([self.theta + r * vectors[v].double() for v, r in some]))
        losses = torch.cat(found).view(len(vectors), len(radii))
        return losses.nan_to_num(nan=torch.inf, posinf=torch.inf).cpu()

    @torch.no_grad()
    def _mean(self, thetas: list[Tensor]) -> Tensor:
        total = self.theta.new_zeros(len(thetas))
        for x, y in zip(self.data.x.split(self.chunk), self.data.y.split(self.chunk), strict=True):
            total += self._sums(thetas, _double(x), _double(y))
        return total / len(self.data.y)

    def _sums(self, thetas: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        def one(theta: Tensor) -> Tensor:
            params = from_vector(theta, self.params)
            outputs = functional_call(self.trace.module, {**params, **self.buffers}, (x,))
            return self.trace.loss.per_sample(outputs, y).sum()

        if len(thetas) > 1 and self.side_by_side > 1:
            try:
                return vmap(one)(torch.stack(thetas))
            except RuntimeError:
                self.side_by_side = 1  # a network that cannot be mapped
        return torch.stack([one(theta) for theta in thetas])


def _doubled(tensors: Mapping[str, Tensor]) -> Params:
    return {k: _double(t) for k, t in tensors.items()}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
