"""Every kind of figure in every format: that it is there, has its size, and shows the data."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import fake_run, sweep
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from glocal.errors import GlocalError, GlocalWarning
from glocal.report.figure import make_figure
from glocal.report.plots import KINDS, drawing
from glocal.report.summary import View, group_runs
from glocal.store.run import Run, Runs

LRS = (0.001, 0.1)


@pytest.fixture
def runs() -> list[Run]:
    return sweep(("er", "ewc"), LRS, (1, 2), lambda a, lr, s: lr + 0.1 * s + 0.1 * (a == "ewc"))


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_png_has_content_and_changes_with_the_data(kind: str, runs: list[Run], tmp_path: Path) -> None:
    first = pixels(Runs(runs).plot(kind, tmp_path / "new" / "folders" / "one.png"))
    height, width, _ = first.shape
    assert 300 <= height <= 900 and 600 <= width <= 1200  # a column or two of a paper, at 150 dots an inch
    assert (first != 255).any(axis=2).mean() > 0.02
    more = sweep(("er", "ewc"), LRS, (1, 2), lambda a, lr, s: 0.5 * lr + 0.2 * s)
    for run in more:
        run.arrays["epoch_loss"][:] = run.arrays["epoch_loss"] * np.linspace(1, 2, 3)[:, None]
        run.arrays["distance_from_init"][:] = run.arrays["distance_from_init"] ** 2
    other = pixels(Runs(more).plot(kind, tmp_path / "other.png"))
    assert other.shape != first.shape or (other != first).any()


def words(runs: list[Run], kind: str, over: str = "lr") -> str:
    """All texts of a figure, without line breaks."""
    figure = make_figure(drawing(runs, kind, over=over))
    return " ".join(" ".join(text.get_text().split()) for text in figure.findobj(Text))


def drawn(runs: list[Run], kind: str) -> list[Axes]:
    figure = Figure()
    KINDS[kind](figure, group_runs(runs), View())
    return figure.axes


def test_lines_pass_through_the_means(runs: list[Run]) -> None:
    """Of three tasks, forgetting over two is ¾ of what is lost, and ACC 90 less half of it; er before ewc."""
    lost = np.array([[lr + 0.15 + 0.1 * (name == "ewc") for lr in LRS] for name in ("er", "ewc")]) * 100
    for kind, expected in (("forgetting", 0.75 * lost), ("accuracy", 90 - lost / 2)):
        lines = [line for line in drawn(runs, kind)[0].lines if line.get_label() in ("er (global)", "ewc (local)")]
        assert np.array([line.get_ydata() for line in lines]) == pytest.approx(expected)
        assert np.array([line.get_xdata() for line in lines]) == pytest.approx(np.array([LRS, LRS]))
        assert [line.get_linestyle() for line in lines] == ["-", "--"]
    paths = [line for line in drawn(runs, "tradeoff")[0].lines if np.size(line.get_xdata()) == 2]
    assert np.array([line.get_xdata() for line in paths]) == pytest.approx(0.75 * lost)
    assert np.array([line.get_ydata() for line in paths]) == pytest.approx(90 - lost / 2)
    paths = [line for line in drawn(runs, "plasticity")[0].lines if np.size(line.get_xdata()) == 2]
    assert np.array([line.get_xdata() for line in paths]) == pytest.approx(np.full_like(lost, 90))
    assert np.array([line.get_ydata() for line in paths]) == pytest.approx(0.75 * lost)


def test_seeds_have_thin_lines_and_means_thick_ones() -> None:
    """Forgetting over two of three tasks is ¾ of what is lost; seed 2 of the high rate diverged."""
    lost = {(0.001, 1): 0.2, (0.001, 2): 0.4, (0.1, 1): 0.6}
    runs = [fake_run("er", lr, seed, lost=x) for (lr, seed), x in lost.items()]
    (axes,) = drawn([*runs, fake_run("er", 0.1, 2, diverged=3)], "forgetting-by-seed")
    *seeds, mean = axes.lines
    assert [np.asarray(line.get_ydata()).tolist() for line in seeds] == [pytest.approx([15, 45]), pytest.approx([30])]
    assert np.asarray(mean.get_ydata()).tolist() == pytest.approx([22.5, 45])
    assert mean.get_linewidth() > 2 * max(line.get_linewidth() for line in seeds)


def test_paths_say_which_learning_rates_they_go_through(runs: list[Run]) -> None:
    assert "points grow with the learning rate, 0.001 to 0.1" in words(runs, "plasticity")
    assert "points grow" not in words([run for run in runs if run.lr == 0.1], "plasticity")


def test_accuracy_over_tasks(runs: list[Run], tmp_path: Path) -> None:
    """After t of three tasks, task o has lost (t − o)/2 of `lost`: on average (t − 1)/4 of it, er before ewc."""
    axes, share = drawn(runs, "accuracy-over-tasks")[0], np.arange(3) / 4
    lost = [100 * (lr + 0.15 + 0.1 * (name == "ewc")) for name in ("er", "ewc") for lr in LRS]
    assert np.array([line.get_ydata() for line in axes.lines]) == pytest.approx(90 - np.outer(lost, share))
    assert all(np.array_equal(line.get_xdata(), [1, 2, 3]) for line in axes.lines)
    for line, band in zip(axes.lines, axes.collections, strict=True):
        x, y = np.asarray(band.get_paths()[0].vertices).T
        last = y[x == 3]
        mean, std = np.asarray(line.get_ydata())[-1], 5 * share[-1]  # of two seeds, one loses 10 points more
        assert (last.min(), last.max()) == pytest.approx((mean - std, mean + std))
    colours = {line.get_color() for line in axes.lines}
    assert len(colours) == 4, "learning rates can be told apart"
    assert "lower learning rate, 0.001 to 0.1" in words(runs, "accuracy-over-tasks")
    assert "learning rate 0.1" in words([fake_run("er", 0.1)], "accuracy-over-tasks")


def test_distances_and_their_ratio_to_sgd(runs: list[Run]) -> None:
    """er and ewc move 20 √lr; SGD moves half and a quarter of that by seed, and did not finish at the high rate."""
    (alone,) = drawn(runs, "distance")
    assert np.array([line.get_ydata() for line in alone.lines]) == pytest.approx(np.array([20 * np.sqrt(LRS)] * 2))
    assert (alone.get_xscale(), alone.get_yscale()) == ("log", "log")
    moved = {1: 10 * LRS[0] ** 0.5, 2: 5 * LRS[0] ** 0.5}
    sgd = [fake_run("sgd", LRS[0], seed, distance=distance) for seed, distance in moved.items()]
    both, ratio = drawn([*runs, *sgd, fake_run("sgd", LRS[1], 1, diverged=1)], "distance")
    er, base, ewc = (line for line in ratio.lines if ")" in str(line.get_label()))
    assert np.array([line.get_ydata() for line in (er, base, ewc)]) == pytest.approx(np.array([[3.0], [1.0], [3.0]]))
    assert [np.size(line.get_xdata()) for line in both.lines if ")" in str(line.get_label())] == [2, 1, 2]
    assert len(drawn([*runs[2:4], *sgd], "distance")[1].lines) < len(ratio.lines)  # er has no rate in common with SGD


def test_the_ratio_to_sgd_is_that_of_runs_that_differ_in_the_algorithm_alone() -> None:
    """er moves two and three times as far as SGD, by the number of tasks."""
    runs = [fake_run("er", distance=ratio * 5.0 * tasks, tasks=tasks) for tasks, ratio in ((2, 2.0), (3, 3.0))]
    runs += [fake_run("sgd", distance=5.0 * tasks, tasks=tasks) for tasks in (2, 3)]
    _, two, _, three = drawn(runs, "distance")
    for axes, ratio in ((two, 2.0), (three, 3.0)):
        lines = {str(line.get_label()): line.get_ydata() for line in axes.lines if ")" in str(line.get_label())}
        assert lines == {"er (global)": pytest.approx([ratio]), "sgd (global)": pytest.approx([1.0])}


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".PNG"])
def test_formats_by_suffix(suffix: str, runs: list[Run], tmp_path: Path) -> None:
    path = Runs(runs).plot("forgetting", tmp_path / f"figure{suffix}")
    assert path.read_bytes()[:5] in (b"%PDF-", b"<?xml", b"\x89PNG\r")


def test_resolution(runs: list[Run], tmp_path: Path) -> None:
    small, large = (pixels(Runs(runs).plot("forgetting", tmp_path / "f.png", dpi=dpi)) for dpi in (100, 300))
    assert large.shape == (3 * small.shape[0], 3 * small.shape[1], 3)
    with pytest.raises(GlocalError, match="dpi = 5 was given; it must be 30 to 1200"):
        Runs(runs).plot("forgetting", tmp_path / "f.png", dpi=5)


def test_words_in_the_figure(runs: list[Run], tmp_path: Path) -> None:
    dead = fake_run("ewc", 0.1, 3, diverged=4)
    svg = Runs([*runs, dead]).plot("forgetting", tmp_path / "figure.svg").read_text()
    for word in (
        "er (global)",
        "ewc (local)",
        "rotated-digits",
        "3 tasks · 2 to 3 seeds",
        "1 of 9 runs diverged",
        "learning rate",
    ):
        assert word in svg, word
    again = Runs([*runs, dead]).plot("forgetting", tmp_path / "again.svg").read_text()
    assert svg == again


def test_matrix_shows_the_most_accurate_rate_and_its_numbers(runs: list[Run], tmp_path: Path) -> None:
    er = [r for r in runs if r.algorithm == "er"]
    svg = Runs(er).plot("matrix", tmp_path / "figure.svg").read_text()
    assert "lr 0.001, best of 2 on test data" in words(er, "matrix")  # it forgets less there, and learns the same
    # seeds lose 0.101 and 0.201 of the first task's 0.9 by the end: 74.9 on average, halfway 82.45
    for number in (">90<", ">82<", ">75<", ">10<", ">20<"):
        assert number in svg, number


def test_a_choice_of_learning_rates_by_test_data_is_stated(runs: list[Run]) -> None:
    for kind in ("matrix", "loss"):
        assert "on test data" in words(runs, kind), kind
        one = [run for run in runs if run.lr == 0.1]
        assert "on test data" not in words(one, kind), "nothing was chosen"


@pytest.mark.parametrize("kind", ["forgetting", "accuracy", "accuracy-over-tasks", "loss", "tradeoff"])
def test_bands_are_named_where_there_are_any(kind: str, runs: list[Run]) -> None:
    assert "± one standard deviation over seeds" in words(runs, kind)
    assert "deviation" not in words([run for run in runs if run.seed == 1], kind)


def test_another_option_than_the_learning_rate() -> None:
    """At a penalty of p, tasks lose 0.1 p; learning rates that differ have lines of their own."""
    runs = [
        fake_run("ewc", lr, seed, lost=0.1 * p, options={"penalty": p, "fisher": "exact"}, label=f"ewc penalty={p:g}")
        for p in (1.0, 2.0, 4.0)
        for lr in LRS
        for seed in (1, 2)
    ]
    figure = make_figure(drawing(runs, "forgetting", over="penalty"))
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {"ewc lr=0.001 (local)", "ewc lr=0.1 (local)"}
    for line in lines.values():
        np.testing.assert_allclose(np.asarray(line.get_xdata(), dtype=float), [1, 2, 4])
        np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), np.array([7.5, 15, 30]))
    assert axes.get_xlabel() == "penalty"
    for kind in KINDS:
        assert "penalty" in words(runs, kind, "penalty"), kind


def test_an_option_that_is_no_number_or_zero_has_a_place_for_each_value() -> None:
    for values, shown in (((10.0, 0.0, 2.0), ["0.0", "2.0", "10.0"]), (("sampled", "exact"), ["exact", "sampled"])):
        runs = [fake_run("ewc", lost=0.1 * i, options={"option": x}) for i, x in enumerate(values)]
        (axes,) = make_figure(drawing(runs, "accuracy", over="option")).axes
        assert [label.get_text() for label in axes.get_xticklabels()] == shown
        (line,) = [line for line in axes.lines if line.get_label() == "ewc (local)"]
        heights = dict(zip(np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata()), strict=True))
        order = sorted(range(len(values)), key=lambda i: shown.index(str(values[i])))
        expected = [90 - 100 * 0.1 * i / 2 for i in order]
        np.testing.assert_allclose([heights[i] for i in range(len(values))], expected)


def test_texts_with_spaces_and_optimizers_to_compare_by() -> None:
    """Every algorithm has one line, through the points of all values."""
    modes = ("big step", "small step", "one")
    runs = [fake_run("er", lost=0.1 * i, options={"mode": x}, label=f"er mode={x}") for i, x in enumerate(modes)]
    (axes,) = make_figure(drawing(runs, "accuracy", over="mode")).axes
    assert [(line.get_label(), len(np.asarray(line.get_xdata()))) for line in axes.lines] == [("er (global)", 3)]
    sgd, adam = fake_run("er"), fake_run("er", label="er · adam")
    adam = replace(adam, config={**adam.config, "optimizer": {"name": "adam", "options": {"beta1": 0.9}}})
    (axes,) = make_figure(drawing([sgd, adam], "accuracy", over="optimizer")).axes
    assert [(line.get_label(), len(np.asarray(line.get_xdata()))) for line in axes.lines] == [("er (global)", 2)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["adam", "sgd"]


def test_options_to_compare_by_that_runs_do_not_have() -> None:
    runs = [fake_run("er"), fake_run("ewc", options={"penalty": 1.0})]
    with pytest.raises(GlocalError, match=r"er has no option 'penalty'.*--where algorithm=ewc,"):
        drawing(runs, "forgetting", over="penalty")
    drawing(Runs(runs).where("algorithm=ewc"), "forgetting", over="penalty")
    adam = replace(runs[0], config={**runs[0].config, "optimizer": {"name": "adam", "options": {"beta1": 0.9}}})
    with pytest.raises(GlocalError, match=r"--where optimizer=adam,"):
        drawing([runs[0], adam], "forgetting", over="beta1")
    for missing in ("peanlty", "seed"):
        with pytest.raises(GlocalError, match=f"unknown option of er to compare its runs by: '{missing}'.*batch_size"):
            drawing(runs, "forgetting", over=missing)


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other, and texts that the figure's border cuts."""
    figure.draw_without_rendering()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in hidden]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    border = figure.bbox
    found = [
        (text, "the border")
        for text, box in boxes
        if box.x0 < border.x0 - 1 or box.x1 > border.x1 + 1 or box.y0 < border.y0 - 1 or box.y1 > border.y1 + 1
    ]
    for i, (one, first) in enumerate(boxes):
        for two, second in boxes[i + 1 :]:
            across = min(first.x1, second.x1) - max(first.x0, second.x0)
            down = min(first.y1, second.y1) - max(first.y0, second.y0)
            if across > 1.5 and down > 1.5:
                found.append((one, two))
    return found


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "look", [{}, {"width": 3.4, "style": "paper"}, {"style": "talk"}], ids=["screen", "paper", "talk"]
)
def test_texts_do_not_overlap(kind: str, look: dict[str, Any]) -> None:
    """Long labels, of two challenges with settings that differ; a column of a paper holds one challenge."""
    lost = {"er": 0.1, "ewc penalty=1000 fisher=sampled": 0.3}
    runs = [
        fake_run(name.split()[0], lr, seed, challenge="split-tinyimagenet-by-10", lost=x, label=name, epochs=epochs)
        for name, x in lost.items()
        for lr in (0.001, 0.01, 0.1)
        for seed in (1, 2)
        for epochs in ((2,) if "width" in look else (2, 3))
    ]
    assert overlapping(make_figure(drawing(runs, kind), **look)) == []


