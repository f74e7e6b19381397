"""The index of a store against the runs' own files, which other readers read here."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import glocal
from glocal import files
from glocal.cluster.status import read_status
from glocal.errors import GlocalWarning
from glocal.store import index
from glocal.store.run import Run
from glocal.store.store import Store
from glocal.sweeps.sweep import prepare

OPTIONS: dict[str, Any] = {"tasks": 2, "epochs": 1, "train_eval": 100}
ALGORITHMS, LRS, SEEDS = ["sgd", "er"], [0.1, 0.2], [1, 2]


@pytest.fixture(autouse=True)
def index_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_RUNS", 2)
    monkeypatch.setattr(index, "SETTLED_SECONDS", 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two algorithms, one of two kinds of arrays, notes with signs beyond ASCII, and a diverged run."""
    folder = tmp_path_factory.mktemp("trained") / "store"
    (run,) = glocal.sweep("rotated-digits", ["sgd"], [0.3], [1], store=folder, **OPTIONS)
    for tasks in (2, 3):
        requests = prepare(
            "rotated-digits", ALGORITHMS, LRS, SEEDS, store=folder, **(OPTIONS | {"tasks": tasks})
        ).requests
        for number, request in enumerate(requests.values()):
            arrays = {k: torch.from_numpy(array.copy()) for k, array in run.arrays.items()}
            if tasks == 3:
                arrays = {k: torch.cat([array, array[-1:]]) for k, array in arrays.items()}
                arrays = {k: torch.cat([a, a[:, -1:]], 1) if a.shape == (4, 2) else a for k, a in arrays.items()}
            arrays["update_norm"][-1] = torch.nan if number == 1 else number / 3
            info = {**run.info, "notes": [f'ε = {number}, "quoted"'], "diverged": 7 if number == 1 else None}
            Store(folder).write(request.config, arrays, info, {})
    return folder


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "store")


def content(run: Path) -> tuple[Any, Any, dict[str, tuple[str, Any, bytes]]]:
    """Read a run's files without glocal."""
    config, info = (json.loads((run / name).read_text()) for name in ("config.json", "info.json"))
    return config, info, exact(load_file(run / "arrays.safetensors"))


def exact(arrays: Any) -> dict[str, tuple[str, Any, bytes]]:
    return {k: (str(array.dtype), array.shape, array.tobytes()) for k, array in sorted(arrays.items())}


def assert_as_in_the_files(store: Path) -> list[Run]:
    runs = Store.open(store).runs()
    assert sorted(run.path.name for run in runs if run.path) == sorted(os.listdir(store / "runs"))
    for run in runs:
        assert run.path is not None and run.path.parent == store / "runs"
        assert (run.config, run.info, exact(run.arrays)) == content(run.path)
    return runs


def no_run_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Store, hash: str) -> Run:
        raise AssertionError(f"{hash} was read")

    monkeypatch.setattr(Store, "run", read)


def test_the_index_holds_what_the_files_hold(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = assert_as_in_the_files(store)
    assert (store / index.FILE).exists() and len(first) == 17
    no_run_is_read(monkeypatch)
    second = assert_as_in_the_files(store)
    for one, other in zip(first, second, strict=True):
        assert list(one.arrays) == list(other.arrays) and list(one.info) == list(other.info)
        assert all(array.flags.writeable for array in other.arrays.values())
    assert [run.diverged for run in first] == [run.diverged for run in second]


def flip(name: str) -> Callable[[Path], None]:
    """Flip a bit of a file in place, and give it its old time of modification."""

    def change(run: Path) -> None:
        stat, content = (run / name).stat(), bytearray((run / name).read_bytes())
        content[-5] ^= 1
        (run / name).write_bytes(content)
        os.utime(run / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return change


@pytest.mark.parametrize(
    "change",
    [*map(flip, index.FILES), *(lambda run, name=name: (run / name).unlink() for name in index.FILES)],
    ids=[f"{change} {name}" for change in ("flip", "unlink") for name in index.FILES],
)
def test_a_damaged_run_is_left_out(store: Path, change: Callable[[Path], None]) -> None:
    names = sorted(run.path.name for run in assert_as_in_the_files(store) if run.path)
    change(store / "runs" / names[3])
    with pytest.warns(GlocalWarning, match=f"1 of 17 runs .*{names[3]}"):
        found = glocal.load(store)
    assert sorted(run.path.name for run in found if run.path) == names[:3] + names[4:]


def test_removed_added_and_replaced_runs_are_noticed(store: Path, tmp_path: Path) -> None:
    one, two, three, *_ = assert_as_in_the_files(store)
    assert one.path and two.path and three.path
    one.path.rename(tmp_path / "elsewhere")
    assert len(assert_as_in_the_files(store)) == 16
    (tmp_path / "elsewhere").rename(one.path)
    assert len(assert_as_in_the_files(store)) == 17, "with the times of before"
    shutil.rmtree(two.path)
    request = next(iter(prepare("rotated-digits", ["sgd"], [0.9], [1], store=store, **OPTIONS).requests.values()))
    arrays = {k: torch.from_numpy(array) for k, array in three.arrays.items()}
    Store(store).write(request.config, arrays, three.info, {})
    checksums = {"config.json": files.read_arrays(three.path / "arrays.safetensors")[1]["config.json"]}
    checksums["info.json"] = files.write_json(three.path / "info.json", {**three.info, "label": "other"})
    files.write_tensors(three.path / "arrays.safetensors", arrays, checksums)
    assert "other" in {run.algorithm for run in assert_as_in_the_files(store)}


def test_a_damaged_index_is_not_used(store: Path) -> None:
    assert_as_in_the_files(store)
    path = store / index.FILE
    whole, draw = path.read_bytes(), random.Random(0)
    assert len(index.read(store)) == 17
    header = range(int.from_bytes(whole[:8], "little") + 8)
    for position in [*draw.sample(header, 150), *(draw.randrange(len(whole)) for _ in range(150))]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << draw.randrange(8)]) + whole[position + 1 :])
        assert index.read(store) == {}, position
        path.write_bytes(whole[:position])
        assert index.read(store) == {}, position
    assert_as_in_the_files(store)
    assert len(index.read(store)) == 17, "it is written again"


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code from the index was run",)


