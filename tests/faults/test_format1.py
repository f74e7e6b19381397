"""A store of the first format, written before files had checksums, opens and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from small_sweep import FINISHED, HERE, INTERRUPTED, WITH_PARAMETERS, sweep

import glocal
from glocal.cli.main import main
from glocal.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return shutil.copytree(HERE / "format1", tmp_path / "store")


def test_finished_runs_are_read_and_not_repeated(store: Path, tmp_path: Path) -> None:
    written = {p: p.stat().st_mtime_ns for p in (store / "runs").rglob("*.*")}
    (plain,) = sweep(store, FINISHED)
    (kept,) = sweep(store, WITH_PARAMETERS, keep_parameters=True)
    assert written == {p: p.stat().st_mtime_ns for p in (store / "runs").rglob("*.*")}
    assert [run.lr for run in glocal.load(store)] == [*FINISHED, *WITH_PARAMETERS]
    (again,) = sweep(tmp_path / "new", WITH_PARAMETERS, keep_parameters=True)
    for task in range(4):
        for name, tensor in again.state(task).items():
            np.testing.assert_allclose(tensor, kept.state(task)[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(glocal.GlocalError, match="has not kept its parameters"):
        plain.state(0)


def test_an_interrupted_cohort_resumes(store: Path, tmp_path: Path) -> None:
    checkpoint = next(store.glob("cohorts/*/checkpoint.safetensors"))
    resumed = sweep(store, INTERRUPTED, keep_parameters=True)
    assert not checkpoint.exists() and len(glocal.load(store)) == 4
    for one, other in zip(resumed, sweep(tmp_path / "new", INTERRUPTED, keep_parameters=True), strict=True):
        assert one.config == other.config
        for name, array in other.arrays.items():
            np.testing.assert_allclose(one.arrays[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
        for task in range(4):
            assert {k: v.shape for k, v in one.state(task).items()} == {"weight": (2, 4), "bias": (2,)}


def test_verify_says_which_files_have_no_checksums(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(store, [0.5])
    assert main(["verify", str(store)]) == 0
    without = {Path(line.split("'")[1]).parent.name: line for line in capsys.readouterr().out.splitlines()[:-1]}
    found = {Path(line.split("'")[1]).relative_to(store).parts[0] for line in without.values()}
    assert found == {"runs", "cohorts"}
    assert without["cohorts"].count("theta-") == 2 and "checkpoint.safetensors" in without["cohorts"]
    sweep(store, INTERRUPTED, keep_parameters=True)
    unchecked = [len(verified.unchecked) for verified in Store.open(store).verify()]
    assert sorted(unchecked) == [0, 0, 0, 1, 2], "the two old runs have none"
