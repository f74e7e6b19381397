"""Several forward passes in a step: one augmentation, and running statistics of the trained pass alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal import rng
from glocal.algorithms import SGD, Algorithm, Batch, Memory, Step
from glocal.challenges import Challenge, from_tasks
from glocal.challenges.challenge import Augment, Normalise
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, train
from glocal.networks import Model
from glocal.networks.batchnorm import BatchNorm2d
from glocal.tree import Params, flatten

Order = Literal["old first", "old last", "student twice"]


class Normed(nn.Module):
    """A convolution with a BatchNorm that updates its statistics in place (torch's) or replaces them (glocal's)."""

    def __init__(self, norm: type[nn.BatchNorm2d], outputs: int) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), norm(4), nn.Linear(4 * 2 * 3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


@dataclass(frozen=True)
class LwF(Algorithm):
    """Learning without forgetting: distil the outputs of the last network, which lies in the memory."""

    name: ClassVar[str] = "lwf"

    weight: float = 0.0
    order: Order = "old first"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"old": {k: p.clone() for k, p in params.items()}}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        old = model.outputs(memory["old"], batch.x) if self.order == "old first" else None
        outputs = model.outputs(params, batch.x)
        old = model.outputs(memory["old"], batch.x) if old is None else old
        student = model.outputs(params, batch.x) if self.order == "student twice" else outputs
        distance = (student - old).square().mean()
        return model.criterion.per_sample(outputs, batch.y).mean() + self.weight * distance

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"old": params}


@dataclass(frozen=True)
class Noisy(Algorithm):
    """Train on inputs with noise."""

    name: ClassVar[str] = "noisy"

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        noise = rng.uniform(rng.fold_in(batch.key, "noise"), batch.x.numel()).view(batch.x.shape)
        return model.loss(params, batch.x + 0.1 * noise, batch.y)


@dataclass(frozen=True)
class NoisyAndIdle(Noisy):
    """The same with a method that does nothing."""

    def observe(self, memory: Memory, step: Step) -> Memory:
        return memory


def challenge() -> Challenge:
    def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(256, (n, 3, 4, 5), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        return drawn, torch.arange(n) % 3

    made = from_tasks("pictures", [(data(40, t), data(9, t + 10)) for t in range(2)], setting="domain")
    return replace(made, augment=Augment(2, True), normalise=Normalise((0.5, 0.4, 0.3), (0.25, 0.2, 0.5)))


def cohort(algorithm: Algorithm, norm: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> Cohort:
    def network(shape: Sequence[int], outputs: int) -> nn.Module:
        return Normed(norm, outputs)

    members = tuple(Member(seed, lr, algorithm) for seed, lr in [(0, 0.1), (1, 0.3)])
    return Cohort(challenge(), network, members, epochs=2, batch_size=16)


def trained(
    algorithm: Algorithm, execution: Execution, norm: type[nn.BatchNorm2d] = nn.BatchNorm2d
) -> dict[str, Tensor]:
    *_, last = train(cohort(algorithm, norm), execution=execution)
    return {k: v.clone() for k, v in flatten({"params": last.state.params, "buffers": last.state.buffers}).items()}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNorm2d], ids=["torch", "glocal"])
@pytest.mark.parametrize("order", ["old first", "old last", "student twice"])
@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_distillation_of_weight_0_is_sgd(execution: Execution, order: Order, norm: type[nn.BatchNorm2d]) -> None:
    distilled, plain = trained(LwF(0.0, order), execution, norm), trained(SGD(), execution, norm)
    assert plain["buffers/norm.running_mean"].abs().max() > 0.01, "there are statistics to disturb"
    for name, tensor in plain.items():
        assert torch.equal(distilled[name], tensor), name
    assert not torch.equal(trained(LwF(1.0, order), execution, norm)["params/head.weight"], plain["params/head.weight"])


@dataclass(frozen=True)
class Consistency(Algorithm):
    """The squared distance between two passes over a batch: 0 if they see the same images."""

    name: ClassVar[str] = "consistency"

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        first, second = model.outputs(params, batch.x), model.outputs(params, batch.x)
        return functional.mse_loss(first, second.detach())


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_two_passes_see_the_same_images(execution: Execution) -> None:
    start, end = cohort(Consistency()).initial()[0], trained(Consistency(), execution)
    for name, tensor in start.items():
        assert torch.equal(end[f"params/{name}"], tensor), name


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_a_method_that_does_nothing_changes_nothing(execution: Execution) -> None:
    noisy, idle = trained(Noisy(), execution), trained(NoisyAndIdle(), execution)
    for name, tensor in noisy.items():
        assert torch.equal(idle[name], tensor), name
    # 0.1 of noise on normalised inputs is little: the solutions are close to those without it.
    plain = trained(SGD(), execution)
    assert (noisy["params/head.weight"] - plain["params/head.weight"]).norm() < 0.2 * plain["params/head.weight"].norm()
