"""Methods of an algorithm are pure functions: what they would keep elsewhere, or return in another form, is refused.

Without that, these runs would end in other numbers than the algorithm says, or in numbers that depend on the cohort.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal.algorithms import SGD, Algorithm
from glocal.engine.loop import Execution
from glocal.errors import GlocalError

pytestmark = pytest.mark.usefixtures("elsewhere")

TINY: dict[str, Any] = {"tasks": 3, "epochs": 1, "batch_size": 1000, "train_eval": 50}
CALLS: list[int] = []


def with_dropout(shape: Any, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, outputs))


@dataclass(frozen=True)
class Global(SGD):
    """Its objective depends on how often `consolidate` has been called, in any run and any rehearsal."""

    name = "global"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        CALLS.append(1)
        return memory

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y) * (1 + len(CALLS))


@dataclass(frozen=True)
class Writes(SGD):
    name = "writes"

    def init(self, model: Any, params: Any, example: Any) -> Any:
        return {"n": torch.zeros(())}

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        memory["n"] = memory["n"] + 1
        return model.loss(params, batch.x, batch.y) * memory["n"]


@dataclass(frozen=True)
class WritesLater(SGD):
    """Only once a task is consolidated."""

    name = "later"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        return {"n": torch.zeros(())}

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        if "n" in memory:
            memory["n"] = memory["n"] + 1
        return model.loss(params, batch.x, batch.y)


@dataclass(frozen=True)
class Predicts(Writes):
    name = "predicts"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y)

    def predict(self, model: Any, params: Any, memory: Any, x: Any, task: int) -> Any:
        memory["seen"] = x
        return model.outputs(params, x)


@dataclass(frozen=True)
class ObservesInPlace(Writes):
    name = "observes"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y) * (1 + memory["n"])

    def observe(self, memory: Any, step: Any) -> Any:
        memory["n"] = memory["n"] + 1
        return memory


@dataclass(frozen=True)
class ConsolidatesInPlace(Predicts):
    name = "consolidates"

    def predict(self, model: Any, params: Any, memory: Any, x: Any, task: int) -> Any:
        return model.outputs(params, x)

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        memory["n"] = memory["n"] + 1
        return memory


@dataclass(frozen=True)
class DirectsInPlace(SGD):
    name = "directs"

    def direction(self, model: Any, grads: Any, params: Any, memory: Any, batch: Any) -> Any:
        for k in grads:
            grads[k] = grads[k] * 0
        return grads


@dataclass(frozen=True)
class BeforeInPlace(SGD):
    name = "before"

    def before_epoch(self, model: Any, params: Any, memory: Any, epoch: int, epochs: int) -> Any:
        for k in params:
            params[k] = params[k] * 0
        return params, memory


@dataclass(frozen=True)
class Keeps(SGD):
    """A float field makes the object that a run's methods are called on."""

    name = "keeps"
    strength: float = 1.0

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        object.__setattr__(self, "star", params)
        return memory


class Undecorated(SGD):
    name = "undecorated"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        self.__dict__["star"] = params
        return memory


@dataclass(frozen=True)
class Swapped(SGD):
    name = "swapped"

    def direction(self, model: Any, params: Any, grads: Any, memory: Any, batch: Any) -> Any:  # type: ignore[override]
        return grads


@dataclass(frozen=True)
class Norms(SGD):
    name = "norms"

    def direction(self, model: Any, grads: Any, params: Any, memory: Any, batch: Any) -> Any:
        return {k: g.norm() for k, g in grads.items()}


@dataclass(frozen=True)
class Flat(SGD):
    name = "flat"

    def direction(self, model: Any, grads: Any, params: Any, memory: Any, batch: Any) -> Any:
        return torch.cat([g.flatten() for g in grads.values()])


@dataclass(frozen=True)
class More(SGD):
    name = "more"

    def direction(self, model: Any, grads: Any, params: Any, memory: Any, batch: Any) -> Any:
        return {**grads, "extra": torch.zeros(2)}


@dataclass(frozen=True)
class Some(Writes):
    name = "some"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y)

    def before_epoch(self, model: Any, params: Any, memory: Any, epoch: int, epochs: int) -> Any:
        return dict(list(params.items())[:1]), memory


@dataclass(frozen=True)
class Reversed(Some):
    name = "reversed"

    def before_epoch(self, model: Any, params: Any, memory: Any, epoch: int, epochs: int) -> Any:
        return memory, params


@dataclass(frozen=True)
class Single(Some):
    name = "single"

    def before_epoch(self, model: Any, params: Any, memory: Any, epoch: int, epochs: int) -> Any:
        return params


@dataclass(frozen=True)
class Longer(Some):
    name = "longer"

    def before_epoch(self, model: Any, params: Any, memory: Any, epoch: int, epochs: int) -> Any:
        return params, {"n": torch.zeros(2)}


@dataclass(frozen=True)
class Auxiliary(SGD):
    name = "auxiliary"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        outputs = model.outputs(params, batch.x)
        return functional.cross_entropy(outputs, batch.y), outputs.detach()


@dataclass(frozen=True)
class WithoutAutograd(SGD):
    name = "without-autograd"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        torch.autograd.grad(model.loss(leaves, data.x, data.y), list(leaves.values()))
        return memory


