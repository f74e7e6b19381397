"""A run that goes on with more tasks is the run that had all of them from the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal import rng
from glocal.challenges import from_tasks
from glocal.challenges.challenge import Challenge
from glocal.engine.config import MEASURES, VALIDATION_MEASURES
from glocal.errors import GlocalError
from glocal.lens.record import open_run
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.sweeps import train_claim

SHAPE = (2, 4, 4)
CLASSES = 3
ALL: dict[str, Any] = {"epochs": 2, "batch_size": 16, "execution": "sequential"}


class SmallNet(nn.Module):
    """A convolution with BatchNorm, and a frozen layer that differs between seeds."""

    def __init__(self, input_shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.frozen = nn.Linear(16, 8)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(x)))


def flip(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.where((rng.uniform(key, len(x)) < 0.5).view(-1, 1, 1, 1), x.flip(-1), x)


def challenge(tasks: int, changed: int | None = None, **options: Any) -> Challenge:
    """Tasks whose sizes differ; every task has the same centres of its classes, and its own offset."""

    def split(task: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * task + n)
        y = torch.arange(n) % CLASSES
        x = torch.randn(n, *SHAPE, generator=generator) + y.view(-1, 1, 1, 1) + task / 2
        return x + (task == changed), y

    parts = [tuple(split(t, n) for n in (40 + 4 * t, 12, 15)) for t in range(tasks)]
    return from_tasks("noise", parts, setting="domain", **options)


def train(tasks: int, algorithms: Any, store: Path, lrs: Any = (0.05,), seeds: Any = (1,), **options: Any) -> list[Run]:
    own = {"challenge": challenge(tasks), "network": SmallNet, "store": store, **ALL, **options}
    return list(glocal.sweep(algorithms=algorithms, lrs=lrs, seeds=seeds, **own))


def require_continued(child: Run, whole: Run, rtol: float = 0.0) -> None:
    """All numbers are those of the whole run; only θ_1 … θ_{k−1} are not measured on tasks after the k-th."""
    k = child.after
    assert child.arrays.keys() == whole.arrays.keys()
    for name, array in whole.arrays.items():
        own = np.array(child.arrays[name])
        if name in (*MEASURES, *VALIDATION_MEASURES):
            assert np.isnan(own[1:k, k:]).all() and not np.isnan(np.delete(own, range(1, k), axis=0)).any()
            own[1:k, k:] = array[1:k, k:]
        np.testing.assert_allclose(own, array, rtol=rtol, atol=rtol, err_msg=name)
    assert child.info["steps"] == whole.info["steps"]
    statistics = [glocal.metrics.summary(run) for run in (child, whole)]
    for name, value in statistics[1].items():
        assert statistics[0][name] == pytest.approx(value, rel=max(rtol, 1e-12), abs=rtol), name


KEPT_ADAM = ("adam", {"state": "kept", "schedule": "cosine"})
CASES = {
    "er": ("er", {"slots": 20}, "sgd", {}),
    "ewc": ("ewc", {}, "sgd", {}),
    "si": ("si", {}, ("sgd", {"momentum": 0.9, "state": "kept"}), {}),
    "adam": ("sgd", {}, KEPT_ADAM, {}),
    "joint": ("joint", {}, "sgd", {}),
    "agem batch": ("agem", {"filling": "batch", "slots": 20}, "sgd", {}),
    "agem": ("agem", {"slots": 20}, "sgd", {"horizon": 4}),
    "ogd-gtl": ("ogd-gtl", {"slots": 12}, "sgd", {"horizon": 4}),
    "gem": ("gem", {"slots": 12}, "sgd", {"horizon": 4}),
    "pnn": ("pnn", {}, "sgd", {"horizon": 4}),
    "packnet": ("packnet", {}, "sgd", {"horizon": 4}),
    "sequence": ("er", {"slots": 20}, ("sgd", {"schedule": "cosine", "span": "sequence"}), {"horizon": 4}),
}


QUICK = {("er", "vectorised"), ("adam", "sequential"), ("ogd-gtl", "sequential")}
EVERY = [(case, execution) for case in CASES for execution in ("sequential", "vectorised")]


@pytest.mark.parametrize(
    ("case", "execution"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in EVERY]
)
def test_bit_for_bit_the_run_with_all_tasks(case: str, execution: str, tmp_path: Path) -> None:
    """Also with BatchNorm, a frozen layer, validation data, momentum and kept averages; both executors."""
    algorithm, options, optimizer, planned = CASES[case]
    own: Any = {"optimizer": optimizer, "execution": execution, "seeds": (1, 2), "algorithms": [(algorithm, options)]}
    train(2, store=tmp_path / "runs", keep_state=True, **own, **planned)
    children = train(4, store=tmp_path / "runs", after=tmp_path / "runs", **own)
    for child, whole in zip(children, train(4, store=tmp_path / "whole", **own), strict=True):
        require_continued(child, whole)
        assert child.path is not None and whole.path is not None and child.path.name != whole.path.name
        assert child.config["parent"]["run"] in {run.path.name for run in glocal.load(tmp_path / "runs") if run.path}


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorised"])
def test_in_other_cohorts(execution: str, tmp_path: Path) -> None:
    """Runs of one cohort go on alone, and runs that were trained alone go on together.

    In a cohort of several seeds the frozen layer is among the buffers, and one momentum gives all runs velocities.
    """
    momenta = [("sgd", {"momentum": m, "state": "kept"}) for m in (0.0, 0.9)]
    every: Any = {"algorithms": [("er", {"slots": 20})], "execution": execution}
    train(2, store=tmp_path / "together", seeds=(1, 2), optimizer=momenta, keep_state=True, **every)
    whole = train(3, store=tmp_path / "whole", seeds=(1, 2), optimizer=momenta, **every)
    for optimizer, seed, expected in zip(sorted(momenta * 2, key=str), (1, 2, 1, 2), whole, strict=True):
        own: Any = {"seeds": (seed,), "optimizer": [optimizer], **every}
        (child,) = train(3, store=tmp_path / "children", after=tmp_path / "together", **own)
        require_continued(child, expected, rtol=1e-5)
        train(2, store=tmp_path / "alone", keep_state=True, **own)
    children = train(3, store=tmp_path / "alone", after=tmp_path / "alone", seeds=(1, 2), optimizer=momenta, **every)
    assert {run.info["cost"]["cohort_runs"] for run in children} == {4}
    for child, expected in zip(children, whole, strict=True):
        require_continued(child, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotated-digits", "permuted-digits", "split-digits"])
def test_named_challenges(name: str, tmp_path: Path) -> None:
    own: Any = {"batch_size": 500, "epochs": 1, "store": tmp_path, "train_eval": 100, "validation": 0.1}
    glocal.sweep(name, ["si"], [0.1], [1, 2], tasks=2, keep_state=True, **own)
    children = glocal.sweep(name, ["si"], [0.1], [1, 2], tasks=4, after=tmp_path, **own)
    for child, whole in zip(children, glocal.sweep(name, ["si"], [0.1], [1, 2], tasks=4, **own), strict=True):
        require_continued(child, whole)
    labels = {
        run.after: row["challenge"] for run in glocal.load(tmp_path) for row in glocal.Runs([run]).table().to_dicts()
    }
    assert labels == {0: name, 2: name}
    rows = glocal.load(tmp_path).table().to_dicts()
    assert sorted((row["tasks"], row["after"] or 0, row["seeds"]) for row in rows) == [(2, 0, 2), (4, 0, 2), (4, 2, 2)]
    assert len({row["challenge"] for row in rows}) == 3


@pytest.mark.slow
def test_again_and_again_with_parameters_and_augmentation(tmp_path: Path) -> None:
    """2 tasks, then 3, then 5; the parameters of all of them are kept, and the lens reads them."""
    own: Any = {"keep_parameters": True, "keep_state": True, "store": tmp_path / "runs"}
    stages = []
    for tasks, after in ((2, None), (3, tmp_path / "runs"), (5, tmp_path / "runs")):
        stages += train(tasks, ["ewc"], after=after, challenge=challenge(tasks, transform=flip), **own)
    (whole,) = train(5, ["ewc"], tmp_path / "whole", challenge=challenge(5, transform=flip), keep_parameters=True)
    assert [run.after for run in stages] == [0, 2, 3]
    for t in range(6):
        ours, theirs = stages[-1].state(t), whole.state(t)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours), t
    assert glocal.metrics.summary(stages[-1]) == glocal.metrics.summary(whole)


def test_interrupted_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = {"algorithms": [("er", {"slots": 20})], "seeds": (1, 2), "keep_parameters": True}
    train(2, store=tmp_path, keep_state=True, **own)
    trained, stopped = train_claim.train, []

    def stop_after(count: int) -> Any:
        def interrupted(*args: Any) -> Any:
            for number, snapshot in enumerate(trained(*args)):
                yield snapshot
                if number == count:
                    stopped.append(snapshot.finished)
                    raise KeyboardInterrupt

        return interrupted

    for count in (0, 0, 1):  # before the third task, after it, and in the fifth
        monkeypatch.setattr(train_claim, "train", stop_after(count))
        with pytest.raises(KeyboardInterrupt):
            train(5, store=tmp_path, after=tmp_path, **own)
    monkeypatch.setattr(train_claim, "train", trained)
    children = train(5, store=tmp_path, after=tmp_path, **own)
    assert stopped == [2, 3, 5]
    for child, whole in zip(children, train(5, store=tmp_path / "whole", **own), strict=True):
        require_continued(child, whole)
        assert all(torch.equal(child.state(t)[k], v) for t in range(6) for k, v in whole.state(t).items())


def test_the_state_is_kept_when_asked_for_even_later(tmp_path: Path) -> None:
    (short,) = train(2, ["ewc"], tmp_path)
    (again,) = train(2, ["ewc"], tmp_path, keep_state=True)
    assert short.path == again.path
    (child,) = train(3, ["ewc"], tmp_path, after=tmp_path)
    (whole,) = train(3, ["ewc"], tmp_path)
    require_continued(child, whole)


def test_a_finished_child_is_not_trained_again(tmp_path: Path) -> None:
    """Also if a longer run that it could go on from has come since."""
    train(2, ["ewc"], tmp_path, keep_state=True)
    (first,) = train(4, ["ewc"], tmp_path, after=tmp_path)
    train(3, ["ewc"], tmp_path, keep_state=True)
    (again,) = train(4, ["ewc"], tmp_path, after=tmp_path)
    assert first.path == again.path
    (longest,) = train(5, ["ewc"], tmp_path, after=tmp_path)
    assert longest.after == 3


@pytest.mark.slow
def test_a_child_can_be_opened_by_the_lens(tmp_path: Path) -> None:
    own: Any = {"batch_size": 500, "epochs": 1, "store": tmp_path, "keep_parameters": True, "device": "cpu"}
    glocal.sweep("rotated-digits", ["gem"], [0.1], [1], tasks=2, keep_state=True, horizon=3, **own)
    (child,) = glocal.sweep("rotated-digits", ["gem"], [0.1], [1], tasks=3, after=tmp_path, **own)
    assert child.path is not None
    assert len(open_run(child.path).trace().checkpoints) == 4


class PlansAhead(glocal.Algorithm):
    """Uses the number of tasks, but not before a task is finished."""

    name = "plans-ahead"

    def consolidate(self, model: Any, params: Any, memory: Any, data: Any) -> Any:
        return {"share": data.x.new_tensor(1 / model.tasks)}

    def init(self, model: Any, params: Any, example: Any) -> Any:
        return {"share": example.x.new_zeros(())}


REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "no state": ({"keep_state": False}, {}, "keep-state"),
    "no parameters": ({}, {"keep_parameters": True}, "keep-parameters"),
    "another rate": ({}, {"lrs": [0.1]}, "differs in lr"),
    "another size": ({}, {"batch_size": 8}, "differs in batch_size"),
    "as long": ({}, {"challenge": challenge(2)}, "2 tasks already"),
    "other data": ({}, {"challenge": challenge(4, changed=1)}, "task 2"),
    "a head that grows": ({}, {"challenge": challenge(4, outputs=5)}, "3 outputs"),
    "a shared memory": ({"algorithms": ["gem"]}, {"algorithms": ["gem"]}, "horizon"),
    "columns": ({"algorithms": ["pnn"]}, {"algorithms": ["pnn"]}, "horizon"),
    "pruning": ({"algorithms": ["packnet"]}, {"algorithms": ["packnet"]}, "horizon"),
    "a user's": ({"algorithms": [PlansAhead]}, {"algorithms": [PlansAhead]}, "horizon"),
    "another horizon": ({"horizon": 3, "algorithms": ["gem"]}, {"algorithms": ["gem"]}, "horizon"),
    "a schedule": (
        {"optimizer": ("sgd", {"warmup": 1, "span": "sequence"})},
        {"optimizer": ("sgd", {"warmup": 1, "span": "sequence"})},
        "horizon=4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on(case: str, tmp_path: Path) -> None:
    first, then, reason = REFUSED[case]
    common: Any = {"algorithms": ["sgd"], "network": "mlp", "epochs": 1}
    train(2, store=tmp_path, **{**common, "keep_state": True, **first})
    with pytest.raises(GlocalError, match=reason):
        train(4, store=tmp_path, after=tmp_path, **{**common, **then})


def test_a_short_horizon_and_an_empty_store(tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match="horizon = 2"):
        train(3, ["sgd"], tmp_path, horizon=2)
    with pytest.raises(GlocalError, match="icarl uses the classes of later tasks"):
        glocal.sweep("split-digits", ["icarl"], [0.1], [1], tasks=2, horizon=3, store=tmp_path)
    Store.create(tmp_path / "empty")
    with pytest.raises(GlocalError, match="no finished run"):
        train(3, ["sgd"], tmp_path, after=tmp_path / "empty")
