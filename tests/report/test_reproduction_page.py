"""What docs/reproduction.py computes: paces, dates, figures, and the sentence that goes with the numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest
from fake_runs import fake_run, published_runs, table1_run
from matplotlib.figure import Figure
from scipy import stats

from glocal.paper import results
from glocal.paper.claims import TableRow
from glocal.paper.table1 import COLUMNS
from glocal.report.table import signed
from glocal.store.run import Run, Runs

TINY = COLUMNS["split-tinyimagenet"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, reading and writing elsewhere."""
    spec = importlib.util.spec_from_file_location(
        "reproduction", Path(__file__).parents[2] / "docs" / "reproduction.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for part in (module, module.split_text):
        monkeypatch.setattr(part, "HERE", tmp_path)
        monkeypatch.setattr(part, "RESULTS", tmp_path)
    return module


def short(
    row: str, lr: float, seconds: float = 2.0, steps: int = 10, cohort: int = 4, pace: float = 0.2, **info: Any
) -> Run:
    chosen = TINY.row(row)
    made = fake_run(
        row,
        lr,
        11,
        challenge="split-tinyimagenet",
        setting="task",
        tasks=2,
        network={"name": "resnet18"},
        options=dict(chosen.options),
    )
    costs = {"seconds": seconds, "memory_bytes": 0, "cohort_runs": cohort}
    costs["step_seconds"] = pace
    return replace(made, info={**made.info, "cost": costs, "steps": steps, "versions": {"device": "x"}, **info})


def cifar(seed: int, accuracy: float) -> Run:
    """ewc at 0.1 as the paper trains it. Forgetting is the published 43.56, by the formulas of `fake_run` 0.3125 of
    `lost`; the accuracy is (1 + learnt − lost / 2) / 2."""
    lost = 0.4356 / 0.3125
    column = COLUMNS["split-cifar10"]
    made = fake_run(
        "ewc",
        0.1,
        seed,
        challenge="split-cifar10",
        setting="task",
        tasks=5,
        epochs=50,
        learnt=2 * accuracy - 1 + lost / 2,
        lost=lost,
        network={"name": "resnet18"},
        options=dict(column.row("ewc").options),
    )
    return replace(made, config={**made.config, "batch_size": 32})


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (0.49, "z = +2.87 by seed 11, +0.16 by 2 seeds. Ours deviate by 6.0 points, the published ones by 2.0"),
        (0.60, "z = +2.87 by seed 11, +5.83 by 2 seeds. Ours deviate by 0.5 points, the published ones by 2.0"),
    ],
)
def test_a_number_that_one_seed_put_far_off_is_told_with_what_more_seeds_say(
    page: ModuleType, second: float, said: str
) -> None:
    """Published: 54.01 ± 1.99, an unbiased variance of 4.95. One seed borrows it: 6.99 / √(4.95 (1 + 1/5)) = 2.87. Two
    have their own, 72 or 0.5: 0.99 / √(72 / 2 + 0.99) = 0.16, or 6.49 / √(0.5 / 2 + 0.99) = 5.83."""
    runs = Runs([cifar(11, 0.61), cifar(13, second)])
    _, told = page.split_text.first_seed_outliers(runs, page.compare(runs))
    assert said in told and "forgetting" not in told and "seed 11 is 1.0 deviations from our mean" in told
    assert page.split_text.first_seed_outliers(runs[:1], page.compare(runs[:1])) == []
    # The row has one learning rate, and so the same standard errors.
    mean = (61 + 100 * second) / 2 - 54.01
    row = f"averaged over learning rates: +6.99 points (z +2.9) by seed 11, {signed(mean)} ± "
    assert row in told and f"By seed: +6.99 (11) and {signed(100 * second - 54.01)} (13)." in told
    assert f"{1 if second < 0.5 else 2} of 2 seeds are above the published mean" in told
    assert ("too large to tell" in told) is (second < 0.5)
    near = Runs([cifar(11, 0.55), cifar(13, second)])
    assert page.split_text.first_seed_outliers(near, page.compare(near)) == []


@pytest.mark.parametrize(("spread", "interval"), [(10.0, 12.42), (0.5, 0.62)])
def test_how_many_seeds_would_settle_the_difference(page: ModuleType, spread: float, interval: float) -> None:
    """Seeds of ewc at the two highest rates are 0 and ±`spread` from their mean, with variance spread²; those of er
    move at all rates alike. With five seeds t = 2.776 and t spread / √5 is the interval; the published rise is 4.26 in
    ewc and 4.85 in er. With the number of seeds that the page names, 80 % of
    simulated experiments find a difference of 0.595."""
    ewc = [run for run in published_runs("ewc", spread=0.0) if run.lr < 0.02]
    ewc += [run for run in published_runs("ewc", spread=spread) if run.lr > 0.02]
    (text,) = page.split_text.power(page.compare([*ewc, *published_runs("er")]))
    told = [float(x.replace("−", "-")) for x in re.findall(r"[+−]\d+\.\d+", text)]
    assert told == pytest.approx([-0.595, -0.595 - interval, -0.595 + interval, -0.595], abs=0.011)
    assert f"by 5 seeds, and deviates by {spread:.1f} points" in text
    if spread > 1:
        assert "more than 200 seeds" in text
    else:
        enough = int(re.findall(r"(\d+) seeds would tell", text)[0])
        rng, found = np.random.default_rng(0), {}
        for n in (enough - 1, enough):
            samples = rng.normal(0.595, spread, (20_000, n))
            half = stats.t.ppf(0.975, n - 1) * samples.std(1, ddof=1) / np.sqrt(n)
            found[n] = float((samples.mean(1) > half).mean())
        assert found[enough - 1] < 0.8 < found[enough]
    one = [run for run in published_runs("er") if run.seed == 11]
    assert page.split_text.power(page.compare([*ewc, *one])) == []
    assert page.split_text.power(page.compare(ewc)) == []


def test_what_single_images_do_to_learning_is_told(page: ModuleType) -> None:
    """Learning accuracy among a task's own classes is (1 + learnt) / 2, at the two highest of three rates."""
    learnt = {("sgd", 0.1): 0.5, ("sgd", 0.5): 0.7, ("ewc", 0.1): 0.1, ("ewc", 0.5): 0.2, ("er", 0.5): 0.4}
    learnt |= {("sgd", 0.01): 0.0, ("ewc", 0.01): 0.0}
    runs = [
        fake_run(name, lr, setting="task", learnt=x, options={"statistics": "published"} if name == "ewc" else {})
        for (name, lr), x in learnt.items()
    ]
    (text,) = page.split_text.single_images(Runs(runs))
    assert text.startswith("`ewc` do") and "is 80.0 % (`sgd`) and 57.5 % (`ewc`)" in text
    assert page.split_text.single_images(Runs([run for run in runs if run.algorithm != "ewc"])) == []
    assert page.split_text.single_images(Runs([run for run in runs if run.algorithm != "sgd"])) == []


