r"""Test Definition 3.1: is an algorithm's approximation \hat L_o of a finished task's loss local or global?

    local:   I(\hat L_o(θ); θ_o) > 0 for all θ,     global:   I(\hat L_o(θ); θ_o) = 0 for all θ ≠ θ_o

A global approximation would be the same for any other solution θ_o. So several solutions of the first task are trained
on the same data, from different initialisations and, if there are several epochs, with a different order in the first.
The algorithm's memory is reset after that epoch. In the others, order and random numbers are the same for all
solutions: which examples a reservoir stores depends on them, and they are not part of θ_o. Every solution has D
memories that differ only in their random numbers, the same D for every solution (`ResampledMemory`): this separates the
randomness of a memory from dependence on θ_o. All are consolidated at θ_o, and each \hat L_o is evaluated at the same
probes θ: other runs at their initialisation, half-way, at their solution, and as far beyond it as they have moved, in a
random direction. `measure_dependence` tests whether the values depend on the solution.

Definition 3.1 does not say whether a memory's random draws belong to θ_o. Here, as in the paper's classification, they
do not: experience replay trains θ_o on the examples it stored, so the two are statistically dependent, but \hat L_o
would be the same at any other solution, and it is global.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from glocal import tree
from glocal.algorithms import ALGORITHMS
from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory, Step
from glocal.challenges.challenge import Challenge, Task
from glocal.engine.cohort import Cohort, Member
from glocal.engine.evaluate import Record
from glocal.engine.loader import Loader, evenly_spaced
from glocal.engine.loop import Snapshot, train
from glocal.engine.state import State
from glocal.errors import require
from glocal.lens.approximation_error import evaluate_approximation
from glocal.lens.record import copy_checkpoint
from glocal.lens.training_trace import Checkpoint, require_positive
from glocal.networks.model import MakeNetwork, Model
from glocal.rng import generator, global_generator, split
from glocal.sweeps import resolve, user_code
from glocal.tree import Params, from_vector, to_vector

PROBE_LOCATIONS = ("initialisation", "path", "solution", "beyond")
"""Where probes are taken from every run that is reserved for them."""
MAX_SOLUTIONS = 10_000
NUM_TASKS = 2
"""Tasks that a memory has room for; only the first is trained."""
REPETITIONS = 2
"""Evaluations with the same solution and draw. They differ only by randomness that no seed controls."""
LEVEL = 0.01
"""Significance level of the permutation test."""
PERMUTATIONS = 999
ROUNDING_ULPS = 64
"""Differences of at most this many units in the last place of the largest value count as 0."""
NUM_NEIGHBORS = 3
"""k of the mutual information; less if there are fewer values of one s."""


class Dependence(NamedTuple):
    """Dependence on s of each of P sets of values, (P,), and one p-value for all of them."""

    first_order_index: Tensor  # Sobol index of s: σ_α² / σ²
    total_index: Tensor  # (σ_α² + σ_γ²) / σ²
    information: Tensor  # I(V; s) in nats
    p_values: Tensor
    p_value: float


@dataclass(frozen=True)
class Verdict:
    r"""The declared and the measured locality of an algorithm.

    The indices and `information` are means over the probes; `by_probe` has the values of each.
    """

    algorithm: str
    declared: Locality
    found: Locality
    first_order_index: float  # share of Var[\hat L_o(θ)] due to θ_o alone
    total_index: float  # and with its interaction with the memory's random draws
    information: float  # I(\hat L_o(θ); θ_o) in nats, at most the logarithm of the number of solutions
    p_value: float
    values: Tensor  # \hat L_o(θ), (solutions, draws, repetitions, probes)
    by_probe: Dependence
    probe_locations: tuple[str, ...]  # one of `PROBE_LOCATIONS` for each probe
    distance: float  # mean distance between two solutions
    num_diverged: int  # runs that diverged and were left out

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
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Verdict:
    r"""Train several solutions θ_o of the first task and test whether \hat L_o depends on θ_o.

    The algorithm is 'local' if independence is rejected at the level 0.01, otherwise 'global'.

    Args:
        algorithm: a name, an instance or a class.
        challenge: a name or a challenge; its first task is trained.
        network: a name or a function that makes the network.
        lr: learning rate.
        epochs: epochs. If more than one, each solution shuffles its first epoch differently.
        batch_size: examples per step.
        examples: maximum number of training examples.
        solutions: number of solutions to compare.
        draws: number of memories per solution, each with its own random numbers.
        probes: number of θ at which \hat L_o is evaluated.
        seed: base seed. Solution i uses seed + 1 + i for its initialisation and first epoch.
        device: where to train.
    """
    most = f"solutions = {solutions} was given; it must be at least 3 and at most {MAX_SOLUTIONS:,}."
    require(3 <= solutions <= MAX_SOLUTIONS, most)
    require(draws >= 2, f"draws = {draws} was given; it must be at least 2.")
    require(lr > 0, f"lr = {lr:g} was given; it must be positive.")
    require_positive(probes=probes, epochs=epochs, batch_size=batch_size, examples=examples)
    tested = resolve.algorithm(algorithm).value
    overridden = type(tested).approximation is not Algorithm.approximation or type(tested) in ALGORITHMS.values()
    message = "does not override `approximation`, so there is no L̂_o to test. Return 0 from it if there is none."
    require(overridden, f"{resolve.name_of(tested)} {message}")
    resolved_challenge = resolve.challenge(challenge).value
    resolve.check_setting(tested, resolved_challenge)
    fixed = _fix_data(resolved_challenge, seed, examples)
    make = resolve.network(network, fixed).value
    num_probe_runs = -(-probes // len(PROBE_LOCATIONS))
    member = Member(seed, lr, ResampledMemory(tested, draws))
    cohort = Cohort(fixed, make, (member,) * (solutions + num_probe_runs), epochs, batch_size, 1, torch.device(device))
    loader = Loader(cohort)
    loader.load_task(0)
    starts, snapshot = _train_solutions(cohort, loader.example())
    finite_runs = (snapshot.state.diverged < 0).nonzero().flatten().tolist()
    num_diverged, allowed = len(cohort) - len(finite_runs), solutions - 3
    message = f"{num_diverged} of {len(cohort)} runs diverged at lr = {lr:g}; at most {allowed} may. Lower lr."
    require(num_diverged <= allowed, message)
    probe_runs, solution_runs = finite_runs[:num_probe_runs], finite_runs[num_probe_runs:]
    theta = torch.stack([to_vector(snapshot.state.select(run).params) for run in solution_runs])
    distance = float(torch.pdist(theta).mean())
    require(distance > 0, "all solutions are identical. Use a randomly initialised network or epochs ≥ 2.")
    points = [p for run in probe_runs for p in _probes(starts[run], copy_checkpoint(snapshot.state, run), seed, run)]
    values = _evaluate(cohort, loader.whole(0), snapshot, solution_runs, points[:probes])
    finite = values.isfinite().flatten(0, 2).all(0)
    require(bool(finite.any()), f"at no probe is {tested.name}'s approximation finite for all solutions. Lower lr.")
    values = values[..., finite]
    dependence = measure_dependence(values, generator(seed, "locality", "exchanges"))
    return Verdict(
        algorithm=resolve.name_of(tested),
        declared=tested.locality,
        found="local" if dependence.p_value <= LEVEL else "global",
        first_order_index=float(dependence.first_order_index.mean()),
        total_index=float(dependence.total_index.mean()),
        information=float(dependence.information.mean()),
        p_value=dependence.p_value,
        values=values,
        by_probe=dependence,
        probe_locations=tuple(PROBE_LOCATIONS[i % len(PROBE_LOCATIONS)] for i in range(probes) if finite[i]),
        distance=distance,
        num_diverged=num_diverged,
    )


def _fix_data(challenge: Challenge, seed: int, examples: int) -> Challenge:
    """Return the challenge's first tasks with the data of one seed, whichever seed a run has."""

    def make(index: int, _: int) -> Task:
        task = challenge.task(index, seed)
        return replace(task, train=evenly_spaced(task.train, examples), test=evenly_spaced(task.test, 1))

    return replace(challenge, tasks=min(challenge.tasks, NUM_TASKS), make_task=make, seeded=False, on_device=False)


