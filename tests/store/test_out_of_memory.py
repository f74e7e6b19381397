"""A cohort that runs out of memory goes on in halves, and memory is planned by the limits of cgroups."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import glocal
from glocal.algorithms import Batch, Memory
from glocal.algorithms.baselines import SGD
from glocal.challenges import from_tasks
from glocal.challenges.challenge import Challenge
from glocal.engine import memory_budget
from glocal.engine.cohort import Cohort
from glocal.engine.executors import Vectorised
from glocal.engine.memory_budget import cgroup_free_bytes, free_bytes, is_out_of_memory
from glocal.errors import GlocalError, GlocalWarning
from glocal.networks import mlp
from glocal.networks.model import Model
from glocal.sweeps import train_claim
from glocal.sweeps.sweep import prepare
from glocal.tree import Params

TASKS = 3
QUICK: dict[str, Any] = {"epochs": 1, "batch_size": 20, "network": "mlp"}


def noise() -> Challenge:
    """Three small tasks."""
    x = torch.randn(TASKS, 40, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(40) % 2
    return from_tasks("noise", [((part, y), (part[:10], y[:10])) for part in x], setting="domain")


def no_memory_on_a_gpu() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def no_memory_on_a_cpu() -> None:
    torch.empty(2**50)


def no_memory_in_python() -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise GlocalError("a user's code failed") from error


ERRORS = [no_memory_on_a_gpu, no_memory_on_a_cpu, no_memory_in_python]


def fail_above(runs: int, task: int | None, error: Callable[[], None], begun: list[tuple[int, int]]) -> Any:
    """Fail at once (None), or after a task, if a cohort is larger than this; note the sizes and starts of all."""
    train = train_claim.train

    def limited(cohort: Cohort, begin: Any, *args: Any) -> Iterator[Any]:
        begun.append((len(cohort), 0 if begin is None else begin.finished))
        if task is None and len(cohort) > runs:
            error()
        for snapshot in train(cohort, begin, *args):
            yield snapshot
            if len(cohort) > runs and snapshot.finished == task:
                error()

    return limited


@pytest.mark.parametrize(("task", "error"), [(None, ERRORS[0]), (0, ERRORS[1]), (2, ERRORS[2])])
def test_halves_go_on_from_the_checkpoint(
    task: int | None, error: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: Any = (noise(), [("er", {"slots": 20})], [0.1, 0.2], [1, 2, 3])
    whole = glocal.sweep(*wanted, store=tmp_path / "whole", keep_parameters=True, **QUICK)
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(train_claim, "train", fail_above(2, task, error, begun))
    with pytest.warns(GlocalWarning, match="did not fit into memory") as warned:
        halved = glocal.sweep(*wanted, store=tmp_path / "halved", keep_parameters=True, **QUICK)
    again = [(2, 0), (2, 0), (1, 0), (1, 0)] if task is None else []
    assert sorted(begun) == sorted([(6, 0), (3, task or 0), (3, task or 0), *again])
    assert len(warned) == (3 if task is None else 1)
    for one, other in zip(whole, halved, strict=True):
        assert one.config == other.config
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
        for t in range(TASKS + 1):
            assert all(torch.equal(p, other.state(t)[k]) for k, p in one.state(t).items())
    assert {run.info["cost"]["cohort_runs"] for run in halved} == ({1, 2} if task is None else {3})
    assert not list((tmp_path / "halved" / "cohorts").glob("[!.]*"))


class Growing(SGD):
    """Plain SGD that keeps 64 MB more after every task."""

    name: ClassVar[str] = "growing"

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        first = next(iter(params.values()))
        kept = [*memory.get("ballast", {}).values(), first.new_zeros(2**24)]
        return {"ballast": {str(i): part for i, part in enumerate(kept)}}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("algorithm", ["er", Growing])
def test_a_gpu_with_less_memory_than_planned(algorithm: Any, tmp_path: Path) -> None:
    """Steps are captured there; one algorithm runs out of memory in its first steps, one in a later task."""
    device, wide = torch.device("cuda", 0), partial(mlp, hidden=(2_000, 2_000))
    wanted: Any = (noise(), [algorithm], [0.01, 0.02], range(8))
    options: Any = QUICK | {"network": wide, "device": "cuda:0", "keep_parameters": True}
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    whole = glocal.sweep(*wanted, store=tmp_path / "whole", **options)
    share = 0.7 * torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        with pytest.warns(GlocalWarning, match="did not fit into memory"):
            halved = glocal.sweep(*wanted, store=tmp_path / "halved", **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert {run.info["cost"]["cohort_runs"] for run in whole} == {16}
    assert max(run.info["cost"]["cohort_runs"] for run in halved) <= 8
    for one, other in zip(whole, halved, strict=True):
        assert one.config == other.config
        for t in range(TASKS + 1):
            torch.testing.assert_close(dict(one.state(t)), dict(other.state(t)), rtol=1e-4, atol=1e-5)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import glocal
from glocal.sweeps import train_claim
from test_out_of_memory import QUICK, fail_above, noise

train_claim.train = fail_above(2, None, lambda: os.kill(os.getpid(), signal.SIGKILL), [])
glocal.sweep(noise(), ["sgd"], [0.1, 0.2], [1, 2], store=sys.argv[2], **QUICK)
"""


