"""Our numbers against the published ones: z scores, marks and the paper's test, on runs with known statistics."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fake_runs import fake_run
from fake_runs import table1_run as run
from rich.console import Console
from scipy import stats

from glocal.errors import GlocalError
from glocal.metrics import Over, Scope, summary
from glocal.paper import results, table1
from glocal.paper.comparison import Comparison, ComparisonRow, Estimate, compare, render, write_tables
from glocal.paper.table1 import COLUMNS
from glocal.store.run import Run

ROTATED = COLUMNS["rotated-mnist"]
T = ROTATED.tasks
SPREAD = np.array([-1.0, 0.5, 0.0, 1.5, -1.0])
"""Deviations of the five seeds, up to a factor; their mean is 0."""


def runs_of(row: str, off: float, rise: float = 0.0) -> list[Run]:
    """Five seeds at five rates; means `off` points above the published ones, forgetting rising by `rise` per rate."""
    made = []
    for i, lr in enumerate(ROTATED.lrs):
        theirs = ROTATED.published_cell(ROTATED.row(row), lr)
        acc, forgetting = (theirs["acc_mean"], theirs["forgetting_mean"]) if theirs else (80.0, 10.0)
        for seed, extra in zip(table1.SEEDS, SPREAD, strict=True):
            # Seeds differ more at higher rates: their differences between rates differ too.
            made.append(run(row, lr, seed, acc + off + 2 * extra, forgetting + rise * i + (1 + i) * extra))
    return made


def row_at(made: Comparison, algorithm: str, lr: float) -> ComparisonRow:
    (found,) = [x for x in made.rows if (x.algorithm, x.lr) == (algorithm, lr)]
    return found


def test_z_score_and_its_mark() -> None:
    for off, far in ((0.5, False), (6.0, True), (-6.0, True)):
        found = row_at(compare(runs_of("ewc", off)), "ewc", 0.01).acc
        assert found.ours is not None and found.published is not None
        assert (found.published.mean, found.published.std) == (73.18, 3.53)
        assert found.ours.mean == pytest.approx(73.18 + off)
        assert found.ours.std == pytest.approx(2 * SPREAD.std())
        # Ours are (−2, 1, 0, 3, −2) from their mean: the squares' sum is 18, over 4 the unbiased variance 4.5.
        error = np.sqrt(4.5 / 5 + 3.53**2 / 4)
        assert found.standard_error == pytest.approx(error) == pytest.approx(2.00380, abs=1e-5)
        assert found.z == pytest.approx(off / error)
        assert found.differs is far is bool(abs(off / error) > 2)


@pytest.mark.parametrize(("off", "far"), [(8.0, False), (10.0, True)])
def test_one_seed_borrows_the_published_variance(off: float, far: bool) -> None:
    """The unbiased published variance is 3.53² 5/4: of one run all of it, of the mean of five a fifth."""
    alone = run("ewc", 0.01, 11, 73.18 + off, 22.0)
    made = compare([alone])
    found = made.rows[0].acc
    assert found.standard_error == pytest.approx(4.32335, abs=1e-5)
    assert found.z == pytest.approx(off / 4.32335, abs=1e-5)
    assert found.differs is far
    (row,) = csv.DictReader(io.StringIO(str(render(made, "csv"))))
    assert row["acc_std"] == row["forgetting_std"] == "" and float(row["acc_published_std"]) == 3.53
    text = str(render(made, "markdown"))
    assert f"| {73.18 + off:.2f} |" in text and "| 22.00 |" in text and "± 0.00" not in text
    assert "one seed has no deviation" in text


def test_two_seeds_and_one_that_diverged() -> None:
    """Only finished runs count: two that are 4 apart have the unbiased variance 8."""
    two = [run("ewc", 0.01, 11, 72, 22), run("ewc", 0.01, 13, 76, 22)]
    assert compare(two).rows[0].acc.standard_error == pytest.approx(np.sqrt(8 / 2 + 3.53**2 / 4))
    assert "one seed" not in str(render(compare(two), "markdown"))
    two[1] = run("ewc", 0.01, 13, 76, 22, diverged=3)
    assert compare(two).rows[0].acc.standard_error == pytest.approx(4.32335, abs=1e-5)
    assert "one seed has no deviation" in str(render(compare(two), "markdown"))


def split_run(seed: int = 11, setting: str = "task", **more: Any) -> Run:
    """SI on split-cifar10 at lr 0.01, of the published size."""
    column = COLUMNS["split-cifar10"]
    made = fake_run(
        "si",
        0.01,
        seed,
        challenge="split-cifar10",
        tasks=5,
        epochs=50,
        setting=setting,
        network={"name": "resnet18"},
        options=dict(column.row("si").options),
    )
    return replace(made, config={**made.config, "batch_size": 32, "precision": "bf16", **more})


@pytest.mark.parametrize(
    ("setting", "scope", "compared"),
    [("task", None, True), ("task", "task", True), ("task", "class", False), ("class", None, False)],
)
def test_split_challenges_are_compared_among_the_tasks_own_classes(
    setting: str, scope: Scope | None, compared: bool
) -> None:
    made = compare([split_run(setting=setting)], scope=scope)
    assert (made.rows[0].acc.published is not None) is compared
    if compared:
        assert made.rows[0].acc.published == Estimate(63.91, made.rows[0].acc.published.std, 5)  # type: ignore[union-attr]
    for format in ("markdown", "latex"):
        assert ("Not compared: the published numbers of split-cifar10" in str(render(made, format))) is not compared


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 1}, r"differ in epochs: 50 with seed 11, 1 with seed 13"),
        ({"precision": "tf32"}, r"differ in precision: bf16 with seed 11, tf32 with seed 13"),
        ({"batch_size": 64}, r"differ in batch_size: 32 with seed 11, 64 with seed 13"),
        ({"network": {"name": "resnet18", "width": 20}}, r"differ in network.width: absent with seed 11, 20 with"),
        (
            {"challenge": {**split_run().config["challenge"], "options": {"angles": list(range(99))}}},
            r"challenge.options.angles: None with seed 11, \[0, 1, .*\.\.\. with seed 13",
        ),
    ],
)
def test_runs_of_one_cell_differ_in_their_random_numbers_alone(change: dict[str, Any], said: str) -> None:
    compare([split_run(), split_run(13)])
    compare([split_run(), split_run(13, protocol=2)])
    with pytest.raises(GlocalError, match=said):
        compare([split_run(), split_run(13, **change)])
    with pytest.raises(GlocalError, match=said.replace("13", "11")):
        compare([split_run(), split_run(**change)])


def test_options_that_the_row_does_not_fix_are_equal_too() -> None:
    one, other = run("er", 0.01, 11, 80, 5), run("er", 0.01, 13, 80, 5)
    chosen = {"name": "er", "options": {"slots": 500, "replay": 64}}
    other = replace(other, config={**other.config, "algorithm": chosen})
    with pytest.raises(GlocalError, match=r"er on rotated-mnist at lr 0.01 .* algorithm.options.replay: 0 .* 64"):
        compare([one, other])


@pytest.mark.parametrize("over", ["t-1", "t"])
def test_challenges_in_the_papers_layout(over: Over) -> None:
    """One line per learning rate, the challenges beside each other, forgetting over T−1 tasks or over T."""
    made = compare([*runs_of("si", 0.0), split_run()], over)
    text = str(render(made, "markdown")).split("\n\n### rotated-mnist")[0]
    lines = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    assert {len(row) for row in lines} == {8}
    assert [row[1] for row in lines[2:]] == ["0.001", "0.005", "0.01", "0.05", "0.1"]
    ours, theirs = made.rows[2], made.rows[-1]
    mean, over_t = (ours.forgetting[over].ours.mean for over in ("t-1", "t"))  # type: ignore[union-attr]
    assert over_t == pytest.approx(mean * (T - 1) / T)
    assert lines[4][3].startswith(f"{over_t if over == 't' else mean:.2f} ±")
    assert lines[4][5] == f"{theirs.acc.ours.mean:.2f}" and lines[2][5:] == ["–"] * 3  # type: ignore[union-attr]
    assert lines[0][4] == lines[0][7] == "seeds" and (lines[4][4], lines[4][7]) == ("5", "1")
    assert str(render(compare(runs_of("si", 0.0)), "markdown")).startswith("### rotated-mnist")


def test_latex_captions_and_columns() -> None:
    tex = str(render(compare([*runs_of("si", 0.0), *runs_of("er", 0.0), split_run()]), "latex"))
    _, rotated, split, _ = (row for row in tex.splitlines() if row.startswith(r"\caption"))
    assert rotated.startswith(r"\caption{\textbf{rotated-mnist}.")
    assert split.startswith(r"\caption{\textbf{split-cifar10}.")
    assert "angles" in rotated and "angles" not in split and "one seed" in split and "one seed" not in rotated
    for table in tex.split(r"\begin{tabular}{")[1:]:
        columns = len(table.partition("}")[0])
        body = table.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
        assert {row.count(" & ") + row.startswith("& ") for row in body.splitlines() if "&" in row} == {columns - 1}


def test_ours_alone() -> None:
    """Without the published numbers no format has columns for them."""
    made = compare(runs_of("ewc", 1.0), published=False)
    assert all(x.acc.published is None and x.acc.z is None for x in made.rows)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render(made, "rich"))
    for text in (str(render(made, "markdown")), str(render(made, "latex")), console.file.getvalue()):  # type: ignore[attr-defined]
        assert "published" not in text.lower().replace("as published", "") and "Δ" not in text and "Delta" not in text
    head, rule, first = str(render(made, "markdown")).splitlines()[2:5]
    assert head.count("|") == rule.count("|") == first.count("|") == 6
    assert r"\begin{tabular}{llrrr}" in str(render(made, "latex"))
    assert r"\begin{tabular}{llrrrrrrr}" in str(render(compare(runs_of("ewc", 1.0)), "latex"))


def test_forgetting_over_all_tasks_follows_from_the_published_number() -> None:
    both = row_at(compare(runs_of("er", 0)), "er", 0.1).forgetting
    for over, share in (("t-1", 1.0), ("t", 19 / 20)):
        assert both[over].published.mean == pytest.approx(share * 9.05)  # type: ignore[index, union-attr]
        assert both[over].ours.mean == pytest.approx(share * 9.05)  # type: ignore[index, union-attr]
        assert both[over].z == pytest.approx(0, abs=1e-9)  # type: ignore[index]


@pytest.mark.parametrize(("rise", "sign"), [(4.0, "negative"), (-4.0, "positive"), (-0.5, "not settled")])
def test_the_papers_test(rise: float, sign: str) -> None:
    """Two lowest minus two highest rates, with scipy's interval of the per-seed differences."""
    ours = runs_of("ogd-gtl", 0, rise)
    (row,) = compare(ours).trends
    trend = row.trend
    forgotten = {(r.lr, r.seed): 100 * _forgetting(r) for r in ours}
    low, mid, _, high, highest = ROTATED.lrs
    each = [
        (forgotten[low, s] + forgotten[mid, s] - forgotten[high, s] - forgotten[highest, s]) / 2 for s in table1.SEEDS
    ]
    expected = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (trend.lower, trend.upper) == pytest.approx(tuple(expected))
    assert trend.difference == pytest.approx(-3 * rise)
    assert trend.sign == sign
    assert row.published is None


