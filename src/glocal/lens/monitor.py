r"""The locality assumption, watched while a cohort trains (§3.2): ξ_o of every finished task, once an epoch.

    monitor = Monitor(cohort, epsilon=0.1, tell=print)
    for snapshot in monitor.train():
        ...
    monitor.assumption(run=0).first_break

By default \hat L_o is the second-order expansion with a diagonal ggn, and both it and L_o are taken on the same few
examples of task o: the expansion is of the loss it is compared with, so that no error comes from the sample, and all
finished tasks of all runs are measured in one pass. It keeps 3 P numbers for every run and finished task. With 'own' it
is the algorithm's \hat L_o, from the live memory, run by run and task by task; that was made with all of the task's
data, or with others, and ξ_o then contains the difference between the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.feed import evenly_spaced
from glocal.engine.state import State
from glocal.engine.train import Execution, Progress, Snapshot, train
from glocal.errors import GlocalError, require, unknown
from glocal.lens.approximation import Curves, Moment, own_approximation, own_loss
from glocal.lens.region import Assumption, Break, assumption, positive
from glocal.lens.subject import Point
from glocal.lens.taylor import chosen, expand, value
from glocal.tree import Params, Tree

Watched: TypeAlias = Literal["diagonal", "kronecker", "own"]
WATCHED = ("diagonal", "kronecker", "own")
EXAMPLES = 100


class Monitor:
    """Watches every run of a cohort, each until its first break is told and beyond."""

    def __init__(
        self,
        cohort: Cohort,
        epsilon: float,
        approximation: Watched = "diagonal",
        every: int = 1,
        examples: int = EXAMPLES,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """At the end of every `every`-th epoch of a task, on at most `examples` examples of each finished task. Who is
        given as `tell` hears of every run's first break, in a sentence."""
        positive(epsilon)
        if approximation not in WATCHED:
            raise unknown("approximation to watch", approximation, WATCHED)
        require(every >= 1, f"a monitor looks every 1, 2, … epochs; every={every} was given.")
        require(examples >= 1, f"a monitor needs 1 example of a task or more; {examples} were asked for.")
        algorithm = cohort.algorithm
        if isinstance(algorithm, Partition) and approximation != "own":
            raise GlocalError(
                f"{algorithm.name} has a network of its own for every task, which is not expanded: "
                f"approximation={approximation!r} was given; allowed: 'own'."
            )
        self.cohort, self.epsilon, self.every, self.examples, self.tell = cohort, epsilon, every, examples, tell
        self.form = None if approximation == "own" else chosen(2, approximation)
        self.breaks: list[Break | None] = [None] * len(cohort)
        self._model = cohort.model(vectorised=False)
        self._data: list[list[Data]] = [[] for _ in cohort.groups]  # [group][task]
        self._held: list[Tree] = []  # [task], runs stacked: the expansion's parts, or θ_o alone
        self._stacked: Tree = {}  # the same with the tasks along the second axis
        self._looks: list[tuple[int, int, Tensor]] = []  # finished, step, (3, runs, T)
        self._mapped = True

    def train(
        self, begin: Snapshot | None = None, execution: Execution = "auto", progress: Progress | None = None
    ) -> Iterator[Snapshot]:
        """`engine.train`, watched."""
        past = 0 if begin is None else begin.finished
        require(
            past == len(self._held),
            f"a run was to go on after {past} tasks; this monitor has seen {len(self._held)} of them end, and knows no "
            "solution of the others. Watch from the beginning.",
        )
        for snapshot in train(self.cohort, begin, execution, progress, self._look):
            if snapshot.finished:
                self._finish(snapshot.finished - 1, snapshot.state)
            yield snapshot

    def curves(self, run: int = 0) -> Curves:
        """What was seen of a run."""
        tasks = self.cohort.challenge.tasks
        finished, step = (torch.tensor([look[i] for look in self._looks], dtype=torch.long) for i in (0, 1))
        seen = [look[2][:, run] for look in self._looks]
        rows = torch.stack(seen, 1) if seen else torch.zeros(3, 0, tasks, dtype=torch.float64)
        return Curves(finished, step, *rows)

    def assumption(self, run: int = 0) -> Assumption:
        """The locality assumption along what was seen of a run."""
        return assumption(self.curves(run), self.epsilon)

    @torch.no_grad()
    def _finish(self, task: int, state: State) -> None:
        """Keep some of the task's examples, and what \\hat L_o is made of."""
        parts = []
        for group, runs in enumerate(self.cohort.groups):
            data = self._sample(task, self.cohort.members[runs.start].seed)
            self._data[group].append(data)
            for run in range(runs.start, runs.stop):
                params = {k: p[run] for k, p in state.params.items()}
                if self.form is None:
                    parts.append({"centre": {k: p.clone() for k, p in params.items()}})
                else:
                    bound = self._model.bind({k: b[run] for k, b in state.buffers.items()}, training=False)
                    parts.append(expand(bound, params, data, 2, self.form).parts)
        self._held.append(tree.stack(parts))
        if self.form is not None:
            self._stacked = tree.map_tree(lambda *leaves: torch.stack(leaves, 1), *self._held)

    def _sample(self, task: int, seed: int) -> Data:
        data = evenly_spaced(self.cohort.challenge.task(task, seed).train, self.examples)
        return Data(self.cohort.door.ready(data.x.to(self.cohort.device)), data.y.to(self.cohort.device))

    @torch.no_grad()
    def _look(self, task: int, epoch: int, state: State) -> None:
        if task == 0 or (epoch + 1) % self.every:
            return
        seen = torch.full((3, len(self.cohort), self.cohort.challenge.tasks), torch.nan, dtype=torch.float64)
        seen[:, :, :task] = self._own(task, state) if self.form is None else self._expansions(task, state)
        self._looks.append((task, state.clock, seen))
        for run, before in enumerate(self.breaks):
            if before is None:
                self._judge(run)

    def _judge(self, run: int) -> None:
        finished, step, seen = self._looks[-1]
        last = Curves(torch.tensor([finished]), torch.tensor([step]), *seen[:, run : run + 1])
        found = assumption(last, self.epsilon).first_break
        if found is not None:
            self.breaks[run] = found._replace(moment=len(self._looks) - 1)
            if self.tell is not None:
                member = self.cohort.members[run]
                self.tell(f"{member.algorithm.name}, lr {member.lr:g}, seed {member.seed}: {self.breaks[run]}")

    def _own(self, task: int, state: State) -> Tensor:
        found = torch.full((3, len(self.cohort), task), torch.nan, dtype=torch.float64)
        for group, runs in enumerate(self.cohort.groups):
            for run in range(runs.start, runs.stop):
                own, algorithm = state.select(run), self.cohort.members[run].algorithm
                moment = Moment(task, state.clock, Point(own.params, own.buffers), own.memory)
                for o in range(task):
                    found[0, run, o] = own_loss(algorithm, self._model, moment, self._data[group][o], o)
                    found[1, run, o] = own_approximation(algorithm, self._model, moment, o)
                    found[2, run, o] = _distance(own.params, {k: c[run] for k, c in self._held[o]["centre"].items()})
        return found

    def _expansions(self, task: int, state: State) -> Tensor:
        """L_o, \\hat L_o and ‖θ − θ_o‖, (3, runs, finished tasks)."""
        parts = []
        for group, runs in enumerate(self.cohort.groups):
            own = (state.params, state.buffers, self._stacked)
            params, buffers, expansions = (tree.select(part, runs) for part in own)
            x, y, weight = self._examples(group)
            if self._mapped:
                each = vmap(vmap(self._one, (None, None, 0, 0, 0, 0)), (0, 0, None, None, None, 0))
                try:
                    parts.append(each(params, buffers, x, y, weight, expansions))
                    continue
                except RuntimeError:
                    self._mapped = False  # a network that cannot be mapped
            rows = []
            for run in range(runs.stop - runs.start):
                mine = [tree.select(part, run) for part in (params, buffers, expansions)]
                of_task = [tree.select(mine[2], o) for o in range(task)]
                rows.append(
                    torch.stack([self._one(*mine[:2], x[o], y[o], weight[o], of_task[o]) for o in range(task)])
                )
            parts.append(torch.stack(rows))
        return torch.cat(parts).movedim(-1, 0).double().cpu()

    def _examples(self, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Those of all finished tasks, (tasks, n, ...), with weights that are 0 where a smaller task repeats its own."""
        held = self._data[group]
        n = max(len(data.y) for data in held)
        place = torch.arange(n, device=self.cohort.device)
        x, y = (torch.stack([part[place % len(part)] for part in parts]) for parts in zip(*held, strict=True))
        return x, y, torch.stack([(place < len(data.y)).to(torch.get_default_dtype()) for data in held])

    def _one(self, params: Params, buffers: Params, x: Tensor, y: Tensor, weight: Tensor, parts: Tree) -> Tensor:
        true = self._model.bind(buffers, training=False).loss(params, x, y, weight)
        return torch.stack([true, value(parts, self.form, params), _distance(params, parts["centre"]).to(true.dtype)])


def _distance(params: Params, centre: Params) -> Tensor:
    return tree.total((params[k] - c).square() for k, c in centre.items()).sqrt()
