"""Evaluate every task at the current parameters, and record the matrices R[t, o] that all metrics derive from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.config import MEASURES, VALIDATION_MEASURES
from glocal.engine.executors import Executor
from glocal.engine.loader import evenly_spaced
from glocal.engine.state import State
from glocal.errors import GlocalError, require


@dataclass
class Record:
    """Measurements of a cohort.

    arrays, with the runs along the first axis:
        m[run, t, o] for every m of MEASURES, and of VALIDATION_MEASURES where there are validation data: on task o
            with θ_t, the parameters after t tasks; t = 0: initialisation.
        distance_from_init[run, t − 1] = ‖θ_t − θ_0‖₂ and update_norm[run, t − 1] = ‖θ_t − θ_{t−1}‖₂ for t = 1…T.
        epoch_loss[run, t, e]: the mean objective over epoch e of task t.
        memory_bytes[run, t]: the size of the algorithm's memory after t + 1 tasks.
    epoch_step_seconds: seconds per step and run, one value per epoch; a task's first epoch is left out, because it
        includes start-up, unless it is the only one.
    executor: the name of what executed it (`engine.choose`).
    """

    arrays: dict[str, Tensor]
    seconds: float = 0.0
    epoch_step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    executor: str = ""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def blank(cls, runs: int, tasks: int, epochs: int, validation: bool = False) -> Record:
        measures = (*MEASURES, *VALIDATION_MEASURES) if validation else MEASURES
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(measures, (runs, tasks + 1, tasks))
        shapes |= {"distance_from_init": (runs, tasks), "update_norm": (runs, tasks)}
        shapes |= {"epoch_loss": (runs, tasks, epochs)}
        arrays = {k: torch.full(shape, torch.nan, dtype=torch.float64) for k, shape in shapes.items()}
        return cls(arrays | {"memory_bytes": torch.zeros(runs, tasks, dtype=torch.long)})

    @property
    def tasks(self) -> int:
        return self.arrays["update_norm"].shape[1]

    @property
    def step_seconds(self) -> float | None:
        """Return the median seconds of one run's step, without start-up, consolidation and evaluation, or None."""
        return median(self.epoch_step_seconds) if self.epoch_step_seconds else None

    def extend(self, tasks: int) -> Record:
        """Return the record with room for more tasks; what is not measured is NaN."""
        runs, _, epochs = self.arrays["epoch_loss"].shape
        arrays = self.blank(runs, tasks, epochs, VALIDATION_MEASURES[0] in self.arrays).arrays
        for name, old in self.arrays.items():
            arrays[name][tuple(map(slice, old.shape))] = old
        return replace(self, arrays=arrays)

    def select(self, runs: Sequence[int]) -> Record:
        """Return the record of some runs, with their share of the seconds; epoch_step_seconds is per run already."""
        seconds = self.seconds * len(runs) / self.arrays["memory_bytes"].shape[0]
        arrays = {k: a[runs] for k, a in self.arrays.items()}
        return replace(self, arrays=arrays, seconds=seconds, epoch_step_seconds=list(self.epoch_step_seconds))


