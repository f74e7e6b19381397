"""Progressive networks: finished columns do not change, and the current column trains on L_t."""

from __future__ import annotations

import pytest
import torch
from old_tasks import SmallResidual, buffers_over_time, largest_change, logits_over_time, small_convolutions, task_data
from small_problems import blobs, cohort_of, small_mlp, train_to_the_end
from torch.nn import functional

from glocal.algorithms.baselines import SGD
from glocal.algorithms.partition import PNN
from glocal.engine.cohort import MakeNetwork
from glocal.engine.loop import Execution, train
from glocal.tree import select

CHALLENGE = blobs((96, 96, 96))
RUNS = [(0, 0.1), (1, 0.05)]
NETWORKS = [small_mlp, small_convolutions, SmallResidual]
EXECUTIONS: list[Execution] = ["vectorised", "sequential"]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_old_logits_never_change(network: MakeNetwork, execution: Execution) -> None:
    over_time = logits_over_time(cohort_of(CHALLENGE, PNN(), RUNS, network, epochs=3), execution)
    assert largest_change(over_time) == 0


@pytest.mark.parametrize("network", NETWORKS)
def test_vectorised_and_run_by_run_agree(network: MakeNetwork) -> None:
    cohort = cohort_of(CHALLENGE, PNN(), RUNS, network)
    mapped, single = (train_to_the_end(cohort, execution).state for execution in EXECUTIONS)
    rtol, atol = (1e-5, 1e-6) if network is small_mlp else (1e-4, 1e-5)
    torch.testing.assert_close(mapped.params, single.params, rtol=rtol, atol=atol)
    torch.testing.assert_close(mapped.buffers, single.buffers, rtol=rtol, atol=atol)
    assert not torch.equal(mapped.params["laterals.0.0.weigh.weight"][0], mapped.params["laterals.0.0.weigh.weight"][1])


def test_the_first_task_is_learnt_as_by_plain_sgd() -> None:
    plain, progressive = (
        next(s.state.params for s in train(cohort_of(CHALLENGE, a, RUNS), execution="vectorised") if s.finished == 1)
        for a in (SGD(), PNN())
    )
    for k, p in plain.items():
        assert torch.equal(p, progressive[f"columns.0.{k}"])


def test_every_task_trains_its_own_column_and_no_other() -> None:
    solutions = [
        {k: p.clone() for k, p in s.state.params.items()} for s in train(cohort_of(CHALLENGE, PNN(), RUNS[:1]))
    ]
    for task in range(3):
        moved = {k for k, p in solutions[task + 1].items() if not torch.equal(p, solutions[task][k])}
        assert moved == {k for k in solutions[0] if k.startswith((f"columns.{task}.", f"laterals.{task - 1}."))}


def test_every_columns_statistics_are_those_of_its_own_task() -> None:
    states = buffers_over_time(cohort_of(CHALLENGE, PNN(), RUNS, SmallResidual), "vectorised")
    for task in range(3):
        moved = {k for k, b in states[task + 1].items() if not torch.equal(b, states[task][k])}
        assert moved == {k for k in states[0] if k.startswith(f"columns.{task}.")}


def test_it_learns_every_task() -> None:
    end = train_to_the_end(cohort_of(CHALLENGE, PNN(), [(0, 0.1)], epochs=10))
    assert float(end.record.arrays["test_class_accuracy"][0, -1].min()) > 0.9


def test_its_approximation_is_the_loss_reached_wherever_theta_goes() -> None:
    cohort = cohort_of(CHALLENGE, PNN(), RUNS)
    run_state = train_to_the_end(cohort).state.select(1)
    model = cohort.model(vectorised=False)
    for task in range(3):
        data = task_data(cohort, task)
        final_loss = functional.cross_entropy(model.outputs(run_state.params, data.x, task), data.y)
        approximation = PNN().approximation(model, run_state.memory, task)
        torch.testing.assert_close(approximation(run_state.params), final_loss)
        elsewhere = {k: p + 1 for k, p in run_state.params.items()}
        assert torch.equal(approximation(elsewhere), approximation(run_state.params))


def test_one_task_can_be_trained_too() -> None:
    cohort = cohort_of(CHALLENGE.first(1), PNN(), RUNS)
    plain = train_to_the_end(cohort_of(CHALLENGE.first(1), SGD(), RUNS), "vectorised").state.params
    columns = train_to_the_end(cohort, "vectorised").state.params
    assert all(torch.equal(p, columns[f"columns.0.{k}"]) for k, p in plain.items())
    assert select(columns, 0).keys() == {f"columns.0.{k}" for k in plain}
