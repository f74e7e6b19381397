"""How the steps of a cohort are executed: mapped over its runs, captured in a CUDA graph, or run by run.

All three advance the same pure `Program`; they differ in speed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from glocal import tree
from glocal.algorithms.algorithm import Batch, Memory, Step
from glocal.engine.cohort import Cohort, per_run
from glocal.engine.loader import Feed
from glocal.engine.state import State
from glocal.engine.step import Hyper, Program
from glocal.fast.sgd_update import descend
from glocal.fast.step_trace import Recorder, StepOfRuns, pure
from glocal.rng import generator
from glocal.tree import Params, Tree

Tick = Callable[[int], None]  # so many steps were made
BATCH_DIMS = Batch(0, 0, 0, None, None, 0)  # type: ignore[arg-type]
DATA_DIMS = Batch(None, None, 0, None, None, 0)  # type: ignore[arg-type]
STEP_DIMS = Step(BATCH_DIMS, 0, 0, 0, 0, 0)  # type: ignore[arg-type]


class Executor(Protocol):
    """A way to execute a cohort. `state` is advanced in place."""

    note: str
    """What a user should know of how it went, if anything."""

    def before_epoch(self, state: State, epoch: int) -> None:
        """The algorithm's work before an epoch."""
        ...

    def epoch(self, state: State, feed: Feed, epoch: int, tick: Tick) -> Tensor:
        """One pass over the current task; returns the objective at every step, (runs, steps)."""
        ...

    def consolidate(self, state: State, feed: Feed) -> None:
        """The algorithm's work after the task."""
        ...

    def predict(self, state: State, runs: slice, x: Tensor, task: int) -> Tensor:
        """Logits of some neighbouring runs, (runs, n, outputs), in as many equal groups as there are inputs (n, ...)
        in x; those of a group share theirs."""
        ...