CHUNK = {"cpu": 500, "cuda": 10_000}
"""Batch sizes of evaluation: on a CPU sums do not depend on the cohort."""
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
        self.loss = cohort.loss
        self.merge_groups = cohort.device.type == "cuda"
        network = cohort.model(vectorised=False).module
        self._convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in network.modules())
        self._data = lru_cache(maxsize=None)(self._load)

    def _load(self, task: int) -> list[EvaluationGroup]:
        groups = [self._load_group(task, runs) for runs in self.cohort.groups]
        sizes = {(s.runs.stop - s.runs.start, *(len(d.y[0]) for d in s.splits.values())) for s in groups}
        masks = {None if s.mask is None else tuple(s.mask.tolist()) for s in groups}
        own_seen = self.cohort.challenge.seeded and self.cohort.challenge.evaluate == "seen"
        if not self.merge_groups or len(groups) == 1 or len(sizes) > 1 or len(masks) > 1 or own_seen:
            return groups
        runs, names = slice(groups[0].runs.start, groups[-1].runs.stop), groups[0].splits
        splits = {k: Data(*(torch.cat([s.splits[k][i] for s in groups]) for i in range(2))) for k in names}
        return [EvaluationGroup(runs, splits, groups[0].mask)]

    def _load_group(self, task: int, runs: slice) -> EvaluationGroup:
        device, challenge = self.cohort.device, self.cohort.challenge
        task_data = challenge.task(task, self.cohort.members[runs.start].seed if challenge.seeded else 0, device)
        splits = {**task_data.splits, "train": evenly_spaced(task_data.train, self.cohort.train_eval)}
        mask = None
        if 0 < len(task_data.classes) < challenge.outputs:
            mask = torch.zeros(challenge.outputs, dtype=torch.bool, device=device)
            mask[list(task_data.classes)] = True
        return EvaluationGroup(
            runs, {k: Data(d.x[None].to(device), d.y[None].to(device)) for k, d in splits.items()}, mask
        )

    def measure(self, executor: Executor, state: State, record: Record, row: int, first: int = 0) -> Tensor:
        """Fill row t of every matrix, from the column `first` on, and return every run's mean loss.

        A run that has diverged, or whose loss is no longer finite, has no accuracy: its row stays empty.
        """
        for task in range(first, self.cohort.challenge.tasks):
            for group, (runs, splits, mask) in enumerate(self._data(task)):
                masks = _scopes(mask, self._seen_classes(row, group))
                for split, data in splits.items():
                    for name, values in self._split(executor, state, runs, data, masks, task).items():
                        record.arrays[f"{split}_{name}"][runs, row, task] = values
        losses = record.arrays["train_class_loss"][:, row].mean(1)
        lost = (state.diverged >= 0).cpu() | ~losses.isfinite()
        for name in record.arrays.keys() & {*MEASURES, *VALIDATION_MEASURES}:
            record.arrays[name][lost, row] = torch.nan
        return losses

    def validation_losses(self, executor: Executor, state: State, task: int) -> Tensor:
        """Return every run's mean loss on a task's validation data, among the classes that its setting counts."""
        losses = torch.full((len(self.cohort),), torch.nan, dtype=torch.float64)
        name = self._validation_scope
        for group, (runs, splits, mask) in enumerate(self._data(task)):
            masks = _scopes(mask, self._seen_classes(task, group))
            losses[runs] = self._split(executor, state, runs, splits["validation"], masks, task)[f"{name}_loss"]
        return losses

    def check_validation_loss(self, task: int) -> None:
        """Raise an error if the loss has no value among the classes that count."""
        for group, (_, _, mask) in enumerate(self._data(task)):
            classes = _scopes(mask, self._seen_classes(task, group))[self._validation_scope]
            require(
                classes is None or self.loss.has_value_among(classes),
                f"patience needs a loss among the classes of task {task + 1}: '{self.loss.name}' takes neither outputs "
                "of −∞ for the others, nor the outputs of these alone. Leave patience out, or give another loss.",
            )

    @property
    def _validation_scope(self) -> str:
        return "task" if self.cohort.challenge.setting == "task" else "class"

    def _seen_classes(self, row: int, group: int) -> Tensor | None:
        """Return a mask of the classes of a group's first `row` tasks if others do not count, otherwise None."""
        if self.cohort.challenge.evaluate == "all":
            return None
        masks = [self._data(task)[group].mask for task in range(row)]
        if any(mask is None for mask in masks):
            return None
        none = torch.zeros(self.cohort.challenge.outputs, dtype=torch.bool, device=self.cohort.device)
        return torch.stack([none, *(mask for mask in masks if mask is not None)]).any(0)

    def _split(
        self,
        executor: Executor,
        state: State,
        runs: slice,
        data: Data,
        masks: Mapping[str, Tensor | None],
        task: int,
    ) -> dict[str, Tensor]:
        """Return the means over a split; `masks` are the classes that count in each scope, None for all."""
        sums: dict[str, Tensor] = {}
        kind, fewer = self.cohort.device.type, 1
        if self._convolves:
            fewer = (CONV_DIVISOR[kind] if data.x[0, 0].numel() > LARGE_INPUT_NUMEL else 1) * data.x.shape[0]
        chunk = max(1, CHUNK[kind] // fewer)
        for x, y in zip(data.x.split(chunk, 1), data.y.split(chunk, 1), strict=True):
            outputs = executor.predict(state, runs, x, task)
            targets = y.repeat_interleave(outputs.shape[0] // y.shape[0], 0)
            if outputs.shape[1:] != (expected := (x.shape[1], self.cohort.challenge.outputs)):
                raise GlocalError(
                    f"{self.cohort.algorithm.name}.predict must return logits of shape {expected} for {x.shape[1]} "
                    f"inputs; it returned {tuple(outputs.shape[1:])}."
                )
            for scope, mask in masks.items():
                if scope == "task" and mask is None:
                    continue
                for measure, value in self._sums(outputs, targets, mask).items():
                    key = f"{scope}_{measure}"
                    sums[key] = sums[key] + value if key in sums else value
        mean_values = torch.stack(list(sums.values())) / data.y.shape[1]  # from the device in one piece
        means = dict(zip(sums, mean_values.cpu(), strict=True))
        if masks["task"] is None:
            means |= {k.replace("class", "task"): v for k, v in means.items()}
        return means

    def _sums(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Return sums over the examples; with a mask, only these classes count."""
        if mask is None:
            loss = self.loss.per_sample(outputs, targets).sum(1, dtype=torch.float64)
        else:
            loss = self.loss.among(outputs, targets, mask).sum(1, dtype=torch.float64)
            outputs = outputs.masked_fill(~mask, -torch.inf)
        if targets.is_floating_point():
            return {"loss": loss, "accuracy": torch.full_like(loss, torch.nan)}
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == targets).sum(1).double()}


def _scopes(mask: Tensor | None, seen: Tensor | None) -> dict[str, Tensor | None]:
    """Return the classes that count in each scope, given those of a task and those seen before; None for all."""
    return {"task": mask, "class": None if seen is None or mask is None else seen | mask}
