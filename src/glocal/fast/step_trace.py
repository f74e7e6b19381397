"""Trace steps that are taken often, and run the trace from then on (`op_trace`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from glocal import tree
from glocal.algorithms.algorithm import Batch
from glocal.engine.state import State
from glocal.engine.step import Hyper
from glocal.fast.op_trace import Function, copy_with_strides, trace

StepOfRuns: TypeAlias = Callable[[State, Hyper, Batch], Tensor]


class StepTracer:
    """A step that is traced once it has been taken often; results stay the same bit by bit.

    There is one trace per combination of shapes: the last batch of an epoch may be short, a memory may have grown. A
    step that cannot be traced, or whose trace gives other results, keeps running as it is. Traces are compared with the
    step again in every task, because code may ask for the task in ways that cannot be traced.
    """

    min_calls, min_calls_after_first = 500, 30
    """Steps of one shape after which it is traced: tracing takes a second the first time and a tenth of one later."""

    def __init__(self, step: StepOfRuns) -> None:
        self._step = step
        self._made: dict[Hashable, int] = {}
        self._traces: dict[Hashable, Function | None] = {}
        self._compared: dict[Hashable, int] = {}  # the last task in which a trace was compared with the step

    def __call__(self, state: State, hyper: Hyper, batch: Batch) -> Tensor:
        leaves = tree.flatten(state.parts())
        arguments = [*leaves.values(), *tree.flatten(hyper).values(), *(t for t in batch if t is not None)]
        shapes = (*leaves, *((t.shape, t.stride(), t.dtype) for t in arguments))
        replay = self._traces.get(shapes)
        if replay is None:
            enough = self.min_calls_after_first if any(self._traces.values()) else self.min_calls
            if shapes not in self._traces and self._count(shapes) >= min(enough, self.min_calls):
                self._traces[shapes] = self._trace(state, hyper, arguments)
                self._compared[shapes] = int(batch.task)
            return self._step(state, hyper, batch)
        if self._compared[shapes] != int(batch.task):
            self._compared[shapes] = int(batch.task)
            if not bitwise_equal(self._of_tensors(state, hyper), replay, arguments):
                self._traces[shapes] = None
                return self._step(state, hyper, batch)
        with torch.no_grad():
            losses, *new = replay(arguments)
        _put(state, new)
        return losses

    def _count(self, shapes: Hashable) -> int:
        if shapes not in self._made and len(self._made) > 64:  # a memory that grows at every step, say
            self._made.clear()
            self._traces.clear()
        self._made[shapes] = self._made.get(shapes, 0) + 1
        return self._made[shapes]

    def _of_tensors(self, example: State, hyper: Hyper) -> Function:
        """Return the step as a function of a list of tensors."""
        names = list(tree.flatten(example.parts()))

        def step(arguments: Sequence[Tensor]) -> list[Tensor]:
            state, rest = replace(example), iter(arguments[len(names) :])
            _put(state, arguments[: len(names)])
            losses = self._step(state, tree.map_tree(lambda _: next(rest), hyper), Batch(*rest))
            new = tree.flatten(state.parts())
            return [losses, *(new[name] for name in names)]

        return step

    def _trace(self, example: State, hyper: Hyper, arguments: list[Tensor]) -> Function | None:
        """Return the trace, or None if the step cannot be traced or its trace gives other results."""
        step = self._of_tensors(example, hyper)
        try:
            recorded = trace(step, arguments)
            return recorded if bitwise_equal(step, recorded, arguments) else None
        except Exception:
            return None


def _put(state: State, leaves: Iterable[Tensor]) -> None:
    remaining = iter(leaves)
    vars(state).update(tree.map_tree(lambda _: next(remaining), state.parts()))


def compile_step(step: StepOfRuns, module: nn.Module, device: torch.device) -> StepOfRuns:
    """Trace the step once it has been taken often, on a CPU, where dispatch takes most of the time."""
    return StepTracer(step) if device.type == "cpu" and is_traceable(module) else step


def bitwise_equal(one: Function, other: Function, given: Sequence[Tensor]) -> bool:
    """Return whether two functions return the same and leave the same in their arguments, bit by bit."""

    def results(function: Function) -> list[Tensor]:
        arguments = [copy_with_strides(t) for t in given]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return [*function(arguments), *arguments]

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)

    return all(same(a, b) for a, b in zip(results(one), results(other), strict=True))


def is_traceable(network: nn.Module) -> bool:
    """Return whether all modules are torch's or ours, without hooks: others may behave differently at every call."""
    for part in network.modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        trusted = type(part).__module__.split(".")[0] in ("glocal", "torch")
        if not trusted or isinstance(part, torch.jit.ScriptModule) or any(hooks) or "forward" in vars(part):
            return False
    return True
