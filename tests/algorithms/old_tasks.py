"""Record the logits of finished tasks during later ones, and define convolutional networks for such tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glocal.algorithms.algorithm import Batch
from glocal.engine.cohort import Cohort
from glocal.engine.loop import Execution, train
from glocal.engine.state import State
from glocal.networks.model import Model


class SmallResidual(nn.Module):
    """A residual block with BatchNorm and a strided shortcut, average pooling, a head."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(shape[0], 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.first, self.norm1 = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.shortcut = nn.Conv2d(4, 6, 1, 2, bias=False)
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        y = self.norm2(self.second(self.norm1(self.first(x)).relu()))
        return self.head((y + self.shortcut(x)).relu().mean((2, 3)))

    def unit_groups(self) -> dict[str, tuple[str | None, str | None]]:
        return {
            "stem": (None, "stem"),
            "norm": ("stem", "stem"),
            "first": ("stem", "inner"),
            "norm1": ("inner", "inner"),
            "second": ("inner", "sum"),
            "norm2": ("sum", "sum"),
            "shortcut": ("stem", "sum"),
            "head": ("sum", None),
        }


def by_images(shape: Sequence[int], outputs: int) -> nn.Module:
    """Normalise per image in training and by running statistics at test time."""
    norm = nn.InstanceNorm2d(8, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(shape[0], 8, 2), norm, nn.ReLU(), nn.Flatten(), nn.Linear(72, outputs))


def small_convolutions(shape: Sequence[int], outputs: int) -> nn.Module:
    """A sequential network for 4 × 4 images: unpadded convolutions, pooling, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(8, 10),
        nn.ReLU(),
        nn.Linear(10, outputs),
    )


def logits_over_time(cohort: Cohort, execution: Execution) -> list[list[Tensor]]:
    """Return all runs' logits on the test inputs of finished tasks after every task: [t][o] (runs, n, K)."""
    model = cohort.model(vectorised=False)
    inputs = [cohort.challenge.task(o, 0).test.x for o in range(cohort.challenge.tasks)]
    return [
        [each_runs_logits(cohort, model, snapshot.state, inputs[o], o) for o in range(snapshot.finished)]
        for snapshot in train(cohort, execution=execution)
    ][1:]


def each_runs_logits(cohort: Cohort, model: Model, state: State, x: Tensor, task: int) -> Tensor:
    actual = []
    for run in range(len(cohort)):
        run_state = state.select(run)
        bound = model.bind(run_state.buffers, training=False)
        actual.append(cohort.algorithm.predict(bound, run_state.params, run_state.memory, x, task))
    return torch.stack(actual)


def largest_change(over_time: list[list[Tensor]]) -> float:
    """Return the largest change of a finished task's logit."""
    changes = [float((later[o] - over_time[o][o]).abs().max()) for t, later in enumerate(over_time) for o in range(t)]
    assert changes
    return max(changes)


def task_data(cohort: Cohort, task: int) -> Batch:
    train_set = cohort.challenge.task(task, 0).train
    return Batch(train_set.x, train_set.y, torch.tensor(task), torch.tensor(0))


def buffers_over_time(cohort: Cohort, execution: Execution) -> list[dict[str, Tensor]]:
    """Return all runs' buffers before the first task and after every task."""
    return [{k: b.clone() for k, b in s.state.buffers.items()} for s in train(cohort, execution=execution)]
