"""Accuracy among the classes seen so far: that of a loop over examples, with a name of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glocal
from glocal.algorithms import ER, SGD, Algorithm, ICaRL
from glocal.challenges import from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, train
from glocal.errors import GlocalError
from glocal.lens.record import open_run
from glocal.networks import mlp
from glocal.report import summary
from glocal.sweeps import resolve

CLASSES = [0, 1, 2], [3, 4], [0, 5]


def part(n: int, classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    random, y = np.random.default_rng(n), np.resize(classes, n)
    return np.eye(7, dtype=np.float32)[y] + random.normal(0, 0.5, (n, 7)).astype(np.float32), y


# Class 6 never occurs, and class 0 comes back.
CHALLENGE = from_tasks("growing", [(part(30 + n, c), part(21 + n, c)) for n, c in enumerate(CLASSES)], outputs=7)


@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
@pytest.mark.parametrize("algorithm", [SGD(), ER(slots=20), ICaRL(slots=22)])
def test_classes_of_later_tasks_do_not_count(algorithm: Algorithm, execution: Execution) -> None:
    members = tuple(Member(seed, 0.2, algorithm) for seed in (1, 2))
    cohort = Cohort(CHALLENGE.among_seen_classes(), mlp, members, epochs=2, batch_size=8)
    model, differs = cohort.model(vectorised=False), False
    for snapshot in train(cohort, execution=execution):
        row = snapshot.finished
        for run, (o, own) in ((run, item) for run in range(2) for item in enumerate(CLASSES)):
            state = snapshot.state.select(run)
            x, y = CHALLENGE.task(o, 0).test
            logits = algorithm.predict(model.bind(state.buffers, training=False), state.params, state.memory, x, o)
            allowed = sorted({c for classes in (*CLASSES[:row], own) for c in classes})
            predicted = torch.tensor([max(allowed, key=lambda c: float(values[c])) for values in logits])
            stored = snapshot.record.arrays["test_class_accuracy"][run, row, o]
            assert float(stored) == pytest.approx(float((predicted == y).double().mean()), abs=0.5 / len(y))
            differs |= bool((logits.argmax(1) != predicted).any())
            loss = torch.nn.functional.cross_entropy(logits[:, allowed], torch.tensor([allowed.index(c) for c in y]))
            stored = snapshot.record.arrays["test_class_loss"][run, row, o]
            assert float(stored) == pytest.approx(float(loss), rel=1e-4, abs=1e-4)
    assert differs, "among all classes other predictions are made"
    assert (snapshot.state.diverged < 0).all()


def test_all_classes_count_by_default() -> None:
    cohort = Cohort(CHALLENGE, mlp, (Member(1, 0.2, SGD()),), epochs=1, batch_size=8)
    first = next(train(cohort))
    x, y = CHALLENGE.task(0, 0).test
    with torch.no_grad():
        predicted = cohort.network(1)(x).argmax(1)
    assert float(first.record.arrays["test_class_accuracy"][0, 0, 0]) == pytest.approx(
        float((predicted == y).double().mean())
    )


def test_runs_say_what_was_measured(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "store": tmp_path, "tasks": 2, "keep_parameters": True}
    runs = [glocal.sweep("split-digits", ["sgd"], [0.1], [1], evaluate=e, **options)[0] for e in ("all", "seen")]
    assert runs[0].path != runs[1].path
    assert "evaluate" not in runs[0].config["challenge"] and runs[1].config["challenge"]["evaluate"] == "seen"
    assert "among the classes seen so far" in str(summary.render(runs[1:], "markdown"))
    assert "seen so far" not in str(summary.render(runs[:1], "markdown"))
    assert runs[1].path is not None
    assert open_run(runs[1].path).cohort.challenge.evaluate == "seen"
    # After the last task all classes but those of later tasks count, and accuracy among fewer classes is not lower.
    assert (runs[1].arrays["test_class_accuracy"] >= runs[0].arrays["test_class_accuracy"]).all()


def test_other_tasks_are_refused() -> None:
    with pytest.raises(GlocalError, match="evaluate='seen' was given for rotated-digits"):
        resolve.challenge("rotated-digits", evaluate="seen")
    with pytest.raises(GlocalError, match="unknown evaluate 'some'"):
        glocal.sweep("split-digits", ["sgd"], [0.1], [1], evaluate="some")
