"""A sweep that is monitored trains the same runs, and says where each left an old task's region."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import glocal
from glocal.challenges import Challenge, from_tasks
from glocal.cli.main import main
from glocal.errors import GlocalError
from glocal.store.run import Runs


def two_tasks() -> Challenge:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 6)).astype("float32")
    first, second = (x[:, :2] > 0) @ [1, 2], (x[:, 2:4] > 0) @ [1, 2]
    return from_tasks("signs", [((x, y), (x, y)) for y in (first, second, first)], setting="domain")


def made(store: Path, monitor: float | None, algorithm: str = "sgd") -> Runs:
    how = {"epochs": 4, "batch_size": 10, "store": store, "monitor": monitor}
    return glocal.sweep(two_tasks(), [algorithm], [0.01, 0.3], [1], **how)  # type: ignore[arg-type]


def notes(runs: Runs, lr: float) -> list[str]:
    (run,) = [run for run in runs if run.lr == lr]
    return list(run.info["notes"])


def test_it_changes_nothing_and_says_what_it_saw(tmp_path: Path) -> None:
    watched, plain = made(tmp_path / "a", 0.1), made(tmp_path / "b", None)
    for one, other in zip(watched, plain, strict=True):
        assert one.config == other.config
        for name, array in other.arrays.items():
            np.testing.assert_array_equal(one.arrays[name], array)
    assert [len(notes(plain, lr)) for lr in (0.01, 0.3)] == [0, 0]
    (near,), (far,) = notes(watched, 0.01), notes(watched, 0.3)
    assert near.startswith("monitored with ε = 0.1: the locality assumption holds; the largest error is")
    assert far.startswith("monitored with ε = 0.1: the locality assumption is violated between steps ")
    assert all("monitored" not in run.info for run in plain)
    for run in watched:
        kept = run.info["monitored"]
        assert kept["epsilon"] == 0.1 and kept["finished"] == sorted(kept["finished"])
        assert set(kept["finished"]) == {1, 2} and kept["step"] == sorted(kept["step"])
        assert [len(errors) for errors in kept["errors"]] == kept["finished"]
        assert (max(max(errors) for errors in kept["errors"]) >= 0.1) is (run.lr == 0.3)
    again = {run.lr: run for run in glocal.load(tmp_path / "a")}
    assert [again[run.lr].info["monitored"] for run in watched] == [run.info["monitored"] for run in watched]


def test_partitioned_networks_by_their_own_approximation(tmp_path: Path) -> None:
    (note,) = notes(made(tmp_path, 0.1, "pnn"), 0.3)
    assert note == "monitored with ε = 0.1: the locality assumption holds; the largest error is 0"


def test_by_what_is_said(tmp_path: Path) -> None:
    """Replay of everything is exact; plain SGD's 0 is not, however near; and a chain has Kronecker factors."""
    how = {"epochs": 4, "batch_size": 10, "monitor": 0.1, "monitor_by": "own"}
    (exact,) = glocal.sweep(two_tasks(), [("er", {"slots": 180})], [0.1], [1], store=tmp_path / "a", **how)  # type: ignore[arg-type]
    assert exact.info["notes"][-1].startswith("monitored with ε = 0.1 by own: the locality assumption holds")
    (none,) = glocal.sweep(two_tasks(), ["sgd"], [0.01], [1], store=tmp_path / "b", **how)  # type: ignore[arg-type]
    assert none.info["notes"][-1].startswith(
        "monitored with ε = 0.1 by own: the locality assumption is violated at step"
    )
    run = ["run", "rotated-digits", "sgd", "--tasks", "2", "--epochs", "1", "--batch-size", "500"]
    assert main([*run, "--monitor", "1e9", "--monitor-by", "kronecker", "--store", str(tmp_path / "c")]) == 0
    (note,) = glocal.load(tmp_path / "c")[0].info["notes"]
    assert note.startswith("monitored with ε = 1e+09 by kronecker: the locality assumption holds")


def test_as_often_as_is_said(tmp_path: Path) -> None:
    """Six steps an epoch: after every one, every second and, as four epochs have no other, the third and the last."""
    for every, seen in ((1, [1, 2, 3, 4]), (2, [2, 4]), (None, [3, 4]), (9, [4])):
        how = {"epochs": 4, "batch_size": 10, "monitor": 0.1, "monitor_every": every, "store": tmp_path / str(every)}
        (run,) = glocal.sweep(two_tasks(), ["sgd"], [0.1], [1], **how)  # type: ignore[arg-type]
        steps = [6 * (4 * task + epoch) for task in (1, 2) for epoch in seen]
        assert run.info["monitored"]["step"] == steps
    asked = ["run", "rotated-digits", "sgd", "--tasks", "2", "--epochs", "2", "--batch-size", "500"]
    assert main([*asked, "--monitor", "1", "--monitor-every", "1", "--store", str(tmp_path / "run")]) == 0
    assert len(glocal.load(tmp_path / "run")[0].info["monitored"]["step"]) == 2


def test_no_such_region(tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match="monitor_every=2 needs an ε"):
        glocal.sweep(two_tasks(), ["sgd"], [0.1], [1], store=tmp_path, monitor_every=2)
    with pytest.raises(GlocalError, match="monitor_every"):
        glocal.sweep(two_tasks(), ["sgd"], [0.1], [1], store=tmp_path, monitor=0.1, monitor_every=0)
    with pytest.raises(GlocalError, match=r"unknown monitor_by 'diagnal'.*'diagonal'"):
        glocal.sweep(two_tasks(), ["sgd"], [0.1], [1], store=tmp_path, monitor=0.1, monitor_by="diagnal")
    with pytest.raises(GlocalError, match="monitor_by='own' needs an ε"):
        glocal.sweep(two_tasks(), ["sgd"], [0.1], [1], store=tmp_path, monitor_by="own")
    with pytest.raises(GlocalError, match=r"monitor = -1.* was given; it must be positive"):
        made(tmp_path, -1)


def test_a_sweep_says_which_runs_nobody_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sweep", "split-digits", "--algorithms", "sgd", "--lrs", "0.1", "--seeds", "1", "--tasks", "2"]
    asked += ["--epochs", "1", "--store", str(tmp_path)]
    for monitor, said in (([], False), (["--monitor", "0.1"], True)):
        assert main([*asked, *monitor]) == 0
        assert (
            "1 runs were in the store already and were not monitored" in " ".join(capsys.readouterr().out.split())
        ) is said