def _forgetting(r: Run) -> float:
    R = r.arrays["test_class_accuracy"]
    return float(np.mean([R[o + 1, o] - R[T, o] for o in range(T - 1)]))


def test_the_published_difference_and_the_verdicts() -> None:
    made = compare([*runs_of("ewc", 0), *runs_of("si", 0)])
    by_name = {trend.algorithm: trend for trend in made.trends}
    assert by_name["ewc"].published == pytest.approx((15.42 + 21.52 - 22.88 - 22.57) / 2)
    assert by_name["si"].published == pytest.approx((16.09 + 21.8 - 15.41 - 10.76) / 2)
    assert by_name["ewc"].trend.verdict == "supports the paper"
    assert by_name["si"].trend.verdict == "forgets less at high lr" and by_name["si"].trend.sign == "positive"
    for text in (render(made, "markdown"), render(made, "latex")):
        assert "supports the paper" in str(text) and "forgets less at high lr" in str(text)


def test_a_seed_that_diverged_at_a_compared_rate_is_left_out() -> None:
    ours = runs_of("ewc", 0)
    lost = run("ewc", 0.1, 55, 70, 20, diverged=7)
    made = compare([lost if (r.lr, r.seed) == (0.1, 55) else r for r in ours])
    assert made.trends[0].trend.seeds == 4
    found = row_at(made, "ewc", 0.1)
    assert (found.seeds, found.diverged) == (5, 1) and found.acc.ours is not None and found.acc.ours.seeds == 4
    assert "| 0.1 | 4 of 5 |" in str(render(made, "markdown"))


