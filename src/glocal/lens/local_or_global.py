r"""Definition 1 as an experiment: is an algorithm's approximation \hat L_o of a finished task local or global?

    local:   I(\hat L_o(θ); θ_o) > 0 for all θ,     global:   I(\hat L_o(θ); θ_o) = 0 for all θ ≠ θ_o:

modifying θ_o would not change a global approximation. So θ_o is modified. An ensemble of solutions of the first task is
trained from different initialisations and, in a first pass, in different orders; the data are the same for all. In the
passes that follow, which the memories watch, order and random numbers are the same too: they count among the memory's
draws, for which examples a reservoir keeps depends on them, and not on θ. Whatever then differs between two solutions'
\hat L_o, it owes to the solutions.

Every solution has D memories that differ only in their random numbers, the same D for every solution: this separates
the randomness of a memory (which examples it stored) from dependence on θ_o. The first memory is the one that training
uses; the others observe the same steps (`ResampledMemory`). All are consolidated at θ_o, and each \hat L_o is evaluated
at the same probes θ: other runs at their initialisation, half-way, at their solution, and as far beyond it as they have
moved, in a random direction. `measure_dependence` tests whether the values depend on the solution.

What Definition 1 does not say of the memory's draws is settled by the paper's reading of it: they are no part of θ_o.
Experience replay trains θ_o on what its reservoir holds, so that the two do depend on each other by chance, and still
its \hat L_o would be the same at any other solution: global.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from glocal import tree
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory, Step
from glocal.challenges.challenge import Challenge, Task
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loader import Loader, evenly_spaced
from glocal.engine.loop import Execution, Snapshot, train
from glocal.engine.measurements import Record
from glocal.engine.memory_budget import initial_state, state_at
from glocal.engine.state import State
from glocal.errors import require
from glocal.lens.independence_test import Dependence, measure_dependence
from glocal.lens.trace import Checkpoint
from glocal.networks.model import MakeNetwork, Model
from glocal.rng import generator
from glocal.sweeps import resolve, user_code
from glocal.tree import Params, from_vector, to_vector

PLACES = ("initialisation", "path", "solution", "beyond")
"""Where every run that is kept for probes is looked from."""
TASKS = 2
"""Tasks that a memory is laid out for; the first one is trained."""
REPETITIONS = 2
"""Evaluations of the same solution with the same draws: what differs between them is chance that nobody holds fixed."""


@dataclass(frozen=True)
class Verdict:
    r"""What an algorithm declares and what was found, with the numbers behind it.

    Means over the probes, of which `by_probe` has each: the share of \hat L_o(θ)'s variance that θ_o explains alone,
    and that it is involved in by what it makes of the draws; I(\hat L_o(θ); θ_o) in nats, at most the logarithm of the
    number of solutions. `distance` is the mean distance between two solutions; `lost` counts those that diverged and
    were left out.
    """

    algorithm: str
    declared: Locality
    found: Locality
    variance_explained: float
    variance_involved: float
    information: float
    p_value: float
    values: Tensor
    r"""\hat L_o(θ), (solutions, draws, repetitions, probes)."""
    by_probe: Dependence
    places: tuple[str, ...]
    """Where each probe lies."""
    distance: float
    lost: int

    @property
    def agrees(self) -> bool:
        return self.declared == self.found


def locality(
    algorithm: str | Algorithm | type[Algorithm],
    challenge: str | Challenge,
    network: str | MakeNetwork = "mlp",
    lr: float = 0.1,
    epochs: int = 3,
    *,
    batch_size: int = 32,
    examples: int = 500,
    solutions: int = 24,
    draws: int = 3,
    probes: int = 8,
    level: float = 0.01,
    seed: int = 0,
    device: torch.device | str = "cpu",
    execution: Execution = "auto",
) -> Verdict:
    r"""Train `solutions` solutions of the first task on at most so many `examples`; test whether \hat L_o knows them.

    The first of several epochs is in an order of its own for each; of one epoch, all share the order.

    It is found local where independence is rejected at the `level`, global where nothing speaks against it.
    """
    require(solutions >= 3, f"an ensemble has at least 3 solutions; {solutions} were asked for.")
    require(draws >= 2, f"chance is told from dependence by at least 2 draws; {draws} were asked for.")
    require(probes >= 1, f"an approximation is evaluated at 1 probe or more; {probes} were asked for.")
    require(1e-3 <= level < 1, f"the level of the test is from 0.001 to below 1; {level} was given.")
    trained = lr > 0 and min(epochs, batch_size, examples) >= 1
    given = f"lr={lr:g}, epochs={epochs}, batch_size={batch_size}, examples={examples}"
    require(trained, f"solutions take an lr above 0, and epochs, batch_size, examples of at least 1; {given}.")
    tested = resolve.algorithm(algorithm).value
    met = resolve.challenge(challenge).value
    resolve.check_setting(tested, met)
    shared = _shared(met, seed, examples)
    make = resolve.network(network, shared).value
    apart = -(-probes // len(PLACES))
    member = Member(seed, lr, ResampledMemory(tested, draws))
    cohort = Cohort(shared, make, (member,) * (solutions + apart), epochs, batch_size, 1, torch.device(device))
    starts, snapshot = _trained(cohort, execution)
    alive = (snapshot.state.diverged < 0).nonzero().flatten().tolist()
    lost = len(cohort) - len(alive)
    require(
        len(alive) >= 3 + apart,
        f"{lost} of {len(cohort)} solutions diverged at lr={lr:g}, and too few are left. Choose a smaller one.",
    )
    held, kept = alive[:apart], alive[apart:]
    theta = torch.stack([to_vector(snapshot.state.select(run).params) for run in kept])
    distance = float(torch.pdist(theta).mean())
    require(
        distance > 0,
        "all solutions are the same point: the network's initialisation must depend on chance, or epochs be several.",
    )
    points = [p for run in held for p in _probes(starts[run], _point(snapshot.state, run), seed, run)][:probes]
    values = _values(cohort, snapshot, kept, points)
    known = values.isfinite().flatten(0, 2).all(0)
    require(bool(known.any()), f"no probe has a finite approximation by {tested.name} for every solution.")
    places = tuple(PLACES[i % len(PLACES)] for i in range(probes) if known[i])
    found = measure_dependence(values[..., known], generator(seed, "locality", "exchanges"))
    return Verdict(
        algorithm=resolve.name_of(tested),
        declared=tested.locality,
        found="local" if found.p_value <= level else "global",
        variance_explained=float(found.explained.mean()),
        variance_involved=float(found.involved.mean()),
        information=float(found.information.mean()),
        p_value=found.p_value,
        values=values[..., known],
        by_probe=found,
        places=places,
        distance=distance,
        lost=lost,
    )


def _shared(challenge: Challenge, seed: int, examples: int) -> Challenge:
    """The challenge's first tasks as one seed meets them, for all runs alike."""

    def make(index: int, _: int) -> Task:
        task = challenge.task(index, seed)
        return replace(task, train=evenly_spaced(task.train, examples), test=evenly_spaced(task.test, 1))

    return replace(challenge, tasks=min(challenge.tasks, TASKS), make_task=make, seeded=False, on_device=False)