def without_checksums(path: Path) -> None:
    save_file({"text": np.frombuffer(b'{"values": [], "kinds": []}', np.uint8)}, path, {"version": glocal.__version__})


def of_another_version(path: Path) -> None:
    tensors, metadata = files.read_tensors(path)
    files.write_tensors(path, tensors, metadata | {"version": "0.0.1"})


@pytest.mark.parametrize(
    "replace",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(pickle.dumps(Harmful())),
        lambda path: torch.save({"a": torch.ones(2)}, path),
        lambda path: files.write_tensors(path, {"a": torch.ones(2)}, {"version": glocal.__version__}),
        without_checksums,
        of_another_version,
    ],
    ids=["empty", "pickle", "torch", "other tensors", "no checksums", "other version"],
)
def test_a_foreign_index_is_written_again(store: Path, replace: Callable[[Path], None]) -> None:
    assert_as_in_the_files(store)
    replace(store / index.FILE)
    assert index.read(store) == {}
    assert_as_in_the_files(store)
    assert len(index.read(store)) == 17


def test_an_index_that_cannot_be_written(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> Any:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", read_only)
        assert len(assert_as_in_the_files(store)) == 17
    assert {path.name for path in store.iterdir()} == {"glocal-store.json", "runs", "cohorts"}
    (store / index.FILE).mkdir()
    assert len(assert_as_in_the_files(store)) == 17


def write_and_read(store: Path) -> None:
    written = index.read(store)
    for _ in range(20):
        index.write(store, written)
        assert index.read(store).keys() == written.keys()


@pytest.mark.slow
def test_two_processes_write_at_once(store: Path) -> None:
    assert_as_in_the_files(store)
    both = [multiprocessing.get_context("spawn").Process(target=write_and_read, args=(store,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert_as_in_the_files(store)
    assert not list(store.glob(".*"))


def test_young_files_are_not_indexed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SETTLED_SECONDS", 3600)
    assert_as_in_the_files(store)
    assert index.read(store) == {}


def test_small_stores_have_no_index(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_RUNS", 18)
    assert_as_in_the_files(store)
    assert not (store / index.FILE).exists()


def test_verify_reads_the_files(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_in_the_files(store)
    no_run_is_read(monkeypatch)
    with pytest.raises(AssertionError, match="was read"):
        list(Store.open(store).verify())


def test_finished_runs_are_read_without_torch(store: Path) -> None:
    """It takes longer to import than 10,000 runs to read."""
    commands = [["status", str(store)], ["table", str(store)], ["plot", str(store), "-o", str(store / "figure.png")]]
    code = f"import sys; from glocal.cli.main import main; print([main(c) for c in {commands}], 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "[0, 0, 0] False"


def test_a_finished_sweep_is_read_from_the_index(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"store": store, **OPTIONS}
    first = glocal.sweep("rotated-digits", ALGORITHMS, LRS, SEEDS, **options)
    assert len(first) == 8 and len(index.read(store)) == 8
    no_run_is_read(monkeypatch)
    second = glocal.sweep("rotated-digits", ALGORITHMS, LRS, SEEDS, **options)
    assert [run.path for run in first] == [run.path for run in second]


def test_status_counts_all_diverged_runs(store: Path) -> None:
    """Those whose objective was not finite, and those that exploded with finite numbers."""
    request = next(iter(prepare("rotated-digits", ["sgd"], [5.0], [1], store=store, **OPTIONS).requests.values()))
    (run, *_) = (run for run in Store(store).runs() if run.diverged is None and run.tasks == 2)
    arrays = {k: torch.from_numpy(array.copy()) for k, array in run.arrays.items()}
    arrays["epoch_loss"][1] = 1e6
    arrays["train_class_loss"][2] = 1e6
    before = read_status(Store(store))
    Store(store).write(request.config, arrays, run.info, {})
    assert (before.finished, before.diverged) == (17, 2)
    assert (read_status(Store(store)).finished, read_status(Store(store)).diverged) == (18, 3)