def test_another_size_or_other_options_are_not_compared() -> None:
    smaller = replace(runs_of("er", 0)[0], config={**runs_of("er", 0)[0].config, "epochs": 1})
    made = compare([smaller])
    assert made.rows[0].acc.published is None
    assert "numbers of rotated-mnist are of 20 tasks, 5 epochs" in str(render(made, "markdown"))
    other = runs_of("er", 0)[0]
    chosen = {"name": "er", "options": {"slots": 50, "replay": 0}}
    label = "er slots=50"
    other = replace(other, config={**other.config, "algorithm": chosen}, info={**other.info, "label": label})
    made = compare([*runs_of("er", 0), other])
    assert row_at(made, label, 0.001).acc.published is None
    assert row_at(made, "er", 0.001).acc.published is not None
    with pytest.raises(GlocalError, match=r"the runs of er .* differ in epochs: 5 with seed 11, 1 with seed 11"):
        compare([*runs_of("er", 0), smaller])


def test_formats_agree(tmp_path: Path) -> None:
    made = compare([*runs_of("ewc", 6.0), *runs_of("er", 0)])
    table = list(csv.DictReader(io.StringIO(str(render(made, "csv")))))
    assert [float(row["acc_mean"]) for row in table] == pytest.approx(
        [x.acc.ours.mean for x in made.rows if x.acc.ours]
    )
    marked = {(row["algorithm"], row["lr"]) for row in table if row["acc_differs"] == "true"}
    assert marked == {("ewc", f"{lr:g}") for lr in ROTATED.lrs}
    decoded = json.loads(str(render(made, "json")))
    assert len(decoded["cells"]) == 10 and {row["algorithm"] for row in decoded["test"]} == {"er", "ewc"}
    text = str(render(made, "markdown"))
    assert text.count("**") == 2 * 5 and "73.18 ± 3.53" in text
    tex = str(render(made, "latex"))
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}") == 2
    assert r"\textcolor{red}{ewc}" in tex and r"\textcolor{blue}{er}" in tex
    assert not set(tex) & set("Δ√²±−§")
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(render(made, "rich"))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert shown.count("73.18 ± 3.53") == 1 and max(map(len, shown.splitlines())) <= width
    assert {path.name for path in write_tables(made, tmp_path / "new")} >= {"table1.md", "table1.tex", "table1.csv"}
    with pytest.raises(GlocalError, match="'xls'"):
        render(made, "xls")


