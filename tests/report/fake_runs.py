"""Runs whose every number follows from a formula, for the tests of tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from glocal.engine.config import MEASURES
from glocal.paper.table1 import COLUMNS
from glocal.store.run import Run

LOCALITY = {"sgd": "global", "er": "global", "agem": "global", "si": "global", "joint": "global"}


def fake_run(
    algorithm: str = "er",
    lr: float = 0.1,
    seed: int = 0,
    *,
    challenge: str = "rotated-digits",
    learnt: float = 0.9,
    lost: float = 0.1,
    distance: float = 2.0,
    tasks: int = 3,
    epochs: int = 2,
    setting: str = "domain",
    diverged: int | None = None,
    network: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    label: str | None = None,
    regression: bool = False,
) -> Run:
    """Every task is learnt to accuracy `learnt`, and after each later task `lost`/(T−1) less than before it.

    So, after T tasks, task o has lost `lost` (T−o)/(T−1): over T−1 tasks the average forgetting is
    lost (1/(T−1)²) Σ_{k=1}^{T−1} k = lost T / (2 (T−1)). Losses are 1 − accuracy; accuracies among the task's own
    classes are halfway to 1; before a task is met its accuracy is 0.1, or 0.2 once one task has been learnt. A
    regression has the same losses and no accuracies.
    """
    R = np.empty((tasks + 1, tasks))
    for t in range(tasks + 1):
        for o in range(1, tasks + 1):
            fall = lost / max(tasks - 1, 1)
            R[t, o - 1] = learnt - fall * (t - o) if t >= o else (0.1 if t == 0 else 0.2)
    if diverged is not None:
        R[1:] = np.nan
    arrays: dict[str, np.ndarray] = {}
    for name in MEASURES:
        _, scope, what = name.split("_")
        values = R if scope == "class" or regression else (1 + R) / 2
        arrays[name] = (np.nan * values if regression else values) if what == "accuracy" else 1 - values
    steps = np.arange(1, tasks + 1)
    arrays["distance_from_init"] = distance * np.sqrt(steps / tasks) * (np.nan if diverged is not None else 1)
    arrays["update_norm"] = np.full(tasks, distance / tasks)
    arrays["epoch_loss"] = 1.0 / np.arange(1, epochs + 1) + 0.1 * steps[:, None]
    arrays["memory_bytes"] = steps * 100
    return Run(
        config={
            "challenge": {
                "name": challenge,
                "tasks": tasks,
                "outputs": 10,
                "options": {"angles": None},
                "loss": "squared-error" if regression else "cross-entropy",
            },
            "network": network or {"name": "mlp", "hidden": [100, 100]},
            "algorithm": {"name": algorithm, "options": options or {}},
            "lr": lr,
            "seed": seed,
            "epochs": epochs,
            "batch_size": 64,
            "train_eval": 100,
            "precision": "fp32",
            "protocol": 1,
        },
        arrays=arrays,
        info={
            "label": label or algorithm,
            "locality": LOCALITY.get(algorithm, "local"),
            "setting": setting,
            "diverged": diverged,
            "steps": 10,
            "finished": "2024-03-01T12:00:00+00:00",
            "cost": {"seconds": 2.0, "memory_bytes": 1_500},
            "versions": {},
            "notes": [],
        },
    )


def table1_run(row: str, lr: float, seed: int, acc: float, forgetting: float, **more: Any) -> Run:
    """A run of Rotated-MNIST of the published size, with this accuracy and forgetting over T−1 tasks, in percent.

    Of `fake_run`, forgetting is lost T / (2 (T−1)) and accuracy learnt − lost / 2.
    """
    column = COLUMNS["rotated-mnist"]
    tasks = column.tasks
    lost = 2 * (tasks - 1) / tasks * forgetting / 100
    chosen = column.row(row)
    made = fake_run(
        chosen.algorithm,
        lr,
        seed,
        challenge="rotated-mnist",
        learnt=acc / 100 + lost / 2,
        lost=lost,
        tasks=tasks,
        epochs=column.epochs,
        options={"replay": 0, **chosen.options},
        **more,
    )
    return replace(made, config={**made.config, "batch_size": column.batch_size})


def published_runs(row: str, standard_errors: float = 0.0, spread: float = 1.0) -> list[Run]:
    """Five seeds at each learning rate, with means so many standard errors from the published ones.

    Seeds are 0 and ±`spread` from their mean, so their unbiased variance is spread² and the standard error of the
    difference from the published mean √(s²/4 + spread²/5).
    """
    column, runs = COLUMNS["rotated-mnist"], []
    for lr in column.lrs:
        cell = column.published_cell(column.row(row), lr)
        assert cell is not None
        means = [
            cell[f"{what}_mean"] + standard_errors * math.sqrt(cell[f"{what}_std"] ** 2 / 4 + spread**2 / 5)
            for what in ("acc", "forgetting")
        ]
        for seed, off in zip(column.seeds, (-1, -1, 0, 1, 1), strict=True):
            runs.append(table1_run(row, lr, seed, *(mean + spread * off for mean in means)))
    return runs


def sweep(
    algorithms: Iterable[str],
    lrs: Iterable[float],
    seeds: Iterable[int],
    lost: Callable[[str, float, int], float],
    **more: Any,
) -> list[Run]:
    """One run for every combination; `lost(algorithm, lr, seed)` is what it forgets of the first task."""
    lrs, seeds = list(lrs), list(seeds)
    return [
        fake_run(name, lr, seed, lost=lost(name, lr, seed), distance=20 * lr**0.5, **more)
        for name in algorithms
        for lr in lrs
        for seed in seeds
    ]