def _train_solutions(cohort: Cohort, example: Batch) -> tuple[list[Checkpoint], Snapshot]:
    """Train the first task; return every run's initialisation and the snapshot at the end.

    Initialisations differ between runs, and so does the first of several epochs. The other epochs, or the only one,
    have the same seed for all runs.
    """
    seeded = cohort.only([replace(m, seed=m.seed + 1 + run) for run, m in enumerate(cohort.members)])
    state = seeded.initial_state(example)
    starts = [copy_checkpoint(state, run) for run in range(len(cohort))]
    if cohort.epochs > 1:
        first_epoch = _train_task(replace(seeded, epochs=1), state).state
        state = seeded.initial_state(example, (first_epoch.params, first_epoch.buffers))
        state = replace(state, diverged=first_epoch.diverged)
        cohort = replace(cohort, epochs=cohort.epochs - 1)
    return starts, _train_task(cohort, state)


def _train_task(cohort: Cohort, state: State) -> Snapshot:
    """Train the first task from a state."""
    return next(train(cohort, Snapshot(0, state, Record.blank(len(cohort), cohort.challenge.tasks, cohort.epochs))))


def _probes(start: Checkpoint, end: Checkpoint, seed: int, run: int) -> list[Checkpoint]:
    """Return a probe at each of the PROBE_LOCATIONS of a run."""
    a, b = to_vector(start.params), to_vector(end.params)
    direction = torch.randn(b.shape[0], generator=generator(seed, "locality", "probe", run)).to(b)
    extrapolation = b + (b - a).norm() * direction / direction.norm()
    return [start, *(Checkpoint(from_vector(v, end.params), end.buffers) for v in ((a + b) / 2, b, extrapolation))]