def test_results_in_one_small_file_give_the_same_table(tmp_path: Path) -> None:
    """All rows of a column, with matrices that do not compress."""
    chance = np.random.default_rng(0)
    ours = []
    for row in ROTATED.all_rows:
        for one in runs_of(row.algorithm, 1.0, rise=2.0):
            noisy = np.round(one.arrays["test_class_accuracy"] + chance.normal(0, 0.01, (T + 1, T)), 4)
            arrays = {**one.arrays, "test_class_accuracy": noisy, "test_task_accuracy": noisy}
            ours.append(replace(one, arrays=arrays))
    ours[3] = run(ours[3].config["algorithm"]["name"], ours[3].lr, ours[3].seed, 70, 10, diverged=3)
    path = results.write(ours, tmp_path / "results.parquet")
    assert path.stat().st_size < 2_000_000
    again = results.read(path, path)
    assert len(again) == len(ours)
    for here, there in zip(compare(ours).rows, compare(again).rows, strict=True):
        assert here.acc.ours and there.acc.ours
        assert there.acc.ours.mean == pytest.approx(here.acc.ours.mean, abs=1e-5)
        assert there.forgetting["t"].ours.std == pytest.approx(here.forgetting["t"].ours.std, abs=1e-5)  # type: ignore[union-attr]
        assert (there.diverged, there.seeds) == (here.diverged, here.seeds)
    for one, other in zip(ours, again, strict=True):
        np.testing.assert_allclose(one.arrays["distance_from_init"], other.arrays["distance_from_init"], rtol=1e-6)


