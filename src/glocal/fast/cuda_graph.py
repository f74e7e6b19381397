"""Steps inside captured CUDA graphs: data, draws, gradient, projection and update without the host.

A graph holds addresses: it is captured anew when a tensor that it uses has moved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from glocal import tree
from glocal.engine.choose import Ladder
from glocal.engine.cohort import Cohort
from glocal.engine.executors import OnStep, Sequential, Tick, Vectorised, copy_into_
from glocal.engine.loader import Loader
from glocal.engine.state import State
from glocal.errors import first_line, require
from glocal.fast import channels_last

T = TypeVar("T")
Advance: TypeAlias = Callable[[State, Loader, int], Tensor]
"""A step on the batch at the cursor, of a given size; returns the losses."""
WARM_UP = 3
MAX_GRAPHS = 8
"""Graphs that are kept for one run or cohort."""
MAX_STREAMS = 10
"""Runs that a GPU works on at the same time."""


class Graphs:
    """The captured steps of one state, and where they leave their losses.

    Libraries keep a workspace for every stream: graphs that are replayed at the same time must be captured on different
    streams.
    """

    def __init__(self, runs: int, stream: torch.cuda.Stream) -> None:
        self._stream, device = stream, stream.device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.losses = torch.zeros(0, runs, device=device)

    def prepare(self, advance: Advance, state: State, loader: Loader) -> list[torch.cuda.CUDAGraph]:
        """Return the graph of every step of an epoch, captured where necessary; the next replay is the first step."""
        if self.losses.shape[0] != loader.steps:
            self.losses = self.losses.new_zeros(loader.steps, self.losses.shape[1])
        sizes = [loader.size(i) for i in range(loader.steps)]
        graphs = {size: self._graph(advance, state, loader, size) for size in set(sizes)}
        self.cursor.zero_()
        return [graphs[size] for size in sizes]

    def _graph(self, advance: Advance, state: State, loader: Loader, size: int) -> torch.cuda.CUDAGraph:
        used = [*tree.flatten(state.as_tree()).values(), *loader.tensors.values(), self.losses]
        key = (size, *(t.data_ptr() for t in used), *(n for t in used for n in t.shape))
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = self._capture(advance, state, loader, size)
        return self._graphs[key]

    def _capture(self, advance: Advance, state: State, loader: Loader, size: int) -> torch.cuda.CUDAGraph:
        """Capturing needs a few real steps first, which must leave no trace."""
        before = tree.map_tree(torch.clone, state.as_tree())
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        drawn = torch.cuda.get_rng_state(self.cursor.device)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    self.cursor.zero_()
                    self._step(advance, state, loader, size)
            current.wait_stream(self._stream)
            require(drawn.equal(torch.cuda.get_rng_state(self.cursor.device)), "it draws from torch's global generator")
            with without_garbage_collection(), torch.cuda.graph(graph, stream=self._stream):
                self._step(advance, state, loader, size)
        except BaseException:
            release_generator(self.cursor.device)
            raise
        finally:
            current.wait_stream(self._stream)
            copy_into_(before, state.as_tree())
        return graph

    def _step(self, advance: Advance, state: State, loader: Loader, size: int) -> None:
        """A step that leaves every tensor of the state where it was."""
        own = State.from_tree(dict(state.as_tree()), state.clock)
        losses = advance(own, loader, size)
        self.losses.index_copy_(0, self.cursor.view(1), losses.view(1, -1))
        copy_into_(own.as_tree(), state.as_tree())
        self.cursor += 1


class GraphedVectorised(Vectorised):
    """All runs in one graph."""

    capturable = True

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        self._graphs = Graphs(len(cohort), torch.cuda.Stream(cohort.device))

    def arrange(self, state: State) -> None:
        channels_last.arrange(state)

    def epoch(self, state: State, loader: Loader, epoch: int, tick: Tick, on_step: OnStep | None = None) -> Tensor:
        graphs = [] if on_step else captured(self, lambda: self._graphs.prepare(self._advance, state, loader))
        if not graphs:
            return super().epoch(state, loader, epoch, tick, on_step)
        for graph in graphs:
            graph.replay()
            tick(len(self.cohort))
        return self._graphs.losses.T.contiguous()

    def _advance(self, state: State, loader: Loader, size: int) -> Tensor:
        cursor = self._graphs.cursor
        return self.step(state, loader.with_scheduled_lr(self.hyper, cursor), loader.batch_at(cursor, size))


class GraphedRuns(Sequential):
    """A graph for every run, replayed on several streams at the same time."""

    capturable = True

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        self._streams = [torch.cuda.Stream(cohort.device) for _ in range(min(MAX_STREAMS, len(cohort)))]
        self._graphs = [Graphs(1, self._stream(run)) for run in range(len(cohort))]

    def _stream(self, run: int) -> torch.cuda.Stream:
        return self._streams[run % len(self._streams)]

    def arrange(self, state: State) -> None:
        if self.cohort.precision != "fp32":  # cuDNN's kernels for tensor cores convert images to channels-last
            channels_last.arrange(state)

    def epoch(self, state: State, loader: Loader, epoch: int, tick: Tick, on_step: OnStep | None = None) -> Tensor:
        def prepare(run: int) -> list[torch.cuda.CUDAGraph]:
            return self._graphs[run].prepare(self._advance(run), state.select(run), loader)

        graphs = [] if on_step else captured(self, lambda: [prepare(run) for run in range(len(self.cohort))])
        if not graphs:
            return super().epoch(state, loader, epoch, tick, on_step)
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for of_runs in zip(*graphs, strict=True):
            for run, graph in enumerate(of_runs):
                with torch.cuda.stream(self._stream(run)):
                    graph.replay()
            tick(len(self.cohort))
        for stream in self._streams:
            current.wait_stream(stream)
        return torch.cat([graphs.losses.T for graphs in self._graphs])

    def _advance(self, run: int) -> Advance:
        hyper = tree.select(self.hyper, run)

        def advance(state: State, loader: Loader, size: int) -> Tensor:
            cursor = self._graphs[run].cursor
            batch = loader.batch_at(cursor, size, slice(run, run + 1))
            own = batch._replace(x=batch.x[0], y=batch.y[0], key=batch.key[0])
            return self.step(state, loader.with_scheduled_lr(hyper, cursor, run), own)

        return advance


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage: destroying an old graph, say, while another is captured makes the capture fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def release_generator(device: torch.device) -> None:
    """Let torch's global generator draw again: a failed capture leaves it as if the capture went on."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def captured(executor: GraphedVectorised | GraphedRuns, capture: Callable[[], list[T]]) -> list[T]:
    """Return what was captured; after a failure nothing, then and later, and the executor notes it."""
    if not executor.capturable:
        return []
    try:
        return capture()
    except Exception as error:
        executor.capturable = False
        executor.note = f"step by step, because it cannot be captured in a CUDA graph: {first_line(error)}"
        torch.cuda.synchronize()
        return []


def captured_executors() -> Ladder:
    """Return executors that capture their steps, by name; those that are fast more often come first."""
    return {
        "vectorised in a CUDA graph": GraphedVectorised,
        "in one CUDA graph per run": GraphedRuns,
    }
