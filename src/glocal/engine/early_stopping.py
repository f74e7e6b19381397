"""Early stopping: end a task at the epoch with the lowest validation loss."""

from __future__ import annotations

import torch
from torch import Tensor

from glocal import tree
from glocal.engine.cohort import Cohort
from glocal.engine.evaluate import Evaluator
from glocal.engine.executors import Executor, copy_into_
from glocal.engine.state import State
from glocal.tree import Tree


class EarlyStopping:
    """Which runs of a cohort have finished a task, and the state of each after its best epoch.

    A run has finished when its validation loss has not been lower than before for `patience` epochs. It is trained on
    until all runs of its cohort have finished; then each returns to its best state, so that its result does not depend
    on the others. Without patience all epochs are trained.
    """

    def __init__(self, cohort: Cohort, evaluator: Evaluator, task: int) -> None:
        self.cohort, self.evaluator, self.task = cohort, evaluator, task
        self.patience = cohort.patience
        if self.patience is not None:
            evaluator.check_validation_loss(task)
        self.stopped = torch.zeros(len(cohort), dtype=torch.bool)
        self._lowest = torch.full((len(cohort),), torch.inf, dtype=torch.float64)
        self._waited = torch.zeros(len(cohort), dtype=torch.long)
        self._best: Tree = {}

    def after_epoch(self, executor: Executor, state: State) -> bool:
        """Note the states of runs that have become better, and return whether the task is finished."""
        if self.patience is None:
            return False
        losses = self.evaluator.validation_losses(executor, state, self.task)
        better = (losses < self._lowest) & ~self.stopped
        self._keep(state, better)
        self._lowest = torch.where(better, losses, self._lowest)
        self._waited = torch.where(better, 0, self._waited + 1)
        self.stopped |= self._waited >= self.patience
        return bool(self.stopped.all())

    def _keep(self, state: State, better: Tensor) -> None:
        if not self._best:
            self._best = tree.map_tree(torch.clone, state.as_tree())
        runs = better.nonzero().flatten().to(self.cohort.device)
        for best, new in zip(tree.flatten(self._best).values(), tree.flatten(state.as_tree()).values(), strict=True):
            best[runs] = new[runs]

    def restore_best(self, state: State) -> None:
        """Return every run to the state after its best epoch."""
        if self.patience is not None:
            copy_into_(self._best, state.as_tree())
