"""Array jobs of workers, by submitit's executors that need no Slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import glocal
from glocal.cli.main import main
from glocal.cluster.slurm import submit
from glocal.store.store import Store
from glocal.sweeps.options import SweepOptions
from glocal.sweeps.plan import read_plans, write_plan

pytest.importorskip("submitit")
pytestmark = [  # submitit leaves processes and files to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TINY: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500}


def options(workers: int, **changes: Any) -> SweepOptions:
    return SweepOptions(**{"on": "slurm", "time": "1h", "gpus": 0, "workers": workers, **changes})


def test_a_job_trains_the_plans(tmp_path: Path) -> None:
    write_plan("rotated-digits", ["sgd"], [0.1], [1], store=tmp_path / "store", **TINY)
    (job,) = submit(tmp_path / "store", [], options(1), cluster="debug")
    assert job.result() == 0
    assert len(Store.open(tmp_path / "store").runs()) == 1


@pytest.mark.slow
def test_a_preempted_job_is_requeued(tmp_path: Path) -> None:
    """submitit's local executor starts a job again that asks for it, as Slurm does."""
    store = tmp_path / "store"
    sizes: dict[str, Any] = {"tasks": 5, "epochs": 2, "batch_size": 50}
    write_plan("rotated-digits", ["sgd"], [0.1], [1, 2], store=store, workers=2, **sizes)
    jobs = submit(store, [], options(2), cluster="local")
    while not list(store.glob("cohorts/*/*/checkpoint.safetensors")):
        assert not any(job.done() for job in jobs)
        time.sleep(0.05)
    held = next(cohort for cohort in Store.open(store).cohorts() if cohort.last.held)
    os.kill(held.last.about["pid"], signal.SIGUSR2)  # as Slurm does before it ends a job
    assert [job.result() for job in jobs] == [0, 0]
    assert any("Requeued" in (job.stdout() or "") + (job.stderr() or "") for job in jobs)
    assert len(Store.open(store).runs()) == 2 and not Store.open(store).cohorts()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": None}, "needs the time of a job"),
        ({"time": "59s"}, "needs a minute or more"),
        ({"slurm": "account"}, "write NAME=VALUE"),
        ({}, "Slurm did not accept the jobs"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(glocal.GlocalError, match=message):
        submit(tmp_path, [], options(1, **changes))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command sbatch that submits nothing, and the script that it was given."""
    for name, text in (("sbatch", f'cp "$1" {tmp_path}/given; echo Submitted batch job 12'), ("srun", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "given"


def test_nothing_is_submitted_where_nothing_is_left(tmp_path: Path, sbatch: Path) -> None:
    arguments = ["sweep", "rotated-digits", "--algorithms", "sgd", "--lrs", "0.1", "--seeds", "1", "--tasks", "2"]
    arguments += ["--epochs", "1", "--batch-size", "500", "--store", str(tmp_path / "store")]
    on_slurm = ["--on", "slurm", "--time", "1h", "--gpus", "0"]
    assert main([*arguments, *on_slurm, "--plan"]) == 2 and not (tmp_path / "store").exists()
    assert main(arguments) == 0
    assert main([*arguments, *on_slurm]) == 0 and not sbatch.exists()
    store = Store.open(tmp_path / "store")
    assert not read_plans(store)
    (store.runs_path / store.names()[0] / "arrays.safetensors").write_bytes(b"")
    with pytest.warns(glocal.errors.GlocalWarning, match="moved to"):
        assert main([*arguments, *on_slurm]) == 0 and sbatch.exists()
    assert len(read_plans(store)) == 1


@pytest.mark.parametrize("device", ["cpu", "all", "tpu"])
def test_the_device_of_the_workers(device: str, tmp_path: Path) -> None:
    write_plan("rotated-digits", ["sgd"], [0.1], [1], store=tmp_path / "store", **TINY)
    (job,) = submit(tmp_path / "store", [], options(1, device=device), cluster="debug")
    assert job.result() == 0
    assert len(Store.open(tmp_path / "store").runs()) == (device != "tpu")


def test_what_sbatch_is_given(tmp_path: Path, sbatch: Path) -> None:
    """An array, requeued on preemption, with the user's own options."""
    own = options(
        16,
        gpus=1,
        time="4h",
        partition="gpu",
        slurm="account=mine,mem_per_cpu=2G,exclude=n1,n2,export=ALL,SEED=1,exclusive=true",
    )
    jobs = submit(tmp_path / "store", [], own)
    assert [job.job_id for job in jobs] == [f"12_{index}" for index in range(16)]
    lines = set(sbatch.read_text().splitlines())
    wanted = ["array=0-15%16", "requeue", "time=240", "partition=gpu", "gpus-per-node=1", "account=mine"]
    missing = {
        f"#SBATCH --{option}"
        for option in [*wanted, "mem-per-cpu=2G", "exclude=n1,n2", "export=ALL,SEED=1", "exclusive", "signal=USR2@120"]
    } - lines
    assert not missing, lines


@pytest.mark.parametrize(
    "text",
    ["exclusive", "n1,exclude=n2", "=4", "a=1,=2", "time=10", "account=mine,gpus_per_node=2", "export=ALL,Path=1"],
)
def test_options_for_sbatch_are_checked(text: str, tmp_path: Path, sbatch: Path) -> None:
    with pytest.raises(glocal.GlocalError, match=f"slurm = '{text}'"):
        submit(tmp_path / "store", [], options(1, slurm=text))
    assert not sbatch.exists()
