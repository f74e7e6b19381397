"""A run's result is bit-equal in every cohort and under every executor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from small_problems import blobs, cohort_of, train_to_the_end
from torch import Tensor

from glocal.algorithms import (
    AGEM,
    DER,
    ER,
    EWC,
    GEM,
    HAT,
    OGD,
    OGDGTL,
    PNN,
    SGD,
    SI,
    Algorithm,
    DERpp,
    ICaRL,
    Joint,
    Laplace,
    OGDAve,
    OGDPublished,
    OptimalHard,
    OptimalSoft,
    PackNet,
    RandomICaRL,
    StableSGD,
)
from glocal.engine.loop import Snapshot, train
from glocal.networks.mlp import mlp
from glocal.sweeps.resolve import label_of
from glocal.tree import flatten, select

ALGORITHMS: list[Algorithm] = [
    SGD(),
    StableSGD(),
    Joint(),
    ER(slots=30),
    GEM(slots=30),
    AGEM(slots=30),
    AGEM(slots=30, filling="batch"),
    SI(),
    SI(importance="published"),
    PNN(),
    PackNet(),
    HAT(),
    EWC(fisher="exact"),
    EWC(fisher="sampled"),
    EWC(anchors="each"),
    ICaRL(slots=30),
    ICaRL(slots=30, features="raw"),
    RandomICaRL(slots=30),
    DER(slots=30),
    DERpp(slots=30),
]
CLOSE: list[Algorithm] = [
    Laplace(),
    Laplace(implicit=True),
    OGD(slots=16),
    OGDGTL(slots=16),
    OGDAve(slots=16),
    OGDPublished(),
    OptimalHard(structure="full"),
    OptimalHard(structure="low-rank", rank=4),
    OptimalSoft(),
    OptimalSoft(implicit=True),
    OptimalSoft(structure="low-rank", rank=4),
]
"""Their matrices are multiplied and decomposed in an order that depends on how many runs there are."""
RUNS = [(seed, lr) for seed in (0, 1, 2, 3, 4) for lr in (0.01, 0.05, 0.1, 0.2, 0.3)]
CHALLENGE = blobs((150, 110), test=230)


pytestmark = pytest.mark.usefixtures("two_threads")


def label(algorithm: Algorithm) -> str:
    return label_of(algorithm)


def all_of_a_run(end: Snapshot, run: int) -> dict[str, Tensor]:
    """Parameters, memory (but for a buffer's spare row, which is never read), losses and accuracies."""
    memory: Mapping[str, Any] = dict(select(end.state.memory, run))
    if "count" in memory:
        memory = {k: v[:-1] if v.dim() else v for k, v in memory.items()}
    record = {k: v[run] for k, v in end.record.arrays.items()}
    return flatten({"params": select(end.state.params, run), "memory": memory, "record": record})


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [k for k in a if not torch.equal(a[k], b[k])]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
def test_a_run_gives_the_same_bits_alone_among_others_and_run_by_run(algorithm: Algorithm) -> None:
    together = train_to_the_end(cohort_of(CHALLENGE, algorithm, RUNS), "vectorised")
    for run in (0, 13):
        alone = train_to_the_end(cohort_of(CHALLENGE, algorithm, [RUNS[run]]))
        assert differing(all_of_a_run(together, run), all_of_a_run(alone, 0)) == []
    some = slice(8, 12)
    one_by_one = train_to_the_end(cohort_of(CHALLENGE, algorithm, RUNS[some]), "sequential")
    for place, run in enumerate(range(8, 12)):
        assert differing(all_of_a_run(together, run), all_of_a_run(one_by_one, place)) == []
    first = next(k for k in together.state.params if k.endswith("layers.0.weight"))
    params = together.state.params[first].flatten(1)
    assert len({tuple(row.tolist()) for row in params}) == len(RUNS), "every run is another one"


def flat(params: Mapping[str, Tensor], run: int) -> Tensor:
    return torch.cat([p[run].flatten().double() for p in params.values()])


@pytest.mark.parametrize("algorithm", CLOSE, ids=label)
def test_a_run_ends_in_the_same_place_alone_among_others_and_run_by_run(algorithm: Algorithm) -> None:
    runs, network = RUNS[::6], partial(mlp, hidden=(8, 6))
    together = train_to_the_end(cohort_of(CHALLENGE, algorithm, runs, network), "vectorised").state.params
    one_by_one = train_to_the_end(cohort_of(CHALLENGE, algorithm, runs, network), "sequential").state.params
    alone = train_to_the_end(cohort_of(CHALLENGE, algorithm, [runs[3]], network)).state.params
    for actual, expected in [
        (flat(alone, 0), flat(together, 3)),
        *((flat(one_by_one, i), flat(together, i)) for i in range(5)),
    ]:
        assert float((actual - expected).norm() / expected.norm()) < 1e-5


def test_recorded_distances_do_not_depend_on_the_cohort_either() -> None:
    together = train_to_the_end(cohort_of(CHALLENGE, SGD(), RUNS), "vectorised").record
    for run in (0, 13, 24):
        alone = train_to_the_end(cohort_of(CHALLENGE, SGD(), [RUNS[run]])).record
        assert torch.equal(alone.arrays["distance_from_init"][0], together.arrays["distance_from_init"][run])
        assert torch.equal(alone.arrays["update_norm"][0], together.arrays["update_norm"][run])


def test_recorded_distances_are_euclidean() -> None:
    solutions = []
    for snapshot in train(cohort_of(CHALLENGE, SGD(), RUNS[:3])):
        solutions.append({k: p.double() for k, p in snapshot.state.params.items()})
        record = snapshot.record
    for run in range(3):
        for t in (1, 2):
            for name, origin in (("distance_from_init", solutions[0]), ("update_norm", solutions[t - 1])):
                differences = [(solutions[t][k][run] - origin[k][run]).flatten() for k in origin]
                expected = torch.cat(differences).norm()
                torch.testing.assert_close(record.arrays[name][run, t - 1], expected, rtol=1e-6, atol=0)


def test_every_named_algorithm_is_tested_here() -> None:
    from glocal.algorithms import ALGORITHMS as NAMED

    assert {type(a) for a in (*ALGORITHMS, *CLOSE)} == set(NAMED.values())
