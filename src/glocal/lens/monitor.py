r"""The locality assumption, watched while a cohort trains (§3.2): ξ_o of every finished task, every few epochs.

    monitor = Monitor(cohort, epsilon=0.1, tell=print)
    for snapshot in train(cohort, watch=monitor):
        ...
    monitor.assumption(run=0).first_break

By default \hat L_o is the second-order expansion with a diagonal ggn, and both it and L_o are taken on the same few
examples of task o: the expansion is of the very loss that it is compared with, so that no error comes from the sample,
and with BatchNorm's statistics of θ_o. From the first one on it has room for all tasks but the last, 3 P numbers for
each of them and each run. With 'own' it is the algorithm's \hat L_o, from the live memory.
That was made with all of the task's data, or with others, and ξ_o then contains the difference between the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.loader import Loader
from glocal.engine.state import State
from glocal.errors import GlocalError, require, unknown
from glocal.inputs import evenly_spaced_indices
from glocal.lens.approximation import Curves, difference, own_approximation, own_loss
from glocal.lens.map_runs import Runwise
from glocal.lens.record import Snapshot
from glocal.lens.region import Assumption, Break, assumption, positive
from glocal.lens.taylor import after, chosen, expand
from glocal.lens.trace import Checkpoint
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.sweeps.training import MonitorSummary
from glocal.tree import Params, Tree

Watched: TypeAlias = Literal["diagonal", "kronecker", "own"]
WATCHED = ("diagonal", "kronecker", "own")
LEAST, MOST, PART = 8, 100, 300
"""Examples that are kept of a task: one for PART that are trained on, epochs counted, within these bounds. So what an
expansion costs is a small part of training too. 'own' makes none and keeps MOST."""
AT_ONCE = 500
"""Examples that go through the network at once."""


class Monitor:
    """Watches all runs of one cohort through one training: hand it to `engine.train` as `watch`.

    breaks: every run's first moment outside, as far as it was looked at; None where there was none.
    """

    def __init__(
        self,
        cohort: Cohort,
        epsilon: float,
        approximation: Watched = "diagonal",
        every: int | None = None,
        examples: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Looks at the end of every `every`-th epoch of a task and of its last, on at most `examples` examples of each
        finished task; if not said, of every third epoch, and more seldom as tasks to look at become more, on as many as
        cost little beside training. Who is given as `tell` hears of every run's first break, in a sentence."""
        positive(epsilon)
        if approximation not in WATCHED:
            raise unknown("approximation to watch", approximation, WATCHED)
        require(every is None or every >= 1, f"a monitor looks every 1, 2, … epochs; every={every} was given.")
        allowed = examples is None or examples >= 1
        require(allowed, f"a monitor needs 1 example of a task or more; {examples} were asked for.")
        algorithm = cohort.algorithm
        if isinstance(algorithm, Partition) and approximation != "own":
            raise GlocalError(
                f"{algorithm.name} has outputs of their own for every task, which are not expanded: "
                f"approximation={approximation!r} was given; allowed: 'own'."
            )
        self.cohort, self.epsilon, self.every, self.examples, self.tell = cohort, epsilon, every, examples, tell
        self.form = None if approximation == "own" else chosen(2, approximation)
        self.breaks: list[Break | None] = [None] * len(cohort)
        self._runwise = Runwise(cohort)
        self._data: list[Data] = []  # of every finished task, (groups, n, ...)
        self._together: list[Tensor] = []  # x and y of all of them, one task's after the other's, (groups, N, ...)
        self._held: Tree = {}  # (runs, T − 1, ...): the parts of the finished tasks' expansions, or each θ_o alone
        self._looks: list[tuple[int, int, Tensor]] = []  # finished, step, (3, runs, T)
        self._began = -1  # the step at which the first task was learnt

    @torch.no_grad()
    def __call__(self, task: int, epoch: int, state: State, loader: Loader) -> None:
        """Called by training at the end of an epoch, before the task is consolidated."""
        # The last task is not kept: nothing follows it.
        require(
            task == len(self._data),
            f"task {task} is in training, and this monitor has seen {len(self._data)} tasks end: it knows no solution "
            "of the others. Watch a cohort from its beginning, once.",
        )
        last = epoch + 1 == self.cohort.epochs
        if task and (last or (epoch + 1) % (self.every or max(3, task)) == 0):
            self._look(task, state)
        if last and task + 1 < self.cohort.challenge.tasks:
            self._finish(task, state, loader)

    def curves(self, run: int = 0) -> Curves:
        """What was seen of a run."""
        finished, step = (torch.tensor([look[i] for look in self._looks], dtype=torch.long) for i in (0, 1))
        seen = [look[2][:, run] for look in self._looks]
        none = torch.zeros(3, 0, self.cohort.challenge.tasks, dtype=torch.float64)
        return Curves(finished, step, *(torch.stack(seen, 1) if seen else none))

    def assumption(self, run: int = 0) -> Assumption:
        """The locality assumption along what was seen of a run."""
        found = assumption(self.curves(run), self.epsilon)
        if found.first_break is None or found.first_break.moment or self.form is None:
            return found
        if not all(bool(leaf[run, 0].isfinite().all()) for leaf in tree.flatten(self._held).values()):
            return found
        # It held at the first task's solution, where an expansion has no error.
        return replace(found, first_break=found.first_break._replace(after=self._began))

    def summary(self, run: int) -> MonitorSummary:
        """Return where a run left an old task's ε-region, and all measurements, for its record in a store."""
        result, curves = self.assumption(run), self.curves(run)
        outcome = f"{result.first_break}"
        if result.first_break is None:
            largest = float(result.smallest.max()) if len(result.smallest) else 0.0
            outcome = f"inside every old task's region, with errors up to {largest:.3g}"
        finished, steps = curves.finished.tolist(), curves.step.tolist()
        errors = [
            [error if math.isfinite(error) else None for error in row[:tasks]]
            for row, tasks in zip(curves.error.tolist(), finished, strict=True)
        ]
        record = {"epsilon": result.epsilon, "finished": finished, "step": steps, "errors": errors}
        return MonitorSummary(outcome, record)

    def _finish(self, task: int, state: State, loader: Loader) -> None:
        """Keep some of the task's examples, and what its expansion is made of; θ is at the task's solution."""
        data = self._some(loader)
        self._data.append(data)
        self._together = [torch.cat(parts, 1) for parts in zip(*self._data, strict=True)]
        made: Tree = {"centre": state.params}
        if self.form is not None:
            made = self._runwise(self._expand, (state.params, state.buffers), data)
        if not task:
            self._began, later = state.clock, self.cohort.challenge.tasks - 1
            self._held = tree.map_tree(lambda leaf: leaf.new_empty(leaf.shape[0], later, *leaf.shape[1:]), made)
        tree.map_tree(lambda held, leaf: held[:, task].copy_(leaf), self._held, made)

    def _some(self, loader: Loader) -> Data:
        """Some of the examples that the groups are trained on, (groups, n, ...); the loader writes the next task where
        this one is."""
        few = MOST if self.form is None else max(LEAST, self.cohort.epochs * loader.examples // PART)
        rows = evenly_spaced_indices(loader.examples, self.examples or min(MOST, few)).to(loader.x.device)
        x, y = (part.unflatten(0, (-1, loader.examples)).index_select(1, rows) for part in (loader.x, loader.y))
        return Data(self.cohort.transform.normalize(x), y)

    def _expand(self, model: Model, params: Params, buffers: Params, x: Tensor, y: Tensor) -> Tree:
        """Of one run."""
        risk = Risk.from_model(model.bind(buffers, training=False), params, x, y)
        try:
            return {**expand(risk, 2, self.form).parts, "buffers": buffers}
        except GlocalError as error:
            raise GlocalError(f"this run cannot be watched by expansions, but by 'own'. {error}") from error

    def _look(self, task: int, state: State) -> None:
        seen = torch.full((3, len(self.cohort), self.cohort.challenge.tasks), torch.nan, dtype=torch.float64)
        seen[:, :, :task] = self._own(task, state) if self.form is None else self._expansions(task, state)
        self._looks.append((task, state.clock, seen))
        outside = ~(difference(seen[1, :, :task], seen[0, :, :task]) < self.epsilon).all(1)
        for run in outside.nonzero().flatten().tolist():
            if self.breaks[run] is None:
                self._judge(run)

    def _judge(self, run: int) -> None:
        self.breaks[run] = self.assumption(run).first_break
        if self.tell is not None:
            member = self.cohort.members[run]
            self.tell(f"{member.algorithm.name}, lr {member.lr:g}, seed {member.seed}: {self.breaks[run]}")

    def _own(self, task: int, state: State) -> Tensor:
        r"""L_o, \hat L_o and ‖θ − θ_o‖, (3, runs, finished tasks), by the algorithm's own approximation."""
        found = torch.full((3, len(self.cohort), task), torch.nan, dtype=torch.float64)
        for group, runs in enumerate(self.cohort.groups):
            for run in range(runs.start, runs.stop):
                own, algorithm = state.select(run), self.cohort.members[run].algorithm
                moment = Snapshot(task, state.clock, Checkpoint(own.params, own.buffers), own.memory)
                for o, (x, y) in enumerate(self._data):
                    centre = self._held["centre"]
                    found[0, run, o] = own_loss(algorithm, self._runwise.model, moment, Data(x[group], y[group]), o)
                    found[1, run, o] = own_approximation(algorithm, self._runwise.model, moment, o)
                    found[2, run, o] = _length({k: p - centre[k][run, o] for k, p in own.params.items()})
        return found

    def _expansions(self, task: int, state: State) -> Tensor:
        """The same by the expansions."""
        held = tree.map_tree(lambda leaf: leaf[:, :task], self._held)
        return self._runwise(self._one, (state.params, held), self._together)["seen"].movedim(1, 0).double().cpu()

    def _one(self, model: Model, params: Params, held: Tree, x: Tensor, y: Tensor) -> Tree:
        """Of one run, (3, finished tasks)."""
        tasks = [data.y.shape[1] for data in self._data]
        sizes = tasks if held["buffers"] else [len(y)]  # without any, all tasks are one pass
        losses = []
        for o, data in enumerate(zip(x.split(sizes), y.split(sizes), strict=True)):
            bound = model.bind(tree.select(held["buffers"], o), training=False)
            rows = zip(*(part.split(AT_ONCE) for part in data), strict=True)
            losses += [bound.losses(params, *some) for some in rows]
        true = torch.stack([part.mean() for part in torch.cat(losses).split(tasks)])
        moves = {k: params[k] - centre for k, centre in held["centre"].items()}
        approximate = vmap(lambda parts, moved: after(parts, self.form, moved))(held, moves)
        return {"seen": torch.stack([true, approximate, vmap(_length)(moves)])}


def _length(moved: Params) -> Tensor:
    return tree.total(part.square() for part in moved.values()).sqrt()