@pytest.mark.parametrize("kind", ["forgetting", "loss", "tradeoff"])
def test_legends_are_whole(kind: str) -> None:
    """Of as many algorithms as there are, one of them with a name that matplotlib would hide."""
    names = ["_own", *(f"method-{i}" for i in range(30))]
    runs = [fake_run(name, lr, label=name) for name in names for lr in (0.001, 0.1)]
    figure = make_figure(drawing(runs, kind))
    assert not any(text == "the border" for _, text in overlapping(figure))
    (legend,) = figure.legends
    assert [text.get_text().split(",")[0].strip() for text in legend.get_texts()][:2] == [
        "_own (local)",
        "method-0 (local)",
    ]
    assert len(legend.get_texts()) == len(names)


@pytest.mark.parametrize("look", [{}, {"width": 3.3}, {"width": 6.0, "style": "talk"}])
def test_learning_rates_of_many_digits_do_not_overlap(look: dict[str, Any]) -> None:
    runs = [fake_run(name, lr) for name in ("sgd", "ewc") for lr in np.logspace(-3, 0, 7).tolist()]
    for kind in ("forgetting", "distance"):
        figure = make_figure(drawing(runs, kind), **look)
        assert overlapping(figure) == []
        assert all(axes.get_window_extent().width > 100 for axes in figure.axes)


