"""Networks and algorithms that need special execution: BatchNorm buffers, dropout, data-dependent control flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from small_problems import blobs, cohort_of, train_to_the_end
from torch import Tensor, nn
from torch.nn import functional

from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.algorithms.baselines import SGD, Joint
from glocal.algorithms.ewc import EWC
from glocal.algorithms.gem import AGEM
from glocal.algorithms.replay import ER
from glocal.engine.loop import train
from glocal.engine.state import State
from glocal.networks.mlp import mlp
from glocal.networks.model import Model
from glocal.rng import generator
from glocal.tree import Params, select

RUNS = [(0, 0.02), (0, 0.1), (1, 0.1), (2, 0.05)]
CHALLENGE = blobs((90, 90))


class SmallConv(nn.Module):
    """Convolution, BatchNorm, linear layer: for images of 4 × 4."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(shape[0], 3, 3, bias=False), nn.BatchNorm2d(3)
        self.head = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def with_dropout(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, outputs))


def same_bits(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# BatchNorm


@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=20), EWC(), AGEM(slots=20), Joint()], ids=lambda a: a.name)
def test_batchnorm_trains_the_same_vectorised_and_run_by_run(algorithm: Algorithm) -> None:
    cohort = cohort_of(CHALLENGE, algorithm, RUNS, SmallConv)
    mapped, single = train_to_the_end(cohort, "vectorised").state, train_to_the_end(cohort, "sequential").state
    torch.testing.assert_close(mapped.params, single.params, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mapped.buffers, single.buffers, rtol=1e-4, atol=1e-5)
    means = mapped.buffers["norm.running_mean"]
    assert all(not torch.equal(means[a], means[b]) for a in range(4) for b in range(a))


def test_every_runs_statistics_are_those_of_a_plain_loop() -> None:
    seed, lr = RUNS[2]
    start, *_, end = [
        {k: v[2].clone() for k, v in {**s.state.params, **s.state.buffers}.items()}
        for s in train(cohort_of(CHALLENGE, SGD(), RUNS, SmallConv, epochs=1), execution="vectorised")
    ]
    network = SmallConv(CHALLENGE.input_shape, CHALLENGE.outputs)
    network.load_state_dict(start)
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr=lr)
    for task in range(2):
        x, y = CHALLENGE.task(task, seed).train
        for rows in torch.randperm(len(y), generator=generator(seed, "order", task, 0)).split(32):
            optimiser.zero_grad()
            functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    torch.testing.assert_close(end, dict(network.state_dict()), rtol=1e-4, atol=1e-5)


def after_the_first_task(algorithm: Algorithm, steps: int) -> State:
    challenge = blobs((32 * steps, 32)).first(1)
    return train_to_the_end(cohort_of(challenge, algorithm, [(0, 0.1)], SmallConv, epochs=1)).state


def test_agem_with_nothing_stored_is_plain_sgd_to_batchnorm_too() -> None:
    plain, agem = after_the_first_task(SGD(), 3), after_the_first_task(AGEM(slots=40), 3)
    torch.testing.assert_close(agem.params, plain.params, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(agem.buffers, plain.buffers, rtol=1e-4, atol=1e-6)


def test_ers_empty_slots_do_not_enter_batchnorms_statistics() -> None:
    """Before the first step the reservoir is empty, so that step is plain SGD's."""
    plain, er = after_the_first_task(SGD(), 1), after_the_first_task(ER(slots=40), 1)
    torch.testing.assert_close(er.params, plain.params, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        er.buffers["norm.running_mean"], plain.buffers["norm.running_mean"], rtol=1e-4, atol=1e-6
    )


# Dropout


class LSTM(nn.Module):
    """An LSTM with a dropout of its own, which draws from torch's global generator."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(1).unflatten(1, (4, 4)))[0][:, -1])


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
def test_what_draws_from_the_global_generator_runs_one_by_one_and_says_so() -> None:
    record = train_to_the_end(cohort_of(CHALLENGE, SGD(), RUNS, LSTM)).record
    assert record.executor == "sequential" and len(record.notes) == 1
    with pytest.raises(RuntimeError):
        train_to_the_end(cohort_of(CHALLENGE, SGD(), RUNS, LSTM), "vectorised")


def test_what_can_be_vectorised_needs_no_note() -> None:
    assert train_to_the_end(cohort_of(CHALLENGE, SGD(), RUNS)).record.notes == []


def test_dropout_is_reproducible_and_does_not_depend_on_the_cohort() -> None:
    ends = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        ends.append(train_to_the_end(cohort_of(CHALLENGE, SGD(), RUNS, with_dropout)))
        assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(ends[0].state.params, ends[1].state.params)
    for run, part in enumerate(RUNS):
        alone = train_to_the_end(cohort_of(CHALLENGE, SGD(), [part], with_dropout))
        for name, expected in select(ends[0].state.params, run).items():
            torch.testing.assert_close(alone.state.params[name][0], expected, rtol=1e-4, atol=1e-6)


def test_dropout_drops_in_training_and_differently_in_every_epoch() -> None:
    dropped = train_to_the_end(cohort_of(CHALLENGE, SGD(), [(0, 0.1)], with_dropout)).record
    kept = train_to_the_end(
        cohort_of(
            CHALLENGE,
            SGD(),
            [(0, 0.1)],
            lambda shape, outputs: nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, outputs)),
        )
    ).record
    assert not torch.equal(dropped.arrays["epoch_loss"], kept.arrays["epoch_loss"])
    still = train_to_the_end(cohort_of(CHALLENGE, SGD(), [(0, 0.0)], with_dropout, batch_size=1000)).record
    first, second = still.arrays["epoch_loss"][0, 0].tolist()
    assert first != second


# Algorithms that look at numbers


@dataclass(frozen=True)
class Looking(SGD):
    """Plain SGD that reads its loss before it goes on, which cannot be mapped."""

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = super().objective(model, params, memory, batch)
        return loss if loss.item() < 1e30 else loss.detach()


@dataclass(frozen=True)
class LookingLater(SGD):
    """The same, from the second task on."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"finished": torch.zeros(0)}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        loss = super().objective(model, params, memory, batch)
        return loss if len(memory["finished"]) == 0 or loss.item() < 1e30 else loss.detach()

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"finished": torch.cat([memory["finished"], torch.ones(1)])}


@pytest.mark.parametrize("algorithm", [Looking(), LookingLater()], ids=["always", "from the second task on"])
def test_an_algorithm_that_looks_at_numbers_falls_back_with_the_same_result(algorithm: Algorithm) -> None:
    twin = train_to_the_end(cohort_of(CHALLENGE, SGD(), RUNS), "vectorised")
    looking = train_to_the_end(cohort_of(CHALLENGE, algorithm, RUNS))
    assert same_bits(looking.state.params, twin.state.params)
    (note,) = looking.record.notes
    assert note.startswith("sequential")


def test_a_mistake_of_the_algorithms_author_is_not_hidden() -> None:
    @dataclass(frozen=True)
    class Mistaken(SGD):
        def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
            raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        train_to_the_end(cohort_of(CHALLENGE, Mistaken(), RUNS, lambda s, o: mlp(s, o, (3,))))
