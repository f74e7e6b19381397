"""HAT: gates, gradient masks, compensation and penalty by their formulas; finished tasks do not change."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    CLASSES,
    FEATURES,
    batch_of,
    blobs,
    cohort_of,
    elsewhere,
    examples,
    small_mlp,
    train_to_the_end,
)
from torch import Tensor, nn
from torch.nn import functional

from glocal import losses
from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.hat import HAT
from glocal.engine.cohort import MakeNetwork
from glocal.engine.loop import Execution, train
from glocal.errors import GlocalError
from glocal.networks.hat import GatedNetwork
from glocal.networks.mlp import MLP, mlp
from glocal.networks.model import Model
from glocal.tree import Params

CHALLENGE = blobs((160, 160, 160))
RUNS = [(0, 0.1), (1, 0.05)]
EXECUTIONS: list[Execution] = ["vectorised", "sequential"]
GENTLE = HAT(sparsity=0.05)  # networks this small have no units to spare


# Real training


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("network", [small_mlp, small_convolutions, SmallResidual, by_images])
def test_old_logits_hardly_change(network: MakeNetwork, execution: Execution) -> None:
    over_time = logits_over_time(cohort_of(CHALLENGE, GENTLE, RUNS, network, epochs=6), execution)
    assert largest_change(over_time) < 1e-3


def wide_mlp(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, (40, 40))


def test_it_learns_every_task_and_forgets_none() -> None:
    end = train_to_the_end(cohort_of(CHALLENGE, GENTLE, [(0, 0.1)], wide_mlp, epochs=20)).record
    accuracy = end.arrays["test_class_accuracy"][0]
    assert float(accuracy[-1].min()) > 0.9
    for task in range(3):
        assert float(accuracy[-1, task]) == float(accuracy[task + 1, task])


@pytest.mark.parametrize("network", [small_mlp, small_convolutions, SmallResidual])
def test_vectorised_and_run_by_run_agree(network: MakeNetwork) -> None:
    cohort = cohort_of(CHALLENGE, GENTLE, RUNS, network)
    mapped, single = (train_to_the_end(cohort, execution).state for execution in EXECUTIONS)
    if network is small_mlp:
        assert all(torch.equal(p, single.params[k]) for k, p in mapped.params.items())
    torch.testing.assert_close(mapped.params, single.params, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mapped.memory, single.memory, rtol=1e-4, atol=1e-4)


def test_a_task_learns_its_own_embeddings() -> None:
    cohort = cohort_of(CHALLENGE, GENTLE, [(0, 0.5)])
    states = [{k: p[0].clamp(-6, 6) for k, p in s.state.params.items()} for s in train(cohort)]
    for k in ("embeddings.0", "embeddings.1"):
        for task in range(3):
            moved = [not torch.equal(states[task + 1][k][o], states[task][k][o]) for o in range(3)]
            assert moved == [o == task for o in range(3)]


def test_its_approximation_is_the_loss_reached_wherever_theta_goes() -> None:
    cohort = cohort_of(CHALLENGE, GENTLE, RUNS)
    part = train_to_the_end(cohort).state.select(1)
    model = cohort.model(vectorised=False)
    for task in range(3):
        data = task_data(cohort, task)
        gates = [torch.sigmoid(400 * part.params[f"embeddings.{i}"][task].clamp(-6, 6)) for i in range(2)]
        final_loss = functional.cross_entropy(model.outputs(part.params, data.x, *gates), data.y)
        approximation = GENTLE.approximation(model, part.memory, task)
        torch.testing.assert_close(approximation(part.params), final_loss, rtol=1e-3, atol=1e-4)
        assert torch.equal(approximation(elsewhere(part.params)), approximation(part.params))


# One call at a time, in float64


def gated(hidden: tuple[int, ...] = (4, 6), tasks: int = 3) -> tuple[Model, Params]:
    torch.manual_seed(0)
    module = GatedNetwork(MLP(FEATURES, CLASSES, hidden), (FEATURES,), tasks).double()
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    return Model(module, losses.get("cross-entropy"), tasks, 4), params


def at(progress: float, task: int = 0) -> Batch:
    return batch_of(examples(6, 3), 0, task)._replace(progress=torch.tensor(progress, dtype=torch.float64))


def memory_of(hat: HAT, model: Model, params: Params, tasks: int) -> Memory:
    """After some tasks; how much they used the units is set to numbers that are all different."""
    memory = hat.init(model, params, at(0.0))
    memory["loss_at_solution"] = torch.zeros(tasks, dtype=torch.float64)
    if tasks:
        memory["used"] = {k: torch.linspace(0, 1, u.shape[0]).double().flip(0) for k, u in memory["used"].items()}
    return memory


def by_hand(params: Params, x: Tensor, gates: list[Tensor]) -> Tensor:
    h = x
    for i in range(3):
        h = h @ params[f"network.layers.{i}.weight"].T + params[f"network.layers.{i}.bias"]
        h = h.relu() * gates[i] if i < 2 else h
    return h


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("task", [0, 2])
def test_its_objective_is_the_papers(task: int, progress: float) -> None:
    model, params = gated()
    hat = HAT(scale=20.0, sparsity=0.6)
    memory, batch = memory_of(hat, model, params, task), at(progress, task)
    s = 1 / 20 + (20 - 1 / 20) * progress
    gates = [torch.sigmoid(s * params[f"embeddings.{i}"][task]) for i in range(2)]
    loss = float(functional.cross_entropy(by_hand(params, batch.x, gates), batch.y))
    used = [u.tolist() for u in memory["used"].values()]
    units = [(float(a), u) for gate, us in zip(gates, used, strict=True) for a, u in zip(gate, us, strict=True)]
    price = sum(a * (1 - u) for a, u in units) / sum(1 - u for _, u in units)
    assert float(hat.objective(model, params, memory, batch)) == pytest.approx(loss + 0.6 * price, rel=1e-10)


def test_with_every_unit_used_the_price_is_nothing() -> None:
    model, params = gated()
    hat = HAT(sparsity=0.6)
    memory = memory_of(hat, model, params, 1)
    memory["used"] = {k: torch.ones_like(u) for k, u in memory["used"].items()}
    free = HAT(sparsity=0.0).objective(model, params, memory, at(0.5, 1))
    torch.testing.assert_close(hat.objective(model, params, memory, at(0.5, 1)), free)


def test_predictions_use_the_hardest_gates_of_their_task() -> None:
    model, params = gated()
    x = at(0.0).x
    for task in range(3):
        gates = [torch.sigmoid(400 * params[f"embeddings.{i}"][task]) for i in range(2)]
        actual = HAT().predict(model.eval_mode(), params, memory_of(HAT(), model, params, 1), x, task)
        torch.testing.assert_close(actual, by_hand(params, x, gates), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("task", [0, 1])
def test_gradients_are_conditioned_weight_by_weight(task: int) -> None:
    model, params = gated()
    hat = HAT()
    memory = memory_of(hat, model, params, task)
    ones = {k: torch.ones_like(p) for k, p in params.items()}
    followed = hat.direction(model, ones, params, memory, at(0.5, task))
    used = [[1.0] * FEATURES, *(u.tolist() for u in memory["used"].values()), [float(task > 0)] * CLASSES]
    for layer in range(3):
        below, above = used[layer], used[layer + 1]
        weight = [[1 - min(a, b) for b in below] for a in above]
        torch.testing.assert_close(followed[f"network.layers.{layer}.weight"].tolist(), weight)
        torch.testing.assert_close(followed[f"network.layers.{layer}.bias"].tolist(), [1 - a for a in above])


def test_channels_condition_all_their_positions() -> None:
    torch.manual_seed(0)
    module = GatedNetwork(small_convolutions((1, 4, 4), 3), (1, 4, 4), 2).double()
    wide = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 5))
    for network, head, positions in (
        (module, "network.6.weight", 1),
        (GatedNetwork(wide, (1, 4, 4), 2).double(), "network.2.weight", 4),
    ):
        params = {k: p.detach() for k, p in network.named_parameters()}
        model = Model(network, losses.get("cross-entropy"), 2, 4)
        memory = memory_of(HAT(), model, params, 1)
        followed = HAT().direction(
            model, {k: torch.ones_like(p) for k, p in params.items()}, params, memory, at(1.0, 1)
        )
        used = list(memory["used"].values())
        channels = used[0] if positions == 4 else used[1]
        above = torch.ones(5) if positions == 4 else used[2]
        for i, row in enumerate(followed[head]):
            for j, value in enumerate(row):
                assert float(value) == pytest.approx(1 - min(float(above[i]), float(channels[j // positions])))
        first = followed["network.0.weight"]
        expected = (1 - used[0]).view(-1, 1, 1, 1).expand_as(first)
        torch.testing.assert_close(first, expected)


def residual(tasks: int = 2) -> tuple[Model, Params, Memory]:
    """Groups of units: the stem's, the inside of the block, and what the block and its shortcut add up."""
    torch.manual_seed(0)
    module = GatedNetwork(SmallResidual((1, 4, 4), 3), (1, 4, 4), tasks).double()
    for b in module.buffers():
        if b.is_floating_point():
            b.copy_(torch.rand_like(b) + 0.5)
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    model = Model(module, losses.get("cross-entropy"), tasks, 4).bind(dict(module.named_buffers()))
    return model, params, memory_of(HAT(), model, params, 1)


