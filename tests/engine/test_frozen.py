"""Frozen parameters: held once for all runs of a cohort, without gradients, and part of what a run stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import glocal
from glocal import tree
from glocal.algorithms import ALGORITHMS, EWC, SGD
from glocal.challenges import Challenge
from glocal.engine.cohort import Cohort, Member
from glocal.engine.evaluate import Record
from glocal.engine.executors import Sequential, Vectorised
from glocal.engine.loader import Loader
from glocal.engine.loop import Execution, Snapshot, train
from glocal.engine.memory_budget import bytes_per_run, largest_cohort
from glocal.engine.state import State
from glocal.lens.record import open_run
from glocal.networks.mlp import Linear
from glocal.store.store import Claim

WIDTH, FEATURES = 300, 400
BACKBONE = WIDTH * FEATURES
EXECUTORS: list[Execution] = ["vectorised", "sequential"]


class Adapted(nn.Module):
    """A frozen layer W, the same for all seeds, with a low-rank adapter: (W + B A) x, and a trained head."""

    def __init__(self, outputs: int, width: int = WIDTH, features: int = FEATURES) -> None:
        super().__init__()
        self.backbone = Linear(features, width, bias=False)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.backbone.weight.copy_(torch.randn(width, features, generator=draw) / features**0.5)
        self.backbone.requires_grad_(False)
        self.down, self.up = Linear(features, 2, bias=False), Linear(2, width, bias=False)
        self.head = Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.backbone(x) + self.up(self.down(x))).relu())


def adapted(shape: Sequence[int], outputs: int, width: int = WIDTH) -> nn.Module:
    return Adapted(outputs, width)


def half_shared(shape: Sequence[int], outputs: int, width: int = WIDTH) -> nn.Module:
    """Return a network with a frozen layer that all seeds share, and one that the seed draws."""
    network = Adapted(outputs, width)
    network.up.requires_grad_(False)
    return network


def challenge(features: int = FEATURES) -> Challenge:
    draw = torch.Generator().manual_seed(1)

    def data(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, features, generator=draw), torch.arange(count) % 3

    return glocal.from_tasks("noise", [(data(16), data(6)) for _ in range(2)], setting="domain")


def cohort(runs: int, network: Callable[..., nn.Module] = adapted, **options: Any) -> Cohort:
    algorithm = options.pop("algorithm", SGD())
    members = tuple(Member(seed, 0.1, algorithm) for seed in range(runs))
    return Cohort(challenge(), network, members, epochs=1, batch_size=4, **options)


def end(of: Cohort, execution: Execution, begin: Snapshot | None = None) -> Snapshot:
    *_, last = train(of, begin, execution)
    return last


class Created(TorchDispatchMode):
    """Records every tensor that operations create, views and results in place left out."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.tensors += [t for t in made if t.untyped_storage().data_ptr() not in given]
        return result


@contextmanager
def one_step(of: Cohort, execution: Execution) -> Iterator[tuple[State, list[Tensor]]]:
    """Yield the state after one step of the cohort's first run, or of all its runs, and the tensors it created."""
    loader = Loader(of)
    loader.load_task(0)
    loader.load_epoch(0)
    state = of.initial_state(loader.example())
    executor = Vectorised(of) if execution == "vectorised" else Sequential(of)
    with Created() as created:
        if isinstance(executor, Vectorised):
            executor.step(state, executor.hyper, loader.batch(0))
        else:
            executor.step(state.select(0), tree.select(executor.hyper, 0), next(loader.batches_of(0)))
    yield state, created.tensors


@pytest.mark.parametrize("execution", EXECUTORS)
def test_25_runs_share_one_backbone(execution: Execution) -> None:
    """A stacked backbone would take 25 times its bytes in the state alone."""
    with one_step(cohort(25), execution) as (state, created):
        held = tree.nbytes(state.as_tree()) + sum(t.nbytes for t in created)
    assert held < 4 * (4 * BACKBONE), "state and all tensors of a step take less than four backbones"


def test_models_of_a_cohort_use_the_same_frozen_tensors() -> None:
    of = cohort(2)
    models = [of.model(vectorised) for vectorised in (False, True)]
    modules = [m.module for model in models for m in (model, model.eval_mode())]
    assert len({m.get_parameter("backbone.weight").data_ptr() for m in modules}) == 1
    assert len({id(m) for m in modules}) == 4


@pytest.mark.parametrize("execution", EXECUTORS)
def test_no_gradient_of_a_frozen_parameter_is_computed(execution: Execution) -> None:
    def created(network: Callable[..., nn.Module]) -> int:
        with one_step(cohort(3, network), execution) as (_, tensors):
            return sum(t.shape[-2:] in ((WIDTH, FEATURES), (FEATURES, WIDTH)) for t in tensors)

    assert created(adapted) == 0
    assert created(lambda shape, outputs: Adapted(outputs).requires_grad_(True)) > 0


def with_stacked_backbone(of: Cohort) -> Snapshot:
    """Return the start of training with a copy of all frozen parameters per run."""
    loader = Loader(of)
    loader.load_task(0)
    params, buffers = of.initial()
    frozen = [{k: p for k, p in of.network(m.seed).named_parameters() if not p.requires_grad} for m in of.members]
    state = of.initial_state(loader.example(), (params, {**buffers, **tree.map_tree(torch.detach, tree.stack(frozen))}))
    return Snapshot(0, state, Record.blank(len(of), of.challenge.tasks, of.epochs))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("execution", EXECUTORS)
