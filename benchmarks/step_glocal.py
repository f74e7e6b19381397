"""Worker of `benchmarks.step`: glocal with the executors that the engine chooses, for one run and for a cohort.

A cohort learns and consolidates the first task once; every measurement starts from a copy of that state and runs the
engine's epochs on the second task. `benchmarks.ogd` and `benchmarks.gpu` use the same preparation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product

import torch

from benchmarks import setting
from benchmarks.worker import Measure, ms_per_step, serve
from glocal import __version__, challenges, tree
from glocal.algorithms import AGEM, ER, EWC, SGD, Algorithm
from glocal.challenges import Challenge
from glocal.engine.choose import Execution, choose
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Executor
from glocal.engine.loader import Loader
from glocal.engine.loop import note_divergence
from glocal.engine.state import State
from glocal.fast.step_trace import StepTracer
from glocal.networks.mlp import mlp

MAX_TRACING_SECONDS = 30

ALGORITHMS: dict[str, Algorithm] = {
    "sgd": SGD(),
    "er": ER(slots=setting.ER_SLOTS, replay=setting.BATCH_SIZE),
    "ewc": EWC(penalty=2 * setting.EWC_PENALTY),  # glocal's penalty has a factor ½
    "agem": AGEM(slots=setting.AGEM_SLOTS_PER_TASK * setting.NUM_TASKS, replay=setting.BATCH_SIZE),
}
ONE_RUN = [(setting.SEEDS[0], setting.LR)]
ALL_RUNS = list(product(setting.SEEDS, setting.LRS))


@dataclass(frozen=True)
class PreparedCohort:
    """A cohort that has learned and consolidated the first task and has loaded the second."""

    executor: Executor
    loader: Loader
    state: State

    def copy_state(self) -> State:
        return State.from_tree(tree.map_tree(torch.clone, self.state.as_tree()), self.state.clock)

    def epoch(self, state: State, number: int) -> int:
        """Run an epoch as `glocal.engine.loop.train` does; return its number of model-steps."""
        self.loader.load_epoch(number)
        losses = self.executor.epoch(state, self.loader, number, lambda steps: None)
        note_divergence(state, losses)
        losses.mean(1).double().cpu()
        return losses.numel()


def prepare(cohort: Cohort, execution: Execution = "auto", strict: bool = True) -> PreparedCohort:
    """Learn the first task for one epoch, consolidate it and load the second task.

    If `strict`, raise an error where the executor has a note, such as that the cohort cannot be vectorised.
    """
    loader = Loader(cohort)
    loader.load_task(0)
    executor = choose(cohort, loader, execution)
    if strict and executor.note:
        raise RuntimeError(executor.note)
    state = cohort.initial_state(loader.example())
    executor.arrange(state)
    prepared = PreparedCohort(executor, loader, state)
    prepared.epoch(state, 0)
    with torch.no_grad():
        executor.consolidate(state, loader)
    executor.arrange(state)
    loader.load_task(1, state.memory)
    return prepared


def prepare_mlp(
    algorithm: Algorithm, runs: list[tuple[int, float]], challenge: Challenge | None = None
) -> PreparedCohort:
    """Prepare a CPU cohort of (seed, lr) pairs and run it until its steps are traced."""
    members = tuple(Member(seed, lr, algorithm) for seed, lr in runs)
    challenge = challenge or challenges.make(setting.CHALLENGE, tasks=setting.NUM_TASKS)
    network = partial(mlp, hidden=setting.WIDTHS[1:-1])
    prepared = prepare(Cohort(challenge, network, members, epochs=1, batch_size=setting.BATCH_SIZE))
    run_until_traced(prepared)
    return prepared


def run_until_traced(prepared: PreparedCohort, max_seconds: float = MAX_TRACING_SECONDS) -> None:
    """Run so many steps that they are traced, those of the shorter last batch too, as in all but short trainings.

    Steps so long that tracing gains nothing stop after `max_seconds`.
    """
    state, start = prepared.copy_state(), time.perf_counter()
    full_batches = max(1, prepared.loader.steps - 1)
    for number in range(1 + max(StepTracer.min_calls_after_first, StepTracer.min_calls // full_batches)):
        if time.perf_counter() - start < max_seconds:
            prepared.epoch(state, number)


def measure(prepared: PreparedCohort, state: State) -> float:
    """Train on the second task from `state`; return milliseconds per model-step."""
    numbers = count()
    return ms_per_step(lambda: prepared.epoch(state, next(numbers)), setting.MIN_SECONDS)


def measure_lazily(make: Callable[[], PreparedCohort]) -> Measure:
    """Prepare the cohort at the first request, which belongs to the warm-up round."""
    cache: list[PreparedCohort] = []

    def measurement() -> float:
        if not cache:
            cache.append(make())
        return measure(cache[0], cache[0].copy_state())

    return measurement


def main() -> None:
    torch.set_num_threads(setting.THREADS)
    measurements = {
        f"{name}/{len(runs)}": measure_lazily(partial(prepare_mlp, algorithm, runs))
        for name, algorithm in ALGORITHMS.items()
        for runs in (ONE_RUN, ALL_RUNS)
    }
    serve({"torch": torch.__version__, "glocal": __version__}, measurements)


if __name__ == "__main__":
    main()
