"""Early stopping: a run ends as one that was trained for its best number of epochs, whatever runs are beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glocal
from glocal import tree
from glocal.algorithms import ALGORITHMS
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, Snapshot, train
from glocal.errors import GlocalError
from glocal.networks import mlp
from glocal.optimizers import SGD as PlainSGD

EPOCHS = 10
LRS = 0.02, 0.3, 1.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def noisy(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two overlapping classes, which a network soon learns by heart."""
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    return torch.randn(n, 10, generator=random) + 0.6 * y[:, None], y


def challenge(tasks: int) -> Challenge:
    data = [(noisy(24, 3 * t), noisy(40, 3 * t + 1), noisy(10, 3 * t + 2)) for t in range(tasks)]
    return from_tasks("noisy", data, setting="domain")


def cohort(name: str, tasks: int = 1, device: str = "cpu") -> Cohort:
    members = tuple(Member(1, lr, ALGORITHMS[name](), PlainSGD(momentum=0.9)) for lr in LRS)
    return Cohort(challenge(tasks), mlp, members, EPOCHS, batch_size=8, device=torch.device(device))


def last_of(of: Cohort, execution: Execution = "auto") -> Snapshot:
    *_, last = train(of, execution=execution)
    return last


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
@pytest.mark.parametrize(("name", "patience"), [("er", 2), ("ewc", 3)])
def test_a_task_ends_at_its_best_epoch(name: str, patience: int, execution: Execution, device: str) -> None:
    whole = cohort(name, device=device)
    by_epochs = [last_of(replace(whole, epochs=epochs), execution) for epochs in range(1, EPOCHS + 1)]
    losses = np.stack([s.record.arrays["validation_class_loss"][:, 1, 0].numpy() for s in by_epochs])
    stopped = last_of(replace(whole, patience=patience), execution)
    best, lengths = [], []
    for run in range(len(LRS)):
        lowest = 0
        for epoch in range(EPOCHS):
            if losses[epoch, run] < losses[lowest, run]:
                lowest = epoch
            if epoch - lowest >= patience:
                break
        best.append(lowest)
        lengths.append(epoch + 1)
        expected = tree.flatten(by_epochs[lowest].state.select(run).as_tree())
        for key, leaf in tree.flatten(stopped.state.select(run).as_tree()).items():
            torch.testing.assert_close(leaf, expected[key], rtol=1e-5, atol=1e-7, msg=key)
    assert len(set(best)) > 1, "the runs should stop at different epochs"
    trained = stopped.record.arrays["epoch_loss"][:, 0].isfinite().sum(1)
    assert trained.tolist() == lengths and stopped.state.clock == EPOCHS * 3


@pytest.mark.parametrize("name", ["er", "ogd"])
def test_a_run_does_not_depend_on_those_beside_it(name: str) -> None:
    """ogd draws at the end of a task, whose last epoch differs between the cohorts."""
    together = replace(cohort(name, tasks=3), patience=2)
    all_runs = last_of(together, "sequential")
    for run in range(len(LRS)):
        alone = last_of(together.only(together.members[run : run + 1]), "sequential")
        for key, leaf in tree.flatten(alone.state.as_tree()).items():
            assert torch.equal(leaf[0], tree.flatten(all_runs.state.as_tree())[key][run]), key
        for key, array in alone.record.arrays.items():
            assert torch.equal(array[0].nan_to_num(-1), all_runs.record.arrays[key][run].nan_to_num(-1)), key


def test_in_the_setting_domain_outputs_that_no_class_has_count_too(tmp_path: Path) -> None:
    """As in the accuracies and losses that are reported."""
    data = [(noisy(24, 3 * t), noisy(40, 3 * t + 1), noisy(10, 3 * t + 2)) for t in range(2)]
    spare = from_tasks("spare", data, setting="domain", outputs=10)
    options: Any = {"store": tmp_path, "epochs": 12, "batch_size": 8}
    (stopped,) = glocal.sweep(spare, "sgd", [0.2], [1], patience=2, **options)
    losses = []
    for epochs in range(1, 13):
        (whole,) = glocal.sweep(spare, "sgd", [0.2], [1], **options | {"epochs": epochs})
        losses.append(whole.arrays["validation_class_loss"][1, 0])
    best = int(np.argmin(losses[:7]))
    length = int(np.isfinite(stopped.arrays["epoch_loss"][0]).sum())
    assert length == best + 3 and stopped.arrays["validation_class_loss"][1, 0] == pytest.approx(losses[best], rel=1e-5)


def test_patience_is_part_of_the_name_and_needs_validation_data(tmp_path: Path) -> None:
    options: Any = {"store": tmp_path, "epochs": 4}
    names = {
        glocal.sweep(challenge(2), "sgd", [0.3], [1], patience=patience, **options)[0].path for patience in (None, 1, 2)
    }
    assert len(names) == 3
    with pytest.raises(GlocalError, match="needs validation data"):
        glocal.sweep("rotated-digits", "sgd", [0.3], [1], patience=1, **options)
    with pytest.raises(GlocalError, match="monitor and patience"):
        glocal.sweep(challenge(2), "sgd", [0.3], [1], patience=1, monitor=0.1, **options)


@pytest.mark.parametrize("name", ["icarl", "packnet"])
def test_algorithms_that_need_all_epochs_are_refused(name: str, tmp_path: Path) -> None:
    quick: Any = {"tasks": 2, "epochs": 3, "validation": 0.1, "patience": 1, "store": tmp_path, "setting": "task"}
    with pytest.raises(GlocalError, match=f"{name} needs all epochs"):
        glocal.sweep("split-digits", name, [0.1], [1], **quick)


def test_a_loss_that_stays_the_same_ends_a_task_too(tmp_path: Path) -> None:
    """θ moves by less than its rounding."""
    (run,) = glocal.sweep(challenge(2), "sgd", [1e-20], [1], patience=2, epochs=6, store=tmp_path)
    assert np.isfinite(run.arrays["epoch_loss"]).sum(1).tolist() == [3, 3]
