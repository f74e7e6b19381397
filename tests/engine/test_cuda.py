"""On a GPU a cohort trains inside captured graphs; the results are those of the CPU, within float32's tolerance."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from glocal.algorithms import ALGORITHMS
from glocal.algorithms.algorithm import Algorithm, Batch, Memory
from glocal.challenges import Challenge, from_tasks
from glocal.engine.choose import choose
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Sequential
from glocal.engine.loop import Snapshot, train
from glocal.fast.cuda_graph import GraphedVectorised
from glocal.networks import mlp
from glocal.networks.model import Model
from glocal.optimizers import AdamW
from glocal.tree import Params, flatten

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(scope="module")
def challenge() -> Challenge:
    """Three tasks of 300 and 60 images whose class is the brightest of four bands, turned a little between tasks."""
    made = torch.Generator().manual_seed(0)

    def data(count: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 120, (count, 1, 8, 8), generator=made, dtype=torch.uint8)
        y = torch.arange(count) % 4
        for i, label in enumerate(y.tolist()):
            x[i, 0, (2 * label + shift) % 8] += 120
        return x, y

    return from_tasks("bands", [(data(300, t), data(60, t)) for t in range(3)], setting="domain")


def finish(challenge: Challenge, name: str, device: str, batch_size: int = 64) -> Snapshot:
    runs = tuple(Member(seed, lr, ALGORITHMS[name]()) for seed in (1, 2) for lr in (0.02, 0.05))
    cohort = Cohort(challenge, mlp, runs, epochs=2, batch_size=batch_size, device=torch.device(device))
    *_, last = train(cohort)
    return last


@pytest.mark.parametrize("name", ALGORITHMS)
def test_as_on_the_cpu(challenge: Challenge, name: str) -> None:
    compare(finish(challenge, name, "cuda"), finish(challenge, name, "cpu"))


@pytest.mark.parametrize("state", ["reset", "kept"])
def test_optimisers_and_schedules_run_inside_the_graph(challenge: Challenge, state: Literal["reset", "kept"]) -> None:
    """With eps far above rounding errors, which Adam would turn into steps where gradients are almost 0."""
    chosen = [
        AdamW(weight_decay=0.1, clip=1.0, eps=1e-3, schedule="cosine", warmup=0.5, span="sequence", state=state),
        AdamW(beta1=0.5, eps=1e-2, schedule="step", gamma=0.5, state=state),
    ]
    runs = tuple(Member(seed, 0.002, ALGORITHMS["si"](), own) for seed in (1, 2) for own in chosen)
    for_cpu = Cohort(challenge, mlp, runs, epochs=2, batch_size=64)
    for_gpu = replace(for_cpu, device=torch.device("cuda"))
    (*_, reference), (*_, ours) = train(for_cpu), train(for_gpu)
    assert ours.record.notes == []
    compare(ours, reference)
    for key, expected in flatten(reference.state.optimizer).items():
        torch.testing.assert_close(flatten(ours.state.optimizer)[key].cpu(), expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["sgd", "ogd-gtl"])
def test_so_it_is_where_every_seed_has_data_of_its_own(challenge: Challenge, name: str) -> None:
    """The tasks of seed 2 in the opposite order: all seeds are measured at once, each on its own."""
    own = replace(challenge, seeded=True, make_task=lambda t, seed: challenge.task(t if seed == 1 else 2 - t, seed))
    compare(finish(own, name, "cuda", 32), finish(own, name, "cpu", 32))


def compare(ours: Snapshot, reference: Snapshot) -> None:
    for key, expected in reference.state.params.items():
        torch.testing.assert_close(ours.state.params[key].cpu(), expected, rtol=1e-3, atol=1e-4)
    for key, matrix in reference.record.arrays.items():
        tolerance = 0.02 if key.endswith("accuracy") else 1e-4 if key == "epoch_loss" else 1e-3
        torch.testing.assert_close(ours.record.arrays[key], matrix, rtol=1e-3, atol=tolerance)


def test_it_is_the_graph_that_runs(challenge: Challenge) -> None:
    from glocal.engine.loader import Loader

    cohort = Cohort(challenge, mlp, (Member(1, 0.1, ALGORITHMS["er"]()),), 1, 64, device=torch.device("cuda"))
    loader = Loader(cohort)
    loader.load_task(0)
    executor = choose(cohort, loader, "auto")
    assert isinstance(executor, GraphedVectorised) and executor.note == ""
    *_, last = train(cohort)
    assert last.record.notes == []


class RowLSTM(nn.Module):
    """An LSTM over the rows of an image, which `vmap` cannot batch."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(shape[-1], 8, batch_first=True), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(1, -2))[0][:, -1])


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
def test_what_cannot_be_vectorised_is_replayed_run_by_run(
    challenge: Challenge, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tuple(Member(1, lr, ALGORITHMS["er"]()) for lr in (0.02, 0.05))
    of = Cohort(challenge, RowLSTM, runs, 1, 64, device=torch.device("cuda"))
    *_, expected = train(of, execution="sequential")

    def eagerly(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("steps were not captured")

    monkeypatch.setattr(Sequential, "epoch", eagerly)
    *_, last = train(of)
    assert last.record.executor == "in one CUDA graph per run" and len(last.record.notes) == 1
    for key, params in expected.state.params.items():
        torch.testing.assert_close(last.state.params[key], params, rtol=1e-3, atol=1e-4)


@dataclass(frozen=True)
class OverTheHost(Algorithm):
    """Plain SGD by a detour that no captured graph can make."""

    name: ClassVar[str] = "over-the-host"

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        return model.loss(params, batch.x.cpu().to(batch.x.device), batch.y)


def test_what_cannot_be_captured_is_trained_step_by_step(challenge: Challenge) -> None:
    def finished(algorithm: Algorithm) -> Snapshot:
        runs = tuple(Member(1, lr, algorithm) for lr in (0.02, 0.05))
        *_, last = train(Cohort(challenge, mlp, runs, epochs=2, batch_size=64, device=torch.device("cuda")))
        return last

    ours = finished(OverTheHost())
    torch.rand(2, device="cuda")  # torch's own generator is not left in the middle of a capture
    plain = finished(ALGORITHMS["sgd"]())
    assert len(ours.record.notes) == 1 and ours.record.executor == "vectorised"
    for key, expected in plain.state.params.items():
        torch.testing.assert_close(ours.state.params[key], expected, rtol=1e-4, atol=1e-5)


class Littering(nn.Linear):
    """A network that drops an old CUDA graph in every pass, in a cycle that only garbage collection finds."""

    graphs: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__(math.prod(shape), outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.graphs:
            cycle: list[Any] = [self.graphs.pop()]
            cycle.append(cycle)
        return super().forward(x.flatten(1))


def test_no_garbage_is_collected_during_a_capture(challenge: Challenge) -> None:
    for _ in range(40):
        graph, zero = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph):
            zero += 1
        Littering.graphs.append(graph)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        members = tuple(Member(1, lr, ALGORITHMS["sgd"]()) for lr in (0.02, 0.05))
        *_, last = train(Cohort(challenge, Littering, members, 1, 64, device=torch.device("cuda")))
    finally:
        gc.set_threshold(*before)
    assert last.record.notes == [] and "CUDA graph" in last.record.executor


def test_a_diverged_run_is_noted_at_the_step_the_cpu_notes(challenge: Challenge) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        runs = tuple(Member(1, lr, ALGORITHMS["sgd"]()) for lr in (0.05, 1e12))
        *_, last = train(Cohort(challenge, mlp, runs, epochs=1, batch_size=64, device=torch.device(device)))
        found[device] = last.state.diverged.tolist()
    assert found["cpu"] == found["cuda"] and found["cpu"][0] == -1 < found["cpu"][1]
