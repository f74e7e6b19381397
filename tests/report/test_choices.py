"""The table of choices: what it chooses, what it says, and that it does not depend on the order of the runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fake_runs import fake_run
from scipy import stats

import glocal
from glocal.cli.main import main
from glocal.errors import GlocalWarning
from glocal.report import choices
from glocal.store.run import Run, Runs


def trained(algorithm: str, lr: float, seed: int, first: float, last: float, test: float, **more: object) -> Run:
    """Two tasks: validation accuracies after the first task and at the end (of both), and the test accuracy."""
    run = fake_run(algorithm, lr, seed, tasks=2, **more)  # type: ignore[arg-type]
    R = np.array([[0, 0], [first, 0], [last, last]])
    own = {"validation_class_accuracy": R, "validation_class_loss": 1 - R}
    return replace(run, arrays={**run.arrays, **own, "test_class_accuracy": 0 * R + test})


SEEDS = (1, 2, 3)
ER = [(0.1, 0.9, 0.5, (0.60, 0.62, 0.64)), (0.5, 0.8, 0.7, (0.70, 0.75, 0.71))]
SGD = [(0.1, 0.5, 0.5, (0.65, 0.65, 0.65)), (0.5, 0.4, 0.3, (0.60, 0.66, 0.63))]


def sweep(algorithm: str, table: Sequence[tuple[float, float, float, tuple[float, ...]]]) -> list[Run]:
    return [
        trained(algorithm, lr, seed, first, last, own)
        for lr, first, last, tests in table
        for seed, own in zip(SEEDS, tests, strict=True)
    ]


def test_choices_optimism_and_ranks_by_hand() -> None:
    """On the first task er's low rate looks better; it is 10 points worse, and behind sgd."""
    runs = Runs([*sweep("er", ER), *sweep("sgd", SGD)])
    table = runs.choose("first-task", "all-validation", "oracle-test").to_dicts()
    rows = {(row["algorithm"], row["protocol"]): row for row in table}
    er = rows["er", "first-task"]
    assert (er["choice"], er["lr"], er["configurations"], er["seeds"], er["agree"]) == ("lr=0.1", 0.1, 2, 3, 3)
    assert (er["criterion"], er["acc_mean"]) == pytest.approx((90, 62))
    interval = stats.t.interval(0.95, 2, loc=10, scale=stats.sem([10, 13, 7]))
    assert (er["optimism"], er["low"], er["high"]) == pytest.approx((10, *interval), abs=1e-5)
    assert [rows[name, "first-task"]["rank"] for name in ("er", "sgd")] == [2, 1]
    assert er["kendall_tau"] == -1
    for protocol in ("all-validation", "oracle-test"):
        best = rows["er", protocol]
        assert (best["choice"], best["optimism"], best["rank"], best["kendall_tau"]) == ("lr=0.5", 0, 1, 1)


def test_the_order_of_the_runs_does_not_matter() -> None:
    runs = [*sweep("er", ER), *sweep("sgd", SGD)]
    expected = choices.rows(runs)
    for order in np.random.default_rng(0).permuted(np.tile(np.arange(len(runs)), (5, 1)), axis=1):
        assert choices.rows([runs[i] for i in order]) == expected


def test_one_seed_has_no_deviation() -> None:
    rows = choices.rows([run for run in sweep("er", ER) if run.seed == 1])
    assert rows and all(row["acc_std"] is None for row in rows)


def test_options_are_part_of_the_configuration() -> None:
    runs = []
    for penalty, last in ((1.0, 0.6), (10.0, 0.8)):
        options = {"penalty": penalty, "fisher": "exact"}
        more = {"options": options, "label": f"ewc penalty={penalty:g}"}
        runs += [trained("ewc", lr, 1, 0.5, last + lr, 0.5, **more) for lr in (0.01, 0.1)]
    (row,) = choices.rows(runs, ["all-validation"])
    assert (row["choice"], row["configurations"]) == ("lr=0.1 penalty=10", 4)


