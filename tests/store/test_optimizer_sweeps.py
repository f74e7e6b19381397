"""Sweeps over optimisers: names of runs, cohorts, resuming, tables, and combinations that are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glocal
from glocal.cli.train import Sweep
from glocal.lens.record import open_run
from glocal.optimizers import SGD, AdamW
from glocal.store.store import Claim

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 2, "batch_size": 200, "train_eval": 100}
KEPT = ("adam", {"state": "kept", "schedule": "cosine", "span": "sequence", "clip": 1.0})


def same_arrays(a: glocal.Runs, b: glocal.Runs) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.config == other.config
        for key in one.arrays:
            np.testing.assert_array_equal(one.arrays[key], other.arrays[key], err_msg=key)


def test_plain_sgd_is_no_part_of_a_runs_name(tmp_path: Path) -> None:
    """The name is the hash of the configuration of runs before there were optimisers."""
    (run,) = glocal.sweep("split-digits", ["er"], [0.1], [1], store=tmp_path, **QUICK)
    fields = {"challenge", "network", "algorithm", "lr", "seed", "epochs", "batch_size", "train_eval", "precision"}
    assert set(run.config) == fields | {"protocol"} and run.algorithm == "er"
    text = json.dumps(run.config, sort_keys=True, separators=(",", ":"))
    assert run.path is not None and run.path.name == hashlib.sha256(text.encode()).hexdigest()[:16]
    for same in ("sgd", SGD(), SGD, ("sgd", {"momentum": 0}), [("sgd", {"weight_decay": "0"})]):
        (again,) = glocal.sweep("split-digits", ["er"], [0.1], [1], store=tmp_path, optimizer=same, **QUICK)
        assert again.path == run.path
    (other,) = glocal.sweep("split-digits", ["er"], [0.1], [1], store=tmp_path, optimizer="adam", **QUICK)
    assert other.path != run.path and other.config["optimizer"]["options"]["beta2"] == 0.999


def test_scalars_of_the_optimiser_train_together_and_label_the_table(tmp_path: Path) -> None:
    adamw = [("adamw", {"weight_decay": decay, "warmup": 0.5}) for decay in (0.0, 0.5)] + [AdamW(schedule="cosine")]
    runs = glocal.sweep("split-digits", ["er"], [0.001, 0.01], [1, 2], optimizer=adamw, store=tmp_path, **QUICK)
    assert {run.info["cost"]["cohort_runs"] for run in runs} == {12}
    labels = [f"weight_decay={decay:g} warmup=0.5 schedule=constant" for decay in (0, 0.5)]
    labels.append("schedule=cosine warmup=0 weight_decay=0.01")  # defaults that the others do not have are shown
    table = runs.table()
    assert sorted(set(table["algorithm"])) == sorted(f"er · adamw {label}" for label in labels)
    assert table["seeds"].to_list() == [2] * 6 and table["acc_mean"].n_unique() > 3
    (alone,) = glocal.sweep("split-digits", ["er"], [0.01], [2], optimizer=adamw[1], store=tmp_path / "alone", **QUICK)
    (together,) = runs.where(lambda run: run.algorithm == alone.algorithm and (run.lr, run.seed) == (0.01, 2))
    same_arrays(glocal.Runs([together]), glocal.Runs([alone]))


def test_a_resumed_sweep_equals_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(store: str, optimizer: Any) -> glocal.Runs:
        return glocal.sweep("split-digits", ["si"], [0.001, 0.01], [1], store=tmp_path / store, **optimizer, **QUICK)

    both: dict[str, Any] = {"optimizer": [KEPT, ("adam", KEPT[1] | {"clip": 0.0})]}
    whole, save = sweep("whole", both), Claim.save

    def save_then_die(self: Claim, snapshot: Any) -> None:
        save(self, snapshot)
        if snapshot.finished == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Claim, "save", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        sweep("broken", both)
    monkeypatch.setattr(Claim, "save", save)
    part = sweep("broken", {"optimizer": KEPT})  # of the interrupted cohort, those that clip
    same_arrays(whole[:2], part)
    same_arrays(whole, sweep("broken", both))


def test_a_run_is_retraced_with_its_optimiser(tmp_path: Path) -> None:
    (run,) = glocal.sweep("split-digits", ["sgd"], [0.01], [1], store=tmp_path, optimizer=KEPT, **QUICK)
    assert run.path is not None
    assert open_run(run.path).retrace(examples=100).deviation == 0


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "message"),
    [
        ("packnet", "adamw", "packnet freezes weights by gradients of 0; with weight decay they would move"),
        ("packnet", ("sgd", {"momentum": 0.9, "state": "kept"}), "set state=reset"),
        ("hat", "adam", "hat scales gradients, which adam undoes"),
        ("hat", ("sgd", {"weight_decay": 0.1}), "set weight_decay=0"),
        ("stable-sgd", "adamw", "stable-sgd scales gradients, which adamw undoes"),
        (("laplace", {"implicit": True}), "adamw", "laplace scales gradients, which adamw undoes"),
        (
            "er",
            3,
            "'int' is not an optimizer: it does not subclass glocal.optimizers.Optimizer. Built in are sgd, adam",
        ),
        ("er", ("adam", {"momentum": 0.9}), "unknown option of adam 'momentum'"),
        ("er", ("sgd", {"momentum": "much"}), "sgd.momentum = 'much' was given; it must be a finite number"),
        ("er", [], "at least one algorithm and one optimizer"),
    ],
)
def test_combinations_that_break_a_promise_are_refused(algorithm: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(glocal.GlocalError, match=message):
        glocal.sweep("rotated-digits", [algorithm], [0.1], [1], optimizer=optimizer)


def test_the_command_line_and_a_sweep_file_choose_optimisers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []

    def sweep(*_: Any, optimizer: Any, **options: Any) -> glocal.Runs:
        chosen.append(optimizer)
        return glocal.Runs()

    monkeypatch.setattr("glocal.sweeps.sweep.sweep", sweep)
    given: dict[str, Any] = {"challenge": "rotated-digits", "algorithms": ("er",)}
    Sweep(**given).train()
    Sweep(**given, optimizer=("adamw",), optimizer_options=("weight_decay=0,0.1", "schedule=cosine")).train()
    Sweep(**given, optimizer=("sgd", "adam"), optimizer_options=("sgd.momentum=0.9",)).train()
    file = tmp_path / "sweep.toml"
    file.write_text(
        'challenge = "rotated-digits"\nalgorithms = ["er"]\noptimizer = {name = "adam", beta1 = [0.5, 0.9]}\n'
    )
    Sweep.from_file(file).train()
    assert chosen == [
        [("sgd", {})],
        [("adamw", {"weight_decay": decay, "schedule": "cosine"}) for decay in ("0", "0.1")],
        [("sgd", {"momentum": "0.9"}), ("adam", {})],
        [("adam", {"beta1": 0.5}), ("adam", {"beta1": 0.9})],
    ]
    with pytest.raises(glocal.GlocalError, match=r"OPTIMIZER\.momentum=0\.9"):
        Sweep(**given, optimizer=("sgd", "adam"), optimizer_options=("momentum=0.9",)).train()