@torch.no_grad()
def _evaluate(
    cohort: Cohort, data: Batch, snapshot: Snapshot, runs: Sequence[int], probes: Sequence[Checkpoint]
) -> Tensor:
    r"""Return \hat L_o(θ) as (runs, draws, repetitions, probes), holding one consolidated memory at a time.

    The first two runs show whether draws and repetitions change the values at all; if they do not, they are evaluated
    only once for the other runs.
    """
    resampled = cohort.algorithm
    assert isinstance(resampled, ResampledMemory)
    algorithm, seed, draws = resampled.algorithm, cohort.members[0].seed, range(resampled.draws)
    model = cohort.model(vectorised=False)
    data = data.with_inputs(model.transform.normalize(data.x))
    # A probe has its own BatchNorm statistics, the same for all solutions.
    probe_models = [model.bind(p.buffers, training=False) for p in probes]
    streams = [generator(seed, "locality", "consolidate", draw) for draw in draws]
    keys = [torch.randint(2**63 - 1, (), generator=stream).to(cohort.device) for stream in streams]

    def evaluate(run: int, draw: int) -> Tensor:
        state = snapshot.state.select(run)
        memory = tree.map_tree(torch.clone, resampled.memories(state.memory)[draw])
        # Dropout and users' code draw from torch's global generator: it has the same seed for every solution.
        with global_generator(generator(seed, "locality", "network", draw), cohort.device):
            (params, buffers), batch = copy_checkpoint(snapshot.state, run), data._replace(key=keys[draw])
            memory = algorithm.consolidate(model.bind(buffers, key=batch.key), params, memory, batch)
            values = [_approximation(algorithm, m, memory, p) for m, p in zip(probe_models, probes, strict=True)]
        return torch.stack(values).cpu()

    def table(runs: Sequence[int], draws: Sequence[int], repetitions: int) -> Tensor:
        rows = [torch.stack([torch.stack([evaluate(r, d) for _ in range(repetitions)]) for d in draws]) for r in runs]
        return torch.stack(rows)

    pilot = table(runs[:2], draws, REPETITIONS)
    rest = table(runs[2:], draws if _varies(pilot, 1) else draws[:1], REPETITIONS if _varies(pilot, 2) else 1)
    return torch.cat([pilot, rest.expand(-1, len(draws), REPETITIONS, -1)])


