"""Dark experience replay: objective, stored logits and approximation against hand-written loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import by_hand
import pytest
import torch
from small_problems import (
    CLASSES,
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    gradient,
    small_mlp,
    train_to_the_end,
)
from test_executors import SmallConv, with_dropout
from torch import Tensor
from torch.nn import functional

from glocal.algorithms.algorithm import Memory, Step
from glocal.algorithms.baselines import SGD
from glocal.algorithms.replay import DER, DERpp
from glocal.challenges import from_tasks
from glocal.engine.loop import train
from glocal.errors import GlocalError
from glocal.networks.model import MakeNetwork, Model
from glocal.tree import Params, select

BATCH = 4
BOTH = pytest.mark.parametrize("kind", [DER, DERpp], ids=lambda kind: kind.name)


def after_observing(der: DER, model: Model, params: Params, sizes: Sequence[int]) -> Memory:
    """The memory after one step of every task, each at parameters of its own."""
    memory = der.init(model, params, batch_of(examples(BATCH, 0)))
    for task, size in enumerate(sizes):
        batch = batch_of(examples(size, 20 + task), task, task)
        _, aux = der.objective(model, elsewhere(params, task), memory, batch)
        memory = der.observe(memory, Step(batch, {}, {}, {}, aux, {}, torch.tensor(0.1)))
    return memory


@BOTH
def test_logits_are_those_of_the_network_that_saw_the_example(kind: type[DER]) -> None:
    model, params = double_model()
    memory = after_observing(kind(slots=9), model, params, [4, 3, 4])
    assert sorted(set(memory["task"][:-1].tolist())) == [0, 1, 2]
    for slot in range(9):
        then = elsewhere(params, int(memory["task"][slot]))
        expected = model.outputs(then, memory["x"][[slot]])[0]
        torch.testing.assert_close(memory["logits"][slot], expected, rtol=1e-12, atol=1e-12)


def past_loss(model: Model, params: Params, memory: Memory, rows: Sequence[int], alpha: float, beta: float) -> Tensor:
    """Both terms on some slots, one example after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for i in rows:
        outputs = model.outputs(params, memory["x"][[i]])
        squared = sum((outputs[0, k] - memory["logits"][i, k]) ** 2 for k in range(CLASSES)) / CLASSES
        total = total + alpha * squared + beta * functional.cross_entropy(outputs, memory["y"][[i]])
    return total / len(rows)


@pytest.mark.parametrize("current", [BATCH, 2], ids=["full batch", "short last batch"])
def test_the_objective_adds_the_logits_of_one_draw_and_the_labels_of_another(current: int) -> None:
    model, params = double_model()
    der, derpp = DER(slots=9, alpha=0.3), DERpp(slots=9, alpha=0.3, beta=0.7)
    memory = after_observing(derpp, model, params, [4, 3, 4])
    batch = batch_of(examples(current, 9), 8, 3)
    first, second = (by_hand.chosen(8, purpose, 9, BATCH) for purpose in ("replay", "second replay"))
    assert set(first) != set(second)

    def without_labels(p: Params) -> Tensor:
        stream = functional.cross_entropy(model.outputs(p, batch.x), batch.y)
        return stream + past_loss(model, p, memory, first, 0.3, 0)

    def with_labels(p: Params) -> Tensor:
        return without_labels(p) + past_loss(model, p, memory, second, 0, 0.7)

    for algorithm, expected in ((der, without_labels), (derpp, with_labels)):
        value, _ = algorithm.objective(model, params, memory, batch)
        torch.testing.assert_close(value, expected(params), rtol=1e-12, atol=0)
        grad_value = gradient(lambda p: algorithm.objective(model, p, memory, batch)[0], params)  # noqa: B023
        torch.testing.assert_close(grad_value, gradient(expected, params), rtol=1e-9, atol=1e-12)


@BOTH
def test_an_empty_memory_makes_it_plain_sgd(kind: type[DER]) -> None:
    model, params = double_model()
    der = kind(slots=6)
    memory = after_observing(der, model, params, [])
    batch = batch_of(examples(BATCH, 9))
    expected = functional.cross_entropy(model.outputs(params, batch.x), batch.y)
    torch.testing.assert_close(der.objective(model, params, memory, batch)[0], expected)


