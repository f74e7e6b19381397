"""What an algorithm of a user's own takes or returns by mistake is refused with the method's name."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_runs import fake_run

import glocal
from glocal.algorithms import SGD
from glocal.errors import GlocalError
from glocal.rng import seeded_only
from glocal.store.run import Runs
from glocal.sweeps import resolve

pytestmark = pytest.mark.usefixtures("elsewhere")

TINY: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 1000, "train_eval": 50}


@dataclass(frozen=True)
class PerSample(SGD):
    name = "per-sample"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        outputs = model.outputs(params, batch.x)
        return torch.nn.functional.cross_entropy(outputs, batch.y, reduction="none")


@dataclass(frozen=True)
class Number(PerSample):
    name = "number"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return 1.0


@dataclass(frozen=True)
class Counts(SGD):
    name = "counts"

    def init(self, model: Any, params: Any, example: Any) -> Any:
        return {"steps": torch.zeros(())}

    def observe(self, memory: Any, step: Any) -> Any:
        return {"steps": 1}


@dataclass(frozen=True)
class Lists(Counts):
    name = "lists"

    def observe(self, memory: Any, step: Any) -> Any:
        return memory

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        return [memory]


@dataclass(frozen=True)
class Grows(Counts):
    name = "grows"

    def observe(self, memory: Any, step: Any) -> Any:
        return {"steps": torch.cat([memory["steps"].view(-1), step.lr.view(1)])}


@dataclass(frozen=True)
class Noisy(SGD):
    name = "noisy"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y) * noise()


@dataclass(frozen=True)
class Forgets(SGD):
    """Calls the module with its own parameters instead of those that are trained."""

    name = "forgets"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model.module(batch.x), batch.y)


@dataclass(frozen=True)
class Detached(SGD):
    name = "detached"

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y).detach()


@dataclass(frozen=True)
class Directed(Detached):
    name = "directed"

    def direction(self, model: Any, grads: Any, params: Any, memory: Any, batch: Any) -> Any:
        return {k: torch.ones_like(p) for k, p in params.items()}


@dataclass(frozen=True)
class Consolidates(SGD):
    name = "consolidates"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        np.random.permutation(len(data.y))
        return memory


@dataclass(frozen=True)
class Predicts(SGD):
    name = "predicts"

    def predict(self, model: Any, params: Any, memory: Any, x: Any, task: int) -> Any:
        return model.outputs(params, x) + random.random()


@dataclass(frozen=True)
class Fewer(SGD):
    name = "fewer"

    def predict(self, model: Any, params: Any, memory: Any, x: Any, task: int) -> Any:
        return model.outputs(params, x)[:, :2]


class Undecorated(SGD):
    name = "undecorated"
    strength: float = 0.1


class Between(SGD):
    strength: float = 0.1


@dataclass(frozen=True)
class Last(Between):
    name = "last"


class Named(SGD):
    """Its helpers are called nearly as methods of the protocol."""

    name: str = "named"  # type: ignore[misc]

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        return self._objective(model, params, batch) + self.objectives()

    def _objective(self, model: Any, params: Any, batch: Any) -> Any:
        return model.loss(params, batch.x, batch.y)

    def objectives(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Slots(SGD):
    strength: float = 0.1


@dataclass(frozen=True)
class Computed(SGD):
    name = "computed"
    half: float = field(init=False)


@dataclass(frozen=True)
class Holds(SGD):
    name = "holds"
    weights: Any = field(default_factory=lambda: torch.ones(2))


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_a_memory_that_grows_from_step_to_step_is_refused(seeds: list[int]) -> None:
    with pytest.raises(GlocalError, match=r"grows\.observe changes the shapes .* 'steps' from \(\) to \(2,\)"):
        glocal.sweep("rotated-digits", [Grows()], [0.1], seeds, **TINY)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            PerSample,
            r"per-sample\.objective must return one number .* it returned a tensor of shape \(1000,\)",
        ),
        (Number, r"number\.objective must return one number as a tensor; it returned a float"),
        (Counts, r"'steps' in the memory from counts\.observe is of the type int"),
        (Lists, r"lists\.consolidate must return a dict of tensors; it returned list"),
    ],
)
def test_the_method_and_what_it_returned_are_named(algorithm: Any, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        glocal.sweep("rotated-digits", [algorithm], [0.1], [1, 2], **TINY)


def noise() -> float:
    return float(np.random.default_rng().uniform(0.5, 1.5))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (np.random.rand, "noisy draws from Python's random or numpy's"),
        (random.random, "noisy draws from Python's random or numpy's"),
        (noise, "noisy gives different losses for the same step"),
    ],
)
@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_noise_that_no_seed_covers_is_refused(
    draw: Any, message: str, seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "noise", draw)
    with pytest.raises(GlocalError, match=message):
        glocal.sweep("rotated-digits", [Noisy()], [0.1], seeds, **TINY)


@pytest.mark.parametrize("kind", ["Consolidates", "Predicts"])
def test_noise_after_a_task_is_refused(kind: str) -> None:
    with pytest.raises(GlocalError, match="draws from Python's random or numpy's"):
        glocal.sweep("rotated-digits", [globals()[kind]()], [0.1], [1], **TINY)


def test_a_draw_of_another_thread_is_not_blamed_on_the_code() -> None:
    calls: list[int] = []

    def once() -> int:
        calls.append(len(calls))
        return random.randrange(9) if len(calls) == 1 else len(calls)

    assert seeded_only(once, "the code", "its key") == 2


def test_an_own_direction_needs_no_gradient() -> None:
    """Steps along a fixed direction, as of an evolution strategy."""
    run = glocal.sweep("rotated-digits", [Directed()], [0.1], [1], **TINY)[0]
    assert run.arrays["distance_from_init"][0] > 0


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_an_objective_of_the_networks_own_parameters_is_refused(seeds: list[int]) -> None:
    for algorithm in (Forgets(), Detached()):
        with pytest.raises(GlocalError, match=r"\.objective does not depend on `params`"):
            glocal.sweep("rotated-digits", [algorithm], [0.1], seeds, **TINY)


def test_predictions_for_fewer_classes_are_refused() -> None:
    with pytest.raises(GlocalError, match=r"fewer\.predict must return logits of shape \(\d+, 10\).*\(\d+, 2\)"):
        glocal.sweep("rotated-digits", [Fewer()], [0.1], [1], **TINY)


def _three(model: Any, params: Any, batch: Any) -> Any:
    return None


@pytest.mark.parametrize("name", ["objective", "consolidate"])
def test_arguments_of_a_method_are_checked_before_training(name: str) -> None:
    algorithm = type("Own", (SGD,), {name: staticmethod(_three), "name": "own"})
    with pytest.raises(GlocalError, match=rf"own\.{name} takes \(model, params, batch\); .*\(model, params, memory, "):
        resolve.algorithm(algorithm)


@pytest.mark.parametrize(
    ("name", "method"), [("observe", lambda self, *args: args[0]), ("approximation", staticmethod(_three))]
)
def test_arguments_of_a_method_may_have_any_names(name: str, method: Any) -> None:
    algorithm = type("Own", (SGD,), {name: method, "name": "own"})
    assert resolve.algorithm(algorithm).config["name"] == "own"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Undecorated, r"declares fields \(strength\) without @dataclass"),
        (Last, r"Between declares fields \(strength\) without @dataclass"),
        (Slots, "slots=True"),
        (Computed, r"init=False \(half\)"),
        (Holds, r"holds\.weights = tensor.* cannot be part of a run's name"),
        (type("Own", (SGD,), {"objectve": SGD.objective, "name": "own"}), "'objectve'.*did you mean 'objective'"),
    ],
)
def test_definitions_that_would_be_ignored_are_refused(algorithm: Any, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        resolve.algorithm(algorithm)


def test_a_field_of_any_type_takes_what_a_name_can_hold() -> None:
    for value in (None, "text", [1, 2], {"a": 0.5}):
        assert resolve.algorithm(Holds(weights=value)).config["options"] == {"weights": value}


def test_helpers_may_be_called_nearly_as_methods() -> None:
    assert resolve.algorithm(Named).config["name"] == "named"


def test_versions_of_an_algorithm_can_be_told_apart() -> None:
    runs = []
    for source in ("052ac9f9a6b892b4", "dc509c3b523514d6"):
        run = fake_run("mine")
        runs.append(replace(run, config={**run.config, "algorithm": {**run.config["algorithm"], "source": source}}))
    assert {row["algorithm"] for row in Runs(runs).table().to_dicts()} == {
        f"mine source={s}" for s in ("052ac9f9a6b892b4", "dc509c3b523514d6")
    }
    assert list(Runs(runs).where("source=dc509c3b523514d6")) == runs[1:]
