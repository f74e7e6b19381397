r"""The locality assumption, watched while a cohort trains (§3.2): ξ_o of every finished task, every few epochs.

    monitor = Monitor(cohort, epsilon=0.1, tell=print)
    for snapshot in train(cohort, watch=monitor):
        ...
    monitor.assumption(run=0).first_break

By default \hat L_o is the second-order expansion with a diagonal ggn, and both it and L_o are taken on the same few
examples of task o: the expansion is of the very loss that it is compared with, so that no error comes from the sample,
and with BatchNorm's statistics of θ_o. It keeps 3 P numbers for every run and finished task. With 'own' it is the
algorithm's \hat L_o, from the live memory.
That was made with all of the task's data, or with others, and ξ_o then contains the difference between the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.feed import Feed, evenly_spaced
from glocal.engine.state import State
from glocal.errors import GlocalError, require, unknown
from glocal.lens.approximation import Curves, Moment, difference, own_approximation, own_loss
from glocal.lens.region import Assumption, Break, assumption, positive
from glocal.lens.subject import Point
from glocal.lens.taylor import after, chosen, expand
from glocal.tree import Params, Tree

Watched: TypeAlias = Literal["diagonal", "kronecker", "own"]
WATCHED = ("diagonal", "kronecker", "own")
LEAST, MOST, PART = 8, 100, 300
"""Examples that are kept of a task: one for PART that are trained on, epochs counted, within these bounds. So what an
expansion costs is a small part of training too. 'own' makes none and keeps MOST."""
AT_ONCE = 500
"""Examples that go through the network at once."""


class Together(NamedTuple):
    """The examples kept of all finished tasks, one task's after the other's."""

    x: Tensor
    y: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, tasks: list[Data]) -> Together:
        x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))
        return cls(x, y, [len(data.y) for data in tasks])


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
        self._model = cohort.model(vectorised=False)
        self._data: list[list[Data]] = [[] for _ in cohort.groups]  # [group][task]
        self._together: list[Together] = []  # [group], of all finished tasks
        self._held: Tree = {}  # of every finished task, runs stacked: the expansion's parts, or θ_o alone
        self._looks: list[tuple[int, int, Tensor]] = []  # finished, step, (3, runs, T)
        self._mapped = True
        self._began = -1  # the step at which the first task was learnt

    @torch.no_grad()
    def __call__(self, task: int, epoch: int, state: State, feed: Feed) -> None:
        """Called by training at the end of an epoch, before the task is consolidated."""
        # The last task is not kept: nothing follows it.
        require(
            task == len(self._held),
            f"task {task} is in training, and this monitor has seen {len(self._held)} tasks end: it knows no solution "
            "of the others. Watch a cohort from its beginning, once.",
        )
        last = epoch + 1 == self.cohort.epochs
        if task and (last or (epoch + 1) % (self.every or max(3, task)) == 0):
            self._look(task, state)
        if last and task + 1 < self.cohort.challenge.tasks:
            self._finish(task, state, feed)

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
        if not all(bool(leaf[run].isfinite().all()) for leaf in tree.flatten(self._held["0"]).values()):
            return found
        # It held at the first task's solution, where an expansion has no error.
        return replace(found, first_break=found.first_break._replace(after=self._began))

    def _finish(self, task: int, state: State, feed: Feed) -> None:
        """Keep some of the task's examples, and what its expansion is made of; θ is at the task's solution."""
        parts = []
        for group, runs in enumerate(self.cohort.groups):
            whole = feed.whole(group)[0]
            few = MOST if self.form is None else max(LEAST, self.cohort.epochs * len(whole.y) // PART)
            x, y = evenly_spaced(whole, self.examples or min(MOST, few))
            # The feed writes the next task where this one was.
            data = Data(self.cohort.door.ready(x).clone(), y.clone())
            self._data[group].append(data)
            for run in range(runs.start, runs.stop):
                params = {k: p[run] for k, p in state.params.items()}
                if self.form is None:
                    parts.append({"centre": {k: p.clone() for k, p in params.items()}})
                else:
                    buffers = {k: b[run].clone() for k, b in state.buffers.items()}
                    bound = self._model.bind(buffers, training=False)
                    parts.append({**expand(bound, params, data, 2, self.form).parts, "buffers": buffers})
        if not self._held:
            self._began = state.clock
        self._held[str(task)] = tree.stack(parts)
        self._together = [Together.of(data) for data in self._data]

    def _look(self, task: int, state: State) -> None:
        seen = torch.full((3, len(self.cohort), self.cohort.challenge.tasks), torch.nan, dtype=torch.float64)
        seen[:, :, :task] = self._own(task, state) if self.form is None else self._expansions(state)
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
                moment = Moment(task, state.clock, Point(own.params, own.buffers), own.memory)
                for o in range(task):
                    centre = self._held[str(o)]["centre"]
                    found[0, run, o] = own_loss(algorithm, self._model, moment, self._data[group][o], o)
                    found[1, run, o] = own_approximation(algorithm, self._model, moment, o)
                    found[2, run, o] = _length({k: p - centre[k][run] for k, p in own.params.items()})
        return found

    def _expansions(self, state: State) -> Tensor:
        """The same by the expansions, runs that share their data side by side."""
        parts = []
        for group, runs in enumerate(self.cohort.groups):
            params, buffers, held = (tree.select(part, runs) for part in (state.params, state.buffers, self._held))
            one = partial(self._one, data=self._together[group])
            count = runs.stop - runs.start
            if count > 1 and self._mapped:
                try:
                    parts.append(vmap(one)(params, buffers, held))
                    continue
                except RuntimeError:
                    self._mapped = False  # a network that cannot be mapped
            each = [[tree.select(part, run) for part in (params, buffers, held)] for run in range(count)]
            parts.append(torch.stack([one(*mine) for mine in each]))
        return torch.cat(parts).movedim(1, 0).double().cpu()

    def _one(self, params: Params, buffers: Params, held: Tree, data: Together) -> Tensor:
        """Of one run, (3, finished tasks)."""
        sizes = data.sizes if buffers else [len(data.y)]  # without any, all tasks are one pass
        losses = []
        for x, y, parts in zip(data.x.split(sizes), data.y.split(sizes), held.values(), strict=False):
            bound = self._model.bind(parts["buffers"], training=False)
            rows = zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True)
            losses += [bound.losses(params, *row) for row in rows]
        true = torch.stack([part.mean() for part in torch.cat(losses).split(data.sizes)])
        moves = [{k: params[k] - c for k, c in parts["centre"].items()} for parts in held.values()]
        expansions = [after(parts, self.form, moved) for parts, moved in zip(held.values(), moves, strict=True)]
        return torch.stack([true, torch.stack(expansions), torch.stack([_length(moved) for moved in moves])])


def _length(moved: Params) -> Tensor:
    return tree.total(part.square() for part in moved.values()).sqrt()
