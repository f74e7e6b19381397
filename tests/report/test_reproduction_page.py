"""What docs/reproduction.py computes: paces, dates, figures, and the sentence that goes with the numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_runs import fake_run

from glocal.paper import results
from glocal.paper.table1 import COLUMNS
from glocal.runs import Runs
from glocal.store.run import Run

TINY = COLUMNS["split-tinyimagenet"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, reading and writing elsewhere."""
    spec = importlib.util.spec_from_file_location(
        "reproduction", Path(__file__).parents[2] / "docs" / "reproduction.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def short(
    row: str, lr: float, seconds: float = 2.0, steps: int = 10, cohort: int = 4, pace: float | None = None, **info: Any
) -> Run:
    """As an earlier version wrote it, where no pace is given."""
    chosen = TINY.named(row)
    made = fake_run(
        row,
        lr,
        11,
        challenge="split-tinyimagenet",
        setting="task",
        tasks=2,
        network={"name": "resnet18"},
        options={"options": dict(chosen.options)},
    )
    costs = {"seconds": seconds, "memory_bytes": 0, "cohort_runs": cohort}
    costs |= {} if pace is None else {"step_seconds": pace}
    return replace(made, info={**made.info, "cost": costs, "steps": steps, "versions": {"device": "x"}, **info})


def test_projected_cost(page: ModuleType) -> None:
    """sgd: 6 s for 300 steps are 20 ms; a run of 10 tasks, 100 epochs and 313 batches has 313,000 steps; 25 such."""
    runs = Runs([short("sgd", 0.01, 2.0, 100), short("sgd", 0.1, 4.0, 200, cohort=8), short("icarl", 0.1, 7.2, 100)])
    text = page.projection(runs, TINY)
    assert "| `sgd` | 20.00 | 43.5 |" in text  # 0.02 × 313,000 × 25 / 3600 = 43.47
    assert "| `icarl` | 72.00 | 156.5 |" in text  # 0.072 × 313,000 × 25 / 3600 = 156.5
    assert "Seconds by steps of 4 to 8 runs trained together" in text
    assert "start-up, consolidation and measuring are included." in text and "not timed" not in text
    assert "313,000 steps a run × 2 rows × 5 learning rates × 5 seeds: at this pace 200.0 hours" in text
    assert "without `agem`, `er`, `si`, `ewc`, `ogd-published`, `ogd-gtl`, of which" in text


def test_the_pace_of_training_is_projected_where_it_is_known(page: ModuleType, tmp_path: Path) -> None:
    """sgd: the median of 1, 2 and 40 ms, whatever the seconds; icarl: 7.2 s for 100 steps, as it does not say more."""
    paces = (0.04, 0.001, 0.002)
    timed = [short("sgd", lr, 900.0, 100, pace=pace) for lr, pace in zip(TINY.lrs[:3], paces, strict=True)]
    silent = [short("sgd", TINY.lrs[3], 900.0, 100), short("icarl", 0.1, 7.2, 100)]
    unsure = replace(silent[1], info={**silent[1].info, "cost": {**silent[1].info["cost"], "step_seconds": None}})
    for icarl in (silent[1], unsure):
        kept = results.read(results.write([*timed, silent[0], icarl], tmp_path / "r.npz"))
        text = page.projection(kept, TINY)
        assert "| `sgd` | 2.00 | 4.3 |" in text  # 0.002 × 313,000 × 25 / 3600 = 4.347
        assert "| `icarl` | 72.00 | 156.5 |" in text
        assert "at this pace 160.8 hours" in text
        assert "in the median epoch of 4 to 4 runs" in text and "measuring are left out. For `icarl`, whose" in text
    assert "measuring are left out. The whole column is" in page.projection(Runs(timed), TINY)


def test_days_where_they_are_known(page: ModuleType) -> None:
    first, last = ("2024-02-28T23:59:59+00:00", "2024-03-02T00:00:00+00:00")
    undated = short("sgd", 0.1)
    dated = [short("sgd", 0.1, finished=when) for when in (last, first)]
    assert page.cost(Runs([undated])) == "1 runs took 2 s together on x."
    assert page.cost(Runs([undated, dated[0]])).endswith("on x, finished on 2024-03-02.")
    assert page.cost(Runs([undated, *dated])).endswith("on x, finished from 2024-02-28 to 2024-03-02.")