def _trained(cohort: Cohort, execution: Execution) -> tuple[list[Checkpoint], Snapshot]:
    """The first task, from an initialisation and in an order of its own for every run; from the second epoch on, or the
    first if it is the only one, with one seed for all."""
    loader = Loader(cohort)
    loader.load_task(0)
    own = cohort.only([replace(m, seed=m.seed + 1 + run) for run, m in enumerate(cohort.members)])
    state = initial_state(own, loader)
    starts = [_point(state, run) for run in range(len(cohort))]
    if cohort.epochs > 1:
        apart = _learnt(replace(own, epochs=1), state, execution).state
        state = replace(state_at(own, loader, apart.params, apart.buffers), diverged=apart.diverged)
        cohort = replace(cohort, epochs=cohort.epochs - 1)
    return starts, _learnt(cohort, state, execution)


def _learnt(cohort: Cohort, state: State, execution: Execution) -> Snapshot:
    """The first task, from there."""
    record = Record.blank(len(cohort), cohort.challenge.tasks, cohort.epochs)
    return next(train(cohort, Snapshot(0, state, record), execution))


def _point(state: State, run: int) -> Checkpoint:
    own = tree.map_tree(torch.clone, state.select(run).as_tree())
    return Checkpoint(own["params"], own.get("buffers", {}))


def _probes(start: Checkpoint, end: Checkpoint, seed: int, run: int) -> list[Checkpoint]:
    """A run at each of the PLACES."""
    a, b = to_vector(start.params), to_vector(end.params)
    away = torch.randn(b.shape[0], generator=generator(seed, "locality", "probe", run)).to(b)
    beyond = b + (b - a).norm() * away / away.norm()
    return [start, *(Checkpoint(from_vector(at, end.params), end.buffers) for at in ((a + b) / 2, b, beyond))]