def test_projected_cost(page: ModuleType) -> None:
    """Two tasks of two epochs of 25 steps; the whole has 10 tasks of 100 epochs of 313, 12.52 times 25, and 25 runs.

    sgd: 10 ms a step, the median, are 0.01 × 313,000 × 25 / 3600 = 21.7 hours; 2 s − 1 s of steps are 0.5 s a task, and
    0.5 × 12.52 × 10 × 25 / 3600 = 0.4 hours. icarl: 20 steps more in two epochs of one task are 10 an epoch, of 9 tasks
    and 100 epochs: 0.02 × 322,000 × 25 / 3600 = 44.7; 4 s − 2.4 s are 0.8 s a task and 0.7 hours.
    """
    runs = Runs(
        [
            short("sgd", 0.01, 2.0, 100, pace=0.01),
            short("sgd", 0.05, 2.0, 100, pace=0.01),
            short("sgd", 0.1, 2.0, 100, cohort=8, pace=0.04),
            short("icarl", 0.1, 4.0, 120, pace=0.02),
        ]
    )
    text = page.split_text.projection(runs, TINY)
    assert "| `sgd` | 10.00 | 21.7 | 0.5 | 0.4 |" in text
    assert "| `icarl` | 20.00 | 44.7 | 0.8 | 0.7 |" in text
    assert "median epoch of 4 to 8 runs trained" in text and "tasks have 12.5 times as many examples" in text
    assert (
        "2 rows of 5 learning rates and 5 seeds, 313,000 steps a run without exemplars, would take 67.6 hours" in text
    )
    assert "without `agem`, `er`, `si`, `ewc`, `ogd-published`, `ogd-gtl`, of which" in text
    more = page.split_text.projection(Runs([*runs, short("icarl-random", 0.1, 4.0, 120, pace=0.02)]), TINY)
    assert "| `icarl-random` | 20.00 | 44.7 |" in more
    assert "median epoch of 4 runs trained" in page.split_text.projection(runs[:2], TINY)


def test_algorithms_without_a_row_are_told_of_once(page: ModuleType, tmp_path: Path) -> None:
    """Task 1 loses 0.1, half of that among its own classes: 0.05; the mean of 0.9 and 0.95 is 0.925. Among all classes
    that of 0.8 and 0.9 is 0.85."""
    table = Runs([short("sgd", 0.1), short("er", 0.1)])
    assert page.split_text.other_algorithms(table, "split-tinyimagenet") == []
    more = Runs([short("derpp", 0.01, 9.4, pace=0.0084), short("gem", 0.01, 17.6, pace=0.01)])
    results.add(more, tmp_path / "split-tinyimagenet-others.parquet")
    told, lines = page.split_text.other_algorithms(table, "split-tinyimagenet")
    assert "each once, at learning rate 0.01 and with seed 11: 2 runs took 27 s together" in told
    absent = told.partition("Not run yet: ")[2]
    assert "`hat`, `ewc`, `laplace`" in absent
    assert not any(f"`{name}`" in absent for name in ("sgd", "er", "gem", "derpp"))
    assert lines.splitlines()[2:] == [
        "| `gem` | 92.50 | 5.00 | 85.00 | 10.00 | 18 |",
        "| `derpp` | 92.50 | 5.00 | 85.00 | 8.40 | 9 |",
    ]


def test_class_incremental_accuracy(page: ModuleType) -> None:
    """Over two tasks, after which the first has lost `lost`: learnt − lost / 2; one task alone would give 50 %. er has
    80 and 70 %, and t = 12.71 standard errors of 5 reach below that; si 80 and 79 %, agem 80 % of one seed."""
    made = [("er", 0.1, 1, 0.2), ("er", 0.1, 2, 0.4), ("er", 0.5, 1, 0.6), ("sgd", 0.1, 1, 0.8)]
    made += [("si", 0.1, 1, 0.2), ("si", 0.1, 2, 0.22), ("agem", 0.1, 1, 0.2)]
    runs = Runs([fake_run(name, lr, seed, setting="task", tasks=2, lost=lost) for name, lr, seed, lost in made])
    text = page.split_text.class_incremental(runs)
    assert "| `er` | 75.00 ± 5.00 (2) | 60.00 (1) |\n| `sgd` | 50.00 (1) | – |" in text
    assert "among all 10 classes" in text and "at most 50 %; `si` are shown to reach more." in text


def test_days_on_which_runs_finished(page: ModuleType) -> None:
    first, last = ("2024-02-28T23:59:59+00:00", "2024-03-02T00:00:00+00:00")
    dated = [short("sgd", 0.1, finished=when) for when in (last, first)]
    assert page.cost(Runs(dated[:1])) == "1 runs took 2 s together on x, finished on 2024-03-02."
    assert page.cost(Runs(dated)).endswith("on x, finished from 2024-02-28 to 2024-03-02.")


def test_seeds_are_counted(page: ModuleType) -> None:
    runs = [fake_run(name, lr, seed) for name in ("er", "ewc") for lr in (0.1, 0.2) for seed in (1, 2)]
    assert page.seeds(Runs(runs)) == "2 seeds"
    assert page.seeds(Runs([*runs, fake_run("pnn", 0.1, 1)])) == "2 seeds (1 of `pnn`)"


def test_split_columns_have_their_figures(page: ModuleType, tmp_path: Path) -> None:
    herding = [short("icarl", lr) for lr in (0.01, 0.1)]
    random = [short("icarl-random", lr) for lr in (0.01, 0.1)]
    for runs, both in ((herding, False), ([*herding, *random], True)):
        results.write(runs, tmp_path / "split-tinyimagenet.parquet")
        text = page.split_text.split("split-tinyimagenet")
        assert "](images/split-tinyimagenet-distance.png)" in text and "| `icarl` | 200.00 |" in text
        assert ("](images/split-tinyimagenet-icarl-buffer.png)" in text) is both
        assert (tmp_path / "images" / "split-tinyimagenet-icarl-buffer.png").exists() is both
        assert (tmp_path / "images" / "split-tinyimagenet-distance.png").exists()
    assert page.split_text.split("split-cifar10") == ""


@pytest.mark.parametrize(
    ("lowest", "highest", "shown", "said"),
    [
        (0.6, 0.2, False, "which is the paper's thesis, and the published row"),
        (0.6, 0.2, True, "which is the paper's thesis."),
        (0.2, 0.6, False, "against the paper's thesis."),
        (-0.1, -0.3, False, "against the paper's thesis."),
    ],
)
def test_the_sentence_follows_the_numbers(
    page: ModuleType, lowest: float, highest: float, shown: bool, said: str
) -> None:
    assert said in page.rotated_text.thesis(lowest, highest, shown)