def test_results_of_tasks_of_unequal_number_and_both_accuracies(tmp_path: Path) -> None:
    ours = [fake_run("er", tasks=2), fake_run("ewc", tasks=5, setting="task", challenge="split-digits")]
    again = results.read(results.write(ours, tmp_path / "r.parquet"))
    for one, other in zip(ours, again, strict=True):
        for name in results.LISTS:
            np.testing.assert_allclose(one.arrays[name], other.arrays[name], atol=1e-7)


def test_results_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    path, first, second = tmp_path / "r.parquet", run("er", 0.01, 11, 80, 5), run("er", 0.01, 13, 82, 5)
    results.add([first], path)
    results.add([second, run("er", 0.01, 11, 90, 5)], path)
    found = {made.seed: 100 * summary(made)["acc"] for made in results.read(path)}
    assert found == pytest.approx({11: 90, 13: 82})
    results.add([], path)
    assert len(results.read(path)) == 2
    path.write_bytes(b"PAR1")
    with pytest.raises(GlocalError, match="not a result file"):
        results.add([second], path)


ADDING = """import sys
sys.path.insert(0, sys.argv[1])
from test_comparison import run
from glocal.paper import results
for seed in range(8):
    results.add([run(sys.argv[3], 0.01, seed, 80, 5)], sys.argv[2])
"""


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    here = str(Path(__file__).parent)
    both = [subprocess.Popen([sys.executable, "-c", ADDING, here, str(path), name]) for name in ("er", "si")]
    assert [one.wait(120) for one in both] == [0, 0]
    found = results.read(path)
    assert {(x.config["algorithm"]["name"], x.seed) for x in found} == {(a, s) for a in ("er", "si") for s in range(8)}


def test_trends_of_diverged_and_unpaired_runs() -> None:
    """Published, EWC on split-cifar10 forgets 0.14 points more at the two lowest rates than at the two highest."""
    diverged = [run("laplace", lr, 11, 80, 5, diverged=3 if lr > 0.01 else None) for lr in ROTATED.lrs]
    unpaired = [run("er", lr, 11 if lr < 0.01 else 13, 80, 5) for lr in ROTATED.lrs]
    column = COLUMNS["split-cifar10"]
    ewc = {"name": "ewc", "options": dict(column.row("ewc").options)}
    local = [
        replace(split_run(algorithm=ewc), config={**split_run(algorithm=ewc).config, "lr": lr}) for lr in column.lrs
    ]
    trends = {row.algorithm: row for row in compare([*diverged, *unpaired, *local]).trends}
    for name in ("laplace", "er"):
        assert trends[name].trend.seeds == 0 and trends[name].trend.verdict.startswith("not tested")
        assert trends[name].record()["difference"] is None
    assert trends["ewc"].published == pytest.approx(0.14)


def test_published_angles_are_replaced_by_their_name() -> None:
    for method in ("sgd", "er"):
        given = {str(seed): degrees for seed, degrees in table1.published_angles(method).items()}
        one = fake_run()
        challenge = {**one.config["challenge"], "options": {"angles": given}}
        one = replace(one, config={**one.config, "challenge": challenge})
        assert results.with_named_angles(one).config["challenge"]["options"]["angles"] == "published"
        given["11"] = [0.0] * 20
        assert results.with_named_angles(one) == one


def test_files_that_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    with pytest.raises(GlocalError, match=r"r\.parquet"):
        results.read(path)
    path.write_bytes(b"something else")
    with pytest.raises(GlocalError, match="not a result file"):
        results.read(path)
    content = results.write([run("er", 0.01, 11, 80, 5)], path).read_bytes()
    for length in (len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(GlocalError, match="not a result file: it is not a complete") as refused:
            results.read(path)
        assert len(str(refused.value).splitlines()) == 1
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(GlocalError, match="not a result file: it has no column config"):
        results.read(path)
    with pytest.raises(GlocalError, match=r"'r\.txt' was given"):
        results.write([], tmp_path / "r.txt")
