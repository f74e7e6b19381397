"""A store's files: who may read them, what is missing in them, and how a store is created."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from small_sweep import HERE, interrupt, sweep

import glocal
from glocal.files import DamagedError, read_tensors
from glocal.store.store import Store

LRS = [0.3, 0.4]


def assert_equal(ones: glocal.Runs, others: glocal.Runs) -> None:
    assert [run.config for run in ones] == [run.config for run in others]
    for one, other in zip(ones, others, strict=True):
        assert {"update_norm", "test_class_loss"} <= one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_the_umask_decides_who_may_read(umask: None, tmp_path: Path) -> None:
    sweep(tmp_path / "store", [0.1], keep_parameters=True)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "store" / "runs").rglob("*.*")}
    assert modes == dict.fromkeys(["config.json", "info.json", "arrays.safetensors", "parameters.safetensors"], 0o640)


def test_a_file_that_cannot_be_opened_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = sweep(tmp_path / "store", [0.1])
    assert run.path is not None

    def denied(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(glocal.GlocalError, match="Permission denied") as raised:
        Store(tmp_path / "store").run(run.path.name)
    assert not isinstance(raised.value, DamagedError)


def rewrite(path: Path, **changes: Any) -> None:
    """Change what a checkpoint of the first format says about itself, which no checksum covers."""
    tensors, metadata = read_tensors(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {"order", "about"}
    about = json.dumps(json.loads(metadata["about"]) | changes)
    save_file(tensors, path, metadata={**metadata, "about": about})


@pytest.mark.parametrize("finished", [99, 3, 2, 0, -1])
def test_a_checkpoint_that_counts_its_tasks_wrongly(finished: int, tmp_path: Path) -> None:
    store = shutil.copytree(HERE / "format1", tmp_path / "store")
    rewrite(next(store.glob("cohorts/*/checkpoint.safetensors")), finished=finished)
    with pytest.warns(UserWarning, match="its runs start again"):
        runs = sweep(store, LRS, keep_parameters=True)
    assert_equal(runs, sweep(tmp_path / "whole", LRS))
    assert len(list(store.glob("damaged/*/checkpoint.safetensors"))) == 1


@pytest.mark.parametrize("task", [0, 1])
def test_parameters_that_are_missing_beside_a_checkpoint(task: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    interrupt(store, LRS, keep_parameters=True)
    next(store.rglob(f"theta-{task:04}.safetensors")).unlink()
    with pytest.warns(UserWarning, match="its runs start again"):
        runs = sweep(store, LRS, keep_parameters=True)
    whole = sweep(tmp_path / "whole", LRS, keep_parameters=True)
    assert_equal(runs, whole)
    for one, other in zip(runs, whole, strict=True):
        for t in range(4):
            assert one.state(t).keys() == other.state(t).keys() == {"weight", "bias"}
            assert all((tensor == other.state(t)[k]).all() for k, tensor in one.state(t).items())


def test_a_state_that_is_not_in_the_file(tmp_path: Path) -> None:
    (run,) = sweep(tmp_path / "store", [0.1], keep_parameters=True)
    assert run.path is not None
    path = run.path / "parameters.safetensors"
    tensors, _ = read_tensors(path)
    save_file({k: t for k, t in tensors.items() if not k.startswith("2/")}, path)
    with pytest.raises(DamagedError, match="no parameters after 2 tasks"):
        run.state(2)


@pytest.mark.parametrize(
    "left", [[], [".glocal-store.json-0a1b2c3d"], ["runs", "cohorts"], ["runs", "cohorts", ".lock"]]
)
def test_a_store_whose_creation_was_interrupted_can_be_used(left: list[str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for name in left:
        (store / name).touch() if name.startswith(".") else (store / name).mkdir()
    assert_equal(sweep(store, [0.1]), glocal.load(store))


@pytest.mark.parametrize("occupied", ["runs", "notes.txt"])
def test_a_folder_of_something_else_is_not_made_a_store(occupied: str, tmp_path: Path) -> None:
    """Such as the folder in which a store is."""
    (tmp_path / occupied).mkdir()
    with pytest.raises(glocal.GlocalError, match="is not a glocal store"):
        Store.create(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [occupied]


def test_simultaneous_creators(tmp_path: Path) -> None:
    with ThreadPool(8) as pool:
        for i in range(25):
            stores = pool.map(Store.create, [tmp_path / str(i)] * 8)
            assert all(Store.open(store.path).runs() == [] for store in stores)