def test_differences_by_rate(page: ModuleType) -> None:
    """Forgetting over T−1 = 4 tasks is 62.5 % of `lost`: 20 and 15 points, 10 and 25. Seed 2 of sgd has no partner."""
    lost = {("sgd", 0.1): 0.32, ("sgd", 0.5): 0.24, ("ogd-gtl", 0.1): 0.16, ("ogd-gtl", 0.5): 0.40, ("er", 0.9): 0.5}
    runs = Runs([fake_run(name, lr, seed=1, tasks=5, lost=x) for (name, lr), x in lost.items()])
    runs += [fake_run("sgd", 0.1, seed=2, tasks=5, lost=0.8)]
    text = page.rotated_text.gtl_minus_sgd(runs)
    assert ", is in points: −10.00 at 0.1, +10.00 at 0.5. One seed gives no verdict." in text
    runs += [fake_run("ogd-gtl", 0.1, seed=2, tasks=5, lost=0.8)]
    assert "in points: −5.00 [−68.53, +58.53] at 0.1, +10.00 at 0.5. `ogd" in page.rotated_text.gtl_minus_sgd(runs)
    assert page.rotated_text.gtl_minus_sgd(Runs([run for run in runs if run.algorithm != "sgd"])) == ""


@pytest.mark.parametrize(("alike", "rising"), [(True, True), (True, False), (False, True)])
def test_what_the_papers_test_makes_of_ogd(page: ModuleType, alike: bool, rising: bool) -> None:
    """Five rates, three seeds that differ a little; forgetting is 62.5 % of `lost`."""
    runs = []
    for i, lr in enumerate((0.001, 0.005, 0.01, 0.05, 0.1)):
        for seed in (1, 2, 3):
            sgd = 0.1 + (0.04 * i if rising else 0.0) + 0.004 * (seed - 2) * (1 + i)
            lost = {"sgd": sgd, "ogd-published": sgd if alike else 0.1, "ogd-gtl": sgd / 2}
            runs += [fake_run(name, lr, seed, tasks=5, lost=x) for name, x in lost.items()]
    text = page.rotated_text.paper_test(page.compare(Runs(runs)))
    same = "−7.50 (`ogd-published`), −7.50 (SGD) and −3.75" in text  # 0.12 × 62.5, from 0.5 of a step to 3.5
    assert same is (alike and rising)
    assert ("The published row is that of SGD" in text) is alike
    assert ("passes the test of local algorithms" in text) is (alike and rising)
    assert page.rotated_text.paper_test(page.compare(Runs([run for run in runs if run.algorithm != "sgd"]))) == ""


def test_tasks_in_which_runs_diverge(page: ModuleType) -> None:
    """Steps 11 and 30 of 30 are in tasks 2 and 3 of three. A task that moves the parameters 4 and then 96 explodes."""
    made = [
        fake_run("laplace", lr, seed, diverged=step) for lr, seed, step in ((0.1, 1, 11), (0.1, 2, 21), (0.01, 1, 30))
    ]
    runs = [replace(run, info={**run.info, "steps": 30}) for run in (*made, fake_run("laplace", 0.01, 2))]
    text = page.rotated_text.divergence(Runs(runs))
    assert "`laplace` at 0.01 in task 3 (1 of 2 runs) and at 0.1 in task 2 to 3 (2 of 2 runs). A gradient" in text
    assert "which they do here" in text
    later = [replace(run, config={**run.config, "lr": 1.0}) for run in runs if run.lr == 0.01]
    assert "which they do not always here" in page.rotated_text.divergence(Runs([*later, *runs[:2]]))
    arrays = {name: np.array(x) for name, x in {"distance_from_init": (4, 4, 99.6), "update_norm": (4, 4, 96)}.items()}
    exploded = replace(runs[-1], arrays={k: v for k, v in runs[-1].arrays.items() if k != "epoch_loss"} | arrays)
    assert (
        "`laplace` at 0.01 with seed 2, whose distance from θ_0 jumps from 4 to 100."
        in page.rotated_text.divergence([exploded])
    )
    assert page.rotated_text.divergence(Runs(runs[-1:])) == ""


def test_runs_that_draw_other_random_numbers(page: ModuleType) -> None:
    runs = [fake_run("er", seed=seed) for seed in range(3)]
    assert page.split_text.draws(Runs(runs)) == ""
    other = [replace(run, config={**run.config, "protocol": 0}) for run in runs[:2]]
    assert page.split_text.draws(Runs([*runs, *other])).endswith(": 2 of protocol 0 and 3 of protocol 1.")


def test_notes_follow_the_numbers(page: ModuleType) -> None:
    """Scores of r, and 3 and 6 times as much with the second seed; losses of 1e30 r leave single precision at 1e9."""
    names = ("statistics", "split", "kind", "task", "seed", "radius", "score", "loss", "base")
    values = [
        (0, seed, r, r * f, 1e30 * r, 0.0)
        for seed, scale in enumerate(((1, 1), (3, 6)))
        for r, f in zip((1.0, 1e9), scale, strict=True)
    ]
    eigen = [("running", "train", "eigen", *x) for x in values]
    random = [("running", "train", "random", *x[:4], 1e30, 0.0) for x in values]
    text = page.NOTES["perturbation-cifar10"](pl.DataFrame([*eigen, *random], names, orient="row"), [])
    assert "single precision\nfrom r = 1e+09 on with running statistics, so" in text
    assert "that is not the radius after which" in text and "score is infinite at r = 1,000,000,000; if" in text
    assert "instead, it is not about 1 at the largest radius." in text  # but 3.4e38 / 1e30
    both = pl.DataFrame([*eigen, *((*x[:7], x[5] * 1e31, 0.0) for x in random)], names, orient="row")
    both = both.with_columns(radius=pl.when(pl.col("radius") > 1).then(1e3).otherwise(1.0))
    text = page.NOTES["perturbation-cifar10"](both, [])
    assert "that is the radius after which" in text and "score is undefined (∞/∞) at r = 1,000; if" in text
    assert "instead, it is about 1 from r = 1,000 on." in text
    assert "2 solutions differ by a factor of 4.5 at the median radius, 6 at most" in text
    assert "is 1.00." in text

    def table(low: float, high: float) -> list[dict[str, Any]]:
        forms = {("ogd", 0.1): low, ("ogd", 1.0): high, ("sgd", 0.1): 2.0, ("sgd", 1.0): 2.0}
        part = "functional part (%)"
        return [{"algorithm": a, "lr": lr, "Δᵀ G Δ": x, "E(t)": x / 2, part: 7 * x} for (a, lr), x in forms.items()]

    # At once: OGD's median of 1, 1 and 4 is 1, and of 3, 3 and 2 it is 3, SGD's 5 and 4.
    numbers = {("ogd", 0.1): (1, 1, 4), ("ogd", 1.0): (3, 3, 2), ("sgd", 0.1): (5, 5, 6), ("sgd", 1.0): (4, 3, 9)}
    rates = pl.DataFrame(
        [
            {"algorithm": a, "lr": lr, "outer": float(x), "forgetting": x / 2}
            for (a, lr), own in numbers.items()
            for x in own
        ]
    )
    text = " ".join(page.NOTES["theorem2"](rates, table(0.2, 1.0)).split())
    assert "keeps 10 % of SGD's Δᵀ G Δ and 10 % of its forgetting, at the highest 50 % and 50 %." in text
    assert "they are 20 % and 20 % at the lowest rate, 75 % and 75 % at the highest." in text
    assert "is 1 % of OGD's curvature at the lowest rate and 7 % at the highest" in text


