"""Tasks with overlapping and unequally many classes: their accuracies are those of a loop over examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glocal.algorithms import ER, GEM, SGD, Algorithm, ICaRL
from glocal.challenges import from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, train
from glocal.networks import mlp

CLASSES = [0, 1, 2], [0, 3], [1, 0], [1, 2, 3, 4]


def part(n: int, classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    random, y = np.random.default_rng(n), np.resize(classes, n)
    return np.eye(5, dtype=np.float32)[y] + random.normal(0, 0.4, (n, 5)).astype(np.float32), y


CHALLENGE = from_tasks("blurry", [(part(30 + n, c), part(21 + n, c)) for n, c in enumerate(CLASSES)])


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    "algorithm", [SGD(), ER(slots=20), pytest.param(GEM(slots=40), marks=pytest.mark.slow), ICaRL(slots=22)]
)
def test_overlapping_classes(algorithm: Algorithm, execution: Execution) -> None:
    members = tuple(Member(seed, 0.2, algorithm) for seed in (1, 2))
    cohort = Cohort(CHALLENGE, mlp, members, epochs=2, batch_size=8)
    *_, last = train(cohort, execution=execution)
    model = cohort.model(vectorised=False)
    for run in range(2):
        state = last.state.select(run)
        for o, classes in enumerate(CLASSES):
            x, y = CHALLENGE.task(o, 0).test
            logits = algorithm.predict(model.bind(state.buffers, training=False), state.params, state.memory, x, o)
            own = [max(classes, key=lambda c: float(row[c])) for row in logits]
            among_all = [int(row.argmax()) for row in logits]
            for scope, predicted in (("task", own), ("class", among_all)):
                accuracy = np.mean(np.array(predicted) == y.numpy())
                stored = float(last.record.arrays[f"test_{scope}_accuracy"][run, -1, o])
                assert stored == pytest.approx(accuracy, abs=0.5 / len(y))
    assert torch.isfinite(last.record.arrays["test_task_loss"]).all()
