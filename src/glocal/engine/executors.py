r"""Executors run a cohort's steps: all runs at once under `vmap`, or one run after the other.

Both map the same `step` and differ only in speed. An acceleration registered under `step.*` may compile it: a trace on
a CPU, a CUDA graph on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from glocal import accelerate, tree
from glocal.algorithms.algorithm import Batch, Memory
from glocal.engine.cohort import Cohort
from glocal.engine.loader import Loader
from glocal.engine.state import State
from glocal.engine.step import UNCHANGED, Hyper, Program, step, unmapped
from glocal.rng import generator, global_generator
from glocal.tree import Tree

CompiledStep: TypeAlias = Callable[[State, Hyper, Batch], Tensor]
Stream: TypeAlias = tuple[str | int, ...] | None
Tick: TypeAlias = Callable[[int], None]  # counts steps of single runs, for progress bars
OnStep: TypeAlias = Callable[[State, int], None]  # is given the state and the number of steps taken in this epoch


class Executor(ABC):
    """Runs the algorithm's methods on all runs of a cohort; the state is advanced in place."""

    vectorised: ClassVar[bool] = False
    """Whether the step is mapped over all runs at once."""
    name: str = ""
    note: str = ""
    """What a user should know about how the cohort was executed; empty if all went as expected."""

    def __init__(self, cohort: Cohort, checked: bool = False) -> None:
        self.cohort = cohort
        self.program = Program(cohort.algorithm, cohort.model(self.vectorised), cohort.optimizer, checked)
        self.hyper = cohort.hyper()
        self.step: CompiledStep = partial(step, self.program, map=vmap if self.vectorised else unmapped)
        compile_step = accelerate.find("step.compile")
        if compile_step is not None:
            self.step = compile_step(self.step, self.program.model.module, cohort.device)

    @abstractmethod
    def epoch(self, state: State, loader: Loader, epoch: int, tick: Tick, on_step: OnStep | None = None) -> Tensor:
        """Make one pass over the current task; return the objective at every step, (runs, steps).

        `on_step` is called after every step; it sees the live state and must not change it.
        """

    @abstractmethod
    def over_runs(
        self, function: Callable[..., Any], runs: slice, trees: Sequence[Tree], *shared: Any, stream: Stream = None
    ) -> Any:
        """Call a function for each of some neighbouring runs and stack the results.

        The function takes one run's entries of `trees`, then `shared`; parts of its result that are an argument itself
        come back as `UNCHANGED`. `stream` seeds torch's global generator, for modules which draw from it.
        """

    def arrange(self, state: State) -> None:
        """Convert a state, in place, to the tensor layout that this executor is fastest with."""
        return

    def before_epoch(self, state: State, epoch: int) -> None:
        """Call the algorithm's `before_epoch`."""
        trees = state.params, state.buffers, state.memory, self.hyper
        runs = slice(0, len(self.cohort))
        params, memory = self.over_runs(
            self.program.before_epoch, runs, trees, epoch, self.cohort.epochs, stream=("before epoch", state.clock)
        )
        if params != UNCHANGED:
            copy_into_(params, state.params)
        if memory != UNCHANGED:
            state.memory = replace_memory(memory, state.memory)

    def consolidate(self, state: State, loader: Loader, limit: int | None = None) -> None:
        """Call the algorithm's `consolidate` with all data of the finished task, or its first `limit` examples."""
        parts = []
        for group, runs in enumerate(self.cohort.groups):
            trees = (state.params, state.buffers, state.memory, self.hyper, {"key": loader.tensors["keys"][:, -1]})
            data, stream = loader.whole(group, limit), (int(loader.task), self.cohort.epochs)
            parts.append(self.over_runs(self.program.consolidate, runs, trees, data, stream=stream))
        memories, buffers = zip(*parts, strict=True)
        if any(memory != UNCHANGED for memory in memories):
            state.memory = with_own_storage(self._concatenate(memories, state.memory))
        copy_into_(self._concatenate(buffers, state.buffers), state.buffers)

    def _concatenate(self, parts: Sequence[Any], old: Tree) -> Tree:
        """Concatenate the trees of all groups of runs; what is unchanged is that of `old`."""
        groups = zip(parts, self.cohort.groups, strict=True)
        return tree.concatenate([tree.select(old, runs) if part == UNCHANGED else part for part, runs in groups])

    def predict(self, state: State, runs: slice, x: Tensor, task: int) -> Tensor:
        """Return logits of neighbouring runs, (runs, n, outputs), for inputs x of a task, (groups, n, ...).

        The runs form as many equal groups as x has; those of a group share their inputs.
        """
        trees, size = (state.params, state.buffers, state.memory, self.hyper), (runs.stop - runs.start) // x.shape[0]
        parts = [slice(runs.start + i * size, runs.start + (i + 1) * size) for i in range(x.shape[0])]
        outputs = [self.over_runs(self.program.predict, p, trees, x[i], task) for i, p in enumerate(parts)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Vectorised(Executor):
    """All runs at once under `vmap`."""

    vectorised = True

    def epoch(self, state: State, loader: Loader, epoch: int, tick: Tick, on_step: OnStep | None = None) -> Tensor:
        losses = []
        for i in range(loader.steps):
            losses.append(self.step(state, loader.with_scheduled_lr(self.hyper, i), loader.batch(i)))
            tick(len(self.cohort))
            if on_step is not None:
                on_step(state, i + 1)
        return torch.stack(losses, 1)

    def over_runs(
        self, function: Callable[..., Any], runs: slice, trees: Sequence[Tree], *shared: Any, stream: Stream = None
    ) -> Any:
        def marked(*arguments: Any) -> Any:
            return _mark_unchanged(function(*arguments), arguments)

        mapped = vmap(marked, in_dims=(*(0 for _ in trees), *(None for _ in shared)))
        return mapped(*(tree.select(part, runs) for part in trees), *shared)

    def predict(self, state: State, runs: slice, x: Tensor, task: int) -> Tensor:
        """All groups at once: on a GPU a call costs more than the work in it."""
        groups = x.shape[0]
        if groups == 1:
            return super().predict(state, runs, x, task)
        trees = [tree.select(part, runs) for part in (state.params, state.buffers, state.memory, self.hyper)]
        grouped = [tree.map_tree(lambda leaf: leaf.unflatten(0, (groups, -1)), part) for part in trees]
        of_group: Callable[..., Tensor] = vmap(self.program.predict, in_dims=(0, 0, 0, 0, None, None))
        of_all: Callable[..., Tensor] = vmap(of_group, in_dims=(0, 0, 0, 0, 0, None))
        return of_all(*grouped, x, task).flatten(0, 1)


class Sequential(Executor):
    """One run after the other: for a cohort of one, and for what cannot be vectorised."""

    def epoch(self, state: State, loader: Loader, epoch: int, tick: Tick, on_step: OnStep | None = None) -> Tensor:
        losses = []
        for run in range(len(self.cohort)):
            run_state = state.select(run)
            hyper = tree.select(self.hyper, run)
            with self._network_randomness(run, (int(loader.task), epoch)):
                for i, batch in enumerate(loader.batches_of(run)):
                    losses.append(self.step(run_state, loader.with_scheduled_lr(hyper, i, run), batch))
                    tick(1)
                    if on_step is not None:
                        stacked = tree.map_tree(lambda leaf: leaf.unsqueeze(0), run_state.as_tree())
                        on_step(State.from_tree(stacked, run_state.clock), i + 1)
            copy_into_(run_state.as_tree(), tree.select(state.as_tree(), run))
        return torch.stack(losses).view(len(self.cohort), -1)

    def over_runs(
        self, function: Callable[..., Any], runs: slice, trees: Sequence[Tree], *shared: Any, stream: Stream = None
    ) -> Any:
        results, unchanged = [], []
        for run in range(runs.start, runs.stop):
            arguments = [tree.select(part, run) for part in trees]
            with nullcontext() if stream is None else self._network_randomness(run, stream):
                results.append(function(*arguments, *shared))
            unchanged.append(_mark_unchanged(results[-1], arguments))
        if not isinstance(results[0], tuple):
            return _stack(results)
        marks = zip(*unchanged, strict=True)
        pairs = zip(zip(*results, strict=True), marks, strict=True)
        return tuple(UNCHANGED if all(m == UNCHANGED for m in marked) else _stack(parts) for parts, marked in pairs)

    def _network_randomness(self, run: int, stream: tuple[str | int, ...]) -> AbstractContextManager[None]:
        """Seed torch's global generator, which an LSTM's dropout and the like draw from, for one run and epoch."""
        run_generator = generator(self.cohort.members[run].seed, "network", *stream)
        return global_generator(run_generator, self.cohort.device)


def _mark_unchanged(result: Any, arguments: Sequence[Any]) -> Any:
    """Replace parts of a result that are an argument itself by `UNCHANGED`: updated in place or not at all."""
    if not isinstance(result, tuple):
        return result
    return tuple(UNCHANGED if any(part is argument for argument in arguments) else part for part in result)


def _stack(results: Sequence[Any]) -> Any:
    """Stack equal results of several runs: tensors, trees of tensors, or tuples of these."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(list(results))
    if isinstance(first, tuple):
        return tuple(_stack(parts) for parts in zip(*results, strict=True))
    return tree.stack(results)


def replace_memory(new: Memory, old: Memory) -> Memory:
    """Return the new memory, in the tensors of the old one if all shapes agree: a captured CUDA graph reads those."""
    new = with_own_storage(new)
    shapes = [{k: v.shape for k, v in tree.flatten(memory).items()} for memory in (new, old)]
    if shapes[0] != shapes[1]:
        return new
    copy_into_(new, old)
    return old


def copy_into_(source: Tree, target: Tree) -> None:
    """Copy a tree's leaves into those of another tree, except for leaves that are the same memory."""
    leaves = tree.flatten(target)
    places = {name: (leaf.data_ptr(), leaf.stride()) for name, leaf in leaves.items()}
    sources = tree.flatten(source)
    moved = {name: leaf for name, leaf in sources.items() if (leaf.data_ptr(), leaf.stride()) != places[name]}
    storages = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    # A source that views some target leaf must be read before that leaf is overwritten.
    safe = {k: v.clone() if v.untyped_storage().data_ptr() in storages else v for k, v in moved.items()}
    for name, leaf in safe.items():
        leaves[name].copy_(leaf)


def with_own_storage(memory: Tree) -> Tree:
    """Return contiguous copies of all leaves: what `vmap` returns for a constant is one tensor shared by all runs."""
    return tree.map_tree(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), memory)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


@cache
def keep_freed_memory() -> None:
    """Tell glibc not to hand large blocks back to the system after every step.

    A step of a cohort allocates tensors of tens of megabytes and frees them again; by default their pages are given
    back and faulted in anew every time, which costs a tenth of the step. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_TOP_PAD, 1 << 26)