@BOTH
def test_empty_slots_do_not_count(kind: type[DER]) -> None:
    model, params = double_model()
    der = kind(slots=20, replay=20)
    memory = after_observing(der, model, params, [4, 3])
    batch = batch_of(examples(BATCH, 9), task=2)
    beta = der.beta if isinstance(der, DERpp) else 0
    expected = functional.cross_entropy(model.outputs(params, batch.x), batch.y)
    expected = expected + past_loss(model, params, memory, range(7), der.alpha, beta)
    torch.testing.assert_close(der.objective(model, params, memory, batch)[0], expected, rtol=1e-12, atol=0)


@BOTH
def test_its_approximation_is_the_mean_over_what_is_stored_of_the_task(kind: type[DER]) -> None:
    model, params = double_model()
    der = kind(slots=7)
    memory = after_observing(der, model, params, [4, 4, 4])
    beta = der.beta if isinstance(der, DERpp) else 0
    for at in (params, elsewhere(params, 9)):
        for task in range(3):
            rows = [i for i in range(7) if int(memory["task"][i]) == task]
            assert rows
            value = der.approximation(model, memory, task)(at)
            torch.testing.assert_close(value, past_loss(model, at, memory, rows, der.alpha, beta), rtol=1e-12, atol=0)


@BOTH
def test_a_whole_run_is_that_of_a_plain_loop(kind: type[DER]) -> None:
    """The published rule; what is stored is the answer of the step's own forward pass, before its update."""
    cohort = cohort_of(blobs((70, 40)), kind(slots=45), [(1, 0.1)])
    end = train_to_the_end(cohort).state
    module, stored = run_by_hand(kind, small_mlp)
    by_hand.assert_same_network(module, end.params)
    x, y, z = by_hand.stacked(stored)
    assert torch.equal(end.memory["x"][0, :45], x) and torch.equal(end.memory["y"][0, :45], y)
    torch.testing.assert_close(end.memory["logits"][0, :45], z, rtol=1e-4, atol=1e-5)
    assert float((z - module(x).detach()).abs().max()) > 0.1, "stored logits must differ from current ones"


@BOTH
def test_batchnorm_sees_stream_and_draws_in_passes_of_their_own(kind: type[DER]) -> None:
    cohort = cohort_of(blobs((70, 40)), kind(slots=45), [(1, 0.1)], SmallConv)
    end = train_to_the_end(cohort).state
    module, _ = run_by_hand(kind, SmallConv)
    by_hand.assert_same_network(module, end.params, 1e-4)
    torch.testing.assert_close(select(end.buffers, 0), dict(module.named_buffers()), rtol=1e-4, atol=1e-5)


def run_by_hand(kind: type[DER], network: MakeNetwork) -> tuple[torch.nn.Module, list]:
    cohort = cohort_of(blobs((70, 40)), kind(slots=45), [(1, 0.1)], network)
    module = by_hand.network(cohort)
    stored: list[tuple[Tensor, Tensor, Tensor]] = []
    seen = 0
    for task in range(2):
        for x, y, key in by_hand.steps(cohort, task):
            outputs = module(x)
            loss = functional.cross_entropy(outputs, y)
            if stored:
                old, _, z = by_hand.stacked(by_hand.drawn(stored, 32, key))
                loss = loss + 0.5 * functional.mse_loss(module(old), z)
                if kind is DERpp:
                    old, labels, _ = by_hand.stacked(by_hand.drawn(stored, 32, key, "second replay"))
                    loss = loss + functional.cross_entropy(module(old), labels)
            by_hand.follow(module, by_hand.gradient(module, loss), 0.1)
            new = list(zip(x, y, outputs.detach(), strict=True))
            seen = by_hand.algorithm_r(stored, new, seen, 45, key)
    return module, stored


