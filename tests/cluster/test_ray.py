"""Tasks of Ray: results are those of one process, also when a node is lost."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import linear
import pytest
import small_challenge
import torch
from workers import difference

import glocal
from glocal.cluster.ray import MAX_TASKS_PER_GPU, divide, train_cohort
from glocal.engine.memory_budget import FREE_MEMORY_FRACTION
from glocal.store.store import Store
from glocal.sweeps.context import ProgressReporter
from glocal.sweeps.plan import write_plan
from glocal.sweeps.sweep import prepare

SMALL: dict[str, Any] = {"challenge": f"{small_challenge.__file__}:make", "network": f"{linear.__file__}:make"}
SMALL |= {"tasks": 6, "epochs": 2, "batch_size": 20, "cohort_size": 4, "seeds": [1, 2, 3, 4], "device": "cpu"}
MINE = """
import os

from glocal.algorithms.baselines import SGD

class Bad(SGD):
    name = "bad"

    def objective(self, model, params, memory, batch):
        raise ZeroDivisionError("no objective")

class Crash(SGD):
    name = "crash"

    def objective(self, model, params, memory, batch):
        os._exit(1)
"""


class Messages(ProgressReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finished = 0

    def message(self, text: str) -> None:
        self.texts.append(text)

    def finish_cohort(self, runs: int) -> None:
        self.finished += runs


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of a head without cores, and a node with one, which claims to have a GPU."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        own = {"include_dashboard": False, "object_store_memory": 100_000_000}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **own})
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000)
        yield cluster
        cluster.shutdown()


def wait_for(store: Store, cohorts: int) -> None:
    """Wait until so many cohorts are in training, after their first task."""
    while sum(c.last.held and c.last.about.get("finished", 0) > 0 for c in store.cohorts()) < cohorts:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_node_is_lost_without_warning(tmp_path: Path, cluster: Any) -> None:
    sweep: dict[str, Any] = {**SMALL, "algorithms": ["er"], "lrs": [0.1, 0.2], "epochs": 4}
    glocal.sweep(**sweep, store=tmp_path / "one")
    store, node, messages = tmp_path / "store", cluster.add_node(num_cpus=1), Messages()

    def lose_node() -> None:
        wait_for(Store(store), 2)  # on two nodes, of one core each
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=lose_node, daemon=True)
    thread.start()
    runs = glocal.sweep(**sweep, store=store, on="ray", address=cluster.address, progress=messages)
    thread.join()
    assert messages.texts == ["A node was lost; runs that go on from their last task: 4."]
    assert len(runs) == messages.finished == 8 and not list(store.glob("plans/*"))
    assert difference(Store(tmp_path / "one"), Store(store)) is None


@pytest.fixture
def listening() -> Iterator[None]:
    """A shell that starts the tests in the background lets all of its processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_stops_the_tasks(tmp_path: Path, cluster: Any, listening: None) -> None:
    sweep: dict[str, Any] = {**SMALL, "algorithms": ["er"], "lrs": [0.1], "epochs": 4}
    glocal.sweep(**sweep, store=tmp_path / "one")
    store = Store(tmp_path / "store")

    def press() -> None:
        wait_for(store, 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        glocal.sweep(**sweep, store=store.path, on="ray", address=cluster.address)
    thread.join()
    (cohort,) = store.cohorts()
    assert cohort.last.about["released"] and cohort.last.about["finished"] < 6 and not store.runs()
    glocal.sweep(**sweep, store=store.path)
    assert difference(Store(tmp_path / "one"), store) is None


@pytest.mark.slow
def test_a_cohort_that_fails_does_not_stop_the_others(tmp_path: Path, cluster: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    sweep: dict[str, Any] = {**SMALL, "lrs": [0.1], "cohort_size": 1, "seeds": [1]}
    algorithms, where = [f"{file}:Bad", "sgd"], {"on": "ray", "address": cluster.address}
    with pytest.raises(glocal.GlocalError, match="ZeroDivisionError: no objective"):
        glocal.sweep(**sweep, algorithms=algorithms, store=tmp_path / "store", **where)
    store = Store(tmp_path / "store")
    assert [run.algorithm for run in store.runs()] == ["sgd"]
    (failed,) = store.cohorts()
    assert failed.failed is not None and failed.failed.endswith(": ZeroDivisionError: no objective")


@pytest.mark.slow
def test_a_process_that_dies_again_and_again_is_given_up(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glocal.cluster.ray.MAX_CRASHES", 2)
    (tmp_path / "mine.py").write_text(MINE)
    sweep: dict[str, Any] = {**SMALL, "algorithms": [f"{tmp_path}/mine.py:Crash"], "lrs": [0.1], "seeds": [1]}
    messages = Messages()
    with pytest.raises(glocal.GlocalError, match=r"^1 of 1 runs are not trained: a process died 2 times: .*\. Run"):
        glocal.sweep(**sweep, store=tmp_path / "store", on="ray", address=cluster.address, progress=messages)
    assert messages.texts == ["A process died; runs that go on from their last task: 1."]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU that cannot be used")
def test_a_gpu_that_cannot_be_used(tmp_path: Path, cluster: Any) -> None:
    sweep: dict[str, Any] = {**SMALL, "algorithms": ["sgd"], "lrs": [0.1], "device": "auto"}
    with pytest.raises(glocal.GlocalError, match=r"^a GPU of the Ray cluster cannot be used \(.*\)\. Try --device cpu"):
        glocal.sweep(**sweep, store=tmp_path / "store", on="ray", address=cluster.address)


def test_a_task_trains_its_cohort_with_the_planned_code_alone(tmp_path: Path) -> None:
    file, arguments = tmp_path / "mine.py", {**SMALL, "tasks": 1, "lrs": [0.1], "cohort_size": 2}
    file.write_text(Path(linear.__file__).read_text())
    plan, job = write_plan(**arguments | {"network": f"{file}:make"}, algorithms=["sgd"], store=tmp_path / "store")
    first, second = (hashes for hashes, _ in divide(job, 0, 0))
    train_cohort(str(tmp_path / "store"), plan, first, "cpu", torch.get_num_threads())
    assert {run.path.name for run in job.stored_runs() if run.path} == set(first)
    file.write_text(f"{file.read_text()}\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(glocal.GlocalError, match="needs code from"):
        train_cohort(str(tmp_path / "store"), plan, second, "cpu", torch.get_num_threads())
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("gpus", "runs_per_gpu", "budget", "cohorts", "fraction"),
    [
        (0, 0, None, 4, 0),  # cohorts are cut to the memory of this machine
        (8, 100, None, 4, 1),  # a GPU for each of four cohorts
        (2, 100, None, 4, 1 / 2),  # two cohorts for each of two GPUs
        (1, 25, None, 4, 1 / 3),  # three of eight runs fit into a GPU
        (1, 25, 8, 4, 1 / 3),
        (1, 9, None, 4, 1),
        (1, 5, None, 8, 1),
        (1, 1_000, None, 4, 1 / 4),
        (1, 1_000, 4, 8, 1 / MAX_TASKS_PER_GPU),
    ],
)
def test_cohorts_share_gpus_by_their_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    runs_per_gpu: int,
    budget: int | None,
    cohorts: int,
    fraction: float,
) -> None:
    """With runs of a megabyte, 32 of them, in cohorts of up to eight."""

    def fitting(cohort: Any, budget: int | None) -> int:
        return 1_000 if budget is None else budget // 10**6

    monkeypatch.setattr("glocal.sweeps.resume.largest_cohort", fitting)
    sweep = {**SMALL, "algorithms": ["sgd"], "lrs": [0.01 * (i + 1) for i in range(8)], "cohort_size": 8}
    job = prepare(**sweep, memory_budget=budget and budget * 10**6, store=tmp_path)
    tasks = divide(job, gpus, gpus and round((runs_per_gpu + 0.1) * 10**6 / FREE_MEMORY_FRACTION))
    assert [own for _, own in tasks] == [pytest.approx(fraction)] * cohorts
    assert sum(len(hashes) for hashes, _ in tasks) == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "127.0.0.1:1"}, r"no Ray cluster answers at '127.0.0.1:1' \(.*refused\)\. Start one: ray start"),
        ({"address": "nonsense"}, "no Ray cluster answers at 'nonsense'"),
        ({"address": "127.0.0.1:99999"}, "no Ray cluster answers at"),
        ({"address": "auto", "on": "here"}, "address = 'auto' was given; it needs on = 'ray'"),
        ({"partition": "gpu"}, "partition = 'gpu' was given; it needs on = 'slurm'"),
        ({"device": "cuda:1"}, "device = 'cuda:1' was given; Ray chooses GPUs itself"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(glocal.GlocalError, match=message):
        glocal.sweep(**{**SMALL, "algorithms": ["sgd"], "lrs": [0.1], "store": tmp_path, "on": "ray", **options})


def test_ray_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(glocal.GlocalError, match=re.escape("on = 'ray' needs ray: pip install 'glocal[ray]'.")):
        glocal.sweep(**SMALL, algorithms=["sgd"], lrs=[0.1], store=tmp_path, on="ray")
