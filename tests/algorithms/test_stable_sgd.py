"""Stable SGD: dropout from given random numbers, the decaying learning rate, and plain SGD as a special case."""

from __future__ import annotations

from collections.abc import Sequence

import by_hand
import pytest
import torch
from old_tasks import small_convolutions
from small_problems import (
    CLASSES,
    FEATURES,
    batch_of,
    blobs,
    cohort_of,
    elsewhere,
    examples,
    small_mlp,
    train_to_the_end,
    uniforms,
)
from torch import Tensor, nn
from torch.nn import functional

from glocal import losses
from glocal.algorithms.algorithm import Algorithm
from glocal.algorithms.baselines import SGD, StableSGD
from glocal.engine.cohort import MakeNetwork
from glocal.engine.loop import Execution, train
from glocal.errors import GlocalError
from glocal.networks.layer_calls import DropoutNetwork
from glocal.networks.mlp import MLP
from glocal.networks.model import Model
from glocal.tree import Params, select

CHALLENGE = blobs((90, 90, 90))
RUNS = [(0, 0.1), (1, 0.05)]
EXECUTIONS: list[Execution] = ["vectorised", "sequential"]


def dropped(hidden: Sequence[int] = (4, 6), batch_size: int = 6) -> tuple[Model, Params]:
    torch.manual_seed(0)
    module = DropoutNetwork(MLP(FEATURES, CLASSES, hidden), (FEATURES,)).double()
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    return Model(module, losses.get("cross-entropy"), 3, batch_size), params


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_without_dropout_and_decay_it_is_plain_sgd(execution: Execution) -> None:
    plain, stable = (
        train_to_the_end(cohort_of(CHALLENGE, a, RUNS), execution) for a in (SGD(), StableSGD(dropout=0.0, decay=1.0))
    )
    assert all(torch.equal(p, stable.state.params[f"network.{k}"]) for k, p in plain.state.params.items())
    assert all(torch.equal(m, stable.record.arrays[k]) for k, m in plain.record.arrays.items())


@pytest.mark.parametrize("network", [small_mlp, small_convolutions])
def test_vectorised_and_run_by_run_agree(network: MakeNetwork) -> None:
    cohort = cohort_of(CHALLENGE, StableSGD(dropout=0.3), RUNS, network)
    mapped, single = (train_to_the_end(cohort, execution).state.params for execution in EXECUTIONS)
    torch.testing.assert_close(mapped, single, rtol=1e-5, atol=1e-6)


def test_its_masks_depend_on_the_seed_alone() -> None:
    cohort = cohort_of(CHALLENGE, StableSGD(), [(3, 0.1), (4, 0.1)])
    torch.manual_seed(1)
    first = train_to_the_end(cohort).state.params
    torch.manual_seed(2)
    second = train_to_the_end(cohort).state.params
    alone = train_to_the_end(cohort.only(cohort.members[1:])).state.params
    for k in first:
        assert torch.equal(first[k], second[k])
        assert torch.equal(select(first, 1)[k], select(alone, 0)[k])


def test_dropout_changes_training_and_differs_from_epoch_to_epoch() -> None:
    still = train_to_the_end(cohort_of(CHALLENGE, StableSGD(), [(0, 0.0)], batch_size=1000)).record
    first, second = still.arrays["epoch_loss"][0, 0].tolist()
    assert first != second


@pytest.mark.parametrize("rate", [0.2, 0.5])
@pytest.mark.parametrize("rows", [6, 4], ids=["full batch", "short last batch"])
def test_its_objective_is_the_loss_behind_the_masks(rate: float, rows: int) -> None:
    """Random numbers are used row by row, the first hidden layer's and then the second's."""
    model, params = dropped()
    algorithm = StableSGD(dropout=rate)
    batch = batch_of(examples(rows, 3), 5)
    u = by_hand.uniforms(5, "dropout", rows * 10).reshape(rows, 10)
    h = batch.x
    for i, part in enumerate([None, u[:, :4], u[:, 4:]]):
        if part is not None:
            h = torch.where(part < rate, 0.0, h / (1 - rate))
        h = h @ params[f"network.layers.{i}.weight"].T + params[f"network.layers.{i}.bias"]
        h = h.relu() if i < 2 else h
    expected = functional.cross_entropy(h, batch.y)
    torch.testing.assert_close(algorithm.objective(model, params, {}, batch), expected, rtol=1e-10, atol=1e-12)


