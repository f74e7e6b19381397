"""Every task, measured with the parameters as they are: accuracy and loss, among all classes and among the task's."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.execute import Executor
from glocal.engine.feed import evenly_spaced
from glocal.engine.record import Record
from glocal.engine.state import State

CHUNK = {"cpu": 500, "cuda": 5000}
"""Examples that go through the network at once: constants, so that sums do not depend on the cohort."""
LARGE = 1024
"""Numbers of an example beyond which a fifth of them do: convolutions keep many numbers of each."""


class Evaluator:
    """Keeps the evaluation data of all tasks on the device, as small as the challenge keeps them."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.loss = losses.get(cohort.challenge.loss)
        self._data = lru_cache(maxsize=None)(self._load)

    def _load(self, task: int, seed: int) -> tuple[dict[str, Data], Tensor | None]:
        made = self.cohort.challenge.task(task, seed, self.cohort.device)
        splits = {"train": evenly_spaced(made.train, self.cohort.train_eval), "test": made.test}
        device = self.cohort.device
        mask = None
        if 0 < len(made.classes) < self.cohort.challenge.outputs:
            mask = torch.zeros(self.cohort.challenge.outputs, dtype=torch.bool, device=device)
            mask[list(made.classes)] = True
        return {k: Data(d.x.to(device), d.y.to(device)) for k, d in splits.items()}, mask

    def measure(self, executor: Executor, state: State, record: Record, row: int) -> Tensor:
        """Fill row t of every matrix; returns every run's mean loss.

        A run that has diverged, or whose loss is no longer finite, has no accuracy: its row stays empty.
        """
        for task in range(self.cohort.challenge.tasks):
            for runs in self.cohort.groups:
                splits, mask = self._data(
                    task, self.cohort.members[runs.start].seed if self.cohort.challenge.seeded else 0
                )
                for split, data in splits.items():
                    for name, values in self._split(executor, state, runs, data, mask, task).items():
                        record.matrices[f"{split}_{name}"][runs, row, task] = values
        losses = record.matrices["train_class_loss"][:, row].mean(1)
        lost = (state.diverged >= 0).cpu() | ~losses.isfinite()
        for matrix in record.matrices.values():
            matrix[lost, row] = torch.nan
        return losses

    def _split(
        self, executor: Executor, state: State, runs: slice, data: Data, mask: Tensor | None, task: int
    ) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        chunk = CHUNK[self.cohort.device.type] // (5 if data.x[0].numel() > LARGE else 1)
        for x, y in zip(data.x.split(chunk), data.y.split(chunk), strict=True):
            outputs = executor.predict(state, runs, x, task)
            scopes = {"class": outputs}
            if mask is not None:
                scopes["task"] = outputs.masked_fill(~mask, -torch.inf)
            for scope, logits in scopes.items():
                for what, value in self._sums(logits, y).items():
                    key = f"{scope}_{what}"
                    sums[key] = sums[key] + value if key in sums else value
        means = {k: (v / data.y.shape[0]).cpu() for k, v in sums.items()}
        if mask is None:
            means |= {k.replace("class", "task"): v for k, v in means.items()}
        return means

    def _sums(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        targets = y.expand(outputs.shape[0], *y.shape)
        loss = self.loss.per_sample(outputs, targets).sum(1, dtype=torch.float64)
        if y.is_floating_point():
            return {"loss": loss, "accuracy": torch.full_like(loss, torch.nan)}
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == targets).sum(1).double()}
