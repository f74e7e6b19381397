"""The vectorised step inside a captured CUDA graph: data, draws, gradient, projection and update without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from glocal import tree
from glocal.engine.cohort import Cohort
from glocal.engine.executors import OnStep, Tick, Vectorised, copy_into_
from glocal.engine.loader import Loader
from glocal.engine.state import State

WARM_UP = 3


class Graphed(Vectorised):
    """Replays one graph a step. A graph holds addresses: it is captured anew when a tensor it uses has moved."""

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._cursor = torch.zeros((), dtype=torch.long, device=cohort.device)
        self._losses = torch.zeros(0, len(cohort), device=cohort.device)

    def epoch(self, state: State, loader: Loader, epoch: int, tick: Tick, on_step: OnStep | None = None) -> Tensor:
        if self.note or on_step is not None:
            return super().epoch(state, loader, epoch, tick, on_step)
        if self._losses.shape[0] != loader.steps:
            self._losses = self._losses.new_zeros(loader.steps, len(self.cohort))
        try:
            graphs = {size: self._graph(state, loader, size) for size in {loader.size(i) for i in range(loader.steps)}}
        except RuntimeError as error:
            self.note = f"step by step, because it cannot be captured in a CUDA graph: {str(error).splitlines()[0]}"
            torch.cuda.synchronize()
            return super().epoch(state, loader, epoch, tick, on_step)
        self._cursor.zero_()
        for i in range(loader.steps):
            graphs[loader.size(i)].replay()
            tick(len(self.cohort))
        return self._losses.T.contiguous()

    def _graph(self, state: State, loader: Loader, size: int) -> torch.cuda.CUDAGraph:
        used = [*tree.flatten(state.as_tree()).values(), *loader.tensors.values()]
        used.append(self._losses)
        key = (size, *(t.data_ptr() for t in used), *(n for t in used for n in t.shape))
        if key not in self._graphs:
            if len(self._graphs) > 8:
                self._graphs.clear()
            self._graphs[key] = self._capture(state, loader, size)
        return self._graphs[key]

    def _capture(self, state: State, loader: Loader, size: int) -> torch.cuda.CUDAGraph:
        """Capturing needs a few real steps first, which must leave no trace."""
        before = tree.map_tree(torch.clone, state.as_tree())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._cursor.zero_()
                    self._advance(state, loader, size)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                self._advance(state, loader, size)
        finally:
            torch.cuda.current_stream().wait_stream(side)
            copy_into_(before, state.as_tree())
        return graph

    def _advance(self, state: State, loader: Loader, size: int) -> None:
        """A step that leaves every tensor of the state where it was."""
        own = State.from_tree(dict(state.as_tree()), state.clock)
        losses = self.step(own, loader.scheduled(self.hyper, self._cursor), loader.batch_at(self._cursor, size))
        self._losses.index_copy_(0, self._cursor.view(1), losses.view(1, -1))
        copy_into_(own.as_tree(), state.as_tree())
        self._cursor += 1