@pytest.mark.slow
def test_a_cohort_whose_processes_are_killed_is_halved(tmp_path: Path) -> None:
    """The kernel kills a process that needs too much memory: here, one that trains more than two runs together."""
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "killed")]
    statuses = [subprocess.run(command, stderr=subprocess.DEVNULL).returncode for _ in range(3)]
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    wanted: Any = (noise(), ["sgd"], [0.1, 0.2], [1, 2])
    whole = glocal.sweep(*wanted, store=tmp_path / "whole", **QUICK)
    for one, other in zip(whole, glocal.sweep(*wanted, store=tmp_path / "killed", **QUICK), strict=True):
        assert other.info["cost"]["cohort_runs"] == 2
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)


def test_a_failed_cohort_frees_its_memory(tmp_path: Path) -> None:
    """The error is kept until the others are trained, without the tensors that its traceback reaches."""
    held: list[weakref.ref[torch.Tensor]] = []

    class Failing(SGD):
        name = "failing"

        def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
            held.append(weakref.ref(batch.x))
            raise ZeroDivisionError("no memory")

    job = prepare(noise(), [Failing], [0.1], [1], store=tmp_path, execution="sequential", **QUICK)
    job.train_next(job.missing())
    gc.collect()
    assert job.errors and held and all(reference() is None for reference in held)


def test_a_run_that_does_not_fit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails with one sentence, and the others are trained."""
    train = train_claim.train

    def limited(cohort: Cohort, *args: Any) -> Iterator[Any]:
        if any(member.lr == 0.2 for member in cohort.members):
            no_memory_on_a_cpu()
        yield from train(cohort, *args)

    monkeypatch.setattr(train_claim, "train", limited)
    with (
        pytest.warns(GlocalWarning),
        pytest.raises(GlocalError, match=r"one run of sgd on noise does not fit"),
    ):
        glocal.sweep(noise(), ["sgd"], [0.1, 0.2], [1, 2], store=tmp_path, **QUICK)
    assert sorted((run.lr, run.seed) for run in glocal.load(tmp_path)) == [(0.1, 1), (0.1, 2)]


def test_a_rehearsal_without_memory_does_not_fall_back_to_one_run_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = Vectorised.epoch

    def limited(self: Vectorised, *args: Any) -> Any:
        if len(self.cohort) > 2:
            no_memory_on_a_cpu()
        return epoch(self, *args)

    monkeypatch.setattr(Vectorised, "epoch", limited)
    with pytest.warns(GlocalWarning, match="did not fit into memory"):
        runs = glocal.sweep(noise(), ["sgd"], [0.1, 0.2], [1, 2], store=tmp_path, **QUICK)
    assert {(run.info["cost"]["executor"], run.info["cost"]["cohort_runs"]) for run in runs} == {("vectorised", 2)}


def test_other_errors_are_not_of_memory() -> None:
    assert not any(map(is_out_of_memory, (None, RuntimeError("shape mismatch"), ValueError("out of memory"))))


def cgroup(folder: Path, limit: tuple[str, object], usage: tuple[str, int], inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (limit, usage):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\nslab 3\n")


def test_the_limits_of_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2, with a limit of the cgroup above; version 1; a path that is not mounted; and no cgroups."""
    own, second = tmp_path / "own", tmp_path / "second"
    cgroup(second / "slurm" / "job", ("max", "max"), ("current", 100), 10)
    cgroup(second / "slurm", ("max", 1000), ("current", 300), 50)
    own.write_text("0::/slurm/job\n")
    assert cgroup_free_bytes(second, own) == [750]
    cgroup(second / "slurm" / "job", ("max", 400), ("current", 100), 10)
    assert sorted(cgroup_free_bytes(second, own)) == [310, 750]

    first = tmp_path / "first"
    cgroup(first / "memory" / "docker", ("limit_in_bytes", 5000), ("usage_in_bytes", 6000), 200)
    cgroup(first / "memory", ("limit_in_bytes", 2**63 - 4096), ("usage_in_bytes", 9000), 0)
    own.write_text("4:memory:/docker\n1:cpu,cpuacct:/docker\n0::/\n")
    assert sorted(cgroup_free_bytes(first, own)) == [0, 2**63 - 4096 - 9000]
    own.write_text("4:memory:/elsewhere/on/the/host\n")
    assert cgroup_free_bytes(first, own) == [2**63 - 4096 - 9000]
    assert cgroup_free_bytes(first, tmp_path / "missing") == []

    before = free_bytes(torch.device("cpu"))
    own.write_text("0::/slurm/job\n")
    monkeypatch.setattr(memory_budget, "CGROUPS", second)
    monkeypatch.setattr(memory_budget, "OWN_CGROUPS", own)
    assert free_bytes(torch.device("cpu")) == 310 < before
