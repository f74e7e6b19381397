"""Evaluate every task at the current parameters: accuracy and loss, among all classes and among the task's own."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from glocal import losses
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.executors import Executor
from glocal.engine.loader import evenly_spaced
from glocal.engine.measurements import Record
from glocal.engine.state import State

CHUNK = {"cpu": 500, "cuda": 10_000}
"""Batch sizes of evaluation: constants, so that sums do not depend on the cohort."""
LARGE_INPUT_NUMEL = 1024
"""Convolutional networks evaluate inputs larger than this in smaller batches."""
CONV_DIVISOR = {"cpu": 5, "cuda": 10}


class EvaluationGroup(NamedTuple):
    """Neighbouring runs in equal groups, what each group is measured on, (groups, n, ...), and a task's classes."""

    runs: slice
    splits: dict[str, Data]
    mask: Tensor | None  # None where all of the classes are the task's


class Evaluator:
    """Evaluates a cohort; keeps the data of all tasks on the device, as the challenge stores them.

    On a GPU, where a call costs more than the work in it, groups of equal shape are evaluated together.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.loss = losses.get(cohort.challenge.loss)
        self.at_once = cohort.device.type == "cuda"
        network = cohort.model(vectorised=False).module
        self._convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in network.modules())
        self._data = lru_cache(maxsize=None)(self._load)

    def _load(self, task: int) -> list[EvaluationGroup]:
        each = [self._load_group(task, runs) for runs in self.cohort.groups]
        sizes = {(s.runs.stop - s.runs.start, *(len(d.y[0]) for d in s.splits.values())) for s in each}
        masks = {None if s.mask is None else tuple(s.mask.tolist()) for s in each}
        if not self.at_once or len(each) == 1 or len(sizes) > 1 or len(masks) > 1:
            return each
        runs, of = slice(each[0].runs.start, each[-1].runs.stop), each[0].splits
        splits = {k: Data(*(torch.cat([s.splits[k][i] for s in each]) for i in range(2))) for k in of}
        return [EvaluationGroup(runs, splits, each[0].mask)]

    def _load_group(self, task: int, runs: slice) -> EvaluationGroup:
        device, challenge = self.cohort.device, self.cohort.challenge
        made = challenge.task(task, self.cohort.members[runs.start].seed if challenge.seeded else 0, device)
        splits = {"train": evenly_spaced(made.train, self.cohort.train_eval), "test": made.test}
        mask = None
        if 0 < len(made.classes) < challenge.outputs:
            mask = torch.zeros(challenge.outputs, dtype=torch.bool, device=device)
            mask[list(made.classes)] = True
        return EvaluationGroup(
            runs, {k: Data(d.x[None].to(device), d.y[None].to(device)) for k, d in splits.items()}, mask
        )

    def measure(self, executor: Executor, state: State, record: Record, row: int) -> Tensor:
        """Fill row t of every matrix and return every run's mean loss.

        A run that has diverged, or whose loss is no longer finite, has no accuracy: its row stays empty.
        """
        for task in range(self.cohort.challenge.tasks):
            for runs, splits, mask in self._data(task):
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
        kind, fewer = self.cohort.device.type, 1
        if self._convolves:
            fewer = (CONV_DIVISOR[kind] if data.x[0, 0].numel() > LARGE_INPUT_NUMEL else 1) * data.x.shape[0]
        chunk = max(1, CHUNK[kind] // fewer)
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
