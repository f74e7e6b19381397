"""A store's files: who may read them, what is missing in them, and how a store is created."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from small_sweep import HERE, interrupt, sweep

import glocal
from glocal.cli.main import main
from glocal.errors import GlocalWarning
from glocal.files import DamagedError, read_tensors
from glocal.store.store import Claim, Store

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


def test_files_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    (store.path / "plans").mkdir()
    folders = [store.path, store.runs_path, store.cohorts_path, store.path / "plans"]
    for folder in folders:
        for name, age in ((".old-12345678", 90_000), (".new-12345678", 3_000)):
            (folder / name).write_text("half")
            os.utime(folder / name, (time.time() - age,) * 2)
    Store.create(store.path)
    assert [sorted(p.name for p in folder.glob(".*-1*")) for folder in folders] == [[".new-12345678"]] * 4


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


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    _, run, _ = sweep(store, [0.1, 0.2, 0.3], keep_parameters=True)
    assert run.path is not None
    assert main(["verify", str(store)]) == 0
    content = bytearray((run.path / "parameters.safetensors").read_bytes())
    content[-1] ^= 1
    (run.path / "parameters.safetensors").write_bytes(content)
    assert main(["verify", str(store)]) == 2
    printed = capsys.readouterr()
    assert str(run.path) in printed.out and "1 of 3" in printed.err
    assert run.state(1) and len(glocal.load(store)) == 3, "only the last state is damaged"
    with pytest.raises(DamagedError, match="Delete it"):
        run.state(3)
    (run.path / "parameters.safetensors").unlink()
    sweep(store, [0.2], keep_parameters=True)
    assert run.state(3) and main(["verify", str(store)]) == 0


def test_a_sweep_trains_damaged_runs_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    whole = sweep(store, LRS, execution="sequential")
    assert whole[0].path is not None
    (whole[0].path / "info.json").unlink()
    with pytest.warns(GlocalWarning, match=r"no info\.json.* moved to"):
        again = sweep(store, LRS, execution="sequential")
    assert_equal(again, whole)
    assert len(list(store.glob("damaged/*/config.json"))) == 1


def test_parameters_are_added_to_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is the run absent."""
    store = tmp_path / "store"
    (without,) = sweep(store, [0.1])
    assert without.path is not None
    before = {p.name: p.stat().st_ino for p in without.path.iterdir()}
    (kept,) = sweep(store, [0.1], keep_parameters=True)
    assert_equal(glocal.Runs([kept]), glocal.Runs([without]))
    after = {p.name: p.stat().st_ino for p in without.path.iterdir()}
    assert after.items() > before.items() and after.keys() - before.keys() == {"parameters.safetensors"}


def test_a_finished_cohort_that_was_left_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"

    def killed(self: Claim) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Claim, "finish", killed)
        sweep(store, LRS)
    assert list(store.glob("cohorts/[!.]*")) and len(glocal.load(store)) == 2
    sweep(store, LRS)
    assert not list(store.glob("cohorts/[!.]*"))


def test_a_cohort_whose_members_are_damaged_does_not_stop_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    interrupt(store, LRS)
    next(store.rglob("members.json")).write_text('{"runs": ["0123456789abcdef"], "parameters": false}')
    with pytest.warns(GlocalWarning, match=r"members\.json"):
        sweep(store, [0.9])
    with pytest.warns(GlocalWarning, match=r"members\.json"):
        assert_equal(sweep(store, LRS), sweep(tmp_path / "whole", LRS))
    assert not list(store.glob("cohorts/[!.]*"))


@pytest.mark.parametrize("moment", [0, 1, 3])
def test_a_store_that_disappears_ends_a_sweep_with_a_sentence(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, save = tmp_path / "store", Claim.save

    def save_and_lose(self: Claim, snapshot: Any) -> None:
        save(self, snapshot)
        if snapshot.finished == moment:
            shutil.rmtree(store)

    with monkeypatch.context() as patched, pytest.raises(glocal.GlocalError) as raised:
        patched.setattr(Claim, "save", save_and_lose)
        sweep(store, LRS, keep_parameters=True)
    assert len(str(raised.value).splitlines()) == 1
    assert_equal(sweep(store, LRS), sweep(tmp_path / "whole", LRS))


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become longer than 200 bytes, which safetensors reports in its own way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_sweep_with_a_sentence(full_disk: None, tmp_path: Path) -> None:
    with pytest.raises(glocal.GlocalError, match="cannot write the checkpoint to"):
        sweep(tmp_path / "store", LRS)
    assert not [p for p in tmp_path.rglob("*") if ".safetensors" in p.name or p.name.startswith(".tmp")]


def test_what_is_finished_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content is synced before its file or folder gets its name, and the folder with the name after it."""
    synced: list[int] = []
    renamed: list[tuple[int, int, int]] = []
    fsync = os.fsync

    def record_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    def recording(rename: Callable[..., None]) -> Callable[..., None]:
        def record(source: Path, target: Path) -> None:
            if not Path(target).name.startswith("."):  # or else it is on its way to be removed
                renamed.append((os.stat(source).st_ino, Path(target).parent.stat().st_ino, len(synced)))
            rename(source, target)

        return record

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", recording(os.rename))
    monkeypatch.setattr(os, "replace", recording(os.replace))
    (run,) = sweep(tmp_path / "store", [0.1], keep_parameters=True)
    assert run.path is not None and run.path.stat().st_ino in {content for content, _, _ in renamed}
    for content, folder, moment in renamed:
        assert content in synced[:moment] and folder in synced[moment:]
    assert {tmp_path.stat().st_ino, (tmp_path / "store").stat().st_ino} <= set(synced)


def test_a_signal_during_reading_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch turns a KeyboardInterrupt at some moments into a TypeError."""
    interrupt(tmp_path / "store", LRS)
    unused = [TypeError("could not determine the shape of object type 'torch.storage.UntypedStorage'")]

    def read(*arguments: Any) -> Any:
        if unused:
            raise unused.pop()
        return read_tensors(*arguments)

    monkeypatch.setattr("glocal.files.read_tensors", read)
    assert_equal(sweep(tmp_path / "store", LRS), sweep(tmp_path / "whole", LRS))
    assert not unused and not (tmp_path / "store" / "damaged").exists()