@pytest.mark.parametrize(("decay", "words"), [(-9.0, "decay lowers it (−9.00"), (9.0, "decay raises it (+9.00")])
def test_words_on_stable_sgd_follow_the_effects(page: ModuleType, tmp_path: Path, decay: float, words: str) -> None:
    """Dropout adds −1 or 1, by seed, and a small batch 5."""
    regimes = {"plastic": (0, 0), "stable": (1, 1), "dropout alone": (1, 0), "decay alone": (0, 1)}
    rows = [
        {"algorithm": name, "batch_size": size, "lr": 0.1, "seed": seed, "t": t}
        | {"forgetting": 30 + (2 * seed - 1) * dropped + decay * decayed + 5 * (size == 10)}
        for name, (dropped, decayed) in regimes.items()
        for size in (10, 128)
        for seed in (0, 1)
        for t in (1, 2)
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "stable-sgd.parquet")
    text = sys.modules["other_findings"].stable_sgd(tmp_path)
    assert words in text and "dropout has no clear effect (+0.00 [" in text and "a small batch raises it (+5.00" in text


def test_an_effect_that_changes_its_sign_is_told_by_learning_rates(page: ModuleType) -> None:
    """Dropout adds 4 points at the high rate and takes 2 at the low one."""
    regimes = {"plastic": (0, 0), "stable": (1, 1), "dropout alone": (1, 0), "decay alone": (0, 1)}
    rows = [
        {"algorithm": name, "batch_size": size, "lr": lr, "seed": seed, "t": 1}
        | {"forgetting": 30 + (4 if lr > 0.05 else -2) * dropped - 9 * decayed}
        for name, (dropped, decayed) in regimes.items()
        for size in (10, 128)
        for lr in (0.01, 0.1)
        for seed in (0, 1)
    ]
    text = sys.modules["study_notes"].part_effects(pl.DataFrame(rows))
    assert "dropout changes it by −2.00 [−2.00, −2.00] at 0.01 and by +4.00 [+4.00, +4.00] at 0.1" in text
    assert "on average by +1.00" in text and "decay lowers it (−9.00" in text


def test_distance_and_forgetting_over_two_sets_of_algorithms(page: ModuleType) -> None:
    """Of three algorithms ρ is 1 with seed 1 and 0.5 with seed 2: 0.75 ± 12.706 × 0.25, cut at 1. With a fourth, which
    moves farthest and forgets least, ρ is −0.2 and −0.4 (Σd² = 12 and 14 of 10)."""
    text = sys.modules["other_findings"]
    lost = {("er", 1): 0.1, ("si", 1): 0.2, ("ewc", 1): 0.3, ("er", 2): 0.2, ("si", 2): 0.1, ("ewc", 2): 0.3}
    far = {"er": 1.0, "si": 2.0, "ewc": 3.0}
    own = [fake_run(name, 0.1, seed, lost=x, distance=far[name]) for (name, seed), x in lost.items()]
    more = [fake_run("derpp", 0.1, seed, lost=0.01, distance=9.0) for seed in (1, 2)]
    task, init = text.DISTANCES
    assert tuple(text.rank_correlations(own, task)[0.1]) == pytest.approx((0.75, -1, 1))
    diverged = fake_run("agem", 0.1, 1, lost=0.9, distance=0.1, diverged=1)
    assert text.rank_correlations([*own, diverged], task) == text.rank_correlations(own, task)
    assert text.rank_correlations([*own, *more], task)[0.1].mean == pytest.approx((-0.2 - 0.4) / 2)
    backward = [replace(run, arrays={**run.arrays, "distance_from_init": -run.arrays["update_norm"]}) for run in own]
    assert text.rank_correlations(backward, init)[0.1].mean == pytest.approx(-0.75)
    told = text.distance_and_forgetting([*own, *more], own)
    assert f"Among the 3 with seed angles: more at 0 of 1 by {task}; more at 0 of 1" in told
    assert "With 1 more, on the published angles: more at 0 of 1 by" in told
    sure = [run for run in own if run.seed == 1] + [replace(r, config={**r.config, "seed": 2}) for r in own[:3]]
    told = text.distance_and_forgetting([*sure, *more], sure)
    assert f"more at 1 of 1 by {task}" in told
    table = [line.split(" | ") for line in text.correlation_table([*own, *more], own).splitlines()]
    assert table[0] == ["| algorithms", "distance", "lr 0.1 |"] and len(table) == 2 + 2 * 3
    assert table[2] == ["| 3 algorithms, seed angles", task, "+0.75 [−1.00, +1.00] |"]
    assert table[4][:2] == ["| 4 algorithms, published angles", task] and table[4][2].startswith("−0.30 [")


