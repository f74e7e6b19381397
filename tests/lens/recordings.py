"""What the tests of approximations along training share: small challenges, networks and cohorts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from glocal.algorithms import Algorithm
from glocal.algorithms.hessian_structures import Structure
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.lens.approximation_error import ErrorCurves, error_curves
from glocal.lens.record import Snapshot, snapshots_of
from glocal.lens.taylor import taylor
from glocal.lens.training_trace import TrainingTrace
from glocal.networks.mlp import mlp


class Double(nn.Module):
    """A network that computes in float64 whatever it is given."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.double())


def linear(shape: Sequence[int], outputs: int) -> nn.Module:
    return Double(mlp(shape, outputs, ()))


def hidden(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, (8, 6))


class Branching(nn.Module):
    """A network that looks at its numbers, and so cannot be mapped."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.base = hidden(shape, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out if float(out.detach().abs().sum()) >= 0 else -out


def normalised(shape: Sequence[int], outputs: int) -> nn.Module:
    """With statistics that go on with training: an expansion keeps those of its solution."""
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs))


def dropping(shape: Sequence[int], outputs: int) -> nn.Module:
    """With chance of its own in every step."""
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, outputs))


class Together(nn.Module):
    """A network that does not take samples one by one."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.base = hidden(shape, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise RuntimeError("two samples or more")
        return self.base(x)


class Recurrent(nn.Module):
    """A network whose samples cannot be mapped, and whose steps cannot either."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.unflatten(1, (-1, 2)))[0][:, -1])


def blobs(tasks: int = 3, new_classes: bool = False, n: int = 40) -> Challenge:
    """Classes around random centres."""
    draw, made = torch.Generator().manual_seed(0), []
    for task in range(tasks):
        centres, y = torch.randn(2, 6, generator=draw), torch.arange(n) % 2
        x = centres[y] + 0.5 * torch.randn(n, 6, generator=draw)
        made.append(((x, y + 2 * task * new_classes),) * 2)
    return from_tasks("blobs", made, setting="class" if new_classes else "domain")


def regressions(orthogonal: bool, tasks: int = 3) -> Challenge:
    """Linear regressions; with orthogonal inputs every loss is a diagonal quadratic."""
    random, made = np.random.default_rng(0), []
    signs = np.array([[(-1) ** bin(row & column).count("1") for column in (1, 2, 4)] for row in range(8)], dtype=float)
    for _ in range(tasks):
        x = signs * random.uniform(0.7, 1.4, size=3) if orthogonal else random.normal(size=(8, 3))
        y = x @ random.normal(size=(3, 2)) + random.normal(size=2) + 0.3 * random.normal(size=(8, 2))
        made.append(((x.astype(np.float32), y.astype(np.float32)),) * 2)
    return from_tasks("regressions", made, setting="domain", loss="squared-error")


def cohort(
    challenge: Challenge,
    algorithm: Algorithm,
    make: object = hidden,
    runs: Sequence[tuple[int, float]] = ((0, 0.1),),
    epochs: int = 2,
    batch_size: int = 8,
) -> Cohort:
    members = tuple(Member(seed, lr, algorithm) for seed, lr in runs)
    return Cohort(challenge, make, members, epochs, batch_size)  # type: ignore[arg-type]


def taylor_curves(
    trace: TrainingTrace,
    order: int = 2,
    structure: Structure = "diagonal",
    snapshots: Sequence[Snapshot] | None = None,
) -> ErrorCurves:
    """The errors of one kind of expansion, at the checkpoints unless other snapshots are given."""
    snapshots = snapshots_of(trace) if snapshots is None else snapshots
    count = max((s.finished for s in snapshots), default=0)
    expansions = [taylor(trace, task, order, structure) for task in range(count)]
    return error_curves(trace, snapshots, {"": expansions})[""]