@dataclass(frozen=True)
class Exemplars(SGD):
    name = "exemplars"

    def exemplars(self, memory: Any) -> Any:
        return torch.zeros(2)


class OtherProtocol(Algorithm):
    """Methods of another library, which would leave plain SGD."""

    name = "other-protocol"

    def loss(self, model: Any, batch: Any) -> Any: ...

    def after_task(self, task: int) -> None: ...


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Global, "global gives different losses for the same step: it keeps state outside of its memory"),
        (Writes, "writes.objective writes n into the memory"),
        (WritesLater, "later.objective writes n into the memory"),
        (Predicts, "predicts.predict writes seen into the memory"),
        (
            ObservesInPlace,
            r"observes.observe writes n into the memory .*: return a new dict, such as \{\*\*memory, 'n'",
        ),
        (ConsolidatesInPlace, "consolidates.consolidate writes n into the memory"),
        (DirectsInPlace, r"directs.direction writes .* into the grads .*: return a new dict"),
        (BeforeInPlace, r"before.before_epoch writes .* into the params .*: return a new dict"),
        (Keeps, "keeps.consolidate sets self.star"),
        (Undecorated, "undecorated.consolidate sets self.star"),
        (Swapped, r"swapped.direction takes \(model, params, grads"),
        (
            Norms,
            r"norms.direction must return a tensor of shape \(\d+, \d+\) for .*; it returned a tensor of shape \(\)",
        ),
        (Flat, "flat.direction must return a dict of all parameters; it returned a tensor"),
        (More, "more.direction must return tensors for the parameters only; it also returned extra"),
        (Some, "some.before_epoch must return a tensor for every parameter; missing"),
        (Reversed, "reversed.before_epoch must return a tensor for every parameter; missing"),
        (Single, r"single.before_epoch must return \(params, memory\); it returned a dict"),
        (Longer, r"longer.before_epoch changes the shapes of the memory: 'n' from \(\) to \(2,\)"),
        (Auxiliary, "aux a dict of tensors"),
        (WithoutAutograd, "without-autograd.consolidate is called without autograd: use model.grad"),
        (OtherProtocol, "other-protocol has the methods loss, after_task, which nothing calls. The engine calls"),
        (Exemplars, r"exemplars.exemplars must return \(x, y\) or None"),
    ],
)
def test_impure_methods_are_refused(algorithm: Any, message: str, seeds: list[int]) -> None:
    with pytest.raises(GlocalError, match=message):
        glocal.sweep("rotated-digits", [algorithm()], [0.1], seeds, **TINY)


@dataclass(frozen=True)
class Cached(SGD):
    """A property that is computed once is no state of the training."""

    name = "cached"
    strength: float = 2.0

    @cached_property
    def half(self) -> Any:
        return self.strength / 2

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return self.half * model.loss(params, batch.x, batch.y)


def test_a_cached_property_is_no_state() -> None:
    options: Any = {"lrs": [0.1], "seeds": [1, 2], **TINY}
    cached, plain = (glocal.sweep("rotated-digits", [algorithm], **options) for algorithm in (Cached(), "sgd"))
    for one, other in zip(cached, plain, strict=True):
        assert (one.arrays["update_norm"] == other.arrays["update_norm"]).all()


@dataclass(frozen=True)
class CountsClasses(SGD):
    name = "counts-classes"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y) * len(model.classes(batch.task))


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
def test_classes_are_those_of_the_task_that_a_tensor_names(execution: Execution) -> None:
    draw = torch.Generator().manual_seed(0)
    tasks = []
    for classes in ((0, 1, 2, 3), (4, 5, 6), (7, 8)):
        y = torch.tensor(classes).repeat(12)
        x = torch.randn(len(y), 5, generator=draw)
        tasks.append(((x, y), (x, y)))
    challenge = glocal.from_tasks("uneven", tasks, setting="class")
    options: Any = {"lrs": [1e-6], "seeds": [1, 2], "epochs": 1, "batch_size": 50, "execution": execution}
    counted, plain = (glocal.sweep(challenge, [algorithm], **options) for algorithm in (CountsClasses(), "sgd"))
    for one, other in zip(counted, plain, strict=True):
        ratio = torch.as_tensor(one.arrays["epoch_loss"] / other.arrays["epoch_loss"]).squeeze(-1)
        torch.testing.assert_close(ratio, torch.tensor([4.0, 3.0, 2.0], dtype=ratio.dtype), rtol=1e-3, atol=0)


def test_gem_with_dropout_does_not_depend_on_its_cohort() -> None:
    options: Any = {"network": with_dropout, "tasks": 4, "epochs": 1, "batch_size": 200, "train_eval": 50}
    together = glocal.sweep("rotated-digits", ["gem"], [0.1], [1, 2], **options)
    (alone,) = glocal.sweep("rotated-digits", ["gem"], [0.1], [2], **options, store="alone")
    (same,) = (run for run in together if run.seed == 2)
    torch.testing.assert_close(
        torch.as_tensor(same.arrays["update_norm"]), torch.as_tensor(alone.arrays["update_norm"]), rtol=1e-5, atol=0
    )
