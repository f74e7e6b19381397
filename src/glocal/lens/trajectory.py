"""The way of a run: θ, and the memory beside it, between tasks, after epochs, and after steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glocal import tree
from glocal.algorithms.algorithm import Algorithm, Memory
from glocal.engine.cohort import Cohort
from glocal.engine.loader import Feed
from glocal.engine.loop import Execution, Progress, Silent, Snapshot, train
from glocal.engine.state import State
from glocal.errors import GlocalError, require
from glocal.lens.subject import CHUNK, Point, Subject, of_run, some_examples
from glocal.networks.model import Model


class Moment(NamedTuple):
    """Where a run is: θ with the tasks finished and the steps made by then (−1: not known), and its memory."""

    finished: int
    step: int
    point: Point
    memory: Memory = {}  # noqa: RUF012 - nobody writes to it


@dataclass(frozen=True)
class Trajectory:
    """A run that was watched. Every end of a task is two moments with the same θ: with M as it was in training, and as
    the beginning of the next task, with one finished task and what was consolidated more."""

    subject: Subject
    algorithm: Algorithm
    model: Model
    moments: Sequence[Moment]


def moments_of(subject: Subject) -> list[Moment]:
    """θ_0, θ_1, …, each with the tasks finished by then."""
    return [Moment(t, -1, point) for t, point in enumerate(subject.solutions)]


def record(
    cohort: Cohort,
    every: int = 1,
    examples: int = CHUNK,
    execution: Execution = "auto",
    progress: Progress | None = None,
    steps: int | None = None,
) -> list[Trajectory]:
    """Train a cohort to the end and keep every run's θ and M: between tasks, and in a task after every `every` epochs
    and the last (0: between tasks alone); after every so many `steps` of an epoch too, where that is said (on a CPU;
    and of several runs if they can be vectorised).

    L_o is taken on at most `examples` training examples of a task. What an algorithm keeps of θ_o was made with all of
    them: unless these are all, ξ_o contains the difference between the two samples.
    """
    require(every >= 0, f"moments are every 0 (none in a task), 1, 2, … epochs; every={every} was given.")
    require(steps is None or steps >= 1, f"moments are every 1, 2, … steps; steps={steps} was given.")
    seen: list[list[Moment]] = [[] for _ in cohort.members]
    points: list[list[Point]] = [[] for _ in cohort.members]
    model = cohort.model(vectorised=False)

    def keep(finished: int, state: State, later: int = 0) -> None:
        for run, moments in enumerate(seen):
            own = tree.map_tree(torch.clone, state.select(run).as_tree())
            now = Moment(finished, state.clock + later, Point(own["params"], own["buffers"]), own["memory"])
            if moments and moments[-1][:2] == now[:2]:
                moments.pop()  # the step that ended an epoch
            moments.append(now)

    def watch(task: int, epoch: int, state: State, _: Feed) -> None:
        if every and ((epoch + 1) % every == 0 or epoch + 1 == cohort.epochs):
            keep(task, state)

    some_examples(examples)
    if steps is not None:
        on_gpu = "steps are recorded on a CPU, for a GPU makes many of them at once: take another device, or epochs."
        require(cohort.device.type == "cpu", on_gpu)
        alone, together = len(cohort) == 1, "steps of all runs are recorded together: execution is 'vectorised'."
        require(alone or execution != "run-by-run", together)
        if execution == "auto":
            execution = "run-by-run" if alone else "vectorised"
        progress = StepByStep(steps, keep, progress)
    training = train(cohort, execution=execution, progress=progress, watch=watch)
    for snapshot in _vectorised(training) if steps is not None and execution == "vectorised" else training:
        if isinstance(progress, StepByStep):
            progress.begin(snapshot.finished, snapshot.state)
        keep(snapshot.finished, snapshot.state)
        for solutions, moments in zip(points, seen, strict=True):
            solutions.append(moments[-1].point)
    return [
        Trajectory(of_run(cohort, run, points[run], examples), member.algorithm, model, seen[run])
        for run, member in enumerate(cohort.members)
    ]


def _vectorised(training: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """A training whose steps are recorded. It begins by trying whether it can be vectorised."""
    try:
        begin = next(training)
    except GlocalError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GlocalError(
            f"runs that cannot be vectorised are recorded one by one, or after epochs: {reason}"
        ) from error
    yield begin
    yield from training


class StepByStep:
    """Keeps a cohort's live state after every so many steps of an epoch."""

    looks = True

    def __init__(self, every: int, keep: Callable[[int, State, int], None], beside: Progress | None) -> None:
        self.every, self.keep, self.beside = every, keep, beside or Silent()

    def begin(self, finished: int, state: State) -> None:
        self.finished, self.state = finished, state
        self.clock = self.made = 0

    def task(self, task: int) -> None:
        self.beside.task(task)

    def steps(self, count: int) -> None:
        """Called after every step of all runs; the state's clock goes on at the end of an epoch."""
        self.beside.steps(count)
        if self.state.clock != self.clock:
            self.clock, self.made = self.state.clock, 0
        self.made += 1
        if self.made % self.every == 0:
            self.keep(self.finished, self.state, self.made)


def apart(a: Point, b: Point) -> Tensor:
    """‖θ − θ'‖₂ in float64."""
    return tree.total((a.params[k] - p).double().square() for k, p in b.params.items()).sqrt()