def test_ticks_tell_values_apart_and_are_exact_where_they_are_short() -> None:
    for values, shown in (((64, 256, 1024), ["64", "256", "1024"]), ((0.1, 0.10001), ["0.1", "0.10001"])):
        runs = [fake_run("er", options={"option": x}) for x in values]
        (axes,) = make_figure(drawing(runs, "accuracy", over="option")).axes
        assert [label.get_text() for label in axes.get_xticklabels()] == shown


def test_a_seed_that_stops_early_keeps_its_last_objective() -> None:
    """Means of (3, 2, 1) and (5, 1, –) are 4, 1.5 and 1; nothing is drawn where both have stopped."""
    runs = [fake_run("er", seed=seed, tasks=1, epochs=4) for seed in (1, 2)]
    for run, values in zip(runs, ((3, 2, 1, np.nan), (5, 1, np.nan, np.nan)), strict=True):
        run.arrays["epoch_loss"][:] = values
    (axes,) = drawn(runs, "loss")
    heights: np.ndarray = np.ma.filled(np.ma.asarray(axes.lines[0].get_ydata(orig=True), dtype=float), np.nan)
    np.testing.assert_allclose(heights, [4, 1.5, 1, np.nan])
    assert "keeps its last value" in words(runs, "loss")


def test_challenges_with_nothing_to_show_say_so(runs: list[Run]) -> None:
    lost = [fake_run("er", lr, challenge="other", diverged=1) for lr in LRS]
    assert "nothing to show" in words([*runs, *lost], "forgetting")
    with pytest.warns(GlocalWarning, match="all runs of other diverged"):
        drawn([*runs, *lost], "matrix")