@BOTH
@pytest.mark.parametrize("network", [small_mlp, SmallConv], ids=["mlp", "batchnorm"])
def test_vectorised_and_run_by_run_agree(kind: type[DER], network: MakeNetwork) -> None:
    cohort = cohort_of(blobs((40, 40)), kind(slots=20), [(0, 0.05), (1, 0.1)], network, epochs=1)
    mapped, single = train_to_the_end(cohort, "vectorised").state, train_to_the_end(cohort, "sequential").state
    tolerance = 1e-5 if network is small_mlp else 1e-4  # convolutions are rounded differently when mapped
    torch.testing.assert_close(mapped.params, single.params, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mapped.buffers, single.buffers, rtol=tolerance, atol=tolerance)
    for name in ("x", "y", "logits"):
        old, new = single.memory[name][:, :-1], mapped.memory[name][:, :-1]
        torch.testing.assert_close(new, old, rtol=10 * tolerance, atol=10 * tolerance)


def test_dropout_stores_the_logits_of_the_training_pass() -> None:
    """Run by run; with no learning the stored logits differ from a pass without dropout, and the run does not fail."""
    cohort = cohort_of(blobs((40, 40)), DER(slots=30), [(0, 0.0)], with_dropout, epochs=1)
    memory = select(train_to_the_end(cohort).state.memory, 0)
    still = by_hand.network(cohort).eval()
    assert not torch.allclose(memory["logits"][:30], still(memory["x"][:30]).detach(), atol=1e-3)


def test_targets_may_be_numbers_and_inputs_bytes() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 1, 4, 4), generator=draw, dtype=torch.uint8)
    y = torch.randn(40, 2, generator=draw)
    tasks = [((x[i::2], y[i::2]), (x[i::2], y[i::2])) for i in (0, 1)]
    challenge = from_tasks("bytes", tasks, setting="domain", loss="squared-error")
    cohort = cohort_of(challenge, DERpp(slots=10), [(0, 0.05), (1, 0.05)])
    states = [s.state.memory for s in train(cohort, execution="vectorised")]
    assert states[-1]["x"].dtype == torch.uint8 and states[-1]["logits"].shape == (2, 11, 2)
    model, memory = cohort.model(vectorised=False), select(states[-1], 1)
    params = select(cohort.initial()[0], 1)
    stored = [i for i in range(10) if int(memory["task"][i]) == 1]
    outputs = torch.func.functional_call(model.module, params, (memory["x"][stored] / 255,))
    squared = (outputs - memory["logits"][stored]).square().mean()
    expected = 0.5 * squared + 0.5 * (outputs - memory["y"][stored]).square().sum(1).mean()
    torch.testing.assert_close(DERpp(slots=10).approximation(model, memory, 1)(params), expected)


def test_what_it_remembers_depends_on_the_solutions() -> None:
    """Runs with one seed and different learning rates store the same examples with different logits: local."""
    end = train_to_the_end(cohort_of(blobs(), DER(slots=20), [(3, 0.001), (3, 0.3)])).state
    first, second = (select(end.memory, run) for run in (0, 1))
    assert torch.equal(first["x"][:-1], second["x"][:-1])
    assert float((first["logits"][:-1] - second["logits"][:-1]).abs().max()) > 0.5


def test_a_larger_alpha_reduces_the_change_of_old_logits() -> None:
    """Between θ_1 and θ_2, on the first task's test set, over ten seeds; with α = 0 it is plain SGD."""
    challenge = blobs((160, 160))
    cohort = cohort_of(challenge, DER(slots=100), [(seed, 0.2) for seed in range(10) for _ in range(3)], epochs=6)
    alphas = [0.0, 0.1, 1.0] * 10
    members = [replace(m, algorithm=DER(slots=100, alpha=a)) for m, a in zip(cohort.members, alphas, strict=True)]
    x, _ = challenge.task(0, 1).test
    model, old_logits = cohort.model(vectorised=False), []
    for snapshot in train(cohort.only(members), execution="vectorised"):
        old_logits.append(torch.stack([model.outputs(select(snapshot.state.params, run), x) for run in range(30)]))
    change = (old_logits[2] - old_logits[1]).detach().square().mean((1, 2)).view(10, 3).mean(0)
    assert change[0] > 2 * change[1] > 4 * change[2]
    plain = train_to_the_end(cohort_of(challenge, SGD(), [(0, 0.2)], epochs=6)).state.params
    torch.testing.assert_close(select(snapshot.state.params, 0), select(plain, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"replay": -1}, {"alpha": -0.1}, {"beta": -0.1}])
def test_what_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(GlocalError, match=next(iter(wrong))):
        DERpp(**wrong)
