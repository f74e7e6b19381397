r"""Check the locality assumption (Assumption 3.2) while a cohort trains: ξ_o of every finished task, every few epochs.

    monitor = Monitor(cohort, epsilon=0.1, on_violation=print)
    for snapshot in train(cohort, watch=monitor):
        ...
    monitor.assumption(run=0).first_violation

By default \hat L_o is the second-order expansion with a diagonal ggn. Expansion and L_o are computed on the same few
examples of task o, with the BatchNorm statistics of θ_o, so that sampling causes no error. The monitor allocates memory
for all tasks but the last at once: 3 P numbers per task and run. With 'own', \hat L_o is the algorithm's own, from the
live memory; that was built from other examples, so ξ_o includes the difference between the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.hessian_structures import Diagonal, HessianStructure, Kronecker
from glocal.algorithms.partition import Partition
from glocal.challenges.challenge import Data
from glocal.engine.cohort import Cohort
from glocal.engine.loader import Loader
from glocal.engine.state import State
from glocal.errors import GlocalError, require, require_known
from glocal.inputs import evenly_spaced_indices
from glocal.lens.approximation_error import ErrorCurves, abs_difference, own_approximation, own_loss
from glocal.lens.locality_assumption import LocalityAssumption, LocalityViolation, locality_assumption, require_epsilon
from glocal.lens.record import Snapshot
from glocal.lens.taylor import evaluate, expand
from glocal.lens.training_trace import Checkpoint, require_positive
from glocal.networks.model import Model
from glocal.risk import Risk
from glocal.tree import Params, Tree

MonitoredApproximation: TypeAlias = Literal["diagonal", "kronecker", "own"]
MIN_EXAMPLES, MAX_MONITORED_EXAMPLES, TRAINED_PER_EXAMPLE = 8, 100, 300
"""A task keeps one example per TRAINED_PER_EXAMPLE that it trains on, counting epochs, within these bounds, so that its
expansion costs a small part of training. 'own' needs no expansion and keeps MAX_MONITORED_EXAMPLES."""
CHUNK_SIZE = 500
"""Examples that pass through the network at once."""


class Monitor:
    r"""Monitors all runs of a cohort: pass it to `engine.loop.train` as `watch`.

    `violations` has the first violation of every run, None where there was none so far.

    Args:
        cohort: the runs.
        epsilon: ε.
        approximation: which \hat L_o.
        every: measure after every so many epochs of a task and after its last one; by default every third epoch, and
            less often as more tasks are finished.
        examples: the largest number of examples per finished task; by default few enough to add less than 5 % to
            training time.
        on_violation: called with one sentence about every run's first violation.
    """

    def __init__(
        self,
        cohort: Cohort,
        epsilon: float,
        approximation: MonitoredApproximation = "diagonal",
        every: int | None = None,
        examples: int | None = None,
        on_violation: Callable[[str], None] | None = None,
    ) -> None:
        require_epsilon(epsilon)
        require_known("monitored approximation", approximation, get_args(MonitoredApproximation))
        require_positive(every=every, examples=examples)
        require(
            approximation == "own" or not isinstance(cohort.algorithm, Partition),
            f"{cohort.algorithm.name} has separate outputs for every task, which are not expanded; "
            f"approximation={approximation!r} was given, use 'own'.",
        )
        self.cohort, self.epsilon, self.every, self.examples = cohort, epsilon, every, examples
        self.on_violation = on_violation
        structures: dict[str, HessianStructure] = {"diagonal": Diagonal(), "kronecker": Kronecker()}
        self.structure = structures.get(approximation)  # None: own
        self.violations: list[LocalityViolation | None] = [None] * len(cohort)
        self._model, self._vectorised_model = (cohort.model(vectorised) for vectorised in (False, True))
        self._vectorised = len(cohort) > 1
        self._group_of_run = [group for group, runs in enumerate(cohort.groups) for _ in range(runs.start, runs.stop)]
        self._data: list[Data] = []  # of every finished task, (groups, n, ...)
        self._all_data: list[Tensor] = []  # x and y of all finished tasks, concatenated, (groups, N, ...)
        self._expansions: Tree = {}  # (runs, T − 1, ...): the parts of all expansions, or θ_o alone
        self._measurements: list[tuple[int, int, Tensor]] = []  # finished, step, (3, runs, T)
        self._first_solution_step = -1

    @torch.no_grad()
    def __call__(self, task: int, epoch: int, state: State, loader: Loader) -> None:
        """Measure at the end of an epoch, before the task is consolidated."""
        require(
            task == len(self._data),
            f"task {task + 1} is training, but this monitor has seen {len(self._data)} tasks end. Use one monitor from "
            "the beginning of one training.",
        )
        last = epoch + 1 == self.cohort.epochs
        if task and (last or (epoch + 1) % (self.every or max(3, task)) == 0):
            self._measure(task, state)
        if last and task + 1 < self.cohort.challenge.tasks:  # nothing follows the last task
            self._finish_task(task, state, loader)

    def curves(self, run: int = 0) -> ErrorCurves:
        """Return the measurements of a run."""
        finished, step = (torch.tensor([m[i] for m in self._measurements], dtype=torch.long) for i in (0, 1))
        values = [m[2][:, run] for m in self._measurements]
        empty = torch.zeros(3, 0, self.cohort.challenge.tasks, dtype=torch.float64)
        return ErrorCurves(finished, step, *(torch.stack(values, 1) if values else empty))

    def assumption(self, run: int = 0) -> LocalityAssumption:
        """Check the locality assumption at the measurements of a run."""
        result = locality_assumption(self.curves(run), self.epsilon)
        violation = result.first_violation
        if violation is None or violation.snapshot or self.structure is None:
            return result
        # At the first task's solution an expansion, if it is finite, has no error: the assumption held there.
        finite = all(bool(leaf[run, 0].isfinite().all()) for leaf in tree.flatten(self._expansions).values())
        step = self._first_solution_step if finite else violation.last_step_inside
        return result._replace(first_violation=violation._replace(last_step_inside=step))

    def summary(self, run: int) -> tuple[str, dict[str, Any]]:
        """Return where a run left an old task's ε-region, and all measurements, for its record in a store."""
        curves = self.curves(run)
        finished = curves.finished.tolist()
        errors = [
            [error if math.isfinite(error) else None for error in row[:tasks]]
            for row, tasks in zip(curves.error.tolist(), finished, strict=True)
        ]
        record = {"epsilon": self.epsilon, "finished": finished, "step": curves.step.tolist(), "errors": errors}
        return str(self.assumption(run)), record

    def _finish_task(self, task: int, state: State, loader: Loader) -> None:
        """Store some of the task's examples and the parts of its expansion; θ is the task's solution."""
        share = max(MIN_EXAMPLES, self.cohort.epochs * loader.examples // TRAINED_PER_EXAMPLE)
        default = MAX_MONITORED_EXAMPLES if self.structure is None else min(MAX_MONITORED_EXAMPLES, share)
        rows = evenly_spaced_indices(loader.examples, self.examples or default).to(loader.x.device)
        # Copies, (groups, n, ...): the loader reuses its memory.
        x, y = (part.unflatten(0, (-1, loader.examples)).index_select(1, rows) for part in (loader.x, loader.y))
        data = Data(self.cohort.transform.normalize(x), y)
        self._data.append(data)
        self._all_data = [torch.cat(parts, 1) for parts in zip(*self._data, strict=True)]
        parts: Tree = {"center": state.params}
        if self.structure is not None:
            parts = self._map_runs(self._expand, (state.params, state.buffers), data)
        if not task:
            self._first_solution_step, count = state.clock, self.cohort.challenge.tasks - 1
            self._expansions = tree.map_tree(lambda leaf: leaf.new_empty(leaf.shape[0], count, *leaf.shape[1:]), parts)
        tree.map_tree(lambda stored, leaf: stored[:, task].copy_(leaf), self._expansions, parts)

    def _expand(self, model: Model, params: Params, buffers: Params, x: Tensor, y: Tensor) -> Tree:
        """Expand one run's loss."""
        risk = Risk.from_model(model.bind(buffers, training=False), params, x, y)
        try:
            return {**expand(risk, 2, self.structure).parts, "buffers": buffers}
        except GlocalError as error:
            raise GlocalError(f"this run cannot be monitored with expansions; use 'own'. {error}") from error

    def _measure(self, task: int, state: State) -> None:
        r"""Store L_o, \hat L_o and ‖θ − θ_o‖ of every run and finished task, and report first violations."""
        values = torch.full((3, len(self.cohort), self.cohort.challenge.tasks), torch.nan, dtype=torch.float64)
        if self.structure is None:
            self._measure_own(task, state, values)
        else:
            parts = tree.map_tree(lambda leaf: leaf[:, :task], self._expansions)
            measured = self._map_runs(self._measure_run, (state.params, parts), self._all_data)["values"]
            values[:, :, :task] = measured.movedim(1, 0)
        self._measurements.append((task, state.clock, values))
        outside = ~(abs_difference(values[1, :, :task], values[0, :, :task]) < self.epsilon).all(1)
        for run in outside.nonzero().flatten().tolist():
            if self.violations[run] is None:
                violation = self.violations[run] = self.assumption(run).first_violation
                if self.on_violation is not None:
                    member = self.cohort.members[run]
                    self.on_violation(f"{member.algorithm.name}, lr {member.lr:g}, seed {member.seed}: {violation}")

    def _map_runs(self, function: Callable[..., Tree], trees: Sequence[Tree], data: Sequence[Tensor]) -> Tree:
        """Return the results of all runs, stacked, of a function of a model, of trees of one run, and of a run's data.

        The runs are mapped with `vmap`, or one at a time after the first failure. Tensors of `data` are per group.
        """
        one_group = len(self.cohort.groups) == 1
        if self._vectorised:
            shared = [part[0] if one_group else part[self._group_of_run] for part in data]
            in_dims = (*(0 for _ in trees), *(None if one_group else 0 for _ in data))
            try:
                return vmap(partial(function, self._vectorised_model), in_dims)(*trees, *shared)
            except (RuntimeError, GlocalError):
                self._vectorised = False
        results = []
        for run, group in enumerate(self._group_of_run):
            arguments = (*(tree.select(part, run) for part in trees), *(part[group] for part in data))
            results.append(function(self._model, *arguments))
        return tree.stack(results)

    def _measure_own(self, task: int, state: State, values: Tensor) -> None:
        """Write the values of the algorithm's own approximation, (3, runs, T)."""
        center = self._expansions["center"]
        for run, group in enumerate(self._group_of_run):
            member, algorithm = state.select(run), self.cohort.members[run].algorithm
            snapshot = Snapshot(task, state.clock, Checkpoint(member.params, member.buffers), member.memory)
            for o, (x, y) in enumerate(self._data):
                values[0, run, o] = own_loss(algorithm, self._model, snapshot, Data(x[group], y[group]), o)
                values[1, run, o] = own_approximation(algorithm, self._model, snapshot, o)
                values[2, run, o] = tree.norm({k: p - center[k][run, o] for k, p in member.params.items()})

    def _measure_run(self, model: Model, params: Params, parts: Tree, x: Tensor, y: Tensor) -> Tree:
        """Return the values of one run by the expansions, (3, finished tasks)."""
        sizes = [data.y.shape[1] for data in self._data]
        passes = sizes if parts["buffers"] else [len(y)]  # without buffers all tasks share one pass
        losses = []
        for o, data in enumerate(zip(x.split(passes), y.split(passes), strict=True)):
            bound = model.bind(tree.select(parts["buffers"], o), training=False)
            chunks = zip(*(part.split(CHUNK_SIZE) for part in data), strict=True)
            losses += [bound.losses(params, *chunk) for chunk in chunks]
        true = torch.stack([part.mean() for part in torch.cat(losses).split(sizes)])
        deltas = {k: params[k] - center for k, center in parts["center"].items()}
        assert self.structure is not None
        product = self.structure.product
        approximate = vmap(lambda stored, delta: evaluate(stored, product, delta))(parts, deltas)
        return {"values": torch.stack([true, approximate, vmap(tree.norm)(deltas)])}