def _approximation(algorithm: Algorithm, model: Model, memory: Memory, probe: Checkpoint) -> Tensor:
    r"""Return \hat L_o(θ) at a probe; report exceptions of a user's algorithm in one line."""

    def evaluate() -> Tensor:
        return evaluate_approximation(algorithm, model, memory, 0, probe.params)

    cls = type(algorithm)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    built_in = file is None or cls.__module__.startswith("glocal.")
    return evaluate() if built_in else user_code.call_user_code(evaluate, f"{file}:{cls.__name__}")


def _varies(values: Tensor, dim: int) -> bool:
    return not torch.allclose(values, values.narrow(dim, 0, 1).expand_as(values), rtol=1e-6, atol=0, equal_nan=True)


@dataclass(frozen=True)
class ResampledMemory(Algorithm):
    """Train as `algorithm` does and keep `draws` memories of the same steps, each with its own random numbers.

    Only the first memory affects training. Memories are not consolidated at the end of the task; empty ones are left
    out of the state.
    """

    name: ClassVar[str] = "resampled-memory"

    algorithm: Algorithm
    draws: int

    def network(self, make: MakeNetwork, tasks: int) -> MakeNetwork:
        return self.algorithm.network(make, tasks)

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return _pack_memories([self.algorithm.init(model, params, example) for _ in range(self.draws)])

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        results = [self.algorithm.before_epoch(model, params, m, epoch, epochs) for m in self.memories(memory)]
        return results[0][0], _pack_memories([m for _, m in results])

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        return self.algorithm.exemplars(self.memories(memory)[0])

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        return self.algorithm.objective(model, params, self.memories(memory)[0], _resample(batch, 0))

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return self.algorithm.direction(model, grads, params, self.memories(memory)[0], _resample(batch, 0))

    def observe(self, memory: Memory, step: Step) -> Memory:
        steps = [step._replace(batch=_resample(step.batch, d)) for d in range(self.draws)]
        return _pack_memories([self.algorithm.observe(m, s) for m, s in zip(self.memories(memory), steps, strict=True)])

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        return self.algorithm.predict(model, params, self.memories(memory)[0], x, task)

    def memories(self, memory: Memory) -> list[Memory]:
        return [memory.get(str(d), {}) for d in range(self.draws)]


def _resample(batch: Batch, draw: int) -> Batch:
    """Return the batch with the random key of one memory; the first one has the batch's own."""
    return batch._replace(key=split(batch.key, draw)) if draw else batch


def _pack_memories(memories: list[Memory]) -> Memory:
    return {str(d): memory for d, memory in enumerate(memories) if memory}


def measure_dependence(values: Tensor, generator: torch.Generator) -> Dependence:
    """Measure how finite values V[s, d, k] of P sets, (S, D, K, P), depend on the solution s.

    d is a draw of a memory's random numbers, k a repetition. If V does not depend on s, the values of a draw are
    exchangeable: the p-value is the share of random permutations within draws, the identity included, whose share of
    the variance between solutions is at least as large. It is exact, and 1 if all values of every draw are equal.
    """
    s, d, k, _ = values.shape
    rounding = ROUNDING_ULPS * torch.finfo(values.dtype).eps * values.double().abs().amax((0, 1, 2))
    min_variance = rounding.square()
    values = values.double()
    alpha, beta, gamma, epsilon = _variance_components(values)
    total = alpha + beta + gamma + epsilon
    observed = _share_between(values, min_variance)
    pool = values.movedim(2, 1).flatten(0, 1)  # (S K, D, P)
    statistics = [observed]  # the identity is one of the permutations
    for _ in range(PERMUTATIONS):
        order = torch.rand(s * k, d, generator=generator).argsort(0).unsqueeze(-1)
        permuted = pool.gather(0, order.expand_as(pool)).unflatten(0, (s, k)).movedim(1, 2)
        statistics.append(_share_between(permuted, min_variance))
    distribution = torch.stack(statistics)
    at_least = distribution >= observed - 1e-9
    means_at_least = distribution.mean(-1) >= observed.mean(-1) - 1e-9
    return Dependence(
        _ratio(alpha, total, min_variance),
        _ratio(alpha + gamma, total, min_variance),
        _information(values, min_variance.sqrt()),
        at_least.double().mean(0),
        float(means_at_least.double().mean()),
    )


