"""Sweeps from Python: what is kept, skipped, split and refused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms import EWC, SGD
from glocal.files import read_tensors
from glocal.paper import results
from glocal.store.store import Store

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500}


def arrays_equal(a: glocal.Runs, b: glocal.Runs) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.config == other.config
        for key in one.arrays:
            np.testing.assert_array_equal(one.arrays[key], other.arrays[key], err_msg=key)


def test_what_is_finished_is_not_repeated(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], store=store, **QUICK)
    assert first[0].path is not None
    written = first[0].path.stat().st_mtime_ns
    both = glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.2], [1], store=store, **QUICK)
    assert both[0].path is not None and both[0].path.stat().st_mtime_ns == written
    assert [r.lr for r in both] == [0.1, 0.2]
    arrays_equal(first, both[:1])


def test_stopped_between_the_last_checkpoint_and_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = tmp_path / "store", Store.write

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], store=store, **QUICK)
    monkeypatch.setattr(Store, "write", write)
    after = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], store=store, **QUICK)
    arrays_equal(after, glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], store=tmp_path / "whole", **QUICK))


def test_a_run_says_when_it_was_finished(tmp_path: Path) -> None:
    """Also after it was written to a file of results."""
    before = datetime.now(UTC).replace(microsecond=0)
    (run,) = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], store=tmp_path / "store", **QUICK)
    assert before <= datetime.fromisoformat(run.finished) <= datetime.now(UTC)
    (kept,) = results.read(results.write([run], tmp_path / "results.parquet"))
    assert kept.info["finished"] == kept.finished == run.finished


def test_a_run_is_named_by_all_that_it_depends_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    common: dict[str, Any] = {**QUICK, "store": store}
    variants = [
        glocal.sweep("rotated-digits", [EWC()], [0.1], [1], **common),
        glocal.sweep("rotated-digits", [EWC(penalty=2.0)], [0.1], [1], **common),
        glocal.sweep("rotated-digits", [EWC(fisher="empirical")], [0.1], [1], **common),
        glocal.sweep("rotated-digits", [EWC()], [0.1], [2], **common),
        glocal.sweep("rotated-digits", [EWC()], [0.1], [1], **{**common, "batch_size": 400}),
        glocal.sweep("permuted-digits", [EWC()], [0.1], [1], **common),
    ]
    loaded = glocal.load(store)
    assert len({v[0].path for v in variants}) == len(variants) == len(loaded)
    order = [(run.algorithm, run.lr, run.seed) for run in loaded]
    assert order == sorted(order)
    assert variants[2][0].algorithm == "ewc fisher=empirical"
    assert variants[2][0].config["algorithm"]["options"]["fisher"] == "empirical"


class PlainInit(glocal.Algorithm):
    """An algorithm whose option is not a field, so that 1 and 2 would have the same name."""

    def __init__(self, weight: float = 1.0) -> None:
        object.__setattr__(self, "weight", weight)


@pytest.mark.parametrize("given", [PlainInit, PlainInit(2.0)], ids=["class", "instance"])
def test_options_that_a_name_cannot_cover_are_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(glocal.GlocalError, match=r"PlainInit.*__init__.*fields"):
        glocal.sweep("rotated-digits", [given], [0.1], [0], tasks=1, epochs=1, store=tmp_path)


def test_scalars_train_together_and_give_what_they_give_alone(tmp_path: Path) -> None:
    algorithms = [("ewc", {"penalty": p}) for p in (0.0, 1.0, 10.0)]
    together = glocal.sweep("rotated-digits", algorithms, [0.1], [1, 2], store=tmp_path / "a", **QUICK)
    assert {r.info["cost"]["cohort_runs"] for r in together} == {6}
    alone = glocal.sweep("rotated-digits", algorithms[2:], [0.1], [2], store=tmp_path / "b", **QUICK)
    arrays_equal(together.where(lambda r: r.seed == 2 and "10" in r.algorithm), alone)


def test_a_cohort_that_does_not_fit_is_split(tmp_path: Path) -> None:
    whole = glocal.sweep("rotated-digits", ["er"], [0.1, 0.2], [1, 2], store=tmp_path / "a", **QUICK)
    budget = 30_000_000
    parts = glocal.sweep(
        "rotated-digits", ["er"], [0.1, 0.2], [1, 2], store=tmp_path / "b", memory_budget=budget, **QUICK
    )
    assert {r.info["cost"]["cohort_runs"] for r in whole} == {4}
    assert max(r.info["cost"]["cohort_runs"] for r in parts) < 4
    arrays_equal(whole, parts)
    with pytest.raises(glocal.GlocalError, match="one run of er on rotated-digits needs about"):
        glocal.sweep("rotated-digits", ["er"], [0.3, 0.4], [1], store=tmp_path / "c", memory_budget=1_000, **QUICK)


def test_parameters_are_kept_when_asked_for_even_later(tmp_path: Path) -> None:
    store = tmp_path / "store"
    without = glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.2], [1], store=store, **QUICK)
    kept = glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.2], [1], store=store, keep_parameters=True, **QUICK)
    arrays_equal(without, kept)
    assert kept[0].path is not None
    parameters, _ = read_tensors(kept[0].path / "parameters.safetensors")
    theta = [{k.partition("/")[2]: p for k, p in parameters.items() if k.startswith(f"{t}/")} for t in range(3)]
    assert all(sum(p.numel() for p in each.values()) == 89_610 for each in theta)
    for t in (1, 2):
        for name, origin in (("distance_from_init", theta[0]), ("update_norm", theta[t - 1])):
            squares = [((theta[t][k] - origin[k]).double() ** 2).sum() for k in origin]
            distance = torch.stack(squares).sum().sqrt().item()
            assert kept[0].arrays[name][t - 1] == pytest.approx(distance, rel=1e-6)


def with_statistics(shape: Sequence[int], outputs: int) -> nn.Module:
    width = math.prod(shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def test_a_kept_state_is_the_whole_network(tmp_path: Path) -> None:
    """With the statistics of its BatchNorm, it gives the accuracies that training measured."""
    common: dict[str, Any] = {**QUICK, "network": with_statistics, "store": tmp_path / "s", "keep_parameters": True}
    run, other = glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.3], [1], **common)
    challenge = glocal.challenges.make("rotated-digits", tasks=2)
    network = with_statistics(challenge.input_shape, challenge.outputs).eval()
    for t in (0, 1, 2):
        network.load_state_dict(run.state(t))
        for o in (0, 1):
            x, y = challenge.task(o, seed=1).test
            with torch.no_grad():
                right = (network(x.float() / 255).argmax(1) == y).double().mean().item()
            assert run.arrays["test_class_accuracy"][t, o] == pytest.approx(right)
    assert run.state(2)["2.num_batches_tracked"] == run.info["steps"] == 16
    assert not torch.equal(run.state(1)["2.running_mean"], run.state(2)["2.running_mean"])
    assert not torch.equal(other.state(2)["2.running_mean"], run.state(2)["2.running_mean"])
    with pytest.raises(glocal.GlocalError, match=r"task = 3 was given; it must be 0 .* to 2"):
        run.state(3)
    forgetful = glocal.sweep("rotated-digits", ["sgd"], [0.2], [1], **(common | {"keep_parameters": False}))
    with pytest.raises(glocal.GlocalError, match="has not kept its parameters"):
        forgetful[0].state(1)


def test_an_interrupted_cohort_goes_on_from_its_last_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glocal.store.store import Claim

    whole = glocal.sweep("rotated-digits", ["agem", "joint"], [0.1, 0.2], [1], store=tmp_path / "a", **QUICK)
    save = Claim.save

    def save_then_die(self: Claim, snapshot: object) -> None:
        save(self, snapshot)  # type: ignore[arg-type]
        if snapshot.finished == 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    for _ in ("agem", "joint"):
        monkeypatch.setattr(Claim, "save", save_then_die)
        with pytest.raises(KeyboardInterrupt):
            glocal.sweep("rotated-digits", ["agem", "joint"], [0.1, 0.2], [1], store=tmp_path / "b", **QUICK)
        monkeypatch.setattr(Claim, "save", save)
        cohorts = list((tmp_path / "b" / "cohorts").glob("[!.]*"))
        assert len(cohorts) == 1, "the cohort is left with its checkpoint"
    resumed = glocal.sweep("rotated-digits", ["agem", "joint"], [0.1, 0.2], [1], store=tmp_path / "b", **QUICK)
    arrays_equal(whole, resumed)


def test_part_of_an_interrupted_cohort_can_be_finished_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glocal.store.store import Claim

    save = Claim.save

    def save_then_die(self: Claim, snapshot: object) -> None:
        save(self, snapshot)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Claim, "save", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        glocal.sweep("rotated-digits", ["er"], [0.1, 0.2, 0.4], [1], store=tmp_path / "b", **QUICK)
    monkeypatch.setattr(Claim, "save", save)
    one = glocal.sweep("rotated-digits", ["er"], [0.2], [1], store=tmp_path / "b", **QUICK)
    assert len(Store.open(tmp_path / "b").runs()) == 1
    rest = glocal.sweep("rotated-digits", ["er"], [0.1, 0.2, 0.4], [1], store=tmp_path / "b", **QUICK)
    whole = glocal.sweep("rotated-digits", ["er"], [0.1, 0.2, 0.4], [1], store=tmp_path / "a", **QUICK)
    arrays_equal(whole, rest)
    arrays_equal(whole[1:2], one)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"epoch": 2}, "unknown option of a sweep 'epoch'. Did you mean 'epochs'"),
        ({"optimizer": {"name": "adam", "beta1": 0.8}}, "'beta1': 0.8} was given; write a pair: (name, "),
        ({"optimizer": "adams"}, "unknown optimizer 'adams'. Did you mean 'adam'"),
        ({"momentum": 0.9}, "momentum is an option of the optimizer"),
        ({"epochs": 0}, "epochs = 0 was given; it must be positive"),
        ({"cohort_size": True}, "cohort_size = True was given; it must be a whole number"),
        ({"memory_budget": 1.5}, "memory_budget = 1.5 was given; it must be a whole number"),
        ({"precision": "fp23"}, "unknown precision 'fp23'. Did you mean 'fp32'"),
        ({"execution": "vectorized"}, "unknown execution 'vectorized'. Did you mean 'vectorised'"),
        ({"keep_parameters": "yes"}, "keep_parameters = 'yes' was given; it must be true or false"),
        ({"monitor": math.inf}, "monitor = inf was given; it must be a finite number"),
        ({"store": 3}, "store = 3 was given; it must be a string"),
    ],
)
def test_options_are_checked_before_training(option: dict[str, Any], message: str) -> None:
    with pytest.raises(glocal.GlocalError, match=re.escape(message)):
        glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], **option)


@pytest.mark.parametrize("lrs", [[[0.1]], [0.01, (0.1,)], 0.1, "0.1"])
def test_learning_rates_are_a_flat_list(lrs: Any) -> None:
    """The message shows what was given, as it was given."""
    with pytest.raises(glocal.GlocalError, match=re.escape(f"lrs = {lrs!r} was given; it must be a flat list")):
        glocal.sweep("rotated-digits", ["sgd"], lrs, [1])


class TwoOutputs(torch.nn.Linear):
    """Returns features beside its outputs: always, or in training as networks with auxiliary heads do."""

    def __init__(self, inputs: int, outputs: int, modes: tuple[bool, ...]) -> None:
        super().__init__(inputs, outputs)
        self.modes = modes

    def forward(self, x: torch.Tensor) -> Any:
        outputs = super().forward(x.flatten(1))
        return (outputs, x) if self.training in self.modes else outputs


@pytest.mark.parametrize(("modes", "mode"), [((False, True), "evaluation"), ((True,), "training")])
def test_a_network_that_returns_a_tuple_is_refused(modes: tuple[bool, ...], mode: str) -> None:
    def make(input_shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        return TwoOutputs(math.prod(input_shape), outputs, modes)

    with pytest.raises(glocal.GlocalError, match=rf"returns a tuple for 2 inputs in {mode} mode; .* \(2, 10\)"):
        glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], network=make)


def test_a_diverged_run_is_a_result(tmp_path: Path) -> None:
    runs = glocal.sweep("rotated-digits", ["sgd"], [0.1, 1e6], [1], store=tmp_path / "s", **QUICK)
    assert runs[0].diverged is None and runs[1].diverged is not None
    assert np.isfinite(runs[0].arrays["test_class_accuracy"]).all()
    assert np.isnan(runs[1].arrays["test_class_accuracy"][1:]).all()


def test_the_store_holds_no_pickle(tmp_path: Path) -> None:
    glocal.sweep("split-digits", ["er"], [0.1], [1], store=tmp_path / "s", keep_parameters=True, **QUICK)
    suffixes = {p.suffix for p in (tmp_path / "s").rglob("*") if p.is_file() and p.name != ".lock"}
    assert suffixes == {".json", ".safetensors"}


@dataclass(frozen=True)
class Dropped(SGD):
    """Makes the network from an option."""

    name: ClassVar[str] = "dropped"
    rate: float = 0.0

    def network(self, make: Any, tasks: int) -> Any:
        return lambda shape, outputs: nn.Sequential(make(shape, outputs), nn.Dropout(self.rate))


@dataclass(frozen=True)
class Halved(SGD):
    """Derives an attribute from an option."""

    name: ClassVar[str] = "halved"
    rate: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self.rate / 2)

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        decay = sum(p.square().sum() for p in params.values())
        return model.loss(params, batch.x, batch.y) + self.half * decay  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cached(SGD):
    name: ClassVar[str] = "cached"
    rate: float = 0.0

    @cached_property
    def half(self) -> float:
        return self.rate / 2

    def init(self, model: Any, params: Any, example: Any) -> Any:
        return {"half": torch.tensor(self.half)}

    objective = Halved.objective


@dataclass(frozen=True)
class Noted(SGD):
    """Notes something in `init`; its options are tensors in a step, as those of other algorithms."""

    name: ClassVar[str] = "noted"
    rate: float = 0.0

    def init(self, model: Any, params: Any, example: Any) -> Any:
        object.__setattr__(self, "shapes", {k: p.shape for k, p in params.items()})
        return {}

    def objective(self, model: Any, params: Any, memory: Any, batch: Any) -> Any:
        decay = sum(p.square().sum() for p in params.values())
        return model.loss(params, batch.x, batch.y) + torch.exp(self.rate) * decay  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", [Dropped, Halved, Cached, Noted])
def test_what_is_computed_from_options_is_every_runs_own(algorithm: Any, tmp_path: Path) -> None:
    """Beside other values of the option as alone, and not the same for all."""
    grid = [algorithm(rate=rate) for rate in (0.0, 0.5, 0.9)]
    options: Any = {"tasks": 1, "epochs": 1, "train_eval": 50}
    together = glocal.sweep("rotated-digits", grid, [0.1], [1], store=tmp_path / "together", **options)
    alone = glocal.sweep("rotated-digits", grid, [0.1], [1], store=tmp_path / "alone", cohort_size=1, **options)
    losses = [[float(run.arrays["epoch_loss"][0, 0]) for run in runs] for runs in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len({round(x, 4) for x in losses[0]}) == 3