def test_versions_of_the_code_of_an_algorithm_choose_each_for_itself() -> None:
    runs = []
    for source, table in (("0a", ER), ("0b", SGD)):
        for run in sweep("mine", table):
            algorithm = {**run.config["algorithm"], "source": source}
            runs.append(replace(run, config={**run.config, "algorithm": algorithm}))
    rows = Runs(runs).choose("oracle-test").to_dicts()
    chosen = {row["algorithm"]: (row["choice"], row["configurations"]) for row in rows}
    assert chosen == {"mine source=0a": ("lr=0.5", 2), "mine source=0b": ("lr=0.1", 2)}


def test_diverged_runs_and_unequal_sweeps_are_told() -> None:
    lost = [trained("er", 0.9, seed, 0.99, 0.99, 0.99, diverged=5 if seed == 1 else None) for seed in SEEDS]
    with pytest.warns(GlocalWarning, match="unequal numbers of configurations on rotated-digits .*: er 3, sgd 2"):
        rows = choices.rows([*sweep("er", ER), *lost, *sweep("sgd", SGD)])
    assert {row["lr"] for row in rows if row["algorithm"] == "er"} == {0.1, 0.5}
    with pytest.warns(GlocalWarning, match=r"different seeds \(1 to 3 seeds\)"):
        choices.rows([*sweep("er", ER[:1]), trained("er", 0.2, 1, 0.1, 0.1, 0.1)])
    all_lost = [trained("er", lr, 1, 0.5, 0.5, 0.5, diverged=5) for lr in (0.1, 0.2)]
    (row,) = choices.rows(all_lost, ["first-task"])
    assert (row["acc_mean"], row["optimism"], row["rank"], row["criterion"]) == (None, None, None, None)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_losses_are_minimised(scale: float) -> None:
    """An oracle's loss is lower; its optimism is positive all the same. Tiny losses are not rounded to 0."""
    runs = []
    for lr, first, last in ((0.1, 0.9, 0.4), (0.2, 0.8, 0.6)):  # accuracies; losses are 1 − these
        run = trained("sgd", lr, 1, first, last, 0.0, regression=True)
        loss = scale * (1 - run.arrays["validation_class_accuracy"])
        losses = dict.fromkeys(("test_class_loss", "validation_class_loss"), loss)
        runs.append(replace(run, arrays={**run.arrays, **losses}))
    early, oracle = choices.rows(runs, ["first-task", "oracle-test"])
    assert (early["lr"], early["criterion"], early["loss_mean"]) == pytest.approx(
        (0.1, 0.1 * scale, 0.6 * scale), rel=1e-6, abs=0
    )
    assert (oracle["lr"], oracle["loss_mean"], early["optimism"]) == pytest.approx(
        (0.2, 0.4 * scale, 0.2 * scale), rel=1e-6, abs=0
    )
    shown = [text for row in choices.render(runs, "markdown").splitlines() for text in row.split(" | ")]  # type: ignore[union-attr]
    assert any(text.startswith(f"+{0.2 * scale:.3g}".replace("-", "−")) for text in shown)


@pytest.mark.parametrize("format", ["rich", "json", "csv", "latex", "markdown"])
def test_the_command(format: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path_factory.getbasetemp() / "chosen"
    if not store.exists():
        flags = "--lrs 0.02 0.2 --seeds 1 2 --tasks 3 --epochs 1 --batch-size 200 --validation 0.2"
        assert main(["sweep", "split-digits", "--algorithms", "er", "sgd", *flags.split(), "--store", str(store)]) == 0
        capsys.readouterr()
    protocols = ["--protocol", "first-k=3", "per-task", "--protocol", "oracle-test"]
    assert main(["choose", str(store), *protocols, "--format", format]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("first-k=3", "per-task", "oracle-test", "lr=0."))
    if format == "json":
        rows = json.loads(out)
        assert len(rows) == 6 and {row["seeds"] for row in rows} == {2}
        by_all = glocal.load(store).choose("all-validation")["choice"].to_list()
        assert [row["choice"] for row in rows if row["protocol"] == "first-k=3"] == by_all