def _variance_components(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Estimate σ_α², σ_β², σ_γ², σ_ε² of V[s, d, k] = μ + α_s + β_d + γ_sd + ε_sdk by a two-way analysis of variance.

    Negative estimates become 0.
    """
    s, d, k, _ = values.shape
    cell, row, column, mean = values.mean(2), values.mean((1, 2)), values.mean((0, 2)), values.mean((0, 1, 2))
    ms_s = d * k * (row - mean).square().sum(0) / (s - 1)
    ms_d = s * k * (column - mean).square().sum(0) / (d - 1)
    ms_sd = k * (cell - row.unsqueeze(1) - column + mean).square().sum((0, 1)) / ((s - 1) * (d - 1))
    epsilon = (values - cell.unsqueeze(2)).square().sum((0, 1, 2)) / (s * d * (k - 1))
    # The expected mean squares: D K σ_α² + K σ_γ² + σ_ε², S K σ_β² + K σ_γ² + σ_ε², K σ_γ² + σ_ε² and σ_ε².
    differences = (ms_s - ms_sd) / (d * k), (ms_d - ms_sd) / (s * k), (ms_sd - epsilon) / k
    alpha, beta, gamma = (difference.clamp(min=0) for difference in differences)
    return alpha, beta, gamma, epsilon


def _information(values: Tensor, rounding: Tensor) -> Tensor:
    """Return I(V; s) of each set, (P,), as the mean over repetitions, within [0, log S].

    Repetitions are not pooled: those of one draw are near each other whether or not V depends on s.
    """
    estimates = [
        torch.stack([_mutual_information(v, r) for v, r in zip(sets.unbind(-1), rounding, strict=True)])
        for sets in values.unbind(2)
    ]
    return torch.stack(estimates).mean(0).clamp(0, math.log(len(values)))


def _mutual_information(v: Tensor, rounding: Tensor) -> Tensor:
    """Estimate I(V; s) in nats from values (S, n) of one repetition by nearest neighbours (Ross, 2014).

    For each of the N values let ρ be the distance to its k-th nearest neighbour of the same s, and m the number of
    values of all s within a distance below ρ: I = ψ(N) + ψ(k) − ⟨ψ(n) + ψ(m)⟩, ψ the digamma function. If ρ = 0, with c
    equal values of the same s and m of all s, the term is log(N c / (n m)) instead.
    """
    n, count = v.shape[1], v.numel()
    k = min(NUM_NEIGHBORS, n - 1)
    v = v - v.mean()
    ordered = v.flatten().sort().values

    def count_within(radius: Tensor) -> Tensor:
        ends = torch.searchsorted(ordered, v + radius, right=True) - torch.searchsorted(ordered, v - radius)
        return ends.double()

    distances = (v.unsqueeze(2) - v.unsqueeze(1)).abs()
    radius = distances.sort(-1).values[..., k]
    ties = (distances <= rounding).sum(-1) * count / (n * count_within(rounding.expand_as(v)))
    psi_count, psi_k, psi_n = torch.tensor([count, k, n], dtype=torch.float64).digamma()
    neighbors = psi_count + psi_k - psi_n - count_within(radius * (1 - 1e-9)).digamma()
    return torch.where(radius <= rounding, ties.log(), neighbors).mean()


def _share_between(values: Tensor, min_variance: Tensor) -> Tensor:
    """Return the share of the variance within draws that lies between solutions."""
    centred = values - values.mean((0, 2), keepdim=True)
    return _ratio(centred.mean(2).square().mean((0, 1)), centred.square().mean((0, 1, 2)), min_variance)


def _ratio(part: Tensor, total: Tensor, min_total: Tensor) -> Tensor:
    """Return part / total, or 0 where the total is only rounding error."""
    valid = total > min_total
    return torch.where(valid, part / torch.where(valid, total, 1), 0)