def test_gates_of_a_residual_network_are_where_units_are_read() -> None:
    model, params, memory = residual()
    x = torch.randn(5, 1, 4, 4).double()
    a, b, c = (torch.sigmoid(400 * params[f"embeddings.{i}"][1]).view(-1, 1, 1) for i in range(3))
    part = {k.removeprefix("network."): t for k, t in {**params, **model.buffers}.items()}

    def normalised(z: Tensor, name: str) -> Tensor:
        statistics = part[f"{name}.running_mean"], part[f"{name}.running_var"]
        return functional.batch_norm(z, *statistics, part[f"{name}.weight"], part[f"{name}.bias"])

    h = normalised(functional.conv2d(x, part["stem.weight"], padding=1), "norm").relu() * a
    inside = normalised(functional.conv2d(h, part["first.weight"], stride=2, padding=1), "norm1").relu() * b
    added = normalised(functional.conv2d(inside, part["second.weight"], padding=1), "norm2")
    summed = (added + functional.conv2d(h, part["shortcut.weight"], stride=2)).relu().mean((2, 3)) * c.flatten()
    expected = summed @ part["head.weight"].T + part["head.bias"]
    torch.testing.assert_close(HAT().predict(model.eval_mode(), params, memory, x, 1), expected)


def test_layers_added_in_a_residual_network_share_their_masks() -> None:
    model, params, memory = residual()
    ones = {k: torch.ones_like(p) for k, p in params.items()}
    followed = HAT().direction(model, ones, params, memory, at(0.5, 1))
    stem, inside, summed = (u.tolist() for u in memory["used"].values())
    ends = {"stem": ([1.0], stem), "first": (stem, inside), "second": (inside, summed), "shortcut": (stem, summed)}
    for name, (below, above) in {**ends, "head": (summed, [1.0] * 3)}.items():
        weight = followed[f"network.{name}.weight"]
        expected = torch.tensor([[1 - min(a, b) for b in below] for a in above], dtype=torch.float64)
        torch.testing.assert_close(weight, expected.view(*expected.shape, *[1] * (weight.dim() - 2)).expand_as(weight))
    for name, units in {"norm": stem, "norm1": inside, "norm2": summed}.items():
        for what in ("weight", "bias"):
            torch.testing.assert_close(followed[f"network.{name}.{what}"].tolist(), [1 - u for u in units])


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_statistics_are_those_of_the_first_task(execution: Execution) -> None:
    before, first, *later = buffers_over_time(cohort_of(CHALLENGE, GENTLE, RUNS, SmallResidual), execution)
    assert all(not torch.equal(first[k], b) for k, b in before.items() if b.is_floating_point())
    assert all(torch.equal(after[k], b) for after in later for k, b in first.items())