def test_split_columns_have_their_figures(page: ModuleType, tmp_path: Path) -> None:
    herding = [short("icarl", lr) for lr in (0.01, 0.1)]
    random = [short("icarl-random", lr) for lr in (0.01, 0.1)]
    for runs, both in ((herding, False), ([*herding, *random], True)):
        results.write(runs, tmp_path / "split-tinyimagenet.parquet")
        text = page.split("split-tinyimagenet")
        assert "](images/split-tinyimagenet-distance.png)" in text and "| `icarl` | 200.00 |" in text
        assert ("](images/split-tinyimagenet-icarl-buffer.png)" in text) is both
        assert (tmp_path / "images" / "split-tinyimagenet-icarl-buffer.png").exists() is both
        assert (tmp_path / "images" / "split-tinyimagenet-distance.png").exists()
    assert page.split("split-cifar10") == ""


@pytest.mark.parametrize(
    ("lowest", "highest", "shown", "said"),
    [
        (0.6, 0.2, False, "which is the paper's thesis, and the published row"),
        (0.6, 0.2, True, "which is the paper's thesis."),
        (0.2, 0.6, False, "against the paper's thesis."),
        (-0.1, -0.3, False, "against the paper's thesis."),
    ],
)
def test_the_sentence_follows_the_numbers(
    page: ModuleType, lowest: float, highest: float, shown: bool, said: str
) -> None:
    assert said in page.thesis(lowest, highest, shown)


def test_differences_by_rate(page: ModuleType) -> None:
    """Forgetting over T−1 = 4 tasks is 62.5 % of `lost`: 20 and 15 points, 10 and 25."""
    lost = {("sgd", 0.1): 0.32, ("sgd", 0.5): 0.24, ("ogd-gtl", 0.1): 0.16, ("ogd-gtl", 0.5): 0.40, ("er", 0.9): 0.5}
    runs = Runs([fake_run(name, lr, tasks=5, lost=x) for (name, lr), x in lost.items()])
    text = page.by_rates(page.compare(runs), runs)
    assert ", is in points: -10.0 at 0.1, +10.0 at 0.5. One seed gives no verdict." in text
    alone = Runs([run for run in runs if run.algorithm != "sgd"])
    assert page.by_rates(page.compare(alone), alone) == ""


def test_further_rows_have_a_sentence_of_their_own(page: ModuleType) -> None:
    assert page.further(Runs([])) == ""
    told = page.further(Runs([short("sgd", 0.1), short("icarl", 0.1), short("icarl", 0.5)]))
    assert told.startswith(" The rows of `sgd` and `icarl` were trained beside") and "3 runs took 6 s" in told


def test_gradients_a_task_are_those_of_the_runs(page: ModuleType) -> None:
    """10 slots for 5 tasks; forgetting over T−1 tasks is `lost` T / (2 (T−1)), so 62.5 % of it."""
    lost = {("sgd", 0.1): 0.32, ("sgd", 0.5): 0.48, ("ogd-gtl", 0.1): 0.16, ("ogd-gtl", 0.5): 0.44}
    lost |= {("ogd-published", lr): lost["sgd", lr] for lr in (0.1, 0.5)}
    runs = Runs(
        [
            fake_run(name, lr, tasks=5, lost=x, options={"options": {"slots": 10} if "ogd" in name else {}})
            for (name, lr), x in lost.items()
        ]
    )
    text = page.orthogonal(page.compare(runs), runs)
    assert (
        "At lr 0.1 plain SGD forgets 20.0 points, `ogd-published` 20.0, and `ogd-gtl`, with 2 gradients a task" in text
    )
    assert "10.0: 50 % less than SGD. At lr 0.5 plain SGD forgets 30.0 points" in text and "27.5: 8 % less" in text
    assert text.endswith("could not show it.")