def test_the_variance_of_published_runs_is_recovered(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published runs that vary three times as much as ours, on the same five sequences."""
    draw, text = np.random.default_rng(0), page.retraining_text
    centres, found = draw.normal(70, 5, size=5), []
    for _ in range(400):
        published = draw.normal(centres, 3**0.5)
        cell = {f"{name}_std": published.std(ddof=1) for name in ("acc", "forgetting")}
        monkeypatch.setattr(type(text.COLUMN), "published_cell", lambda *_, cell=cell: cell)
        ours = draw.normal(centres, 1, size=(10, 5))
        rows = [
            {"algorithm": "er", "lr": 0.1, "sequence": j, "acc": ours[i, j], "forgetting": ours[i, j]}
            for i in range(10)
            for j in range(5)
        ]
        found.append(text.published_variance(pl.DataFrame(rows), 4))
    assert np.mean(found) == pytest.approx(3, abs=4 * np.std(found) / 20)


@pytest.mark.parametrize(
    ("moved", "answer"),
    [
        (1.0, "Yes: 2 of 2 numbers are equivalent within ±2 points"),
        (2.0, "Not shown for all of them: 0 of 2 numbers are equivalent within ±2 points, 2 undecided"),
        (-3.0, "No: 0 of 2 numbers are equivalent within ±2 points, 2 different, if"),
    ],
)
def test_the_line_on_retraining_follows_the_intervals(page: ModuleType, moved: float, answer: str) -> None:
    cell = COLUMNS["rotated-mnist"].published_cell(COLUMNS["rotated-mnist"].row("er"), 0.01)
    assert cell is not None
    rows = [
        {"challenge": "rotated-mnist", "algorithm": "er", "locality": "global", "lr": 0.01, "seed": i, "sequence": j}
        | {name: cell[f"{name}_mean"] + moved + 0.1 * (i - 4.5) for name in ("acc", "forgetting")}
        for i in range(10)
        for j in range(5)
    ]
    text = page.experiment_notes.LINES["retraining"](pl.DataFrame(rows))
    assert answer in text and f"{signed(moved)} [" in text


def test_further_rows_have_a_sentence_of_their_own(page: ModuleType) -> None:
    assert page.rotated_text.extra_rows_cost(Runs([])) == ""
    told = page.rotated_text.extra_rows_cost(Runs([short("sgd", 0.1), short("icarl", 0.1), short("icarl", 0.5)]))
    assert told.startswith(" The rows of `sgd` and `icarl` were trained beside") and "3 runs took 6 s" in told


def test_gradients_a_task_are_those_of_the_runs(page: ModuleType) -> None:
    """10 slots for 5 tasks; forgetting over T−1 tasks is `lost` T / (2 (T−1)), so 62.5 % of it."""
    lost = {("sgd", 0.1): 0.32, ("sgd", 0.5): 0.48, ("ogd-gtl", 0.1): 0.16, ("ogd-gtl", 0.5): 0.44}
    lost |= {("ogd-published", lr): lost["sgd", lr] for lr in (0.1, 0.5)}
    runs = Runs(
        [
            fake_run(name, lr, tasks=5, lost=x, options={"slots": 10} if "ogd" in name else {})
            for (name, lr), x in lost.items()
        ]
    )
    text = page.rotated_text.orthogonality(page.compare(runs), runs)
    assert (
        "At lr 0.1 plain SGD forgets 20.0 points, `ogd-published` 20.0, and `ogd-gtl`, with 2 gradients a task" in text
    )
    assert "10.0: 50 % less than SGD. At lr 0.5 plain SGD forgets 30.0 points" in text and "27.5: 8 % less" in text
    assert text.endswith("could not show it.")


def test_precisions_are_compared_seed_by_seed(page: ModuleType) -> None:
    """Differences of −2 and −4 points: their mean −3, and t = 12.71 standard errors of 1 to either side."""
    found = {
        (name, lr, seed): {"learning_accuracy": accuracy + away, "acc": accuracy}
        for name, accuracies in (("fp32", (0.9, 0.8)), ("bf16", (0.88, 0.76)))
        for seed, accuracy in enumerate(accuracies)
        for lr, away in ((0.1, 0.0), (0.2, 0.01 * (name == "bf16")))
    }
    assert page.split_text.differences(found, "bf16", "acc") == pytest.approx([-2, -4])
    assert page.split_text.differences(found, "bf16", "learning_accuracy") == pytest.approx([-1.5, -3.5])
    told = page.split_text.costs(found, "bf16")
    assert "`bf16` minus `fp32`: −2.50 points right after learning (95 % interval −15.21 to +10.21)" in told
    assert " and −3.00 points in the end (95 % interval −15.71 to +9.71), not shown to differ." in told
    apart = {(name, lr, seed): own | {"acc": 0.5 + (name == "bf16")} for (name, lr, seed), own in found.items()}
    assert "interval +100.00 to +100.00), shown to differ in the end." in page.split_text.costs(apart, "bf16")
    del found["fp32", 0.1, 1], found["fp32", 0.2, 1]
    assert page.split_text.differences(found, "bf16", "acc") == pytest.approx([-2])


def test_the_section_on_precision(page: ModuleType, tmp_path: Path) -> None:
    assert page.split_text.precision() == ""
    plain = [short("sgd", lr) for lr in (0.01, 0.1)]
    half = [
        replace(run, config={**run.config, "precision": "bf16"}) for run in (short("sgd", 0.01, 0.5), short("sgd", 0.1))
    ]
    results.write([*plain, *half[:1]], tmp_path / "precision.parquet")
    text = page.split_text.precision()
    assert "--lrs 0.01 0.1 --seeds 11 --precision" in text and "3 runs took 4 s together" in text
    assert "A run took 0.5 s against 2.0 s: 4.0 times as fast. The split challenges are" in text
    assert "trained with `bf16`, the fastest here;" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[:2] for row in rows] == [["| `fp32`", "0.01"], ["| `fp32`", "0.1"], ["| `bf16`", "0.01"]]
    assert "`bf16` minus `fp32`: +0.00 points right after learning (95 % interval – to –)" in text
    assert "(95 % interval – to –), not shown to differ. A run" in text


def test_agreement_is_told_beside_that_of_impostors(page: ModuleType) -> None:
    """Ten numbers a row. Of seeds that spread by 100 points every mean is within 2 standard errors of any other."""
    same = page.agreement(page.compare([*published_runs("er"), *published_runs("ewc")]))
    assert "Of 20 published numbers" in same and "20 are within 2 standard errors of ours. The same rule lets 0" in same
    assert "0 of 20 numbers pass" in same and "no row passes for another" in same and "mean |Δ| is 0.00" in same
    assert "| `er` | 10 / 10 | 0 / 10 |" in same and "| `ewc` | 0 / 10 | 10 / 10 |" in same
    moved = [run for run in published_runs("er", 10.0) if run.lr == 0.1]
    apart = page.agreement(page.compare([*(run for run in published_runs("er") if run.lr != 0.1), *moved]))
    assert "8 are within 2 standard errors of ours (not the accuracy of `er` at 0.1 and the forgetting of `er`" in apart
    apart = [
        replace(run, config={**run.config, "lr": 0.5})
        for run in (table1_run("sgd", 0.1, s, 70.0, 20.0) for s in (1, 2))
    ]
    assert "`sgd` from" not in page.agreement(page.compare([*published_runs("er"), *apart]))  # at no common rate
    vague = page.agreement(page.compare([*published_runs("er", spread=100.0), *published_runs("ewc")]))
    assert "cannot tell ours of `er` from the published `ewc`: it passes in every cell" in vague


def test_the_findings_are_those_of_the_runs(page: ModuleType, tmp_path: Path) -> None:
    """The published means themselves: forgetting rises in ewc, ogd, agem and er and falls in si, found to be local."""
    names = ("agem", "er", "si", "ewc", "ogd-published")
    classes = {name: "local" if name in ("si", "ewc", "ogd-published") else "global" for name in names}
    table = {"challenge": "rotated-mnist", "algorithm": list(classes), "found": list(classes.values())}
    pl.DataFrame(table).write_parquet(tmp_path / "locality.parquet")
    made = page.compare([run for name in names for run in published_runs(name)])
    parts = page.claims_parts({"rotated-mnist": made})
    abstract = " ".join(parts["abstract"].split())
    assert "agree with the paper's**: 50 of 50, 50 if ± divides by n, are within 2 standard errors" in abstract
    # With si among the local ones: its forgetting is lowest at the highest rate and falls, agem and er both rise, and
    # local ones rise less. Distances are equal. What stays is that accuracy rises less.
    assert "With `si` as local, as measured, 1 stay reproduced, 1 about the classes." in abstract
    # (4.26 + 9.98) / 2 − (2.87 + 4.85 − 5.86) / 3, with si among the first three, and 4.255 − (2.875 + 4.85) / 2.
    assert "Yes: +6.50 [+6.50, +6.50] (rotated-mnist) points" in abstract
    assert "| without `ogd-published` and `si` | +0.39 [+0.39, +0.39] |" in parts["conclusions"]
    assert "| `si` in the other class | −1.07 [−1.07, −1.07] |" in parts["conclusions"]
    assert "in 2 of 2 local and 2 of 3 global algorithms (rotated-mnist)." in parts["conclusions"]
    assert "| verdict | with `si` as local |" in parts["board"]
    si = "| `si` | global | local | 0.1 (5 of 5) | 0.1 | "
    rest = " | −0.70 [−0.70, −0.70] | −0.70 | +5.86 [+5.86, +5.86] | +5.86 | "
    assert si in parts["details"] and rest in parts["details"].partition(si)[2].partition("\n")[0]
    assert "**reproduced** | −1.07 [−1.07, −1.07], contradicted |" in parts["board"]


def made_up_rows(ewc: tuple[float, ...], ogd: tuple[float, ...]) -> list[TableRow]:
    """What seeds forget more at high rates than at low ones; er adds 3, si takes 5 and plain SGD adds 8."""
    changes = {"ewc": ("local", ewc), "ogd-published": ("local", ogd), "er": ("global", (3.0,) * len(ewc))}
    changes |= {"si": ("global", (-5.0,) * len(ewc)), "sgd": ("global", (8.0,) * len(ewc))}
    changes |= {"ogd-gtl": ("local", (7.0,) * len(ewc))}
    return [
        TableRow(
            name,
            locality,
            {"forgetting": {lr: {s: 10 + x * (lr > 0.02) for s, x in enumerate(own)} for lr in (0.001, 0.01, 0.1, 1)}},
            {} if name in ("sgd", "ogd-gtl") else {"forgetting": {0.001: 1.0}},
            0,
        )
        for name, (locality, own) in changes.items()
    ]


OTHER = "without `ogd-published` and `si`"


@pytest.mark.parametrize(
    ("ewc", "ogd", "answer", "others"),
    [
        ((9.0, 9.5, 10.0), (8.0,) * 3, "yes", {"yes"}),
        ((1.0, 3.0, 5.0), (8.0,) * 3, "yes", {"yes", "not settled"}),
        ((1.0, 3.0, 5.0), (-20.0,) * 3, "less", {"less", "yes", "not settled"}),
        ((1.0, 3.0, 5.0), (-40.0, -4.0, 32.0), "not settled", {"yes", "not settled"}),
    ],
)
def test_conclusions_follow_the_rows(
    page: ModuleType, ewc: tuple[float, ...], ogd: tuple[float, ...], answer: str, others: set[str]
) -> None:
    """Global rows rise by −1 on average, er alone by 3 and si by −5; ogd-gtl rises by 7."""
    text, rows = sys.modules["claims_text"], {"made up": made_up_rows(ewc, ogd)}
    e, o = np.array(ewc), np.array(ogd)
    expected = {
        "": (e + o) / 2 + 1,
        "without `ogd-published`": e + 1,
        "`ogd-gtl` for `ogd-published`": (e + 7) / 2 + 1,
        "without `si`": (e + o) / 2 - 3,
        OTHER: e - 3,
        "`si` in the other class": (e + o - 5) / 3 - 3,
    }
    found = text.rises(rows, ["si"])
    assert found.keys() == expected.keys()
    lines = text.choices_table(rows, ["si"]).splitlines()
    for choice, values in expected.items():
        difference = found[choice]["made up"].difference
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert tuple(difference) == pytest.approx((values.mean(), low, high))
        name = choice or "the paper's choice"
        assert f"| {name} | {difference} |" in lines
    assert found[OTHER]["made up"][1:] == (["ewc"], ["er"])
    assert found["`si` in the other class"]["made up"][1:] == (["ewc", "ogd-published", "si"], ["er"])
    assert found[""]["made up"].answer == answer
    assert {own["made up"].answer for choice, own in found.items() if choice} == others
    abstract = " ".join(text.abstract([], rows, ["si"], "").split())
    assert f"algorithms?** {answer.capitalize()}: {found['']['made up'].difference} (made up) points." in abstract
    assert ("This does not show that locality is the reason" in abstract) is (others != {"yes"})


def test_columns_that_differ_are_told_apart(page: ModuleType) -> None:
    """One column rises, one is open; one has icarl as well; one has too few seeds."""
    text = sys.modules["claims_text"]
    rises, unsettled = made_up_rows((1.0, 3.0, 5.0), (8.0,) * 3), made_up_rows((1.0, 3.0, 5.0), (-40.0, -4.0, 32.0))
    both = {"a": rises, "b": unsettled}
    found = text.rises(both, ["si"])
    abstract = " ".join(text.abstract([], both, ["si"], "").split())
    told = f"Yes: {found['']['a'].difference} (a); not settled: {found['']['b'].difference} (b) points."
    assert told in abstract
    icarl = [*rises, replace(rises[0], algorithm="icarl")]
    found = text.rises({"a": rises, "c": icarl, "d": made_up_rows((1.0,), (8.0,))}, ["si"])
    only_icarl = "without `ewc` and `ogd-published`"
    assert all(list(own) == (["c"] if choice == only_icarl else ["a", "c"]) for choice, own in found.items())
    assert found[OTHER]["a"].local == ["ewc"] and found[OTHER]["c"].local == ["ewc", "icarl"]
    assert f"| {only_icarl} | – |" in text.choices_table({"a": rises, "c": icarl}, ["si"])
    partly = {"a": rises, "e": [row for row in rises if row.algorithm != "ogd-published"]}
    assert "| without `ogd-published` | +4.00 [−0.97, +8.97] | – |" in text.choices_table(partly, ["si"])
    assert text.rises({"a": rises[:2]}, []) == {"": {}} and text.choices_table({"a": rises[:2]}, []) == ""
    assert "nothing can be concluded" in text.abstract([], {"a": rises[:2]}, [], "")


def test_what_else_differs_between_the_classes_is_named(page: ModuleType) -> None:
    """Plain SGD and ogd-published rise alike; only split columns have BatchNorm."""
    text, rows = sys.modules["claims_text"], made_up_rows((1.0, 3.0, 5.0), (8.0,) * 3)
    rotated = text._doubts({"rotated-mnist": rows}, ["si"])
    assert "`ogd-published` minus plain SGD is +0.00 [+0.00, +0.00] (rotated-mnist); `si` changes class" in rotated
    split = text._doubts({"split-cifar10": rows}, [])
    assert "BatchNorm statistics" in split and "plain SGD" not in split and "BatchNorm" not in rotated
    assert text._doubts({"rotated-mnist": rows[:1]}, []) == ""


def test_rows_are_compared_as_a_whole(page: ModuleType) -> None:
    """Each of five cells is two standard errors away. All rates have the same spread over seeds, so our row's error
    is that of a cell; the published one, with independent rates, is that of a cell over √5."""
    text = sys.modules["agreement_text"]
    near, far = (page.compare(published_runs("er", x)) for x in (0.5, 2.0))
    column = COLUMNS["rotated-mnist"]
    cells = [column.published_cell(column.row("er"), lr) for lr in column.lrs]
    errors = np.array([np.sqrt(cell["acc_std"] ** 2 / 4 + 1 / 5) for cell in cells if cell])
    found = text.row_differences(far)["er"][0]
    theirs = np.array([cell["acc_std"] ** 2 / 4 for cell in cells if cell])
    assert found[:2] == pytest.approx((2 * errors.mean(), np.sqrt(1 / 5 + theirs.sum() / 25)))
    # Welch: each of the six parts, ours and five cells', has four degrees of freedom.
    parts = np.array([1 / 5, *theirs / 25])
    assert found.degrees == pytest.approx(4 * parts.sum() ** 2 / (parts**2).sum())
    assert (
        f"| `er` | {signed(found.mean)} ± {found.error:.2f} | **{signed(found.z, '.1f')}** |"
        in text.row_differences_table(far)
    )
    assert "2 of 2 (ACC of `er` (rotated-mnist) and FGT of `er` (rotated-mnist)) if by n, by chance" in text.numbers(
        {"rotated-mnist": far}
    )
    assert "0 of 2 if by n, by chance" in text.numbers({"rotated-mnist": near})
    # With one seed at one rate, no two seeds finished at all rates: the cells' own errors, as of independent rates.
    few = page.compare([run for run in published_runs("er", 2.0) if run.lr != 0.01 or run.seed == 11])
    single = [5 * x if lr == 0.01 else 1 / 5 for x, lr in zip(theirs, column.lrs, strict=True)]
    assert text.row_differences(few)["er"][0].error == pytest.approx(np.sqrt(sum(single) + theirs.sum()) / 5)


@pytest.mark.parametrize("sgd", [0.0, 3.0])
def test_the_line_on_balls_says_how_weak_the_evidence_is(page: ModuleType, sgd: float) -> None:
    """Forgetting rises by 2 per doubling of the distance, by 1.5 more for ewc, and by `sgd` more for plain SGD."""
    more, draw = {"sgd": sgd, "er": 0.0, "agem": 0.0, "ewc": 1.5}, np.random.default_rng(0)
    rows = []
    for seed, name, lr, radius in product((1, 2, 3), more, (0.01, 0.04), (0.5, 1.0, 2.0, 4.0, 8.0)):
        distance, learnt = radius * draw.uniform(0.9, 1.1), draw.uniform(80, 90)
        forgetting = (2 + more[name]) * np.log2(distance) + np.log2(lr) + 0.5 * learnt
        keys = {"algorithm": name, "locality": "local" if name == "ewc" else "global", "lr": lr, "seed": seed}
        rows.append(
            keys | {"radius": radius, "distance": distance, "forgetting": forgetting, "learning_accuracy": learnt}
        )
    text = page.experiment_notes.ball_line(pl.DataFrame(rows))
    assert ("+1.50 [+1.50, +1.50] with radii of 2 and more alone, and +1.50 [+1.50, +1.50] compared" in text) is (
        sgd == 0
    )
    assert ("does not show that locality is the reason" in text) is (sgd > 0)


@pytest.mark.parametrize(
    ("sharpness", "said"),
    [(40.0, "at every rate above the limit, and none at any other"), (10.0, "does not explain it alone")],
)
def test_divergence_is_compared_with_the_largest_stable_step(
    page: ModuleType, tmp_path: Path, sharpness: float, said: str
) -> None:
    """2 / 40 = 0.05 and 2 / 10 = 0.2: the run at 0.1 diverges above the first and below the second."""
    rows = {"algorithm": "optimal-soft", "t": [1, 3, 3, 3], "sharpness": [1.0, sharpness / 2, sharpness, 2 * sharpness]}
    pl.DataFrame(rows).write_parquet(tmp_path / "implicit.parquet")
    text = sys.modules["other_findings"]._instability({0.1: "1 of 2 runs at 0.1"}, (0.01, 0.1), tmp_path)
    assert f"above η = {2 / sharpness:g} after task 3: " in text and said in text
    assert sys.modules["other_findings"]._instability({}, (0.01, 0.1), tmp_path) == ""


def test_where_the_optimal_objective_diverges(page: ModuleType, tmp_path: Path) -> None:
    """At equal memory 2 and 4 points above replay at 0.1, whose best rate, 0.2, is 3 and 1 points better than that."""
    accs = {("optimal-soft", 0.1): (62.0, 64.0), ("er", 0.1): (60.0, 60.0), ("er", 0.2): (65.0, 65.0)}
    rows = [
        {"algorithm": name, "lr": lr, "seed": seed, "acc": acc, "sharpness": None, "t": 1}
        for (name, lr), own in accs.items()
        for seed, acc in enumerate(own)
    ]
    types = {"sharpness": pl.Float64}
    pl.DataFrame(rows, schema_overrides=types).write_parquet(tmp_path / "implicit.parquet")
    runs = [fake_run("optimal-soft", 0.1, seed) for seed in (0, 1)]
    runs += [fake_run("optimal-soft", 0.2, 0), fake_run("optimal-soft", 0.2, 1, diverged=3)]
    text = sys.modules["other_findings"].optimal_against_replay(runs, tmp_path)
    assert "by +3.00 [" in text and "each at its best rate, by −2.00 [" in text
    assert text.endswith("runs diverge: 1 of 2 at 0.2.")
    assert "runs diverge: none." in sys.modules["other_findings"].optimal_against_replay(runs[:2], tmp_path)


def test_skills_of_own_approximations(page: ModuleType, tmp_path: Path) -> None:
    """Errors of half the constant's at the low rate and of twice as much at the high one, but for si without it."""
    errors = {("er", "own"): (1.0, 4.0), ("er", "constant"): (2.0, 2.0), ("si", "own"): (1.0, 1.0)}
    rows = [
        {"algorithm": name, "approximation": kind, "lr": lr, "seed": seed, "task": None, "ray": False, "error": error}
        for (name, kind), own in errors.items()
        for lr, error in zip((0.1, 0.5), own, strict=True)
        for seed in (0, 1)
    ]
    pl.DataFrame(rows, schema_overrides={"task": pl.Int64}).write_parquet(tmp_path / "approximation-error.parquet")
    text = sys.modules["other_findings"].own_approximations(tmp_path)
    assert "(2 seeds)? At 0.1, better: `er` (+0.5). At 0.5, worse: `er` (−1)." in text


def test_differences_are_red_beyond_two_standard_errors(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure()
    monkeypatch.setattr(page, "save_figure", lambda fill, path: fill(figure))
    runs = [*published_runs("er", 1.9), *published_runs("ewc", 5.0)]
    page.draw_differences({"rotated-mnist": page.compare(runs)}, Path("x.png"))
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() and first.get_xlim()[1] > 5
    for axes in (first, second):
        points = [line for line in axes.lines if line.get_marker() == "o"]
        assert [line.get_color() == "C3" for line in points] == [False] * 5 + [True] * 5


def test_retrained_differences_are_drawn_with_their_intervals(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five sequences, each with a seed 0.5 below and one 0.5 above their mean, which is 3 points too high."""
    figure, column = Figure(), COLUMNS["rotated-mnist"]
    monkeypatch.setattr(page, "save_figure", lambda fill, path: fill(figure))
    cell = column.published_cell(column.row("er"), 0.01)
    assert cell is not None
    rows = [
        {"challenge": "rotated-mnist", "algorithm": "er", "locality": "global", "lr": 0.01, "seed": i, "sequence": j}
        | {name: cell[f"{name}_mean"] + 3 + 0.5 * i for name in ("acc", "forgetting")}
        for i in (-1, 1)
        for j in range(5)
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "retraining.parquet")
    page.draw_differences({"rotated-mnist": page.compare(published_runs("ewc"))}, Path("x.png"))
    for axes, measure in zip(figure.axes, ("acc", "forgetting"), strict=True):
        (point,) = [line for line in axes.lines if line.get_marker() == "o"]
        assert np.asarray(point.get_xdata()).tolist() == pytest.approx([3]) and len(axes.patches) == 1
        (segment,) = axes.collections[0].get_segments()  # type: ignore[attr-defined]
        interval = page.differences(pl.DataFrame(rows), measure)["er", 0.01]
        assert segment[:, 0].tolist() == pytest.approx([interval.low, interval.high])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["er 0.01"]


@pytest.mark.parametrize(("moved", "said"), [(0.0, "**Our numbers agree"), (10.0, "**Not all of our numbers agree")])
def test_agreement_follows_the_counts(page: ModuleType, moved: float, said: str) -> None:
    runs = [*published_runs("er"), *published_runs("ewc", moved)]
    text = page.agreement_verdict({"rotated-mnist": page.compare(runs)})
    assert text.startswith(said) and f": {20 if moved == 0 else 10} of 20, " in text


@pytest.mark.parametrize(("cells", "agree"), [(2, True), (3, False)])
def test_some_numbers_may_differ_by_chance(page: ModuleType, cells: int, agree: bool) -> None:
    """Of 40 numbers, an accuracy and a forgetting in each of 20 cells. With four to eight degrees of freedom 8 to 12 %
    are expected outside: 3 to 5 numbers."""
    far = COLUMNS["rotated-mnist"].lrs[:cells]
    runs = [run for name in ("agem", "si", "ewc") for run in published_runs(name)]
    runs += [run for x in (0.0, 10.0) for run in published_runs("er", x) if (run.lr in far) is (x > 0)]
    text = page.agreement_verdict({"rotated-mnist": page.compare(runs)})
    assert text.startswith("**Our") is agree and f": {40 - 2 * cells} of 40, " in text


def test_chance_is_that_of_welchs_test(page: ModuleType) -> None:
    """Against scipy's test of five of our runs and five made-up published ones."""
    text, made = sys.modules["agreement_text"], page.compare(published_runs("er", 1.0))
    chances = []
    for divisor, ddof in (("n", 0), ("n − 1", 1)):
        for cell in text.cells_by_name(text.with_divisor(divisor, made)).values():
            published = np.array([-1.0, -1, 0, 1, 1])
            published *= cell.published.std / published.std()  # numpy divides by n, too
            ours = np.array([-1.0, -1, 0, 1, 1]) + cell.difference
            test = stats.ttest_ind(ours, published, equal_var=False)
            assert text.degrees_of_freedom(cell) == pytest.approx(test.df)
            assert abs(cell.z) == pytest.approx(abs(test.statistic))
            chances += [2 * stats.t.sf(2, test.df)] if ddof == 0 else []
    assert text.outside_by_chance(made) == pytest.approx(sum(chances))
    old, new = (list(text.cells_by_name(x).values()) for x in (made, text.with_divisor("n − 1", made)))
    ratios = [a.published.std / b.published.std for a, b in zip(old, new, strict=True)]
    assert ratios == pytest.approx([np.sqrt(5 / 4)] * 10)


@pytest.mark.parametrize(
    ("wins", "said"),
    [(0, "recommends replay"), (4, "recommends replay"), (5, "recommends neither"), (20, "recommends it at equal")],
)
def test_the_forecast_decides_by_the_settings_won(page: ModuleType, wins: int, said: str) -> None:
    leads = pl.DataFrame({"lead": [1.0] * wins + [-1.0] * (24 - wins)})
    assert said in page.experiment_notes._decision(leads)
    assert "has not been trained" in page.experiment_notes._decision(leads.clear())
    lost = pl.DataFrame({"lead": [1.0, 3.0, np.inf]})
    assert page.experiment_notes._lead(lost).startswith("+2.00 [") and "(1 settings" in page.experiment_notes._lead(
        lost
    )


def test_the_first_table_has_the_papers_rows_and_two_more(page: ModuleType) -> None:
    rows = {"agem", "er", "si", "ewc", "icarl", "ogd-published"}
    assert rows | {"sgd", "ogd-gtl"} == page.FRONT_ROWS


def test_the_first_page_is_short() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reproduction.md").read_text()
    assert len(text.split()) <= 3500
    abstract = text.split("\n## ")[0].splitlines()[1:]
    assert len([line for line in abstract if line]) <= 10


def test_own_regions_end_where_the_error_passes_epsilon(page: ModuleType) -> None:
    """Errors 0.1 (r / 3)² and 0.2 on a ray: radii 3 and 0. After tasks 2, 3 and 4 the first error is 0.05, 0.2, 0.3."""
    notes = sys.modules["study_notes"]
    radii = 10.0 ** np.arange(-2, 1.6, 0.25)
    errors = {"ewc": 0.1 * (radii / 3) ** 2, "er": np.full_like(radii, 0.2)}
    rows = []
    for (name, ray), lr, seed in product(errors.items(), (0.001, 0.1), (0, 1, 2)):
        keys = {"algorithm": name, "locality": "local" if name == "ewc" else "global", "lr": lr, "seed": seed}
        keys |= {"approximation": "own", "task": 0}
        rows += [keys | {"ray": True, "distance": r, "error": e} for r, e in zip(radii, ray, strict=True)]
        ends = zip((2, 3, 4), (0.05, 0.2, 0.3), strict=True)
        rows += [keys | {"ray": False, "learnt": t, "distance": (2.5 + 20 * seed) * lr, "error": e} for t, e in ends]
    text = notes.own_regions(pl.DataFrame(rows))
    assert "| `ewc` | local | 3 | 0.0225 | 3 | 3 | 2.25 | 3 |" in text
    assert "| `er` | global | 0 | 0.0225 | 3 | 0 | 2.25 | 3 |" in text
    assert "in 3 of 3 local and 0 of 3 global runs at 0.001 and in 2 of 3 local and 0 of 3 global runs at 0.1" in text
    rounded, lost, unknown = [np.nan, np.nan, 0.01, 0.02], [0.0, 0.05, np.inf, np.inf], [np.nan] * 4
    rays = [pl.DataFrame({"distance": [1.0, 2.0, 4.0, 8.0], "error": e}) for e in (rounded, lost, unknown)]
    assert [notes.ray_radius(ray, 0.1) for ray in rays[:2]] == [np.inf, 2.0]
    assert np.isnan(notes.ray_radius(rays[2], 0.1))
