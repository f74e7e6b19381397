"""On a GPU every instrument finds what it finds on a CPU: in double precision, of one trained trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from recordings import blobs, cohort, hidden, taylor_curves
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from glocal.algorithms import ER, EWC, SGD, Algorithm
from glocal.engine.cohort import Cohort
from glocal.engine.loop import train
from glocal.lens.approximation_error import error_order, own_curves
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.examination import examine_trace
from glocal.lens.forgetting import flatness, forgetting, recursion
from glocal.lens.local_or_global import locality
from glocal.lens.locality_assumption import region_radii
from glocal.lens.monitor import Monitor
from glocal.lens.perturbation import perturbation, top_eigenpairs, unit_directions
from glocal.lens.rank import rank
from glocal.lens.record import record
from glocal.lens.taylor import taylor
from glocal.lens.theorems import ground_truth_of, theorem1, theorem2
from glocal.lens.training_trace import TrainingTrace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
THERE = "cuda"
RUNS = [(0, 0.3), (0, 0.05), (1, 0.1)]


@pytest.fixture(scope="module")
def trace() -> TrainingTrace:
    """A small network that has learnt three tasks by plain gradient descent."""
    challenge = blobs()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    tasks = [(task.train.x.double(), task.train.y) for task in (challenge.task(t, 0) for t in range(3))]
    states = [{k: v.clone() for k, v in module.state_dict().items()}]
    for x, y in tasks:
        for _ in range(60):
            slopes = torch.autograd.grad(cross_entropy(module(x), y), list(module.parameters()))
            with torch.no_grad():
                for p, slope in zip(module.parameters(), slopes, strict=True):
                    p.sub_(0.3 * slope)
        states.append({k: v.clone() for k, v in module.state_dict().items()})
    return trace_checkpoints(module, "cross-entropy", tasks, states)


def regions(trace: TrainingTrace) -> Any:
    ways = torch.cat([top_eigenpairs(trace, 0, 2).vectors, unit_directions(trace, 0, 3)])
    return region_radii(trace, 0, taylor(trace, 0, 2), ways, 0.05)


INSTRUMENTS: dict[str, Callable[[TrainingTrace], Any]] = {
    "all of it": lambda s: examine_trace(s, eigenvalues=4),
    "flatness": flatness,
    "forgetting": forgetting,
    "recursion": lambda s: recursion(forgetting(s)),
    "theorem 1": theorem1,
    "theorem 2": theorem2,
    "ground truth": lambda s: ground_truth_of(s, 0),
    "rank": lambda s: rank(s),
    "rank, estimated": lambda s: rank(s, max_dense=0, steps=10, probes=3),
    "perturbation": lambda s: perturbation(s, 1, eigenvectors=3, directions=3),
    "regions": regions,
    "order": lambda s: error_order(s, 0, taylor(s, 0, 1), unit_directions(s, 0, 1)[0]),
}


def numbers(found: Any) -> Any:
    """Everything that was found, as tensors on the CPU under their names."""
    if isinstance(found, Tensor):
        return found.detach().cpu().double()
    if is_dataclass(found):
        found = {f.name: getattr(found, f.name) for f in fields(found)}
    elif hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, Mapping):
        return {k: numbers(v) for k, v in found.items() if not isinstance(v, str)}
    return found


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_an_instrument(trace: TrainingTrace, name: str) -> None:
    here = numbers(INSTRUMENTS[name](trace))
    there = numbers(INSTRUMENTS[name](trace.to(THERE)))
    trace.to("cpu")
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-8, equal_nan=True)


def there(trained: Cohort) -> Cohort:
    return Cohort(
        trained.challenge,
        trained.make_network,
        trained.members,
        trained.epochs,
        trained.batch_size,
        trained.train_eval,
        torch.device(THERE),
    )


@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=20), EWC()], ids=lambda a: a.name)
def test_recordings(algorithm: Algorithm) -> None:
    trained = cohort(blobs(), algorithm, hidden, RUNS)
    for here, other in zip(record(trained), record(there(trained)), strict=True):
        for structure in ("diagonal", "kronecker", "full"):
            a, b = (
                numbers(taylor_curves(seen.trace, 2, structure, snapshots=seen.snapshots)) for seen in (here, other)
            )
            torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-4, equal_nan=True)
        if algorithm.name != "sgd":
            a, b = numbers(own_curves(here)), numbers(own_curves(other))
            torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("approximation", ["diagonal", "kronecker", "own"])
def test_a_monitor(approximation: Any) -> None:
    trained = cohort(blobs(), EWC(), hidden, RUNS)
    monitors = [Monitor(c, 0.1, approximation, every=1, examples=15) for c in (trained, there(trained))]
    for monitor in monitors:
        for _ in train(monitor.cohort, watch=monitor):
            pass
    for run in range(len(RUNS)):
        a, b = (numbers(monitor.curves(run)) for monitor in monitors)
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("algorithm", ["er", "ewc", "si", "ogd-gtl", "icarl"])
def test_a_verdict(algorithm: str) -> None:
    challenge = blobs(new_classes=True)
    verdicts = [
        locality(algorithm, challenge, hidden, epochs=2, solutions=8, draws=2, probes=3, device=device)
        for device in ("cpu", THERE)
    ]
    assert verdicts[0].found == verdicts[1].found
