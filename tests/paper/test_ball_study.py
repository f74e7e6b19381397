"""The ball: steps against a projection by hand, no limit against the algorithm itself, slopes against known ones."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from small_problems import batch_of, blobs, cohort_of, double_model, elsewhere, examples, flat, gradient, small_mlp

from glocal.engine.loop import train
from glocal.paper import get_study
from glocal.paper.studies.ball import ALGORITHMS, BallSGD, count_labelings, fit, interactions
from glocal.paper.table1 import COLUMNS

STUDY = get_study("ball")


@pytest.mark.parametrize("radius", [0.01, 0.3, 50.0])
def test_a_step_ends_at_the_nearest_point_of_the_ball(radius: float) -> None:
    model, params = double_model()
    centre, lr = elsewhere(params, 3, 0.05), torch.tensor(0.7, dtype=torch.float64)
    batch = batch_of(examples(9, 1))._replace(lr=lr)
    grads = gradient(lambda p: model.loss(p, batch.x, batch.y), params)
    direction = BallSGD(radius=radius).direction(model, grads, params, {"centre": centre}, batch)
    free, c = flat(params) - lr * flat(grads), flat(centre)
    expected = free if (free - c).norm() <= radius else c + radius * (free - c) / (free - c).norm()
    torch.testing.assert_close(flat(params) - lr * flat(direction), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_training_later_tasks_stay_inside_and_without_a_limit_nothing_changes(name: str) -> None:
    """θ_t of all tasks, with the algorithm's published options and a small buffer."""
    kind, challenge = ALGORITHMS[name], blobs((120, 120, 120))
    options = dict(COLUMNS["rotated-mnist"].row(name).options)
    options |= {"slots": 30} if "slots" in options else {}
    plain = kind.__mro__[2](**options)

    def solutions(algorithm: object) -> torch.Tensor:
        cohort = cohort_of(challenge, algorithm, [(0, 0.05), (1, 0.2)], network=small_mlp)  # type: ignore[arg-type]
        return torch.stack([torch.cat([p.flatten(1) for p in s.state.params.values()], 1) for s in train(cohort)])

    moved = solutions(kind(**options, radius=0.1)).double().diff(dim=0).norm(dim=-1)  # (tasks, runs)
    assert moved.shape == (3, 2) and (moved[0] > 0.15).all(), "the first task is free"
    torch.testing.assert_close(moved[1:], torch.full((2, 2), 0.1, dtype=torch.float64), rtol=1e-4, atol=0)
    assert torch.equal(solutions(kind(**options)), solutions(plain))


def rows(local: float, noise: float = 0.0) -> pl.DataFrame:
    """Forgetting with known slopes: 2 per doubling of the distance, `local` more if local, and 3 of the rate."""
    draw, table = np.random.default_rng(0), []
    for seed in range(4):
        for algorithm, locality in (("sgd", "global"), ("er", "global"), ("si", "global"), ("ewc", "local")):
            for lr in (0.01, 0.04, 0.1):
                for radius in (0.5, 1.0, 2.0, np.inf):
                    distance = min(radius, 40 * lr) * draw.uniform(0.9, 1.1)
                    accuracy = 90 - 10 / (1 + distance) + 20 * lr
                    slope = 2 + (local if locality == "local" else 0)
                    value = slope * np.log2(distance) + 3 * np.log2(lr) + 0.5 * accuracy + len(algorithm) + seed
                    value += noise * draw.normal()
                    keys = {"algorithm": algorithm, "locality": locality, "lr": lr, "seed": seed, "radius": radius}
                    measured = {"distance": distance, "forgetting": value, "learning_accuracy": accuracy, "acc": 80.0}
                    table.append(keys | measured)
    return pl.DataFrame(table)


def test_slopes_are_recovered_and_a_diverged_run_is_left_out() -> None:
    exact = rows(1.5).with_columns(
        pl.when(pl.int_range(pl.len()) == 5).then(np.nan).otherwise("forgetting").alias("forgetting")
    )
    by_distance, by_rate = fit(exact, {name: name for name in ("sgd", "er", "si", "ewc")})
    for name in by_distance:
        np.testing.assert_allclose(by_distance[name], 3.5 if name == "ewc" else 2, atol=1e-8)
        np.testing.assert_allclose(by_rate[name], 3, atol=1e-8)
    assert "1 of 192 runs diverged" in STUDY.summarize(exact).verdict
    distance, rate = interactions(exact, {"ewc"})
    assert distance.mean == pytest.approx(1.5) and rate.mean == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(("local", "supported"), [(1.5, True), (0.0, False), (-1.5, False)])
def test_the_verdict_follows_the_interval(local: float, supported: bool) -> None:
    verdict = STUDY.summarize(rows(local, noise=0.3)).verdict
    assert ("not supported" in verdict) is not supported
    STUDY.draw(rows(local), Figure())
    # Of four algorithms one is called local; ewc differs from all others by `local`, and these among them by −local/3.
    counts = {1.5: (1, 4), 0.0: (4, 4), -1.5: (4, 4)}[local]
    assert count_labelings(rows(local), {"ewc"}) == counts
