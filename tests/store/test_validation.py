"""Validation data: held out or given, measured like test data, stored, and used instead of test data for choices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glocal
from glocal.challenges import Challenge, from_tasks, make
from glocal.engine.config import MEASURES, VALIDATION_MEASURES
from glocal.engine.loop import Progress
from glocal.errors import GlocalError
from glocal.lens.record import open_run
from glocal.report import summary
from glocal.sweeps import resolve
from glocal.sweeps.context import ProgressReporter

SMALL: dict[str, Any] = {"tasks": 2, "epochs": 1, "train_eval": 10_000}


def part(n: int, classes: list[int], flip: bool = False) -> tuple[np.ndarray, np.ndarray]:
    random, y = np.random.default_rng(n), np.resize(classes, n)
    x = np.eye(4, dtype=np.float32)[y] + 0.1 * random.random((n, 4), dtype=np.float32)
    return x, (np.roll(y, 1) if flip else y)


def triples(flip: bool = False) -> Challenge:
    """Return two tasks; `flip`: with labels in validation that contradict training."""
    tasks = [(part(40, c), part(12, c, flip), part(20, c)) for c in ([0, 1], [2, 3])]
    return from_tasks("triples", tasks, setting="class")


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits", "rotated-digits"])
def test_a_share_of_the_training_data_is_held_out(name: str) -> None:
    whole, held_out = make(name), make(name).with_validation(0.1)
    held_rows = []
    for index in (0, 1):
        before, after = whole.task(index, 5), held_out.task(index, 5)
        assert after.validation is not None
        n = len(before.train.y)
        assert (len(after.train.y), len(after.validation.y)) == (n - n // 10, n // 10)
        rows = {x.numpy().tobytes(): row for row, x in enumerate(before.train.x)}
        kept, held = ({rows[x.numpy().tobytes()] for x in data.x} for data in (after.train, after.validation))
        if len(rows) == n:  # all images differ
            assert not kept & held and kept | held == set(range(n))
        assert torch.equal(after.test.x, before.test.x)
        held_rows.append(held)
    if name == "permuted-digits":  # both tasks show the same images
        assert held_rows[0] == held_rows[1]


def test_held_out_rows_do_not_depend_on_the_seed() -> None:
    challenge = make("permuted-digits").with_validation(0.25)
    first, second = (challenge.task(0, seed).validation for seed in (1, 2))
    assert first is not None and second is not None
    assert torch.equal(first.x, second.x)


def test_a_challenge_made_of_another_does_not_hold_out_twice() -> None:
    challenge = make("split-digits").with_validation(0.5)
    wrapped = replace(challenge, make_task=challenge.task)
    assert len(wrapped.task(0, 0).train.y) == len(challenge.task(0, 0).train.y) == 400


def test_validation_is_part_of_a_run_s_name_only_where_asked_for() -> None:
    configs = [resolve.challenge("split-digits", validation=share).config for share in (None, 0.1, 0.2)]
    assert "validation" not in configs[0]
    assert [config.get("validation") for config in configs] == [None, 0.1, 0.2]


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
def test_held_out_data_are_measured_like_test_data(tmp_path: Path, execution: str) -> None:
    """A challenge of triples whose validation data are the test data has the same measurements of both."""
    tasks = [make("split-digits").task(index, 0) for index in (0, 1)]
    copies = from_tasks("copies", [((*t.train,), (*t.test,), (*t.test,)) for t in tasks], setting="class")
    runs = glocal.sweep(copies, ["er"], [0.1], [1, 2], epochs=1, store=tmp_path, execution=execution)
    for run in glocal.load(tmp_path):
        assert run.config["challenge"]["validation"] == "own"
        for name in VALIDATION_MEASURES:
            np.testing.assert_array_equal(run.arrays[name], run.arrays[name.replace("validation", "test")])
    assert len(runs) == 2


def test_runs_without_validation_store_no_more_than_before(tmp_path: Path) -> None:
    (run,) = glocal.sweep("split-digits", ["sgd"], [0.1], [1], store=tmp_path, **SMALL)
    assert {*MEASURES} < set(run.arrays) and not {*VALIDATION_MEASURES} & set(run.arrays)


class StopInTask2(Progress):
    def task(self, task: int) -> None:
        if task == 1:
            raise KeyboardInterrupt


class Interrupt(ProgressReporter):
    def start_cohort(self, *shown: Any) -> Progress:
        return StopInTask2()


def test_resumed_runs_keep_their_validation_measurements(tmp_path: Path) -> None:
    whole = glocal.sweep("split-digits", ["er"], [0.1], [1], store=tmp_path / "a", validation=0.2, **SMALL)
    options: dict[str, Any] = {"store": tmp_path / "b", "validation": 0.2, **SMALL}
    with pytest.raises(KeyboardInterrupt):
        glocal.sweep("split-digits", ["er"], [0.1], [1], progress=Interrupt(), **options)
    resumed = glocal.sweep("split-digits", ["er"], [0.1], [1], **options)
    for name in VALIDATION_MEASURES:
        np.testing.assert_array_equal(resumed[0].arrays[name], whole[0].arrays[name])
        assert np.isfinite(resumed[0].arrays[name]).all()


def test_the_learning_rate_is_chosen_on_validation_data(tmp_path: Path) -> None:
    """Validation labels contradict training, so the rate that learns most is the worst there."""
    lrs: list[float] = [1e-4, 0.5]
    options: dict[str, Any] = {"epochs": 4, "batch_size": 8}
    for flip, best in ((False, 0.5), (True, 1e-4)):
        runs = glocal.sweep(triples(flip), ["sgd"], lrs, [1], store=tmp_path / str(flip), **options)
        rows = summary.rows(runs)
        assert rows[1]["acc_mean"] > rows[0]["acc_mean"], "on test data the high rate is better"
        assert {row["chosen_on"] for row in rows} == {"validation"}
        svg = runs.plot("matrix", tmp_path / "matrix.svg").read_text()
        assert f"lr {best:g}, best of 2" in svg
        cells = summary._cells(rows)
        marked = [lr for (_, _, lr, _), (accuracy, _) in cells.items() if accuracy.marked]
        assert marked == [best]


def test_a_stored_run_with_validation_is_opened_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_parameters": True, "validation": 0.5, **SMALL}
    (run,) = glocal.sweep("split-digits", ["sgd"], [0.1], [1], store=tmp_path, **options)
    assert run.path is not None
    stored = open_run(run.path)
    assert stored.cohort.challenge.validation == 0.5
    trace = stored.trace(examples=10_000)
    assert float(trace.value(0, trace.checkpoints[1])) == pytest.approx(run.arrays["train_class_loss"][1, 0], rel=1e-4)


@pytest.mark.parametrize(
    ("challenge", "share", "message"),
    [
        ("split-digits", 1.0, "validation = 1.0 was given; it is a share"),
        ("split-digits", -0.1, "validation = -0.1 was given; it must be positive"),
        (triples(), 0.1, r"triples has validation data already \(own\): leave validation=0.1 out"),
    ],
)
def test_wrong_shares_are_refused(tmp_path: Path, challenge: Any, share: float, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        glocal.sweep(challenge, ["sgd"], [0.1], [1], store=tmp_path, validation=share, epochs=1)


def test_one_example_is_always_left_and_tasks_must_agree() -> None:
    one = from_tasks("one", [(part(1, [0]), part(3, [0]))], setting="domain").with_validation(0.1)
    with pytest.raises(GlocalError, match="holds out 1 of the 1 training examples of task 1 of one"):
        one.task(0, 0)
    with pytest.raises(GlocalError, match="task 2 and task 1 differ in whether they have validation data"):
        from_tasks("mixed", [(part(4, [0]),) * 3, (part(4, [1]),) * 2])
    with pytest.raises(GlocalError, match=r"task 1 is a tuple of length 4"):
        from_tasks("four", [(part(4, [0]),) * 4])
    assert triples().fingerprint != triples(flip=True).fingerprint
