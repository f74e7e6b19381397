"""All runs measured at once, as on a GPU, against seed by seed."""

from __future__ import annotations

import pytest
import torch

from glocal.algorithms import ER, Algorithm, ICaRL
from glocal.challenges import make
from glocal.engine.cohort import Cohort, Member
from glocal.engine.evaluate import Evaluator
from glocal.engine.execute import RunByRun, Vectorised
from glocal.engine.train import Snapshot, train
from glocal.networks import mlp


def trained(algorithm: Algorithm, challenge: str) -> tuple[Cohort, Snapshot]:
    members = tuple(Member(seed, lr, algorithm) for seed in (3, 5) for lr in (0.05, 0.1, 0.2))
    cohort = Cohort(make(challenge, tasks=2), mlp, members, epochs=1, batch_size=200)
    *_, end = train(cohort)
    return cohort, end


@pytest.mark.parametrize("executor", [Vectorised, RunByRun])
@pytest.mark.parametrize(
    ("algorithm", "challenge"), [(ER(slots=20), "rotated-digits"), (ICaRL(slots=20), "split-digits")]
)
def test_measured_at_once_is_measured_seed_by_seed(
    executor: type[Vectorised | RunByRun], algorithm: Algorithm, challenge: str
) -> None:
    cohort, end = trained(algorithm, challenge)
    evaluator = Evaluator(cohort)
    assert len(evaluator._shares) == len(cohort.groups)
    evaluator._shares = [cohort.groups]
    again = {k: m[:, -1].clone() for k, m in end.record.matrices.items()}
    for matrix in end.record.matrices.values():
        matrix[:, -1] = torch.nan
    evaluator.measure(executor(cohort), end.state, end.record, row=2)
    for name, matrix in end.record.matrices.items():
        torch.testing.assert_close(matrix[:, -1], again[name], rtol=1e-5, atol=1e-7)
    assert len(set(again["test_class_loss"][:, 0].tolist())) == 6  # whose is whose can be told