def test_width_in_inches(runs: list[Run]) -> None:
    for width in (3.25, 6.75, 12.0):
        figure = make_figure(drawing(runs, "forgetting"), width=width)
        assert figure.get_figwidth() == pytest.approx(width)
    with pytest.raises(GlocalError, match="it must be 2 to 40 inches"):
        make_figure(drawing(runs, "forgetting"), width=500)


def test_notebooks_show_figures(runs: list[Run]) -> None:
    figure = Runs(runs).figure("forgetting", style="talk")
    assert figure._repr_png_()[:4] == b"\x89PNG"  # type: ignore[attr-defined]


def test_regression_is_drawn_by_its_loss(tmp_path: Path) -> None:
    """With the losses 0.1 after learning and, of the first of three tasks, 0.1 more or 0.4 more at the end."""
    lost = {0.001: 0.4, 0.1: 0.1}
    runs = sweep(("er", "ewc"), LRS, (1, 2), lambda a, lr, s: lost[lr], regression=True)
    svg = {k: Runs(runs).plot(k, tmp_path / f"{k}.svg").read_text() for k in KINDS if k != "plasticity"}
    with pytest.raises(GlocalError, match="learning accuracy and forgetting cannot be drawn"):
        Runs(runs).plot("plasticity", tmp_path / "f.svg")
    assert "lr 0.1, best of 2 on test data" in words(runs, "matrix"), "the lower loss"
    for number in (">0.1<", ">0.15<", ">0.2<", ">0.9<"):
        assert number in svg["matrix"], number
    assert not any("(%)" in text or "accuracy" in text or "points," in text for text in svg.values())
    figure = Figure()
    KINDS["accuracy"](figure, group_runs(runs), View())
    er = next(line for line in figure.axes[0].lines if line.get_label() == "er (global)")
    np.testing.assert_allclose(np.asarray(er.get_ydata()), [(0.5 + 0.3 + 0.1) / 3, (0.2 + 0.15 + 0.1) / 3])
    figure = Figure()
    KINDS["forgetting"](figure, group_runs(runs), View())
    er = next(line for line in figure.axes[0].lines if line.get_label() == "er (global)")
    np.testing.assert_allclose(np.asarray(er.get_ydata()), [(0.4 + 0.2) / 2, (0.1 + 0.05) / 2])


