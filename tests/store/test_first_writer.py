"""Of two processes that finish the same run, the first one's is kept; a damaged run is replaced."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glocal
from glocal import files
from glocal.engine.config import RunConfig
from glocal.store.run import Run
from glocal.store.store import Store

ROUNDS = 25


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("trained") / "store"
    return glocal.sweep("rotated-digits", ["sgd"], [0.3], [1], store=folder, tasks=2, epochs=1, train_eval=100)[0]


def write(store: Store, run: Run, seed: int, writer: int, **kept: Any) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in run.arrays.items()}
    arrays["update_norm"] = torch.full((2,), float(writer), dtype=torch.float64)
    store.write(RunConfig(**(dict(run.config) | {"seed": seed})), arrays, run.info, kept)


def writer_of(store: Store, run: Run, seed: int) -> float:
    return float(store.run(RunConfig(**(dict(run.config) | {"seed": seed})).hash).arrays["update_norm"][0])


def write_and_read(folder: Path, run: Run, writer: int, start: Any, seen: Any) -> None:
    store = Store(folder)
    for seed in range(ROUNDS):
        start.wait(30)
        write(store, run, seed, writer)
        seen[writer * ROUNDS + seed] = writer_of(store, run, seed)


@pytest.mark.slow
def test_the_first_of_two_processes_is_kept(run: Run, tmp_path: Path) -> None:
    """What a process finds after it has written never changes."""
    store, spawn = Store.create(tmp_path / "store"), multiprocessing.get_context("spawn")
    start, seen = spawn.Barrier(2), spawn.Array("d", [-1.0] * 2 * ROUNDS)
    both = [spawn.Process(target=write_and_read, args=(store.path, run, writer, start, seen)) for writer in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    kept = [writer_of(store, run, seed) for seed in range(ROUNDS)]
    assert seen[:] == [*kept, *kept]
    assert not list(store.runs_path.glob(".*"))


def test_a_run_that_is_finished_meanwhile_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parameters that the second process was to keep, if they belong to the same measurements."""
    store, write_tensors, parameters = Store.create(tmp_path / "store"), files.write_tensors, {"w": torch.ones(2)}

    def meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(files, "write_tensors", write_tensors)
        write(store, run, seed=1, writer=1)
        write_tensors(*arguments)

    monkeypatch.setattr(files, "write_tensors", meanwhile)
    write(store, run, seed=1, writer=2)
    assert writer_of(store, run, 1) == 1
    monkeypatch.setattr(files, "write_tensors", meanwhile)
    (path,) = store.runs_path.iterdir()
    inode = (path / "info.json").stat().st_ino
    write(store, run, seed=1, writer=1, parameters=parameters)
    assert (path / "info.json").stat().st_ino == inode
    assert torch.equal(files.read_tensors(path / "parameters.safetensors")[0]["w"], parameters["w"])


def test_a_damaged_run_is_replaced(run: Run, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    write(store, run, seed=1, writer=1)
    (path,) = store.runs_path.iterdir()
    (path / "info.json").unlink()
    write(store, run, seed=1, writer=2, parameters={"w": torch.ones(2)})
    assert writer_of(store, run, 1) == 2 and store.finished(path.name, ["parameters"])
    assert np.isfinite(store.run(path.name).arrays["update_norm"]).all()
    assert [p.name for p in store.runs_path.iterdir()] == [path.name]
