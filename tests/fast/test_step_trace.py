"""Recorded after a while, steps end at the same bits as if they never were; what cannot be recorded goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType

import pytest
import torch
from small_problems import blobs, cohort_of, train_to_the_end
from test_cohort_independence import ALGORITHMS, CLOSE
from torch import Tensor, nn

from glocal.algorithms import ER, EWC, HAT, OGD, SGD, Algorithm
from glocal.algorithms.algorithm import Batch, Memory
from glocal.engine.loop import Execution, Snapshot
from glocal.fast import op_trace
from glocal.fast.op_trace import Function
from glocal.fast.step_trace import StepTracer
from glocal.networks.mlp import mlp
from glocal.networks.model import MakeNetwork, Model
from glocal.sweeps.resolve import label_of
from glocal.tree import Params, flatten

CHALLENGE = blobs((150, 150))  # in batches of 32: four whole ones and a short one
RUNS = [(0, 0.05), (1, 0.1)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record after three steps, and count the steps that are replayed."""
    counted: list[int] = []
    original = StepTracer._trace

    def counting(self: StepTracer, *args: object) -> Function | None:
        replay = original(self, *args)  # type: ignore[arg-type]
        if replay is None:
            return None

        def counts(given: Sequence[Tensor]) -> list[Tensor]:
            counted.append(1)
            return replay(given)

        return counts

    monkeypatch.setattr(StepTracer, "min_calls", 3)
    monkeypatch.setattr(StepTracer, "_trace", counting)
    return counted


def trained(algorithm: Algorithm, execution: Execution, network: MakeNetwork | None = None) -> Snapshot:
    runs = RUNS if execution == "vectorised" else RUNS[1:]
    cohort = cohort_of(CHALLENGE, algorithm, runs, network or (lambda shape, outputs: mlp(shape, outputs, (9, 7))), 3)
    return train_to_the_end(cohort, execution)


def assert_same(a: Snapshot, b: Snapshot) -> None:
    torch.testing.assert_close(flatten(a.state.as_tree()), flatten(b.state.as_tree()), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(a.record.arrays["epoch_loss"], b.record.arrays["epoch_loss"], rtol=0, atol=0)


RUN_BY_RUN: list[Algorithm] = [SGD(), ER(slots=30), EWC(), HAT(), OGD(slots=16)]
CASES = [(a, "vectorised") for a in (*ALGORITHMS, *CLOSE)] + [(a, "sequential") for a in RUN_BY_RUN]


@pytest.mark.parametrize(("algorithm", "execution"), CASES, ids=lambda x: x if isinstance(x, str) else label_of(x))
def test_recorded_or_not_all_ends_the_same(algorithm: Algorithm, execution: Execution, replays: list[int]) -> None:
    recorded = trained(algorithm, execution)
    assert len(replays) > 10, "most of the steps were replayed"
    StepTracer.min_calls = 10**9
    assert_same(recorded, trained(algorithm, execution))


def with_dropout(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, outputs))


def with_batchnorm(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, outputs))


@pytest.mark.parametrize("network", [with_dropout, with_batchnorm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=30)], ids=label_of)
def test_torchs_own_layers_with_dropout_and_statistics(
    algorithm: Algorithm, network: MakeNetwork, replays: list[int]
) -> None:
    recorded = trained(algorithm, "sequential", network)
    assert len(replays) > 10
    StepTracer.min_calls = 10**9
    assert_same(recorded, trained(algorithm, "sequential", network))


@dataclass(frozen=True)
class AsksForTheTask(SGD):
    """Its factor depends on the task in a way that no operation on tensors shows."""

    name = "asks"

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        factor = {"tensor(0)": 1.0, "tensor(1)": 2.0}[str(batch.task)]
        return model.loss(params, batch.x, batch.y) * factor


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
def test_a_trace_is_compared_with_the_step_in_every_task(execution: Execution, replays: list[int]) -> None:
    recorded = trained(AsksForTheTask(), execution)
    assert replays, "steps of the first task were replayed"
    StepTracer.min_calls = 10**9
    assert_same(recorded, trained(AsksForTheTask(), execution))


class Own(nn.Module):
    """Its every call may be another one, which only its author knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def with_a_hook(shape: Sequence[int], outputs: int) -> nn.Module:
    made = mlp(shape, outputs, (9,))
    made.layers[0].register_forward_hook(lambda layer, inputs, output: output * 2)
    return made


def with_another_forward(shape: Sequence[int], outputs: int) -> nn.Module:
    made = mlp(shape, outputs, (9,))
    layer = made.layers[0]
    layer.forward = MethodType(lambda layer, x: type(layer).forward(layer, x) * 2, layer)
    return made


@pytest.mark.parametrize(
    "network",
    [lambda shape, outputs: Own(mlp(shape, outputs, (9,))), with_a_hook, with_another_forward],
    ids=["module", "hook", "forward"],
)
def test_what_is_somebody_elses_is_called_at_every_step(network: MakeNetwork, replays: list[int]) -> None:
    trained(SGD(), "sequential", network)
    assert not replays


@dataclass(frozen=True)
class Hard(SGD):
    """Learns from the examples it is bad at, as many as there are."""

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        losses = model.losses(params, batch.x, batch.y)
        return losses[losses.detach() > losses.detach().median()].mean()


def test_as_many_as_there_are_is_not_a_number_for_good(replays: list[int]) -> None:
    trained(Hard(), "sequential")
    assert not replays


@dataclass(frozen=True)
class Looking(SGD):
    """Reads its loss to choose what to do."""

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = super().objective(model, params, memory, batch)
        return loss if loss.item() < 1e30 else loss.detach()


class Counting(SGD):
    """Against the protocol it counts its calls, and decides by that."""

    calls = 0

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        Counting.calls += 1
        return super().objective(model, params, memory, batch) * (1 + Counting.calls % 2)


def test_who_looks_at_numbers_goes_on_as_before(replays: list[int]) -> None:
    assert_same(trained(Looking(), "sequential"), trained(SGD(), "sequential"))


@pytest.mark.parametrize("algorithm", [Looking(), Counting()], ids=["looks at numbers", "counts"])
def test_neither_a_decision_nor_a_count_is_replayed(algorithm: Algorithm, replays: list[int]) -> None:
    trained(algorithm, "sequential")
    assert not replays


def test_what_is_too_large_to_copy_is_not_recorded(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_trace, "MAX_TRACED_BYTES", 1000)
    trained(SGD(), "vectorised")
    assert not replays