def test_regression_beside_classification_keeps_both_scales(runs: list[Run], tmp_path: Path) -> None:
    both = [*runs, *sweep(("er",), LRS, (1,), lambda a, lr, s: lr, challenge="lines", regression=True)]
    for kind in KINDS:
        assert Runs(both).plot(kind, tmp_path / f"{kind}.png").is_file()
    svg = Runs(both).plot("accuracy", tmp_path / "f.svg").read_text()
    assert "(%)" in svg and "test loss" in svg


def test_one_run_one_rate_is_drawn(tmp_path: Path) -> None:
    for kind in KINDS:
        assert Runs([fake_run()]).plot(kind, tmp_path / f"{kind}.png").is_file()


def test_several_challenges_stand_side_by_side(runs: list[Run], tmp_path: Path) -> None:
    both = [*runs, *sweep(("er",), LRS, (1,), lambda a, lr, s: lr, challenge="split-cifar10", tasks=2)]
    for kind in ("loss", "distance"):
        one, two = (pixels(Runs(x).plot(kind, tmp_path / "f.png")).shape for x in (runs, both))
        assert two[0] * two[1] > one[0] * one[1]


def test_many_algorithms_and_tasks(tmp_path: Path) -> None:
    names = [f"algorithm-{i}" for i in range(8)]
    many = sweep(names, (0.1,), (1,), lambda a, lr, s: 0.3, tasks=12)
    svg = Runs(many).plot("accuracy", tmp_path / "f.svg").read_text()
    assert all(f"{name} (local)" in svg for name in names)
    assert ">82<" not in Runs(many[:1]).plot("matrix", tmp_path / "m.svg").read_text()  # too many tasks for numbers


