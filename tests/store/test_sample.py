"""Sampled sweeps: what is asked for, and that a sweep that was stopped goes on with the same trials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glocal
from glocal.challenges import Challenge, from_tasks
from glocal.engine.loop import Progress
from glocal.errors import GlocalError
from glocal.selection import criterion
from glocal.store.run import Runs
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.options import parse_range
from glocal.sweeps.sample import sample

SPACE = [("ewc", {"penalty": "0.1..1000"})]


def blobs() -> Challenge:
    random = np.random.default_rng(0)

    def part(n: int, classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
        y = np.resize(classes, n)
        return np.eye(4, dtype=np.float32)[y] + 0.3 * random.random((n, 4), dtype=np.float32), y

    return from_tasks("blobs", [(part(24, c), part(8, c), part(8, c)) for c in ([0, 1], [2, 3])], setting="class")


def train(store: Path, trials: int = 14, **more: Any) -> Runs:
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "store": store, "parallel": 4, "seeds": [1, 2], **more}
    return sample(blobs(), SPACE, ["1e-3..1"], trials=trials, **options)


def trials_of(runs: Runs) -> list[tuple[float, ...]]:
    """Return lr, penalty and criterion of every run."""
    return [(run.lr, run.settings["penalty"], criterion(run, "all-validation")) for run in runs]


class Interrupt(ProgressReporter):
    """Interrupts training before a cohort."""

    def __init__(self, after: int) -> None:
        self.left = after

    def start_cohort(self, *shown: Any) -> Progress:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return Progress()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train(tmp_path_factory.mktemp("whole"))


def test_what_was_stopped_goes_on_with_the_same_trials(whole: Runs, tmp_path: Path) -> None:
    """After two of four batches. TPE's own trials begin after ten random ones."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, progress=Interrupt(2))
    assert (len(glocal.load(tmp_path)), len(whole)) == (16, 28)
    resumed = train(tmp_path)
    assert trials_of(resumed) == trials_of(whole)
    assert len(glocal.load(tmp_path)) == len(whole)
    train(tmp_path, progress=Interrupt(0))  # nothing is left to train


def test_only_what_is_sampled_is_trained_however_much_at_a_time(tmp_path: Path) -> None:
    """With every combination of 48 configurations it would be too many runs."""
    runs = train(tmp_path / "store", trials=48, parallel=48, seeds=[1], track=f"tensorboard:{tmp_path / 'logs'}")
    assert len(runs) == 48
    assert len([*(tmp_path / "logs").rglob("events*")]) == 48


def test_more_trials_begin_with_the_same(whole: Runs, tmp_path: Path) -> None:
    assert trials_of(train(tmp_path, trials=6)) == trials_of(whole)[:12]


def test_samples_are_in_their_ranges_and_short(whole: Runs) -> None:
    for run in whole:
        penalty = run.settings["penalty"]
        assert 1e-3 <= run.lr <= 1 and 0.1 <= penalty <= 1000
        assert run.lr == float(f"{run.lr:.3g}") and penalty == float(f"{penalty:.3g}")
    lrs = np.log10([run.lr for run in whole])
    assert lrs.min() < -2 and lrs.max() > -1, "they spread over the logarithm"
    assert len({(run.lr, run.settings["penalty"]) for run in whole}) == 14


def test_whole_numbers_uniform_ranges_and_chosen_rates(tmp_path: Path) -> None:
    adam = ("adam", {"beta1": "0..0.9"})
    options: dict[str, Any] = {"epochs": 1, "batch_size": 24, "store": tmp_path, "sampler": "random"}
    space = [("er", {"slots": "4..12", "replay": [4, 8]})]
    runs = sample(blobs(), space, [0.01234, 0.1], [1], trials=10, optimizer=adam, **options)
    assert {run.lr for run in runs} == {0.01234, 0.1}, "values that were given are not rounded"
    assert all(4 <= run.settings["slots"] <= 12 for run in runs) and {run.settings["replay"] for run in runs} == {4, 8}
    betas = [run.settings["beta1"] for run in runs]
    assert all(0 <= beta <= 0.9 for beta in betas) and max(betas) - min(betas) > 0.3


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1e-4..1", ("1e-4", "1")), ("0..5", ("0", "5")), ("exact", None), (0.1, None), ("../a", None), ("1..inf", None)],
)
def test_ranges(value: object, expected: tuple[str, str] | None) -> None:
    assert parse_range(value) == expected


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(GlocalError, match=r"pip install 'glocal\[optuna\]'"):
        train(tmp_path)
