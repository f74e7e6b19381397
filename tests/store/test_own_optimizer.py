"""Sweeps with an optimiser of one's own: from a file and as an object, named by its code, retraced, and refused."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glocal
from glocal.cli.main import main
from glocal.lens.record import open_run
from glocal.optimizers import SGD, Optimizer
from glocal.sweeps.command import sweep_commands
from glocal.sweeps.plan import write_plan
from glocal.sweeps.user_code import load_object

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 2, "batch_size": 200, "train_eval": 100}
HEAVY_BALL = """
    from dataclasses import dataclass
    from typing import ClassVar

    import torch

    from glocal.optimizers import Optimizer, add_weight_decay, clip_gradients


    @dataclass(frozen=True)
    class HeavyBall(Optimizer):
        name: ClassVar[str] = "heavy-ball"

        beta: float = 0.9

        def init(self, params, hyper):
            return {k: torch.zeros_like(p) for k, p in params.items()}

        def update(self, grads, state, params, hyper):
            grads = add_weight_decay(clip_gradients(grads, hyper), params, hyper)
            velocity = {k: hyper["beta"] * state[k] + g for k, g in grads.items()}
            return velocity, state | velocity
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(HEAVY_BALL))
    return path


def same_accuracies(a: glocal.Runs, b: glocal.Runs) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one.arrays["update_norm"], other.arrays["update_norm"], rtol=1e-5)


