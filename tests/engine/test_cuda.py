"""On a GPU a cohort trains inside captured graphs; the results are those of the CPU, within float32's tolerance."""

from __future__ import annotations

import pytest
import torch

from glocal.algorithms import ALGORITHMS
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.graph import Graphed
from glocal.engine.train import Snapshot, choose, train
from glocal.networks import mlp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(scope="module")
def challenge() -> Challenge:
    """Three tasks of 300 and 60 images whose class is the brightest of four bands, turned a little between tasks."""
    made = torch.Generator().manual_seed(0)

    def data(count: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 120, (count, 1, 8, 8), generator=made, dtype=torch.uint8)
        y = torch.arange(count) % 4
        for i, label in enumerate(y.tolist()):
            x[i, 0, (2 * label + shift) % 8] += 120
        return x, y

    return from_tasks("bands", [(data(300, t), data(60, t)) for t in range(3)], setting="domain")


def finish(challenge: Challenge, name: str, device: str) -> Snapshot:
    runs = tuple(Member(seed, lr, ALGORITHMS[name]()) for seed in (1, 2) for lr in (0.02, 0.05))
    cohort = Cohort(challenge, mlp, runs, epochs=2, batch_size=64, device=torch.device(device))
    *_, last = train(cohort)
    return last


@pytest.mark.parametrize("name", ALGORITHMS)
def test_as_on_the_cpu(challenge: Challenge, name: str) -> None:
    ours, reference = finish(challenge, name, "cuda"), finish(challenge, name, "cpu")
    for key, expected in reference.state.params.items():
        torch.testing.assert_close(ours.state.params[key].cpu(), expected, rtol=1e-3, atol=1e-4)
    for key, matrix in reference.record.matrices.items():
        tolerance = 0.02 if key.endswith("accuracy") else 1e-3
        torch.testing.assert_close(ours.record.matrices[key], matrix, rtol=1e-3, atol=tolerance)
    torch.testing.assert_close(ours.record.epoch_loss, reference.record.epoch_loss, rtol=1e-3, atol=1e-4)


def test_it_is_the_graph_that_runs(challenge: Challenge) -> None:
    from glocal.engine.feed import Feed

    cohort = Cohort(challenge, mlp, (Member(1, 0.1, ALGORITHMS["er"]()),), 1, 64, device=torch.device("cuda"))
    feed = Feed(cohort)
    feed.load_task(0)
    executor, note = choose(cohort, feed, "auto")
    assert isinstance(executor, Graphed) and note == ""


def test_a_diverged_run_is_noted_at_the_step_the_cpu_notes(challenge: Challenge) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        runs = tuple(Member(1, lr, ALGORITHMS["sgd"]()) for lr in (0.05, 1e12))
        *_, last = train(Cohort(challenge, mlp, runs, epochs=1, batch_size=64, device=torch.device(device)))
        found[device] = last.state.diverged.tolist()
    assert found["cpu"] == found["cuda"] and found["cpu"][0] == -1 < found["cpu"][1]
