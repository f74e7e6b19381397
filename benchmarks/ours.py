"""glocal, by the executors that the engine itself chooses: run by run for one run, vectorised for a cohort.

A state with the first task behind it is made once; every measurement begins from a copy of it and does what the engine
does in an epoch of the second task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product

import torch

from benchmarks import setting
from benchmarks.worker import Measure, per_step, serve
from glocal import __version__, challenges, tree
from glocal.algorithms import AGEM, ER, EWC, SGD, Algorithm
from glocal.challenges import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Executor
from glocal.engine.loader import Loader
from glocal.engine.loop import choose, note_divergence
from glocal.engine.memory_budget import initial_state
from glocal.engine.state import State
from glocal.fast.step_trace import StepTracer
from glocal.networks.mlp import mlp

PATIENCE = 30

ALGORITHMS: dict[str, Algorithm] = {
    "sgd": SGD(),
    "er": ER(slots=setting.RESERVOIR, replay=setting.BATCH),
    "ewc": EWC(penalty=2 * setting.EWC_PENALTY),  # glocal's quadratic has a ½
    "agem": AGEM(slots=setting.STORED_PER_TASK * setting.TASKS, replay=setting.BATCH),
}


@dataclass(frozen=True)
class Ready:
    """A cohort that has learnt and consolidated the first task and has the second one loaded."""

    executor: Executor
    loader: Loader
    state: State

    def copy(self) -> State:
        return State.from_tree(tree.map_tree(lambda leaf: leaf.clone(), self.state.as_tree()), self.state.clock)


def epoch(executor: Executor, state: State, loader: Loader, number: int) -> int:
    """One epoch as `glocal.engine.loop.train` makes it; returns its model-steps."""
    loader.load_epoch(number)
    losses = executor.epoch(state, loader, number, lambda steps: None)
    note_divergence(state, losses)
    losses.mean(1).double().cpu()
    return losses.numel()


def prepare(
    algorithm: Algorithm,
    runs: list[tuple[int, float]],
    challenge: Challenge | None = None,
) -> Ready:
    members = tuple(Member(seed, lr, algorithm) for seed, lr in runs)
    challenge = challenge or challenges.make(setting.CHALLENGE, tasks=setting.TASKS)
    network = partial(mlp, hidden=setting.WIDTHS[1:-1])
    cohort = Cohort(challenge, network, members, epochs=1, batch_size=setting.BATCH)
    loader = Loader(cohort)
    loader.load_task(0)
    executor = choose(cohort, loader, "auto")
    if executor.note:
        raise RuntimeError(executor.note)
    state = initial_state(cohort, loader)
    epoch(executor, state, loader, 0)
    with torch.no_grad():
        executor.consolidate(state, loader)
    loader.load_task(1, state.memory)
    ready = Ready(executor, loader, state)
    _repeat(ready)
    return ready


def _repeat(ready: Ready) -> None:
    """So many steps of the second task that they are replayed from now on, as in all but short runs, the short last one
    of an epoch too; unless steps are so long that nothing is gained."""
    state, begun = ready.copy(), time.perf_counter()
    for number in range(
        1 + max(StepTracer.min_calls_after_first, StepTracer.min_calls // max(1, ready.loader.steps - 1))
    ):
        if time.perf_counter() - begun < PATIENCE:
            epoch(ready.executor, state, ready.loader, number)


def measure(ready: Ready) -> float:
    state, numbers = ready.copy(), count()
    return per_step(lambda: epoch(ready.executor, state, ready.loader, next(numbers)), setting.SECONDS)


def lazily(make: Callable[[], Ready]) -> Measure:
    """Prepare at the first request, which is the warm-up."""
    held: list[Ready] = []

    def measured() -> float:
        if not held:
            held.append(make())
        return measure(held[0])

    return measured


def main() -> None:
    torch.set_num_threads(setting.THREADS)
    one = [(setting.SEEDS[0], setting.LEARNING_RATE)]
    many = list(product(setting.SEEDS, setting.LEARNING_RATES))
    contenders = {
        f"{name}/{len(runs)}": lazily(partial(prepare, algorithm, runs))
        for name, algorithm in ALGORITHMS.items()
        for runs in (one, many)
    }
    serve({"torch": torch.__version__, "glocal": __version__}, contenders)


if __name__ == "__main__":
    main()