def _values(cohort: Cohort, snapshot: Snapshot, runs: Sequence[int], probes: Sequence[Checkpoint]) -> Tensor:
    r"""\hat L_o(θ), (runs, draws, repetitions, probes); one memory is consolidated at a time, and forgotten.

    Two runs show whether repetitions differ at all, and whether draws do: what does not is not computed again.
    """
    redrawn = cohort.algorithm
    assert isinstance(redrawn, ResampledMemory)
    tested, seed, draws = redrawn.algorithm, cohort.members[0].seed, range(redrawn.draws)
    model = cohort.model(vectorised=False)
    eyes = [model.bind(p.buffers, training=False) for p in probes]  # a probe brings its own statistics, for all alike
    whole = [_whole(cohort, seed, draw) for draw in draws]

    @torch.no_grad()
    def seen(run: int, draw: int) -> Tensor:
        own = tree.map_tree(torch.clone, snapshot.state.select(run).as_tree())
        memory = redrawn.memories(own.get("memory", {}))[draw]
        with _drawing(cohort.device, seed, draw):
            bound = model.bind(own.get("buffers", {}), key=whole[draw].key)
            memory = tested.consolidate(bound, own["params"], memory, whole[draw])
            values = [_stated(tested, eye, memory, p) for eye, p in zip(eyes, probes, strict=True)]
        return torch.stack(values).cpu()

    def table(runs: Sequence[int], draws: Sequence[int], repetitions: int) -> Tensor:
        rows = [torch.stack([torch.stack([seen(r, d) for _ in range(repetitions)]) for d in draws]) for r in runs]
        return torch.stack(rows)

    pilot = table(runs[:2], draws, REPETITIONS)
    repeat = REPETITIONS if _differ(pilot, 2) else 1
    drawn = draws if _differ(pilot, 1) else draws[:1]
    rest = table(runs[2:], drawn, repeat)
    return torch.cat([pilot, rest.expand(-1, len(draws), REPETITIONS, -1)])


def _stated(tested: Algorithm, model: Model, memory: Memory, probe: Checkpoint) -> Tensor:
    r"""\hat L_o(θ) at a probe; a mistake in somebody's own algorithm told in one line."""

    def value() -> Tensor:
        found = tested.approximation(model, memory, 0)(probe.params)
        what = f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        scalar = isinstance(found, Tensor) and found.dim() == 0
        require(scalar, f"the approximation of {tested.name} is a tensor that holds one number; it returned {what}.")
        return found

    kind = type(tested)
    own = getattr(sys.modules.get(kind.__module__), "__file__", None)
    built_in = own is None or kind.__module__.startswith("glocal.")
    return value() if built_in else user_code.call(value, f"{own}:{kind.__name__}")


def _differ(values: Tensor, along: int) -> bool:
    return not torch.allclose(values, values.narrow(along, 0, 1).expand_as(values), rtol=1e-6, atol=0, equal_nan=True)


def _whole(cohort: Cohort, seed: int, draw: int) -> Batch:
    """All data of the task, with one draw's random numbers."""
    device, (x, y) = cohort.device, cohort.challenge.task(0, seed).train
    stream = generator(seed, "locality", "consolidate", draw)
    random, key = torch.rand(len(y), generator=stream), torch.randint(2**63 - 1, (), generator=stream)
    task, end = torch.zeros((), dtype=torch.long, device=device), torch.ones((), device=device)
    return Batch(x.to(device), y.to(device), random.to(device), task, end, key.to(device))


@contextmanager
def _drawing(device: torch.device, seed: int, draw: int) -> Iterator[None]:
    """What draws from torch's own stream (dropout, a user's code) draws the same numbers at every solution."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator(seed, "locality", "network", draw).initial_seed())
        yield


@dataclass(frozen=True)
class ResampledMemory(Algorithm):
    """Trains as `algorithm` does with the first of its memories; the others look on, each with draws of its own.

    Nothing is consolidated: the memories are as they are before the task ends. An empty one is left out.
    """

    name: ClassVar[str] = "resampled-memory"

    algorithm: Algorithm
    draws: int

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return self.algorithm.network(make, tasks)

    def uniforms(self, model: Model) -> int:
        return self.draws * self.algorithm.uniforms(model)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return _kept([self.algorithm.init(model, params, self._share(example, d)) for d in range(self.draws)])

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        made = [self.algorithm.before_epoch(model, params, m, epoch, epochs) for m in self.memories(memory)]
        return made[0][0], _kept([m for _, m in made])

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        return self.algorithm.exemplars(self.memories(memory)[0])

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        return self.algorithm.objective(model, params, self.memories(memory)[0], self._share(batch, 0))

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return self.algorithm.direction(model, grads, params, self.memories(memory)[0], self._share(batch, 0))

    def observe(self, memory: Memory, step: Step) -> Memory:
        steps = [replace(step, batch=self._share(step.batch, d)) for d in range(self.draws)]
        return _kept([self.algorithm.observe(m, s) for m, s in zip(self.memories(memory), steps, strict=True)])

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return self.algorithm.predict(model, params, self.memories(memory)[0], x, task)

    def memories(self, memory: Memory) -> list[Memory]:
        return [memory.get(str(d), {}) for d in range(self.draws)]

    def _share(self, batch: Batch, draw: int) -> Batch:
        """The batch with the random numbers of one memory."""
        each = batch.random.shape[0] // self.draws
        return batch._replace(random=batch.random[draw * each : (draw + 1) * each])


def _kept(memories: list[Memory]) -> Memory:
    return {str(d): memory for d, memory in enumerate(memories) if memory}
