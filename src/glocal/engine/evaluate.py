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
from glocal.errors import require

CHUNK = {"cpu": 500, "cuda": 10_000}
"""Examples that go through the network at once: constants, so that sums do not depend on the cohort."""
LARGE = 1024
"""Numbers of an example beyond which fewer do: convolutions keep many numbers of each."""
FEWER = {"cpu": 5, "cuda": 10}


class Evaluator:
    """Keeps the evaluation data of all tasks on the device, as small as the challenge keeps them.

    On a GPU, where a call costs more than the work in it, all runs are measured at once, each group on its own data.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.loss = losses.get(cohort.challenge.loss)
        self._data = lru_cache(maxsize=None)(self._load)
        sizes = {runs.stop - runs.start for runs in cohort.groups}
        at_once = cohort.device.type == "cuda" and len(sizes) == 1
        self._shares = [cohort.groups] if at_once else [[runs] for runs in cohort.groups]

    def _load(self, task: int, share: int) -> tuple[dict[str, Data], Tensor | None]:
        """What groups of runs are measured on, stacked, and the task's classes where they are not all."""
        device, challenge = self.cohort.device, self.cohort.challenge
        seeds = [self.cohort.members[runs.start].seed for runs in self._shares[share]]
        made = [challenge.task(task, seed if challenge.seeded else 0, device) for seed in seeds]
        some = [evenly_spaced(own.train, self.cohort.train_eval) for own in made]
        splits = {"train": some, "test": [own.test for own in made]}
        classes, mask = made[0].classes, None
        if 0 < len(classes) < challenge.outputs:
            mask = torch.zeros(challenge.outputs, dtype=torch.bool, device=device)
            mask[list(classes)] = True
        alike = len({own.test.y.shape[0] for own in made}) == 1
        require(alike, f"task {task} of {challenge.name} must have equally many test examples for every seed.")
        stacked = {k: (torch.stack([d.x for d in own]), torch.stack([d.y for d in own])) for k, own in splits.items()}
        return {k: Data(x.to(device), y.to(device)) for k, (x, y) in stacked.items()}, mask

    def measure(self, executor: Executor, state: State, record: Record, row: int) -> Tensor:
        """Fill row t of every matrix; returns every run's mean loss.

        A run that has diverged, or whose loss is no longer finite, has no accuracy: its row stays empty.
        """
        for task in range(self.cohort.challenge.tasks):
            for share, groups in enumerate(self._shares):
                splits, mask = self._data(task, share)
                runs = slice(groups[0].start, groups[-1].stop)
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
        kind = self.cohort.device.type
        chunk = CHUNK[kind] // (FEWER[kind] if data.x[0, 0].numel() > LARGE else 1)
        for x, y in zip(data.x.split(chunk, 1), data.y.split(chunk, 1), strict=True):
            outputs = executor.predict(state, runs, x, task)
            targets = y.repeat_interleave(outputs.shape[0] // y.shape[0], 0)
            scopes = {"class": outputs}
            if mask is not None:
                scopes["task"] = outputs.masked_fill(~mask, -torch.inf)
            for scope, logits in scopes.items():
                for what, value in self._sums(logits, targets).items():
                    key = f"{scope}_{what}"
                    sums[key] = sums[key] + value if key in sums else value
        together = torch.stack(list(sums.values())) / data.y.shape[1]  # from the device in one piece
        means = dict(zip(sums, together.cpu(), strict=True))
        if mask is None:
            means |= {k.replace("class", "task"): v for k, v in means.items()}
        return means

    def _sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = self.loss.per_sample(outputs, targets).sum(1, dtype=torch.float64)
        if targets.is_floating_point():
            return {"loss": loss, "accuracy": torch.full_like(loss, torch.nan)}
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == targets).sum(1).double()}
