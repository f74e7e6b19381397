"""Losses that a user writes, and multi-label targets: training, curvature, names of runs, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import glocal
from glocal import tree
from glocal.algorithms import ALGORITHMS, EWC, SGD, Algorithm
from glocal.challenges import Challenge, from_tasks
from glocal.challenges.challenge import Setting
from glocal.engine.cohort import Cohort, Member, seeded_network
from glocal.engine.loop import Execution, Snapshot, train
from glocal.errors import GlocalError
from glocal.networks import mlp
from glocal.report import summary
from glocal.rng import generator
from glocal.sweeps import resolve

EXECUTIONS = pytest.mark.parametrize("execution", ["sequential", "vectorised"])


def own_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none")


def focal(outputs: Tensor, y: Tensor) -> Tensor:
    """Its second derivative in the outputs depends on the label."""
    log_p = outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return -((1 - log_p.exp()) ** 2) * log_p


def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    """Two outputs, mean and log-variance, for one target."""
    mean, log_variance = outputs.unbind(-1)
    return 0.5 * (log_variance + (y.squeeze(-1) - mean).square() * (-log_variance).exp())


def scalar(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y)


def relative_to_the_batch(outputs: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(outputs, y, reduction="none")
    return losses - losses.mean()


def wrong_targets(outputs: Tensor, y: Tensor) -> Tensor:
    return mse_loss(outputs, y, reduction="none").sum(-1)


def smooth(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)


def weighted(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="none")


WEIGHTS = torch.tensor([1.0, 1.0, 10.0, 10.0])


def weighted_and_smooth(outputs: Tensor, y: Tensor) -> Tensor:
    """Without the other outputs the labels would have other weights."""
    return WEIGHTS[y] * smooth(outputs, y)


def of_three(outputs: Tensor, y: Tensor) -> Tensor:
    """Two outputs are too few."""
    return outputs.topk(3).values.sum(-1) - outputs.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def of_unit_length(outputs: Tensor, y: Tensor) -> Tensor:
    return smooth(outputs / outputs.norm(dim=-1, keepdim=True), y)


def of_four(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - torch.nn.functional.one_hot(y, 4)).square().sum(-1)


def classes(loss: Any, setting: Setting = "class", validation: bool = False) -> Challenge:
    random = np.random.default_rng(0)

    def part(n: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        y = first + np.arange(n) % 2
        return np.eye(4, dtype=np.float32)[y] + random.normal(0, 0.3, (n, 4)).astype(np.float32), y

    data = [(part(24, first), *[part(9, first)] * validation, part(15, first)) for first in (0, 2)]
    return from_tasks("classes", data, loss=loss, setting=setting)


def multi_label(loss: Any = "binary-cross-entropy") -> Challenge:
    """Label c of an example is whether its input c is positive."""
    random = np.random.default_rng(1)

    def part(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = random.normal(size=(n, 3)).astype(np.float32)
        return x, (x > 0).astype(np.int64)

    return from_tasks("multi-label", [(part(40), part(21)) for _ in range(2)], setting="domain", loss=loss)


def trained(challenge: Challenge, algorithm: Algorithm, execution: Execution, epochs: int = 2) -> Snapshot:
    members = tuple(Member(seed, 0.2, algorithm) for seed in (1, 2))
    *_, last = train(Cohort(challenge, mlp, members, epochs=epochs, batch_size=8), execution=execution)
    return last


@EXECUTIONS
@pytest.mark.parametrize(
    "algorithm", [SGD(), EWC(penalty=5.0, fisher="exact"), pytest.param(ALGORITHMS["ogd"](), marks=pytest.mark.slow)]
)
def test_cross_entropy_written_by_a_user_is_the_built_in_one(algorithm: Algorithm, execution: Execution) -> None:
    """EWC and OGD derive the root of its second derivative from automatic differentiation."""
    theirs, ours = (trained(classes(loss), algorithm, execution) for loss in ("cross-entropy", own_cross_entropy))
    for key, params in theirs.state.params.items():
        torch.testing.assert_close(ours.state.params[key], params, rtol=1e-3, atol=1e-5)
    for name, values in theirs.record.arrays.items():
        if name.endswith(("accuracy", "_loss")):
            torch.testing.assert_close(ours.record.arrays[name], values, rtol=1e-3, atol=1e-4)


@EXECUTIONS
def test_multi_label_training_is_that_of_torch(execution: Execution) -> None:
    challenge = multi_label()
    members = tuple(Member(seed, 0.2, SGD()) for seed in (1, 2))
    cohort = Cohort(challenge, mlp, members, epochs=1, batch_size=40)
    *_, last = train(cohort, execution=execution)
    for run, member in enumerate(members):
        module = seeded_network(mlp, challenge, member.seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=member.lr)
        for task in range(2):
            x, y = challenge.task(task, 0).train
            rows = torch.randperm(40, generator=generator(member.seed, "order", task, 0))
            loss = binary_cross_entropy_with_logits(module(x[rows]), y[rows], reduction="none").sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for key, p in module.named_parameters():
            torch.testing.assert_close(tree.select(last.state.params, run)[key], p.detach(), rtol=1e-4, atol=1e-6)
        x, y = challenge.task(1, 0).test
        expected = binary_cross_entropy_with_logits(module(x), y, reduction="none").sum(1).mean().detach()
        assert float(last.record.arrays["test_class_loss"][run, 2, 1]) == pytest.approx(float(expected), rel=1e-4)
    assert last.record.arrays["test_class_accuracy"].isnan().all()


@pytest.mark.parametrize("loss", [smooth, focal, weighted, of_unit_length])
def test_the_loss_among_a_tasks_classes_is_that_of_its_outputs(loss: Any, tmp_path: Path) -> None:
    """Smoothing and a factor for all classes leave no room for outputs of −∞; weights of all classes need them."""
    made = classes(loss)
    run = glocal.sweep(made, ["sgd"], [0.2], [1], epochs=1, batch_size=8, store=tmp_path, keep_parameters=True)[0]
    module = mlp(made.input_shape, 4)
    module.load_state_dict(run.state(2))
    for task in range(2):
        x, y = made.task(task, 0).test
        with torch.no_grad():
            outputs = module(x)
            own = outputs[:, made.task(task, 0).classes]
            if loss is weighted:
                expected = cross_entropy(own, y - 2 * task, reduction="none") * torch.tensor([1.0, 2, 3, 4])[y]
            else:
                expected = loss(own, y - 2 * task)
        assert run.arrays["test_task_loss"][2, task] == pytest.approx(float(expected.mean()), rel=1e-5)


def test_early_stopping_needs_a_loss_among_the_tasks_classes(tmp_path: Path) -> None:
    """With one, a run whose loss falls in every epoch is trained to the end."""
    options: Any = {"epochs": 6, "batch_size": 8}
    for loss in (of_four, of_three, weighted_and_smooth):
        made = classes(loss, "task", True)
        with pytest.raises(GlocalError, match="patience needs a loss among the classes of task 1"):
            glocal.sweep(made, ["sgd"], [0.2], [1], patience=2, store=tmp_path / "refused", **options)
        (run,) = glocal.sweep(classes(loss), ["sgd"], [0.01], [1], store=tmp_path / loss.__name__, **options)
        assert np.isnan(run.arrays["test_task_loss"]).all() and np.isfinite(run.arrays["test_class_loss"]).all()
    runs = [
        glocal.sweep(
            classes(smooth, "task", True), ["sgd"], [0.2], [1], patience=n, store=tmp_path / str(n), **options
        )[0]
        for n in (2, 6)
    ]
    np.testing.assert_array_equal(runs[0].arrays["epoch_loss"], runs[1].arrays["epoch_loss"])


def test_runs_without_classes_are_reported_by_loss(tmp_path: Path) -> None:
    runs = glocal.sweep(multi_label(), ["er", "ewc"], [0.1, 0.3], [1, 2], epochs=2, store=tmp_path)
    for row in summary.rows(runs):
        assert row["metric"] == "loss" and row["acc_mean"] is None and row["loss_mean"] > 0
    assert "nan" not in str(summary.render(runs, "markdown"))


@pytest.mark.slow
def test_outputs_may_differ_from_targets_for_a_users_loss(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    y = 2 * x[:, 0] + np.random.default_rng(0).normal(0, 0.5, 64)
    challenge = from_tasks("line", [((x, y), (x, y))], "domain", outputs=2, loss=gaussian)
    runs = glocal.sweep(challenge, ["sgd"], [0.1], [1], epochs=100, store=tmp_path, batch_size=16)
    residuals = y - np.polyval(np.polyfit(x[:, 0], y, 1), x[:, 0])
    of_the_line = 0.5 * (np.log(residuals.var()) + 1)  # with one variance for all inputs; the network may fit closer
    assert of_the_line - 0.2 < summary.rows(runs)[0]["loss_mean"] < of_the_line + 0.02
    assert summary.rows(runs)[0]["metric"] == "loss"


def test_a_loss_whose_curvature_depends_on_labels(tmp_path: Path) -> None:
    challenge = classes(focal)
    options: dict[str, Any] = {"epochs": 5, "store": tmp_path, "batch_size": 8}
    runs = glocal.sweep(challenge, ["sgd", ("ewc", {"fisher": "empirical"})], [0.5], [1, 2], setting="task", **options)
    assert all(run.arrays["test_task_accuracy"][-1].mean() > 0.8 for run in runs)
    with pytest.raises(GlocalError, match=r"the given loss is not of this kind\. ewc can do without it"):
        glocal.sweep(challenge, [("ewc", {"fisher": "exact"})], [0.5], [1], **options)


def test_a_users_loss_is_part_of_a_runs_name() -> None:
    configs = [resolve.challenge(classes(loss)).config for loss in ("cross-entropy", own_cross_entropy, focal)]
    assert configs[0]["loss"] == "cross-entropy"
    assert configs[1]["loss"] == {
        "name": "own_cross_entropy",
        "source": resolve.source_hash(own_cross_entropy),
        "classes": True,
    }
    assert configs[1]["loss"]["source"] != configs[2]["loss"]["source"]
    assert resolve.challenge(multi_label()).config["loss"] == "binary-cross-entropy"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (scalar, r"'scalar' must return one value per example, \(2,\), not shape \(\)"),
        (relative_to_the_batch, "'relative_to_the_batch' of an example depends on the other examples"),
        (wrong_targets, r"'wrong_targets' does not accept outputs \(2, 4\) and targets \(2,\) of torch.int64"),
        ("hinge", "unknown loss 'hinge'"),
    ],
)
def test_losses_are_checked(loss: Any, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        classes(loss)


def test_a_loss_is_checked_with_two_examples_though_the_first_task_has_one() -> None:
    """With one example, targets (n, 1) that broadcast to (n, n) give the right value."""

    def broadcast(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square().mean(1)

    x, y = np.random.default_rng(0).random((4, 3), dtype=np.float32), np.arange(4.0)
    for task in (((x[:1], y[:1]), (x, y)), ((x[:1], y[:1]), (x[:1], y[:1]))):
        with pytest.raises(GlocalError, match="'broadcast'"):
            from_tasks("lines", [task], setting="domain", loss=broadcast)


def test_targets_are_checked() -> None:
    x, y = np.zeros((4, 3), dtype=np.float32), np.full((4, 2), 2)
    with pytest.raises(GlocalError, match=r"y of task 1 \(train\) has targets outside \[0, 1\]"):
        from_tasks("two", [((x, y), (x, y))], setting="domain", loss="binary-cross-entropy")
    with pytest.raises(GlocalError, match="setting is 'class' with targets that are not classes"):
        from_tasks("two", [((x, y / 2), (x, y / 2))], loss="binary-cross-entropy")
    with pytest.raises(GlocalError, match="outputs is 3, but the targets have 2 columns"):
        from_tasks("two", [((x, y / 2), (x, y / 2))], "domain", outputs=3, loss="binary-cross-entropy")