def test_a_file_and_a_class_train_as_the_built_in_optimiser_does(mine: Path, tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": tmp_path / "runs", **QUICK}
    grid: Any = ["ewc"], [0.01, 0.05], [1]
    betas = (0.5, 0.9)
    known = glocal.sweep(
        "split-digits", *grid, optimizer=[("sgd", {"momentum": b, "clip": 1.0}) for b in betas], **where
    )
    file = f"{mine}:HeavyBall"
    own = glocal.sweep("split-digits", *grid, optimizer=[(file, {"beta": b, "clip": 1.0}) for b in betas], **where)
    assert {run.info["cost"]["cohort_runs"] for run in own} == {4}
    same_accuracies(known, own)
    labels = {run.algorithm for run in own}
    assert labels == {"ewc · heavy-ball clip=1 beta=0.5", "ewc · heavy-ball clip=1"}
    kind, _ = load_object(file, "optimizer")
    as_class = glocal.sweep("split-digits", *grid, optimizer=kind(beta=0.5, clip=1.0), **where)
    same_accuracies(known[:2], as_class)
    assert own.where("optimizer=heavy-ball", "beta=0.5").table().shape[0] == 2


def test_runs_are_named_by_the_code(mine: Path, tmp_path: Path) -> None:
    def sweep() -> Any:
        (run,) = glocal.sweep(
            "split-digits", ["er"], [0.01], [1], optimizer=f"{mine}:HeavyBall", store=tmp_path / "runs", **QUICK
        )
        return run

    first, again = sweep(), sweep()
    assert first.path == again.path and first.settings["optimizer_source"] == first.config["optimizer"]["source"]
    mine.write_text(mine.read_text().replace("state[k] + g", "state[k] + 2 * g"))
    edited = sweep()
    assert edited.path != first.path
    table = glocal.Runs([first, edited]).table()
    assert table.shape[0] == 2 and table["algorithm"].n_unique() == 2, "two versions are never averaged"


def test_a_run_is_retraced_with_the_optimiser_that_trained_it(mine: Path, tmp_path: Path) -> None:
    file = f"{mine}:HeavyBall"
    sizes: dict[str, Any] = {"store": tmp_path / "runs", "keep_parameters": True, **QUICK}
    (run,) = glocal.sweep("split-digits", ["er"], [0.01], [1], optimizer=(file, {"beta": 0.5}), **sizes)
    assert run.path is not None
    assert open_run(run.path, optimizer=file).retrace(examples=100).deviation == 0
    stored = open_run(run.path)  # its parameters are kept: to measure it, the optimiser is not needed
    assert len(stored.trace().checkpoints) == 3
    with pytest.raises(
        glocal.GlocalError, match=r"give --optimizer PATH\.py:heavy-ball \(only to train the run again\)"
    ):
        stored.retrace()
    with pytest.raises(glocal.GlocalError, match="this optimizer is not the one of the run"):
        open_run(run.path, optimizer=SGD(momentum=0.5))


def test_plans_and_commands_name_the_file(mine: Path, tmp_path: Path) -> None:
    file = f"{mine}:HeavyBall"
    plan, job = write_plan(
        "split-digits", ["er"], [0.01], [1], optimizer=[(file, {"beta": 0.5})], store=tmp_path / "runs", **QUICK
    )
    assert [*plan.code] == [str(mine)]
    again = plan.prepare(job.context.store, "cpu", [mine])
    assert [*again.requests] == [*job.requests]
    runs = glocal.sweep(
        "split-digits", ["er"], [0.01], [1], optimizer=(file, {"beta": 0.5}), store=tmp_path / "runs", **QUICK
    )
    (command,) = sweep_commands(runs)
    assert "--optimizer PATH.py:heavy-ball" in command.text and "beta=0.5" in command.text
    words = shlex.split(command.text.replace("PATH.py", str(mine)))[1:]
    assert main([*words, "--store", str(tmp_path / "runs")]) == 0
    assert len(glocal.load(tmp_path / "runs")) == 1, "the command found the run"


BROKEN = {
    "reads an attribute": (
        'hyper["beta"]',
        "self.beta",
        {},
        "HeavyBall reads beta from self: in init and update write",
    ),
    "ignores weight decay": (
        "add_weight_decay(clip_gradients(grads, hyper), params, hyper)",
        "grads",
        {"weight_decay": 0.1},
        "does not use weight_decay",
    ),
    "ignores clipping": ("clip_gradients(grads, hyper)", "grads", {"clip": 0.1}, "does not use clip"),
    "loses state": ("state | velocity", "velocity", {}, "also for parameters without a gradient"),
    "returns one tensor": ("return velocity,", "return [*velocity.values()],", {}, "one direction for every gradient"),
    "returns no state": (
        "return velocity, state | velocity",
        "return velocity",
        {},
        "fails on a small problem: ValueError",
    ),
    "changes the parameters": (
        "        velocity = ",
        "        params['bias'].mul_(0.9)\n        velocity = ",
        {},
        "update changes the parameters in place",
    ),
    "changes the gradients": (
        "        velocity = ",
        "        grads['weight'].mul_(0.9)\n        velocity = ",
        {},
        "update changes the gradients in place",
    ),
    "is misspelt": ("def update(", "def updates(", {}, "did you mean 'update'"),
    "takes other arguments": ("params, hyper):\n        grads", "params):\n        grads", {}, "it is called with"),
    "is no dataclass": ("@dataclass(frozen=True)\n", "", {}, "without @dataclass"),
    "has a learning rate": (
        "beta: float = 0.9",
        "beta: float = 0.9\n    lr: float = 0.1",
        {},
        "which is the run's learning",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_would_be_silently_wrong_is_refused(fault: str, mine: Path, tmp_path: Path) -> None:
    old, new, options, message = BROKEN[fault]
    text = mine.read_text()
    assert old in text
    mine.write_text(text.replace(old, new))
    with pytest.raises(glocal.GlocalError, match=message):
        glocal.sweep(
            "split-digits",
            ["er"],
            [0.01],
            [1],
            optimizer=(f"{mine}:HeavyBall", options),
            store=tmp_path / "runs",
            **QUICK,
        )


class Signs(Optimizer):
    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        return {k: g.sign() for k, g in grads.items()}, state


class Decays(Optimizer):
    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        return {k: g + 0.1 * params[k] for k, g in grads.items()}, state


class Centralised(Optimizer):
    """It moves a weight whose gradient is 0 where others have gradients."""

    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        return {k: g - g.mean() for k, g in grads.items()}, state


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "message"),
    [
        ("packnet", Centralised, "with Centralised they would move"),
        ("hat", Signs, "hat scales gradients, which Signs undoes"),
        ("packnet", Decays, "packnet freezes weights by gradients of 0; with Decays they would move"),
    ],
)
def test_promises_of_algorithms_are_checked(algorithm: str, optimizer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(glocal.GlocalError, match=message):
        glocal.sweep(
            "split-digits",
            [algorithm],
            [0.01],
            [1],
            optimizer=optimizer,
            setting="task",
            store=tmp_path / "runs",
            **QUICK,
        )
    runs = glocal.sweep("split-digits", ["er"], [0.01], [1], optimizer=optimizer, store=tmp_path / "runs", **QUICK)
    assert runs[0].algorithm == f"er · {optimizer.__name__}"


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_two_optimisers_of_one_file_are_two(seeds: list[int], tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(
        "from glocal.optimizers import Optimizer\n"
        "class A(Optimizer):\n"
        "    def update(self, grads, state, params, hyper): return dict(grads), state\n"
        "class B(Optimizer):\n"
        "    def update(self, grads, state, params, hyper): return {k: 3 * g for k, g in grads.items()}, state\n"
    )
    where: dict[str, Any] = {"store": tmp_path / "runs", **QUICK}
    both = glocal.sweep("split-digits", ["sgd"], [0.01], seeds, optimizer=[f"{path}:A", f"{path}:B"], **where)
    one, three = (glocal.sweep("split-digits", ["sgd"], [lr], seeds, **where) for lr in (0.01, 0.03))
    same_accuracies(both[: len(seeds)], one)
    same_accuracies(both[len(seeds) :], three)


class Previous(Optimizer):
    """d = g + (θ_{k−1} − θ_k), with θ itself as its state."""

    def init(self, params: Any, hyper: Any) -> Any:
        return {"last": params, "flag": torch.tensor(0.0), "constant": torch.zeros(3)}

    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        descent = {k: g + (state["last"][k] - params[k]) for k, g in grads.items()}
        return descent, {"last": params, "flag": torch.tensor(1.0), "constant": torch.ones(3)}


class PreviousCloned(Previous):
    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        descent, state = super().update(grads, state, params, hyper)
        return descent, {k: v if k != "last" else {n: p.clone() for n, p in v.items()} for k, v in state.items()}


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_a_state_may_hold_the_parameters_and_constants(seeds: list[int], tmp_path: Path) -> None:
    kept, cloned, plain = (
        glocal.sweep("split-digits", ["sgd"], [0.01], seeds, optimizer=kind, store=tmp_path, **QUICK)
        for kind in (Previous, PreviousCloned, SGD)
    )
    same_accuracies(kept, cloned)
    assert (kept[0].arrays["update_norm"] != plain[0].arrays["update_norm"]).all()


@dataclass(frozen=True)
class Optional(Optimizer):
    """It reads what may be absent, and a number of its own in one mode only."""

    beta: float = 0.5
    adaptive: bool = False

    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        decay, beta = hyper.get("weight_decay", 0.0), hyper["beta"] if self.adaptive else 1.0
        return {k: beta * g + decay * params[k] for k, g in grads.items()}, state


def test_scalars_may_be_read_in_any_way(tmp_path: Path) -> None:
    own, known = (
        glocal.sweep("split-digits", ["sgd"], [0.01], [1, 2], optimizer=o, store=tmp_path / "runs", **QUICK)
        for o in (Optional(weight_decay=0.1), SGD(weight_decay=0.1))
    )
    same_accuracies(own, known)


class NoUpdate(Optimizer): ...


class Counts(Optimizer):
    def init(self, params: Any, hyper: Any) -> Any:
        return {"t": torch.tensor(0)}

    def update(self, grads: Any, state: Any, params: Any, hyper: Any) -> Any:
        return grads, {"t": state["t"] + 0.3}


class EmptyPart(Counts):
    def init(self, params: Any, hyper: Any) -> Any:
        return {"inner": {}, "t": torch.tensor(0.0)}


class Numbers(Counts):
    def init(self, params: Any, hyper: Any) -> Any:
        return {"t": 0}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoUpdate, r"NoUpdate has no update\(self, grads, state, params, hyper\)"),
        (Counts, r"must return a state like that of init.*int64.*float32"),
        (EmptyPart, "'inner' in the state from EmptyPart.init is an empty dict"),
        (Numbers, "'t' in the state from Numbers.init is of the type int"),
    ],
)
def test_states_that_cannot_be_kept_are_refused(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(glocal.GlocalError, match=message):
        glocal.sweep("split-digits", ["er"], [0.01], [1], optimizer=kind, store=tmp_path, **QUICK)


def test_a_run_of_plain_sgd_is_not_retraced_with_another_optimiser(mine: Path, tmp_path: Path) -> None:
    (run,) = glocal.sweep("split-digits", ["er"], [0.01], [1], store=tmp_path / "runs", **QUICK)
    assert run.path is not None
    with pytest.raises(glocal.GlocalError, match="trained with plain SGD: leave the optimizer out"):
        open_run(run.path, optimizer=f"{mine}:HeavyBall")
