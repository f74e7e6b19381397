"""Steps that are made often are recorded, and replayed from then on (`recording`)."""

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
from glocal.fast.op_trace import Function, copied, record

StepOfRuns: TypeAlias = Callable[[State, Hyper, Batch], Tensor]

OFTEN, AGAIN = 500, 30
"""Steps of one shape after which it is recorded, and after which another one is: recording takes a second at first,
later a tenth."""


class Recorder:
    """A step, the same to the last bit, that takes far less time once it has been made often.

    Shapes decide which recording is replayed: an epoch's last batch may be short, a memory may have grown. What cannot
    be recorded, or would come out differently, goes on being made as it was.
    """

    often, again = OFTEN, AGAIN

    def __init__(self, step: StepOfRuns) -> None:
        self._step = step
        self._made: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, Function | None] = {}

    def __call__(self, state: State, hyper: Hyper, batch: Batch) -> Tensor:
        held = tree.flatten(state.parts())
        given = [*held.values(), *hyper.values(), *batch]
        shapes = (*held, *((t.shape, t.stride(), t.dtype) for t in given))
        replay = self._recordings.get(shapes)
        if replay is None:
            if shapes not in self._recordings and self._count(shapes) >= self._enough():
                self._recordings[shapes] = self._record(state, hyper, given)
            return self._step(state, hyper, batch)
        with torch.no_grad():
            losses, *new = replay(given)
        _put(state, new)
        return losses

    def _enough(self) -> int:
        return min(self.often, self.again) if any(self._recordings.values()) else self.often

    def _count(self, shapes: Hashable) -> int:
        if shapes not in self._made and len(self._made) > 64:  # a memory that grows at every step, say
            self._made.clear()
            self._recordings.clear()
        self._made[shapes] = self._made.get(shapes, 0) + 1
        return self._made[shapes]

    def _record(self, like: State, hyper: Hyper, given: list[Tensor]) -> Function | None:
        """The recording, if there can be one and it does what the step does."""
        names = list(tree.flatten(like.parts()))

        def step(given: Sequence[Tensor]) -> list[Tensor]:
            state, rest = replace(like), given[len(names) :]
            _put(state, given[: len(names)])
            losses = self._step(state, dict(zip(hyper, rest, strict=False)), Batch(*rest[len(hyper) :]))
            new = tree.flatten(state.parts())
            return [losses, *(new[name] for name in names)]

        try:
            recorded = record(step, given)
            return recorded if alike(step, recorded, given) else None
        except Exception:
            return None


def _put(state: State, leaves: Iterable[Tensor]) -> None:
    remaining = iter(leaves)
    new = tree.map_tree(lambda _: next(remaining), state.parts())
    state.params, state.buffers, state.memory = new["params"], new["buffers"], new["memory"]
    state.optimizer = new.get("optimizer", {})


def compile_step(step: StepOfRuns, module: nn.Module, device: torch.device) -> StepOfRuns:
    """Trace the step once it has been taken often, on a CPU, where dispatch takes most of the time."""
    return Recorder(step) if device.type == "cpu" and pure(module) else step


def alike(one: Function, other: Function, given: Sequence[Tensor]) -> bool:
    """Whether two functions give the same numbers and leave the same in their arguments, to the last bit."""

    def results(function: Function) -> list[Tensor]:
        own = [copied(t) for t in given]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return [*function(own), *own]

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)

    return all(same(a, b) for a, b in zip(results(one), results(other), strict=True))


def pure(network: nn.Module) -> bool:
    """Whether all of a network's parts are known to do the same at every call, and to draw at random by torch alone:
    they are torch's and ours, and nobody's own code hangs on them."""
    return all(_known(part) for part in network.modules())


def _known(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    ours = type(part).__module__.split(".")[0] in ("glocal", "torch") and not isinstance(part, torch.jit.ScriptModule)
    return ours and not any(hooks) and "forward" not in vars(part)