@pytest.mark.parametrize("network", [adapted, half_shared])
def test_shared_and_stacked_backbones_give_the_same_bits(
    network: Callable[..., nn.Module], execution: Execution, precision: Any
) -> None:
    of = cohort(3, lambda shape, outputs: network(shape, outputs, 24), algorithm=EWC(), precision=precision)
    shared, stacked = end(of, execution), end(of, execution, with_stacked_backbone(of))
    assert len(stacked.state.buffers) > len(shared.state.buffers) == (network is half_shared)
    for key, p in stacked.state.params.items():
        assert torch.equal(shared.state.params[key], p)
        assert not torch.equal(p[0], p[1])


@pytest.mark.parametrize("execution", EXECUTORS)
def test_bf16_casts_a_shared_backbone_once(execution: Execution) -> None:
    with one_step(cohort(3, precision="bf16"), execution) as (_, tensors):
        assert not any(t.dtype == torch.bfloat16 and t.numel() >= BACKBONE for t in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "hat"])  # hat needs a declaration of its units
def test_every_algorithm_trains_beside_frozen_parameters(name: str) -> None:
    of = cohort(2, lambda shape, outputs: Adapted(outputs, 6, FEATURES), algorithm=ALGORITHMS[name]())
    ends = [end(of, execution) for execution in EXECUTORS]
    for key, p in ends[0].state.params.items():
        torch.testing.assert_close(p, ends[1].state.params[key], rtol=1e-4, atol=1e-5)


def test_the_memory_budget_counts_a_shared_backbone_once() -> None:
    of, nbytes = cohort(25), 4 * BACKBONE
    assert bytes_per_run(of) < nbytes
    assert bytes_per_run(cohort(25, drawn)) > nbytes
    assert largest_cohort(of, 10 * nbytes) > 10 > largest_cohort(cohort(25, drawn), 10 * nbytes)
    with pytest.raises(glocal.GlocalError, match="needs about"):
        largest_cohort(of, nbytes)


def drawn(shape: Sequence[int], outputs: int) -> nn.Module:
    network = Adapted(outputs)
    nn.init.normal_(network.backbone.weight)
    return network


SWEEP: dict[str, Any] = {"network": adapted, "epochs": 1, "batch_size": 4, "keep_parameters": True}


def test_a_stored_state_is_the_whole_network_and_holds_the_backbone_once(tmp_path: Path) -> None:
    one, other = glocal.sweep(challenge(), ["sgd"], [0.1], [1, 2], store=tmp_path, **SWEEP)
    network = Adapted(3)
    for run in (one, other):
        for task in range(3):
            network.load_state_dict(run.state(task))
        assert run.path is not None and (run.path / "parameters.safetensors").stat().st_size < 2 * 4 * BACKBONE
    x, y = challenge().task(1, 0).test
    right = (network(x).argmax(1) == y).double().mean()
    assert float(right) == pytest.approx(other.arrays["test_class_accuracy"][2, 1])


def test_an_interrupted_cohort_resumes_with_its_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = glocal.sweep(challenge(), ["er"], [0.1], [1], store=tmp_path / "a", **SWEEP)
    save = Claim.save

    def save_then_stop(self: Claim, snapshot: Snapshot) -> None:
        save(self, snapshot)
        if snapshot.finished == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Claim, "save", save_then_stop)
    with pytest.raises(KeyboardInterrupt):
        glocal.sweep(challenge(), ["er"], [0.1], [1], store=tmp_path / "b", **SWEEP)
    monkeypatch.undo()
    (resumed,) = glocal.sweep(challenge(), ["er"], [0.1], [1], store=tmp_path / "b", **SWEEP)
    for key, p in whole.state(2).items():
        assert torch.equal(resumed.state(2)[key], p)


def test_the_lens_reads_and_retraces_a_run_with_frozen_parameters(tmp_path: Path) -> None:
    """Its networks are the run's own, though the seed draws the frozen parameters."""
    file = tmp_path / "net.py"
    file.write_text(
        "from glocal.networks import mlp\ndef net(shape, outputs):\n    made = mlp(shape, outputs, (12,))\n"
        "    made.layers[0].requires_grad_(False)\n    return made\n"
    )
    options: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500, "train_eval": 5_000}
    runs = glocal.sweep(
        "rotated-digits",
        ["sgd"],
        [0.1],
        [1, 2],
        network=f"{file}:net",
        store=tmp_path / "runs",
        keep_parameters=True,
        **options,
    )
    for run in runs:
        assert run.path is not None
        stored = open_run(run.path, network=f"{file}:net")
        for trace in (stored.trace(examples=5_000), stored.retrace(examples=5_000).run.trace):
            losses = [float(trace.value(o, trace.solution(o))) for o in range(2)]
            assert losses == pytest.approx([run.arrays["train_class_loss"][o + 1, o] for o in range(2)], rel=1e-5)
            assert trace.num_params == 130