class Vectorised:
    """All runs at once: `vmap` over the cohort.

    The runs are independent, so the gradient of the *sum* of their objectives is every run's own gradient, and one
    ordinary backward pass over stacked tensors takes the place of a mapped `grad`.
    """

    note = ""
    """Why it is executed otherwise than it should be."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.program = Program(cohort.algorithm, cohort.model(vectorised=True))
        self.hyper = cohort.hyper()
        self._objective = vmap(self.program.objective, in_dims=(0, 0, 0, 0, BATCH_DIMS))
        self._direction = vmap(self.program.direction, in_dims=(0, 0, 0, 0, 0, BATCH_DIMS))
        self._observe = vmap(self.program.observe, in_dims=(0, 0, STEP_DIMS))
        self._stepping = recorded(self._step, cohort, self.program)

    def before_epoch(self, state: State, epoch: int) -> None:
        if self.program.prepares:
            mapped = vmap(self.program.before_epoch, in_dims=(0, 0, 0, 0, None, None))
            put_in(state, *mapped(state.params, state.buffers, state.memory, self.hyper, epoch, self.cohort.epochs))

    def epoch(self, state: State, feed: Feed, epoch: int, tick: Tick) -> Tensor:
        losses = []
        for i in range(feed.steps):
            losses.append(self.step(state, feed.batch(i)))
            tick(len(self.cohort))
        return torch.stack(losses, 1)

    def step(self, state: State, batch: Batch) -> Tensor:
        return self._stepping(state, self.hyper, batch)

    def _step(self, state: State, hyper: Hyper, batch: Batch) -> Tensor:
        params, names = state.params, list(state.params)
        leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
        with torch.enable_grad():
            losses, buffers, notes = self._objective(leaves, state.buffers, state.memory, hyper, batch)
            gradients = torch.autograd.grad(losses.sum(), [leaves[k] for k in names], allow_unused=True)
        grads = self.program.gradients(params, gradients)
        followed = grads
        if self.program.projects:
            followed, buffers = self._direction(grads, params, buffers, state.memory, hyper, batch)
        seen = move(params, grads, followed, hyper["lr"], watched=self.cohort.algorithm.watches)
        if self.program.observes:
            new = self._observe(state.memory, hyper, Step(batch, *seen, tree.map_tree(torch.detach, notes)))
            state.memory = tree.map_tree(partial(owned, batch), new)
        state.buffers = {k: b.detach() for k, b in buffers.items()}
        return losses.detach()

    def consolidate(self, state: State, feed: Feed) -> None:
        if not self.program.consolidates:
            return
        memories, buffers = [], []
        for group, runs in enumerate(self.cohort.groups):
            data, random = feed.whole(group)
            mapped = vmap(self.program.consolidate, in_dims=(0, 0, 0, 0, DATA_DIMS))
            of = partial(tree.select, index=runs)
            batch = Batch(data.x, data.y, random, feed.task, feed.end, feed.keys_at(feed.steps)[runs])
            made = mapped(of(state.params), of(state.buffers), of(state.memory), of(self.hyper), batch)
            memories.append(made[0])
            buffers.append(made[1])
        state.memory = detached(tree.concatenate(memories))
        put_back(tree.concatenate(buffers), state.buffers)

    def predict(self, state: State, runs: slice, x: Tensor, task: int) -> Tensor:
        groups = x.shape[0]
        of_group: Callable[..., Tensor] = vmap(self.program.predict, in_dims=(0, 0, 0, 0, None, None))
        own = [tree.select(part, runs) for part in (state.params, state.buffers, state.memory, self.hyper)]
        if groups == 1:
            return of_group(*own, x[0], task)
        apart = [tree.map_tree(lambda leaf: leaf.unflatten(0, (groups, -1)), part) for part in own]
        of_all: Callable[..., Tensor] = vmap(of_group, in_dims=(0, 0, 0, 0, 0, None))
        return of_all(*apart, x, task).flatten(0, 1)


class RunByRun:
    """One run after the other, for what cannot be vectorised and for a cohort of one: plain calls, plain autograd."""

    live = False
    """Whether the state of a cohort of one is as it is after every step, for somebody to look at; else after epochs."""

    def __init__(self, cohort: Cohort, note: str = "") -> None:
        self.cohort = cohort
        self.note = note
        self.program = Program(cohort.algorithm, cohort.model(vectorised=False))
        self.hyper = cohort.hyper()
        self._stepping = recorded(self._step, cohort, self.program)

    def before_epoch(self, state: State, epoch: int) -> None:
        if self.program.prepares:
            made = [self._before_epoch_of(state.select(run), run, epoch) for run in range(len(self.cohort))]
            params, memories = zip(*made, strict=True)
            put_in(state, tree.stack(params), tree.stack(memories))

    def _before_epoch_of(self, own: State, run: int, epoch: int) -> tuple[Params, Memory]:
        hyper = tree.select(self.hyper, run)
        return self.program.before_epoch(own.params, own.buffers, own.memory, hyper, epoch, self.cohort.epochs)

    def epoch(self, state: State, feed: Feed, epoch: int, tick: Tick) -> Tensor:
        losses = []
        for run in range(len(self.cohort)):
            own, held = state.select(run), (state.params, state.buffers, state.memory)
            with self._network_randomness(run, feed, epoch):
                losses.append(
                    self._epoch_of(own, run, feed, partial(self._show, state, own, tick) if self.live else tick)
                )
            state.params, state.buffers, state.memory = held
            put_back(own.as_tree(), tree.select(state.as_tree(), run))
        return torch.stack(losses)

    def _show(self, state: State, own: State, tick: Tick, steps: int) -> None:
        """A step is made: the cohort's state is the run's until the epoch ends."""
        parts = own.params, own.buffers, own.memory
        state.params, state.buffers, state.memory = (tree.map_tree(lambda t: t.unsqueeze(0), part) for part in parts)
        tick(steps)

    def step_of(self, state: State, run: int, batch: Batch) -> Tensor:
        """One step of one run of a cohort."""
        own = state.select(run)
        loss = self._stepping(own, tree.select(self.hyper, run), batch)
        put_back(own.as_tree(), tree.select(state.as_tree(), run))
        return loss

    def _epoch_of(self, own: State, run: int, feed: Feed, tick: Tick) -> Tensor:
        hyper = tree.select(self.hyper, run)
        losses = []
        for batch in feed.batches_of(run):
            losses.append(self._stepping(own, hyper, batch))
            tick(1)
        return torch.stack(losses)

    def _step(self, own: State, hyper: Hyper, batch: Batch) -> Tensor:
        """`own` are views into the cohort's state."""
        leaves = {k: p.detach().requires_grad_() for k, p in own.params.items()}
        with torch.enable_grad():
            loss, buffers, notes = self.program.objective(leaves, own.buffers, own.memory, hyper, batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            grads = self.program.gradients(own.params, gradients)
            followed = grads
            if self.program.projects:
                followed, buffers = self.program.direction(grads, own.params, buffers, own.memory, hyper, batch)
            seen = move(own.params, grads, followed, hyper["lr"], watched=self.cohort.algorithm.watches)
            if self.program.observes:
                step = Step(batch, *seen, tree.map_tree(torch.detach, notes))
                own.memory = self.program.observe(own.memory, hyper, step)
            own.buffers = {k: b.detach() for k, b in buffers.items()}
            return loss.detach()

    def consolidate(self, state: State, feed: Feed) -> None:
        if not self.program.consolidates:
            return
        memories, buffers = [], []
        for group, runs in enumerate(self.cohort.groups):
            data, random = feed.whole(group)
            for run in range(runs.start, runs.stop):
                own = state.select(run)
                hyper = tree.select(self.hyper, run)
                batch = Batch(
                    data.x, data.y, random[run - runs.start], feed.task, feed.end, feed.keys_at(feed.steps)[run]
                )
                with self._network_randomness(run, feed, self.cohort.epochs):
                    made = self.program.consolidate(own.params, own.buffers, own.memory, hyper, batch)
                memories.append(made[0])
                buffers.append(made[1])
        state.memory = detached(tree.stack(memories))
        put_back(tree.stack(buffers), state.buffers)

    def predict(self, state: State, runs: slice, x: Tensor, task: int) -> Tensor:
        outputs, each = [], (runs.stop - runs.start) // x.shape[0]
        for run in range(runs.start, runs.stop):
            own, seen = state.select(run), x[(run - runs.start) // each]
            hyper = tree.select(self.hyper, run)
            outputs.append(self.program.predict(own.params, own.buffers, own.memory, hyper, seen, task))
        return torch.stack(outputs)

    @contextmanager
    def _network_randomness(self, run: int, feed: Feed, epoch: int) -> Iterator[None]:
        """Dropout and the like draw from torch's global stream: give every run and epoch one of its own."""
        device = self.cohort.device
        seed = generator(self.cohort.members[run].seed, "network", int(feed.task), epoch).initial_seed()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


def recorded(step: StepOfRuns, cohort: Cohort, program: Program) -> StepOfRuns:
    """The step, recorded when it has been made often: on a CPU, whose time goes to small operations' bookkeeping."""
    return Recorder(step) if cohort.device.type == "cpu" and pure(program.model.module) else step


def move(
    params: Params, grads: Params, followed: Params, lr: Tensor, watched: bool
) -> tuple[Params, Params, Params, Params]:
    """θ ← θ − lr · direction, in place, where there is one; lr one number, or one a run. Returns the gradient, the
    direction, the move and the new θ for those who watch, else nothing."""
    rate = -lr if watched else lr
    rates = {k: per_run(rate, p) if rate.dim() else rate for k, p in params.items()}
    if not watched:
        for k, direction in followed.items():
            descend(params[k], direction, rates[k])
        return {}, {}, {}, {}
    moved = {k: followed[k] * rates[k] for k in params}
    for k, p in params.items():
        p.add_(moved[k])
    return grads, followed, moved, params


def put_in(state: State, params: Params, memory: Memory) -> None:
    """New parameters and a new memory, where the old ones are held if they fit: a captured graph looks there again."""
    put_back(params, state.params)
    memory, held = detached(memory), tree.flatten(state.memory)
    if {k: v.shape for k, v in tree.flatten(memory).items()} == {k: v.shape for k, v in held.items()}:
        put_back(memory, state.memory)
    else:
        state.memory = memory


def put_back(new: Tree, held: Tree) -> None:
    """Write a tree's leaves to where they are held, but for those that were changed in place."""
    leaves = tree.flatten(held)
    moved = {name: leaf for name, leaf in tree.flatten(new).items() if not same_place(leaf, leaves[name])}
    storages = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    # A leaf that now shows what another one held must be read before that one is written.
    safe = {k: v.clone() if v.untyped_storage().data_ptr() in storages else v for k, v in moved.items()}
    for name, leaf in safe.items():
        leaves[name].copy_(leaf)


def same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def owned(batch: Batch, leaf: Tensor) -> Tensor:
    """A leaf of the memory with storage of its own: a constant under `vmap` is one tensor seen by all runs."""
    shared = leaf.shape[0] > 1 and leaf.stride(0) == 0
    fed = (batch.task.data_ptr(), batch.progress.data_ptr(), batch.key.data_ptr())
    return leaf.clone() if shared or leaf.data_ptr() in fed else leaf


def detached(memory: Tree) -> Tree:
    """Leaves with storage of their own: what `vmap` returns for a constant is one tensor seen by all runs."""
    return tree.map_tree(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), memory)