def test_on_average_nothing_is_dropped() -> None:
    """The head is linear in its masked inputs: the mean of the outputs over masks is the output without any."""
    model, params = dropped((8,), 1)
    x = examples(1, 3)[0]
    draws = uniforms(4000, 8, seed=1)
    outputs = torch.stack([model.outputs(params, x, u, 0.4)[0] for u in draws])
    error = outputs.std(0) / 4000**0.5
    plain = model.outputs(params, x)[0]
    assert bool(((outputs.mean(0) - plain).abs() < 4 * error).all())
    assert bool((error > 0).all())


def test_nothing_is_dropped_at_test() -> None:
    model, params = dropped()
    module = MLP(FEATURES, CLASSES, (4, 6)).double()
    module.load_state_dict({k.removeprefix("network."): p for k, p in params.items()})
    x = examples(5, 3)[0]
    assert torch.equal(StableSGD().predict(model.eval_mode(), params, {}, x, 0), module(x))


def test_pixels_are_never_dropped_and_features_of_convolutions_are() -> None:
    network = small_convolutions((1, 4, 4), 3)
    assert DropoutNetwork(network, (1, 4, 4)).widths == [8, 10]
    seen: list[Tensor] = []
    network.get_submodule("0").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.rand(5, 1, 4, 4) + 0.1
    outputs = DropoutNetwork(network, (1, 4, 4))(x, torch.zeros(90), 0.5)
    assert torch.equal(seen[-1], x)
    assert torch.equal(outputs, network.get_parameter("8.bias").expand(5, 3)), "all else is dropped"
    assert not DropoutNetwork(nn.Sequential(nn.Linear(4, 3)), (4,)).widths


def test_a_layer_called_twice_has_two_masks() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            nn.init.eye_(self.first.weight), nn.init.eye_(self.again.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.again(self.first(x)))

    network = DropoutNetwork(Twice(), (5,))
    assert network.widths == [5, 5]
    random = torch.tensor([[0.9, 0.1, 0.9, 0.1, 0.9, 0.9, 0.9, 0.1, 0.1, 0.9]])
    assert network(torch.ones(1, 5), random.flatten(), 0.5)[0].tolist() == [4, 0, 0, 0, 4]


def test_the_learning_rate_decays_with_every_task() -> None:
    model, params = dropped()
    grads = elsewhere(params)
    for task in range(4):
        batch = batch_of(examples(6, 3), 0, task)
        followed = StableSGD(decay=0.5).direction(model, grads, params, {}, batch)
        torch.testing.assert_close(followed, {k: g / 2**task for k, g in grads.items()})


def solutions(algorithm: Algorithm) -> list[Params]:
    """θ_0 and the parameters after every task."""
    return [{k: p.clone() for k, p in s.state.params.items()} for s in train(cohort_of(CHALLENGE, algorithm, RUNS))]


def test_with_a_decay_to_nothing_only_the_first_task_is_learnt() -> None:
    stable, plain = solutions(StableSGD(dropout=0.0, decay=0.0)), solutions(SGD())
    for k, p in plain[1].items():
        assert torch.equal(p, stable[1][f"network.{k}"])
        assert torch.equal(p, stable[3][f"network.{k}"])
        assert not torch.equal(p, plain[3][k])


@pytest.mark.parametrize(
    ("options", "words"), [({"dropout": 1.0}, "dropout"), ({"dropout": -0.1}, "dropout"), ({"decay": -1.0}, "decay")]
)
def test_options_outside_their_range_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(GlocalError, match=words):
        StableSGD(**options)
