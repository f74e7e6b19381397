"""PackNet: owners of weights, trainable weights, and constant logits of finished tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from old_tasks import (
    SmallResidual,
    buffers_over_time,
    by_images,
    largest_change,
    logits_over_time,
    small_convolutions,
    task_data,
)
from small_problems import (
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
from torch import Tensor, nn
from torch.nn import functional

from glocal import losses
from glocal.algorithms.algorithm import Memory
from glocal.algorithms.baselines import SGD
from glocal.algorithms.packnet import PackNet
from glocal.engine.cohort import MakeNetwork
from glocal.engine.loop import Execution, train
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.tree import Params, select

CHALLENGE = blobs((96, 96, 96))
RUNS = [(0, 0.1), (1, 0.05)]
NETWORKS = [small_mlp, small_convolutions, SmallResidual, by_images]
EXECUTIONS: list[Execution] = ["vectorised", "sequential"]


# Real training


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_old_logits_never_change(network: MakeNetwork, execution: Execution) -> None:
    over_time = logits_over_time(cohort_of(CHALLENGE, PackNet(), RUNS, network, epochs=3), execution)
    assert largest_change(over_time) == 0


@pytest.mark.parametrize("algorithm", [PackNet(prune_at=1.0), PackNet(keep=0.4)], ids=["no retraining", "keep"])
def test_old_logits_never_change_with_a_single_epoch(algorithm: PackNet) -> None:
    over_time = logits_over_time(cohort_of(CHALLENGE, algorithm, RUNS, epochs=1), "vectorised")
    assert largest_change(over_time) == 0


@pytest.mark.parametrize("network", NETWORKS)
def test_vectorised_and_run_by_run_agree(network: MakeNetwork) -> None:
    cohort = cohort_of(CHALLENGE, PackNet(), RUNS, network)
    mapped, single = (train_to_the_end(cohort, execution).state for execution in EXECUTIONS)
    rtol, atol = (1e-5, 1e-6) if network is small_mlp else (1e-4, 1e-5)
    torch.testing.assert_close(mapped.params, single.params, rtol=rtol, atol=atol)
    torch.testing.assert_close(mapped.memory, single.memory, rtol=rtol, atol=atol)


def test_a_single_task_is_plain_sgd() -> None:
    plain, packed = (
        train_to_the_end(cohort_of(CHALLENGE.first(1), a, RUNS), "vectorised").state.params for a in (SGD(), PackNet())
    )
    assert all(torch.equal(p, packed[k]) for k, p in plain.items())


def test_it_learns_every_task() -> None:
    end = train_to_the_end(cohort_of(blobs((160, 160)), PackNet(), [(0, 0.1)], epochs=20))
    assert float(end.record.arrays["test_class_accuracy"][0, -1].min()) > 0.9


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_tasks_share_every_layer_equally_and_the_last_has_the_rest(epochs: int) -> None:
    owners = []
    for snapshot in train(cohort_of(CHALLENGE, PackNet(), RUNS, epochs=epochs)):
        owners.append({k: o.clone() for k, o in snapshot.state.memory["owner"].items()})
    for k, last in owners[-1].items():
        assert last[0].numel() in (16 * 16, 12 * 16, 4 * 12)
        for run in range(2):
            counts = [int((last[run] == task).sum()) for task in range(3)]
            assert sum(counts) == last[run].numel(), "every weight is one task's"
            assert max(counts) - min(counts) <= 1
        for task in range(3):
            assert torch.equal(owners[task + 1][k] <= task, last <= task), "what a task owns it keeps"


def test_a_given_share_is_kept_of_what_is_free() -> None:
    end = train_to_the_end(cohort_of(blobs((64, 64, 64, 64)), PackNet(keep=0.25), RUNS)).state
    counts = [int((end.memory["owner"]["layers.0.weight"][0] == task).sum()) for task in range(4)]
    assert counts == [64, 48, 36, 108]  # a quarter of 256, of 192, of 144; the rest


def test_biases_and_statistics_belong_to_the_first_task() -> None:
    cohort = cohort_of(CHALLENGE, PackNet(), RUNS, SmallResidual)
    solutions = [{k: p.clone() for k, p in s.state.params.items()} for s in train(cohort, execution="vectorised")]
    others = [k for k in solutions[0] if k == "head.bias" or "norm" in k]
    assert len(others) == 7
    buffers = buffers_over_time(cohort, "vectorised")
    for k in others:
        assert not torch.equal(solutions[0][k], solutions[1][k])
        assert torch.equal(solutions[1][k], solutions[3][k])
    assert not torch.equal(buffers[0]["norm.running_mean"], buffers[1]["norm.running_mean"])
    assert all(torch.equal(b, buffers[3][k]) for k, b in buffers[1].items())


def test_runs_with_other_shares_train_together() -> None:
    cohort = cohort_of(CHALLENGE, PackNet(), [(1, 0.1)] * 3, epochs=4)
    kinds = (PackNet(), PackNet(keep=0.6), PackNet(keep=0.2, prune_at=0.75))
    members = tuple(replace(m, algorithm=a) for m, a in zip(cohort.members, kinds, strict=True))
    together = train_to_the_end(cohort.only(members), "vectorised").state
    for run, member in enumerate(members):
        alone = train_to_the_end(cohort.only([member])).state
        torch.testing.assert_close(select(together.params, run), select(alone.params, 0), rtol=0, atol=0)
        torch.testing.assert_close(select(together.memory, run), select(alone.memory, 0), rtol=0, atol=0)


def test_its_approximation_is_the_loss_reached_wherever_theta_goes() -> None:
    cohort = cohort_of(CHALLENGE, PackNet(), RUNS)
    run_state = train_to_the_end(cohort).state.select(1)
    model = cohort.model(vectorised=False)
    for task in range(3):
        data = task_data(cohort, task)
        masked = {
            k: p * (run_state.memory["owner"][k] <= task) if "weight" in k else p for k, p in run_state.params.items()
        }
        final_loss = functional.cross_entropy(model.outputs(masked, data.x), data.y)
        approximation = PackNet().approximation(model, run_state.memory, task)
        torch.testing.assert_close(approximation(run_state.params), final_loss)
        assert torch.equal(approximation(elsewhere(run_state.params)), approximation(run_state.params))


# One call at a time, in float64


def after(packnet: PackNet, model: Model, params: Params, tasks: int) -> Memory:
    """The memory after some tasks that ended at other parameters each."""
    memory = packnet.init(model, params, batch_of(examples(2, 0)))
    for task in range(tasks):
        memory = packnet.consolidate(model, elsewhere(params, task), memory, batch_of(examples(9, task)))
    return memory


def pruned_by_hand(weight: Tensor, owner: Tensor, task: int, share: float) -> Tensor:
    """The owners after a task, weight by weight."""
    free = [i for i, o in enumerate(owner.flatten().tolist()) if o == task]
    magnitude = weight.abs().flatten().tolist()
    kept = sorted(free, key=lambda i: -magnitude[i])[: round(share * len(free))]
    expected = owner.clone().flatten()
    expected[[i for i in free if i not in kept]] = task + 1
    return expected.view_as(owner)


@pytest.mark.parametrize(("keep", "shares"), [(0.0, [1 / 3, 1 / 2, 1.0]), (0.3, [0.3, 0.3, 1.0])])
def test_the_largest_free_weights_are_kept(keep: float, shares: list[float]) -> None:
    model, params = double_model()
    packnet = PackNet(keep=keep)
    for task, share in enumerate(shares):
        memory, theta = after(packnet, model, params, task), elsewhere(params, 7 + task)
        new, dealt = packnet.before_epoch(model, theta, memory, 5, 10)
        for k, owner in memory["owner"].items():
            expected = pruned_by_hand(theta[k], owner, task, share)
            assert torch.equal(dealt["owner"][k], expected)
            assert torch.equal(new[k], torch.where(expected > task, 0.0, theta[k])), "what is left to others is 0"
        assert all(torch.equal(new[k], theta[k]) for k in theta if "bias" in k)
        _, again = packnet.before_epoch(model, elsewhere(new), dealt, 6, 10)  # a task is pruned once
        torch.testing.assert_close(again, dealt, rtol=0, atol=0)
        done = packnet.consolidate(model, new, dealt, batch_of(examples(9, 0)))
        torch.testing.assert_close(done["owner"], dealt["owner"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("prune_at", "epochs", "first"),
    [
        (0.5, 10, 5),
        (0.5, 2, 1),
        (0.5, 3, 1),
        (0.3, 10, 3),
        (0.7, 10, 7),
        (0.01, 10, 1),
        (1.0, 10, None),
        (0.5, 1, None),
    ],
)
def test_pruning_comes_at_its_share_of_the_epochs(prune_at: float, epochs: int, first: int | None) -> None:
    model, params = double_model()
    packnet = PackNet(prune_at=prune_at)
    memory, actual = after(packnet, model, params, 1), None
    for epoch in range(epochs):
        params, memory = packnet.before_epoch(model, params, memory, epoch, epochs)
        freed = any(bool((o > 1).any()) for o in memory["owner"].values())
        actual = epoch if freed and actual is None else actual
    assert actual == first


def test_free_weights_begin_a_task_at_zero() -> None:
    model, params = double_model()
    packnet = PackNet()
    memory = after(packnet, model, params, 1)
    begun, same = packnet.before_epoch(model, params, memory, 0, 5)
    assert same is memory
    for k, owner in memory["owner"].items():
        assert torch.equal(begun[k], params[k] * (owner == 0))
    untouched, _ = packnet.before_epoch(model, params, after(packnet, model, params, 0), 0, 5)
    assert all(torch.equal(p, params[k]) for k, p in untouched.items())


@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("pruned", [False, True])
def test_gradients_are_masked_by_ownership(task: int, pruned: bool) -> None:
    model, params = double_model()
    packnet = PackNet()
    memory = after(packnet, model, params, task)
    if pruned:
        params, memory = packnet.before_epoch(model, params, memory, 5, 10)
    batch = batch_of(examples(6, 3), 0, task)

    def objective(p: Params) -> Tensor:
        return packnet.objective(model, p, memory, batch) + 0 * sum(part.sum() for part in p.values())

    masked = {k: p * (memory["owner"][k] <= task) if k in memory["owner"] else p for k, p in params.items()}
    plain = gradient(lambda p: functional.cross_entropy(model.outputs(p, batch.x), batch.y), masked)
    for k, g in gradient(objective, params).items():
        mine = memory["owner"][k] == task if k in memory["owner"] else torch.tensor(task == 0)
        torch.testing.assert_close(g, plain[k] * mine, rtol=1e-10, atol=1e-14)
        assert k not in memory["owner"] or bool(mine.any())


def test_a_network_keeps_its_own_dropout_in_later_tasks() -> None:
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    model = Model(module, losses.get("cross-entropy"), 3, 4).bind(buffers)
    packnet = PackNet()
    memory = packnet.init(model, params, batch_of(examples(2, 0)))
    memory = packnet.consolidate(model, params, memory, batch_of(examples(9, 1)))
    batch = batch_of(examples(4, 3), 0, 1)
    assert len({float(packnet.objective(model, params, memory, batch)) for _ in range(5)}) > 1
    assert all(torch.equal(b, buffers[k]) for k, b in model.buffers.items())
    assert module.training and all(m.training for m in module.modules())


# Mistakes


@pytest.mark.parametrize(
    ("options", "words"), [({"keep": -0.1}, "keep"), ({"keep": 1.1}, "keep"), ({"prune_at": 0.0}, "prune_at")]
)
def test_shares_outside_their_range_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(GlocalError, match=words):
        PackNet(**options)


def test_a_network_without_weights_to_deal_out_is_refused() -> None:
    class Shift(nn.Module):
        def __init__(self, shape: Sequence[int], outputs: int) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(outputs))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, : self.shift.shape[0]] + self.shift

    with pytest.raises(GlocalError, match="linear and convolutional"):
        train_to_the_end(cohort_of(CHALLENGE, PackNet(), RUNS, Shift))