@pytest.mark.parametrize("progress", [0.0, 0.02, 0.5, 1.0])
def test_embeddings_gradients_are_compensated_as_in_the_paper(progress: float) -> None:
    model, params = gated()
    hat = HAT(scale=400.0)
    s = 1 / 400 + (400 - 1 / 400) * progress
    ones = {k: torch.ones_like(p) for k, p in params.items()}
    followed = hat.direction(model, ones, params, memory_of(hat, model, params, 1), at(progress, 1))
    for k in ("embeddings.0", "embeddings.1"):
        expected = [
            [400 / s * (math.cosh(min(50, max(-50, s * e))) + 1) / (math.cosh(e) + 1) for e in row]
            for row in params[k].tolist()
        ]
        torch.testing.assert_close(followed[k], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("product", [1.0, 12.0, 20.0, 45.0])
def test_single_precision_is_enough_for_open_and_shut_gates(product: float) -> None:
    """Even if σ(s e) rounds to 0 or 1 in float32, the compensated derivative is s_max σ'(e)."""
    model, params = gated()
    hat = HAT(scale=100.0, sparsity=1.0)
    s = 1 / 100 + (100 - 1 / 100) * 0.5
    e = product / s * torch.tensor([1.0, -1.0, 1.0, -1.0])
    part = {**{k: p.float() for k, p in params.items()}, "embeddings.0": e.expand(3, -1).clone()}
    part["network.layers.1.weight"] = torch.zeros(6, 4)  # so that units matter for their price alone
    single = Model(model.module.float(), losses.get("cross-entropy"), 3, 4)
    memory, batch = hat.init(single, part, at(0.5)), at(0.5)._replace(x=at(0.5).x.float())
    leaves = {k: p.clone().requires_grad_() for k, p in part.items()}
    grads = torch.autograd.grad(hat.objective(single, leaves, memory, batch), list(leaves.values()))
    followed = hat.direction(single, dict(zip(leaves, grads, strict=True)), part, memory, batch)["embeddings.0"][0]
    soft = torch.sigmoid(e.double())
    torch.testing.assert_close(followed.double(), 100 * soft * (1 - soft) / 10, rtol=1e-4, atol=0)  # of 10 units


def test_compensated_the_gates_learn_as_if_they_were_soft() -> None:
    """The gradient is dL/da times s_max σ'(e) for every s."""
    model, params = gated()
    hat, task = HAT(scale=50.0, sparsity=0.0), 1
    memory, batch = memory_of(hat, model, params, task), at(0.15, task)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    grads = torch.autograd.grad(hat.objective(model, leaves, memory, batch), list(leaves.values()))
    followed = hat.direction(model, dict(zip(leaves, grads, strict=True)), params, memory, batch)
    s = 1 / 50 + (50 - 1 / 50) * 0.15
    gates = [torch.sigmoid(s * params[f"embeddings.{i}"][task]).requires_grad_() for i in range(2)]
    gradients = torch.autograd.grad(functional.cross_entropy(by_hand(params, batch.x, gates), batch.y), gates)
    for i, grad_value in enumerate(gradients):
        soft = torch.sigmoid(params[f"embeddings.{i}"][task])
        actual = followed[f"embeddings.{i}"]
        torch.testing.assert_close(actual[task], grad_value * 50 * soft * (1 - soft), rtol=1e-7, atol=1e-12)
        assert not actual[[0, 2]].any()


def test_embeddings_beyond_their_bounds_are_clamped_and_only_move_back() -> None:
    model, params = gated()
    hat = HAT(sparsity=0.0)
    memory = memory_of(hat, model, params, 0)
    beyond = {**params, "embeddings.0": torch.tensor([[7.0, -7.0, 1.0, 6.0]] * 3, dtype=torch.float64)}
    on, _ = hat.before_epoch(model, beyond, memory, 0, 1)
    assert on["embeddings.0"][0].tolist() == [6, -6, 1, 6]
    batch = at(0.001)
    torch.testing.assert_close(hat.objective(model, beyond, memory, batch), hat.objective(model, on, memory, batch))
    for sign, moves in ((1.0, [True, False, True, True]), (-1.0, [False, True, True, True])):
        gradients = {k: torch.full_like(p, sign) for k, p in params.items()}
        followed = hat.direction(model, gradients, beyond, memory, batch)["embeddings.0"]
        assert [bool(d != 0) for d in followed[0]] == moves
        assert bool((followed * sign >= 0).all())


def test_what_is_used_is_the_most_that_any_task_used() -> None:
    model, params = gated()
    hat = HAT(scale=3.0)
    memory = hat.init(model, params, at(0.0))
    for task in range(3):
        memory = hat.consolidate(model, params, memory, batch_of(examples(9, task), 0, task))
        for k in ("embeddings.0", "embeddings.1"):
            expected = torch.sigmoid(3 * params[k][: task + 1]).max(0).values
            torch.testing.assert_close(memory["used"][k], expected)


# Mistakes


@pytest.mark.parametrize(("options", "words"), [({"scale": 0.5}, "scale"), ({"sparsity": -0.1}, "sparsity")])
def test_options_outside_their_range_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(GlocalError, match=words):
        HAT(**options)


def test_a_network_that_mixes_units_is_refused() -> None:
    def mixing(shape: Sequence[int], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 4), nn.Softmax(-1), nn.Linear(4, outputs))

    with pytest.raises(GlocalError, match="mixes units"):
        train_to_the_end(cohort_of(CHALLENGE, HAT(), RUNS, mixing))


def test_a_weight_that_is_computed_from_others_is_refused() -> None:
    def normed(shape: Sequence[int], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(784, 8)), nn.ReLU(), nn.Linear(8, outputs))

    with pytest.raises(GlocalError, match="weight_orig"):
        train_to_the_end(cohort_of(CHALLENGE, HAT(), RUNS, normed))