@pytest.mark.skipif(not (shutil.which("xelatex") and shutil.which("pdflatex")), reason="needs LaTeX")
def test_pgf_compiles_with_underscores_and_no_package_but_pgf(runs: list[Run], tmp_path: Path) -> None:
    Runs(runs).plot("distance", tmp_path / "f.pgf", over="batch_size")  # math with indices, and batch_size on an axis
    (tmp_path / "t.tex").write_text(
        r"\documentclass{article}\usepackage{pgf}\begin{document}\input{f.pgf}\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout


def test_errors_teach(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(GlocalError, match="Did you mean 'forgetting'"):
        Runs(runs).plot("forgeting", tmp_path / "f.png")
    with pytest.raises(GlocalError, match=r"Did you mean '\.png'"):
        Runs(runs).plot("forgetting", tmp_path / "f.pngg")
    with pytest.raises(GlocalError, match=r"Allowed: \.pdf, \.pgf, \.png, \.svg"):
        Runs(runs).plot("forgetting", tmp_path / "figure")
    with pytest.raises(GlocalError, match="no runs"):
        Runs([]).plot("forgetting", tmp_path / "f.png")
    with pytest.raises(GlocalError, match="all 1 runs diverged"):
        Runs([fake_run(diverged=1)]).plot("distance", tmp_path / "f.png")
    with pytest.raises(GlocalError, match="undefined"):
        Runs([fake_run(tasks=1)]).plot("forgetting", tmp_path / "f.png")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(GlocalError, match="cannot write"):
        Runs(runs).plot("forgetting", tmp_path / "file" / "f.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(GlocalError, match="cannot write"):
        Runs(runs).plot("forgetting", tmp_path / "folder.png")
    with pytest.raises(GlocalError, match="Did you mean 't-1'"):
        make_figure(drawing(runs, "forgetting", View("t1")))  # type: ignore[arg-type]
