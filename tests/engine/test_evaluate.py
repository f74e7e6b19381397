"""All runs measured at once, as on a GPU, against seed by seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glocal import from_tasks
from glocal.algorithms import ER, EWC, Algorithm, ICaRL
from glocal.challenges.challenge import Challenge, Data, Task
from glocal.engine.cohort import Cohort, Member
from glocal.engine.config import MEASURES
from glocal.engine.evaluate import Evaluator
from glocal.engine.executors import Sequential, Vectorised
from glocal.engine.loop import train
from glocal.errors import GlocalError
from glocal.networks import mlp


def seeded(classes: bool, sizes: bool) -> Challenge:
    """Two tasks of two classes, other images and labels for every seed; if asked for, other classes or test sizes."""

    def data(n: int, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(stream)
        return torch.randn(n, 6, generator=draw), torch.randint(2, (n,), generator=draw)

    tasks = []
    for number in range(2):
        x, y = data(30, number)
        tasks.append(((x, y + 2 * number), (x[:20], y[:20] + 2 * number)))
    base = from_tasks("own", tasks, setting="task", outputs=4)

    def task(number: int, seed: int) -> Task:
        of = 1 - number if classes and seed == 5 else number
        made = base.task(of, 0)
        parts = [Data(x, y + 2 * of) for x, y in (data(30, 10 * seed + of), data(20, 99 * seed + of))]
        test = Data(parts[1].x[:13], parts[1].y[:13]) if sizes and seed == 5 else parts[1]
        return replace(made, train=parts[0], test=test)

    return replace(base, seeded=True, make_task=task)


def test_classes_that_were_seen_are_those_of_the_runs_seed() -> None:
    challenge = replace(seeded(classes=True, sizes=False), setting="class", evaluate="seen")
    ends = []
    for seeds in ((3, 5), (5,)):
        cohort = Cohort(challenge, mlp, tuple(Member(seed, 0.1, ER(slots=20)) for seed in seeds), 1, batch_size=10)
        *_, end = train(cohort)
        ends.append(end.record.arrays["test_class_accuracy"][-1])
    assert torch.equal(*ends) and ends[1][1, 1] == 0, "the classes of the second task were not seen after the first"


def test_an_algorithm_that_uses_the_classes_of_tasks_trains_seeds_with_others_apart() -> None:
    challenge = replace(seeded(classes=True, sizes=False), setting="class")
    members = tuple(Member(seed, 0.1, ICaRL(slots=20)) for seed in (3, 5))
    with pytest.raises(GlocalError, match="icarl uses the classes of tasks, which differ between seeds"):
        list(train(Cohort(challenge, mlp, members, 1, batch_size=10)))


@pytest.mark.parametrize("executor", [Vectorised, Sequential])
@pytest.mark.parametrize("algorithm", [ER(slots=20), EWC()])
@pytest.mark.parametrize(("classes", "sizes", "shares"), [(False, False, 1), (True, False, 2), (False, True, 2)])
def test_measured_at_once_is_measured_seed_by_seed(
    executor: type[Vectorised | Sequential], algorithm: Algorithm, classes: bool, sizes: bool, shares: int
) -> None:
    """Where seeds have classes or numbers of their own, they are not measured at once."""
    members = tuple(Member(seed, lr, algorithm) for seed in (3, 5) for lr in (0.05, 0.1, 0.2))
    cohort = Cohort(seeded(classes, sizes), mlp, members, epochs=1, batch_size=10)
    *_, end = train(cohort)
    evaluator = Evaluator(cohort)
    assert len(evaluator._load(0)) == 2
    evaluator.merge_groups = True
    assert len(evaluator._load(0)) == shares
    matrices = {name: end.record.arrays[name] for name in MEASURES}
    again = {k: m[:, -1].clone() for k, m in matrices.items()}
    for matrix in matrices.values():
        matrix[:, -1] = torch.nan
    evaluator.measure(executor(cohort), end.state, end.record, row=2)
    for name, matrix in matrices.items():
        torch.testing.assert_close(matrix[:, -1], again[name], rtol=1e-5, atol=1e-7)
    assert len(set(again["test_class_loss"][:, 0].tolist())) == 6  # whose is whose can be told
