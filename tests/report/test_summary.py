"""Summaries of runs and their formats, on runs whose numbers follow from formulas."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from fake_runs import fake_run, sweep
from rich.console import Console

from glocal.errors import GlocalError
from glocal.report import summary
from glocal.report.summary import View
from glocal.report.table import Cell, Column, Section, Table, mean_std
from glocal.store.run import Run

LRS = (0.001, 0.01, 0.1)
SEEDS = (11, 13, 33)


def forgot(algorithm: str, lr: float, seed: int) -> float:
    """Not monotone in the learning rate, and different for every seed."""
    base = {"er": 0.10, "agem": 0.20, "ewc": 0.30, "ogd": 0.40}[algorithm]
    return base + {0.001: 0.05, 0.01: 0.01, 0.1: 0.08}[lr] + 0.002 * SEEDS.index(seed)


@pytest.fixture
def runs() -> list[Run]:
    second = sweep(("er", "icarl"), (0.01, 0.1), SEEDS, lambda a, lr, s: lr, challenge="split-cifar10", setting="task")
    return sweep(("ogd", "er", "ewc", "agem"), LRS, SEEDS, forgot) + second


def printed(runs: list[Run], width: int, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(summary.render(runs, "rich"))
    return out.getvalue()


def text_of(runs: list[Run], format: str) -> str:
    return str(summary.render(runs, format))


def test_rows_are_the_formulas(runs: list[Run]) -> None:
    rows = summary.rows(runs)
    row = next(r for r in rows if (r["algorithm"], r["lr"], r["challenge"]) == ("ewc", 0.1, "rotated-digits"))
    lost = np.array([forgot("ewc", 0.1, seed) for seed in SEEDS])
    over = lost * 3 / (2 * 2)  # T / (2 (T−1)), T = 3
    assert row["forgetting_mean"] == pytest.approx(100 * over.mean())
    assert row["forgetting_std"] == pytest.approx(100 * over.std())
    assert row["backward_transfer_mean"] == pytest.approx(-100 * over.mean())
    assert row["forward_transfer_mean"] == pytest.approx(10)
    assert row["learning_accuracy_mean"] == pytest.approx(90)
    assert row["acc_mean"] == pytest.approx(90 - 100 * lost.mean() / 2)
    assert row["distance_mean"] == pytest.approx(20 * 0.1**0.5)
    assert (row["seeds"], row["diverged"], row["locality"], row["tasks"]) == (3, 0, "local", 3)
    over_t = next(r for r in summary.rows(runs, View("t")) if (r["algorithm"], r["lr"]) == ("ewc", 0.1))
    assert over_t["forgetting_mean"] == pytest.approx(100 * (lost / 2).mean())


def test_order_is_challenge_then_global_before_local(runs: list[Run]) -> None:
    rows = summary.rows(list(reversed(runs)))
    names = list(dict.fromkeys((row["challenge"], row["algorithm"]) for row in rows))
    digits = [("rotated-digits", name) for name in ("agem", "er", "ewc", "ogd")]
    assert names == [*digits, ("split-cifar10", "er"), ("split-cifar10", "icarl")]
    assert [row["lr"] for row in rows[:3]] == [0.001, 0.01, 0.1]


def test_a_frame_of_no_runs_has_the_columns_of_any_other(runs: list[Run]) -> None:
    assert summary.frame([]).schema == summary.frame(runs).schema


def test_scope_and_measure(runs: list[Run]) -> None:
    own = {r["algorithm"]: r for r in summary.rows(runs) if r["challenge"] == "split-cifar10" and r["lr"] == 0.1}
    other = {r["algorithm"]: r for r in summary.rows(runs, View(scope="class")) if r["challenge"] == "split-cifar10"}
    assert own["er"]["acc_mean"] == pytest.approx(100 * (1 + 0.85) / 2)  # lost 0.1 of 0.9, halfway to 1
    assert other["er"]["acc_mean"] == pytest.approx(85)
    loss = summary.rows([fake_run(lost=0.2)], View(measure="loss"))[0]
    assert loss["forgetting_mean"] == pytest.approx(0.15)  # in the loss's unit: 1 − accuracy
    assert loss["acc_mean"] == pytest.approx(80)


def test_regression_is_measured_by_its_loss() -> None:
    """Of three tasks learnt to the loss 0.1, the first has risen by `lost` at the end and the second by half of it."""
    lost = {0.001: 0.4, 0.1: 0.1}
    runs = [fake_run(lr=lr, seed=seed, lost=lost[lr], regression=True) for lr in lost for seed in (1, 2)]
    for row in summary.rows(runs):
        assert row["loss_mean"] == pytest.approx(0.1 + lost[row["lr"]] / 2) and row["loss_std"] == pytest.approx(0)
        assert row["forgetting_mean"] == pytest.approx(0.75 * lost[row["lr"]])
        assert (row["metric"], row["forgetting_by"], row["acc_mean"]) == ("loss", "loss", None)
    for shown in (printed(runs, 80), text_of(runs, "latex"), text_of(runs, "markdown")):
        assert "0.3" in shown and "0.15" in shown and "0.075" in shown, "the numbers"
        assert "ACC" not in shown and "percent" not in shown and "loss" in shown
    assert "0.15 ± 0*" in " ".join(printed(runs, 80).split()), "the lower loss is the better one"
    text = summary.matrix_table(runs[0]).markdown()
    assert "| `3` | 0.5 | 0.3 | **0.1** |" in text and "Average loss 0.3" in text and "but the last, 0.3." in text
    assert "%" not in text and "nan" not in text


def test_regression_beside_classification() -> None:
    runs = [fake_run(seed=1), fake_run(seed=1, challenge="lines", regression=True)]
    text = printed(runs, 120)
    assert "ACC (↑)" in text and "loss (↓)" in text and "lines: rise in test loss" in " ".join(text.split())
    assert {r["challenge"]: r["acc_mean"] is None for r in summary.rows(runs)} == {
        "lines": True,
        "rotated-digits": False,
    }


def test_diverged_runs_are_counted_and_left_out() -> None:
    alive, dead = fake_run(seed=1, lost=0.2), fake_run(seed=2, lost=0.9, diverged=7)
    row = summary.rows([alive, dead])[0]
    assert (row["seeds"], row["diverged"]) == (2, 1)
    assert row["acc_mean"] == pytest.approx(80) and row["acc_std"] == 0
    lost = summary.rows([dead])[0]
    assert lost["acc_mean"] is None and lost["forgetting_std"] is None and lost["diverged"] == 1
    text = printed([dead], 80)
    assert "diverged" in text and "1 of 1" in text
    assert "diverged & diverged" in text_of([dead], "latex")


def test_one_task_has_no_forgetting_over_the_tasks_before_it() -> None:
    runs = [fake_run(tasks=1)]
    row = summary.rows(runs)[0]
    assert row["forgetting_mean"] is None and row["acc_mean"] == pytest.approx(90)
    assert "–" in printed(runs, 80)


@pytest.mark.parametrize(
    ("other", "labels"),
    [
        ({"tasks": 5}, {"rotated-digits · 3 tasks", "rotated-digits · 5 tasks"}),
        ({"epochs": 1}, {"rotated-digits · 2 epochs", "rotated-digits · 1 epoch"}),
        (
            {"network": {"name": "mlp", "hidden": [10]}},
            {"rotated-digits · hidden 100-100", "rotated-digits · hidden 10"},
        ),
        ({"network": {"name": "linear"}}, {"rotated-digits · hidden 100-100 · mlp", "rotated-digits · linear"}),
    ],
)
def test_what_differs_is_never_averaged(other: dict[str, object], labels: set[str]) -> None:
    rows = summary.rows([fake_run(seed=1), fake_run(seed=2, **other)])  # type: ignore[arg-type]
    assert {row["challenge"] for row in rows} == labels
    assert [row["seeds"] for row in rows] == [1, 1]


def test_hashes_of_a_users_network_are_shown_only_if_its_name_does_not_tell_it_apart() -> None:
    networks = [{"name": name, "source": "052ac9f9a6b892b4", "made": name * 5} for name in ("cnn", "vit")]
    networks += [{"name": "cnn", "source": "052ac9f9a6b892b4", "made": "57eb4977e5bf5947"}]
    runs = [fake_run(network=network) for network in networks]
    assert {row["challenge"] for row in summary.rows(runs[:2])} == {"rotated-digits · cnn", "rotated-digits · vit"}
    names = {"rotated-digits · made cnncnncnncnncnn", "rotated-digits · made 57eb4977e5bf5947"}
    assert {row["challenge"] for row in summary.rows([runs[0], runs[2]])} == names


def test_defaults_of_another_optimizer_are_no_part_of_a_label() -> None:
    plain, adam = fake_run("er"), fake_run("er", label="er · adam")
    adam = replace(adam, config={**adam.config, "optimizer": {"name": "adam", "options": {"beta1": 0.9, "eps": 1e-8}}})
    assert [group.algorithm for group in summary.group_runs([plain, adam])] == ["er", "er · adam"]


def test_options_that_the_label_hides_are_shown() -> None:
    rows = summary.rows([fake_run("ewc", options={"penalty": x}) for x in (1.0, 10.0)])
    assert [row["algorithm"] for row in rows] == ["ewc penalty=1", "ewc penalty=10"]
    assert {row["challenge"] for row in rows} == {"rotated-digits"}


def test_a_default_that_differs_is_shown_and_numbers_are_in_order() -> None:
    """The label of a run leaves defaults out."""
    labels = {100.0: "ewc", 20.0: "ewc penalty=20", 3.0: "ewc penalty=3"}
    runs = [fake_run("ewc", options={"penalty": x, "fisher": "exact"}, label=label) for x, label in labels.items()]
    assert [row["algorithm"] for row in summary.rows(runs)] == ["ewc penalty=3", "ewc penalty=20", "ewc penalty=100"]
    assert summary.rows(runs[:1])[0]["algorithm"] == "ewc", "nothing differs"


def test_only_what_can_be_compared_is_marked() -> None:
    one, two = [fake_run("er", 0.1)], [fake_run("er", 0.1), fake_run("er", 0.2, lost=0.2)]
    assert "*" not in printed(one, 80) and "Bold" not in printed(one, 80)
    assert printed(two, 80).count("*") == 3, "accuracy, forgetting, and the note that explains the mark"
    assert "\n*: the best values" in printed(two, 80) and "Bold" not in printed(two, 80)
    for other in (printed(two, 80, color=True), text_of(two, "latex"), text_of(two, "markdown")):
        assert "Bold: the best values" in other and "*:" not in other


def test_numbers_that_agree_in_the_digits_of_a_label_are_not_averaged() -> None:
    values, label = (0.5000001, 0.5000004), "ewc penalty=0.5"
    runs = [fake_run("ewc", seed=s, options={"penalty": x}, label=label) for x in values for s in (1, 2)]
    rows = summary.rows(runs)
    assert [row["seeds"] for row in rows] == [2, 2]
    assert all(str(x) in row["algorithm"] for x, row in zip(values, rows, strict=True))


def test_a_setting_that_stands_twice_in_a_configuration_is_shown_once() -> None:
    runs = []
    for setting in ("class", "task"):
        run = fake_run("er", setting=setting)
        challenge = run.config["challenge"] | {"setting": setting, "options": {"setting": setting}}
        runs.append(replace(run, config={**run.config, "challenge": challenge}))
    names = {"rotated-digits · setting class", "rotated-digits · setting task"}
    assert {row["challenge"] for row in summary.rows(runs)} == names


def test_options_may_differ_between_challenges() -> None:
    runs = [fake_run("ewc", challenge=c, options={"penalty": x}) for c, x in (("a", 0.7), ("b", 10.0))]
    assert {row["algorithm"] for row in summary.rows(runs)} == {"ewc"}


def test_the_same_run_counts_once() -> None:
    assert summary.rows([fake_run(), fake_run()])[0]["seeds"] == 1


def test_json_is_strict_and_whole(runs: list[Run]) -> None:
    runs = [*runs, fake_run("er", 1.0, diverged=3)]
    rows = summary.rows(runs)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(text_of(runs, "json"), parse_constant=refuse) == rows
    assert any(row["acc_mean"] is None for row in rows)


def test_csv_and_frame_agree(runs: list[Run]) -> None:
    runs = [*runs, fake_run("er", 1.0, diverged=3)]
    rows = summary.rows(runs)
    read = pl.read_csv(io.StringIO(text_of(runs, "csv")), infer_schema_length=None)
    assert read.to_dicts() == rows
    assert summary.frame(runs).to_dicts() == rows
    assert summary.frame([]).is_empty()


def shown(rows: list[summary.Row]) -> list[str]:
    """Every 'mean ± std' that the table must hold."""
    return [f"{r[f'{n}_mean']:.2f} ± {r[f'{n}_std']:.2f}" for r in rows for n in ("acc", "forgetting")]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_terminal_holds_every_number(runs: list[Run], width: int, color: bool) -> None:
    runs = [*runs, *sweep(("er",), LRS, SEEDS, forgot, challenge="a-third-challenge", tasks=7)]
    rows = summary.rows(runs)
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(runs, width, color))
    for number in shown(rows):
        assert number in re.sub(r" +", " ", text), number
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("(global)", "(local)", "0.001", "ACC (↑)", "FGT (↓)", "3 seeds", "T−1 tasks", "task-incremental"):
        assert word in text, word
    assert "–" in text or width == 80  # icarl has no runs on the challenge beside its own


def test_the_best_are_bold_and_starred(runs: list[Run]) -> None:
    rows = summary.rows(runs)
    families: defaultdict[tuple[str, str], list[summary.Row]] = defaultdict(list)
    for row in rows:
        families[row["challenge"], row["algorithm"]].append(row)
    acc = [f"{max(r['acc_mean'] for r in family):.2f}" for family in families.values()]
    fgt = [f"{min(r['forgetting_mean'] for r in family):.2f}" for family in families.values()]
    assert sorted(re.findall(r"mathbf\{([0-9.]+)\}", text_of(runs, "latex"))) == sorted(acc + fgt)
    assert sorted(re.findall(r"([0-9.]+) ± +[0-9.]+\*", printed(runs, 120))) == sorted(acc + fgt)
    bold = re.findall(r"\x1b\[1m *([0-9]+\.[0-9]+)\x1b\[0m", printed(runs, 120, color=True))
    assert sorted(bold) == sorted(acc + fgt)


def test_colours_are_the_papers(runs: list[Run]) -> None:
    text = printed(runs, 120, color=True)
    assert re.search(r"\x1b\[1;34mer", text) and re.search(r"\x1b\[1;31mewc", text)
    latex = text_of(runs, "latex")
    assert r"\textcolor{blue}{er} (global)" in latex and r"\textcolor{red}{ogd} (local)" in latex


def test_latex_is_rectangular(runs: list[Run]) -> None:
    latex = text_of(runs, "latex")
    body = latex.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 4 * 3 + 2  # four algorithms at three rates on one challenge or both; icarl at two
    assert {line.count("&") for line in lines} == {1 + 2 * 2}
    assert r"\begin{tabular}{llrrrr}" in latex
    assert latex.count(r"\midrule") == 5  # above each of agem, er, ewc, icarl, ogd
    assert latex.count("{") == latex.count("}")
    assert latex.count(r"\multirow{3}") == 4


def test_latex_escapes() -> None:
    latex = text_of([fake_run("ewc", label="my_ewc 50% & #1 a>b", tasks=3), fake_run("er", tasks=4)], "latex")
    assert r"my\_ewc 50\% \& \#1 a$>$b" in latex and r"rotated-digits $\cdot$ 3 tasks" in latex


def test_negative_numbers_have_a_minus_sign_in_latex() -> None:
    """Of one seed too, which has no deviation: −0.1 T / (2 (T − 1)) = −7.5 points over T − 1 = 2 tasks."""
    latex = text_of([fake_run("er", lost=-0.1)], "latex")
    assert "$-7.50$" in latex and " -7.50" not in latex


def test_markdown_holds_every_number_and_the_cost(runs: list[Run]) -> None:
    rows = summary.rows(runs)
    page = text_of(runs, "markdown")
    for challenge in {row["challenge"] for row in rows}:
        own = [row for row in rows if row["challenge"] == challenge]
        part = page.split(f"### {challenge}", 1)[1].split("###")[0]
        lines = {line.split("`")[1]: line for line in part.splitlines() if line.startswith("| `")}
        assert set(lines) == {row["algorithm"] for row in own}
        assert len({line.count("|") for line in lines.values()}) == 1
        for row in own:
            line = lines[row["algorithm"]]
            assert f"{row['acc_mean']:.2f}" in line and f"{row['forgetting_mean']:.2f}" in line
            assert row["locality"] in line and "1.5 kB" in line and "2 s" in line


def test_names_do_not_break_markdown() -> None:
    lines = text_of([fake_run("a|b `c`", label="a|b `c`")], "markdown").splitlines()
    rows = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1 and "`` a\\|b `c` ``" in "\n".join(lines)


def test_latex_has_powers_of_ten() -> None:
    cells = (Cell("3.5e-09", "1e-10"), Cell("[−2e−05, +3e+07]"), Cell("12.5"), Cell("type1e-x"))
    tex = Table(tuple(map(Column, "abcd")), (Section("sgd", "", (cells,)),)).latex()
    assert r"$3.5\times10^{-9}_{\,\textcolor{gray}{\pm\,1\times10^{-10}}}$" in tex
    assert r"[$-$2$\times10^{-5}$, +3$\times10^{7}$]" in tex and "& 12.5 & type1e-x" in tex


def test_a_mean_that_rounds_to_zero_has_no_sign() -> None:
    assert str(mean_std(-0.001, 0.002)).startswith("0.00") and str(mean_std(-0.01, None)).startswith("-0.01")
    assert "-0.00" not in text_of([fake_run(lost=-1e-5), fake_run(lost=-2e-5, seed=1)], "markdown")


def test_the_papers_test_with_one_verdict_per_algorithm() -> None:
    """Of three tasks, forgetting over two is ¾ of what is lost: 0.1 per step of the learning rate is 7.5 points."""
    lrs, sign = (0.001, 0.01, 0.05, 0.1), {"ewc": 1, "ogd": -1, "er": 1, "icarl-random": 1}
    runs = sweep(sign, lrs, SEEDS, lambda a, lr, s: 0.4 + sign[a] * 0.1 * lrs.index(lr) + 0.001 * (s - 11))
    rows = {row.algorithm: row.trend for row in summary.trends(summary.group_runs(runs))}
    assert {name: trend.difference for name, trend in rows.items()} == pytest.approx(
        {"ewc": -15, "ogd": 15, "er": -15, "icarl-random": -15}
    )
    verdicts = {"ewc": "supports the paper", "ogd": "contradicts the paper", "er": "forgets more at high lr"}
    verdicts |= {"icarl-random": "contradicts the paper"}  # which predicts no difference for it
    assert {name: trend.verdict for name, trend in rows.items()} == verdicts
    for text in (printed(runs, 100), text_of(runs, "markdown"), text_of(runs, "latex")):
        assert all(verdict in text for verdict in verdicts.values()) and "15.00" in text
    assert summary.trends(summary.group_runs(run for run in runs if run.lr < 0.1)) == []


def test_matrix_of_one_run() -> None:
    """Each of three tasks is learnt to 90 % and then loses 10 points per task."""
    text = summary.matrix_table(fake_run("er", learnt=0.9, lost=0.2)).markdown()
    assert "| `1` | **90.0** | 20.0 | 20.0 |" in text and "| `3` | 70.0 | 80.0 | **90.0** |" in text
    assert "Average accuracy 80.00; forgetting, over all tasks but the last, 15.00." in text
    assert "diverged by step 7" in summary.matrix_table(fake_run(diverged=7)).markdown()
    assert len(summary.matrix_table(fake_run(tasks=20)).columns) == summary.MAX_MATRIX_TASKS


def test_learning_rates_are_plain() -> None:
    assert "0.00001 " in printed([fake_run(lr=1e-5)], 80)


@pytest.mark.parametrize("format", ["rich", "json", "csv", "latex", "markdown"])
def test_nothing_can_be_rendered(format: str) -> None:
    assert summary.render([], format) is not None
    assert "No runs" in printed([], 80)


def test_errors_teach() -> None:
    with pytest.raises(GlocalError, match="Did you mean 'json'"):
        summary.render([], "jsn")
    with pytest.raises(GlocalError, match="Did you mean 't-1'"):
        summary.rows([fake_run()], View("t-2"))  # type: ignore[arg-type]
    with pytest.raises(GlocalError, match="unknown scope 'everything'"):
        summary.rows([fake_run()], View(scope="everything"))  # type: ignore[arg-type]
    with pytest.raises(GlocalError, match="Did you mean 'loss'"):
        summary.rows([fake_run()], View(measure="los"))  # type: ignore[arg-type]


def test_tables_do_not_import_matplotlib() -> None:
    code = "import sys, glocal.report.summary, glocal.report.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
