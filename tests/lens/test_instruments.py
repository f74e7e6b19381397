"""Every instrument by its name: exact where losses are quadratics, and drawn from its rows."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from quadratics import anywhere, dense_hessian, network
from rich.console import Console
from torch import nn

from glocal.cli.main import main
from glocal.errors import GlocalError
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.examination import examine_trace
from glocal.lens.instruments import INSTRUMENTS, NUM_BINS, Measurement, measure
from glocal.lens.taylor import EXPANSIONS
from glocal.lens.training_trace import TrainingTrace
from glocal.paper.study import read_table
from glocal.report.lens_figures import draw_measurement, measurement_table

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def small() -> TrainingTrace:
    return network(seed=3, tasks=3, step=0.4)


@pytest.fixture(scope="module")
def looks(small: TrainingTrace) -> dict[str, Measurement]:
    return {name: measure(small, name) for name in INSTRUMENTS}


Row = dict[str, str | int | float | bool | None]


def number(row: Row, name: str) -> float:
    found = row[name]
    assert isinstance(found, int | float)
    return found


def test_quadratics_have_no_error_and_are_foretold() -> None:
    trace = anywhere(seed=1, tasks=4).trace
    second = [row for row in measure(trace, "error").rows if row["expansion"] == "order 2"]
    assert len(second) == 1 + 2 + 3 and max(number(row, "error") for row in second) < 1e-9
    assert max(number(row, "min_epsilon") for row in measure(trace, "assumption").rows) < 1e-9
    pairs = measure(trace, "forgetting").rows
    assert [(row["learned"], row["task"]) for row in pairs] == [(t, o) for t in (2, 3, 4) for o in range(1, t)]
    for row in pairs:
        assert number(row, "predicted") == pytest.approx(number(row, "measured"), rel=1e-9)
        assert number(row, "gradient_share") + number(row, "quadratic_share") == pytest.approx(1)
    for row in measure(trace, "recursion").rows:
        terms = sum(number(row, k) for k in ("before", "gradient", "quadratic", "v"))
        assert number(row, "predicted") == pytest.approx(number(row, "measured"), rel=1e-9)
        assert number(row, "predicted") == pytest.approx(terms, rel=1e-9)


def test_the_smallest_epsilon_is_the_largest_error(looks: dict[str, Measurement]) -> None:
    errors = [row for row in looks["error"].rows if row["expansion"] == "order 2"]
    assert [row["learned"] for row in looks["assumption"].rows] == [2, 3]
    for row in looks["assumption"].rows:
        own = {other["task"]: other["error"] for other in errors if other["learned"] == row["learned"]}
        assert row["min_epsilon"] == max(own.values()) and own[row["task"]] == row["min_epsilon"]  # type: ignore[type-var]


def test_orders_are_those_of_a_smooth_loss(looks: dict[str, Measurement]) -> None:
    found = {row["expansion"]: row["order"] for row in looks["error"].rows}
    for i, name in enumerate(("order 0", "order 1", "order 2")):
        assert found[name] == pytest.approx(i + 1, abs=0.4)


def test_expansions_by_all_forms_of_the_hessian(looks: dict[str, Measurement]) -> None:
    """What a form leaves out of the Hessian is of the second order, as all of it is for an expansion of order 1."""
    found = {row["expansion"]: number(row, "order") for row in looks["error"].rows}
    assert list(found) == list(EXPANSIONS)
    for name in ("order 2, low-rank", "order 2, kronecker", "order 2, diagonal"):
        assert found[name] == pytest.approx(found["order 1"], abs=0.5)


def test_a_spectrum_is_counted(small: TrainingTrace, looks: dict[str, Measurement]) -> None:
    values = torch.linalg.eigvalsh(dense_hessian(small, 0) / 2)  # one task, before a second
    radius = float(values.abs().max())
    expected, edges = np.histogram(values.numpy(), NUM_BINS, (-radius, radius))
    own = [row for row in looks["spectrum"].rows if row["tasks"] == 1]
    np.testing.assert_allclose([number(row, "eigenvalue") for row in own], (edges[1:] + edges[:-1]) / 2, rtol=1e-5)
    counts = np.array([number(row, "number_of_eigenvalues") for row in own])
    assert counts.sum() == pytest.approx(len(values)) and np.abs(np.cumsum(counts - expected)).max() < 0.01


def test_curvature_is_that_of_dense_matrices(small: TrainingTrace, looks: dict[str, Measurement]) -> None:
    values = [torch.linalg.eigvalsh(dense_hessian(small, o)) for o in range(3)]
    for row, own in zip(looks["flatness"].rows, values, strict=True):
        assert row["top"] == pytest.approx(float(own.max()), rel=1e-6)
        assert row["trace"] == pytest.approx(float(own.sum()), abs=4 * number(row, "trace_error") + 1e-9)
    whole = torch.stack([dense_hessian(small, o) for o in range(3)]).sum(0)
    average = torch.linalg.eigvalsh(whole / 4)  # three tasks, before a fourth
    (row,) = [r for r in looks["rank"].rows if (r["tasks"], r["definition"]) == (3, "|λ| > 0.01")]
    assert row["rank"] == int((average.abs() > 0.01).sum()) and row["error"] == 0


def test_what_theorem_2_adds_up(looks: dict[str, Measurement]) -> None:
    rows = looks["theorem2"].rows
    assert [(row["learned"], row["task"]) for row in rows] == [(2, 1), (3, 1), (3, 2)]
    for row in rows:
        parts = number(row, "outer") + number(row, "functional")
        assert row["hessian"] == pytest.approx(parts)


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_every_row_is_drawn(name: str, looks: dict[str, Measurement], tmp_path: Path) -> None:
    found = looks[name]
    how, figure = found.instrument, Figure(layout="constrained")
    assert found.rows and all(set(row) == set(found.rows[0]) for row in found.rows)
    draw_measurement(found, figure)
    named = [axes.get_ylabel() or [x.get_label() for x in axes.lines] for axes in figure.axes]
    words = [line.replace("_", " ") for line in how.y]
    assert named == (words if how.group or len(words) == 1 else [words])
    drawn = {line: figure.axes[i if how.group else 0].lines for i, line in enumerate(how.y)}
    for i, line in enumerate(how.y):
        finite = [r for r in found.rows if all(math.isfinite(number(r, k)) for k in (how.x, line))]
        shown = [r for r in finite if how.scale != "log" or min(number(r, how.x), number(r, line)) > 0]
        own = drawn[line] if how.group else [drawn[line][i]]
        assert sum(np.size(x.get_xdata()) for x in own) == len(shown) > 0
    assert found.plot(tmp_path / "f.svg").stat().st_size > 1000


def test_one_task_has_what_one_task_can_have() -> None:
    trace = network(seed=2, tasks=1)
    for name in INSTRUMENTS:
        rows = measure(trace, name).rows
        assert bool(rows) is (name in ("ground-truth", "perturbation", "flatness", "rank", "spectrum")), name


OWN = """
import copy, torch
from torch import nn

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    tasks = [(torch.randn(20, 3), torch.randint(2, (20,))) for _ in range(2)]
    states = [copy.deepcopy(net.state_dict())]
    for x, y in tasks:
        for _ in range(5):
            loss = nn.functional.cross_entropy(net(x), y)
            for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
                p.data -= 0.5 * g
        states.append(copy.deepcopy(net.state_dict()))
    return net, "cross-entropy", tasks, states
"""


SINGLE = """class Single(nn.Module):
    def forward(self, x):
        return x @ torch.ones(1, 1)

def make"""


HINGE = """class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, slope):
        return slope * (ctx.saved_tensors[0] > 0)

class Hinge(nn.Module):
    def forward(self, x):
        return Once.apply(x)

def make"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    asked = ["lens", f"{file}:make", "-o", str(tmp_path / "new" / "a.png"), "--device", "cpu", "--show"]
    assert main([*asked, "recursion", "rank", "recursion"]) == 0
    out = capsys.readouterr().out
    assert "forgetting, predicted and measured" in out and out.count("Wrote") == 2
    assert {p.name for p in (tmp_path / "new").iterdir()} == {
        "a-recursion.png",
        "a-recursion.parquet",
        "a-rank.png",
        "a-rank.parquet",
    }
    (row,) = read_table(tmp_path / "new" / "a-recursion.parquet").to_dicts()
    assert row["learned"] == 2 and row["predicted"] == pytest.approx(row["gradient"] + row["quadratic"], rel=1e-4)
    for given in (["--epsilon", "0.1"], ["--eigenvalues", "3"], ["--seed", "1"]):
        assert main([*asked, "rank", *given]) == 2
        assert f"{given[0]} " in capsys.readouterr().err
    assert main([*asked, "theorem3"]) == 2
    assert "'theorem3'" in (said := capsys.readouterr().err) and "theorem" in said and len(said.splitlines()) == 1


def test_who_cannot_be_used_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One output has no Hessian with a true label's entry; and a network of single precision no order in double."""
    file = tmp_path / "own.py"
    own = {
        "nn.Linear(4, 2))": "nn.Linear(4, 1), Single())",
        "cross_entropy": "mse_loss",
        "cross-entropy": "squared-error",
        "torch.randint(2, (20,))": "torch.randn(20, 1)",
        "def make": SINGLE,
    }
    single = OWN
    for old, new in own.items():
        single = single.replace(old, new)
    file.write_text(single)
    asked = ["lens", f"{file}:make", "-o", str(tmp_path / "a.png"), "--device", "cpu", "--show"]
    assert main([*asked, "ground-truth", "error", "flatness", "perturbation"]) == 2
    out, err = capsys.readouterr()
    assert "2 of 4 instruments failed. ground-truth: outputs have the shape" in err and out.count("Wrote") == 2
    assert "perturbation: perturbed losses are computed in float64, where the network fails: " in err
    assert all(math.isnan(number(row, "order")) for row in read_table(tmp_path / "a-error.parquet").to_dicts())


def test_a_network_that_is_not_differentiated_twice_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("nn.Tanh()", "Hinge()").replace("def make", HINGE))
    assert main(["lens", f"{file}:make", "-o", str(tmp_path / "a.png"), "--device", "cpu"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("glocal:")]
    assert len(said) == 1 and "layers that can be differentiated twice: " in said[0]


def test_a_target_may_import_what_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As if it were run itself; what names a run may not."""
    (tmp_path / "made_beside.py").write_text(OWN)
    file = tmp_path / "own.py"
    file.write_text("from made_beside import make\nfrom glocal.algorithms import SGD\n\nclass Mine(SGD):\n    pass\n")
    looked, before = ["lens", f"{file}:make", "-o", str(tmp_path / "a.png"), "--device", "cpu"], [*sys.path]
    assert main(["run", "rotated-digits", f"{file}:Mine", "--lr", "0.1", "--store", str(tmp_path / "s")]) == 2
    assert "identified by one file: put made_beside.py into it, or install made_beside" in " ".join(
        capsys.readouterr().err.split()
    )
    assert sys.path == before
    try:
        assert main(looked) == 0
    finally:
        sys.path[:] = before
    assert (tmp_path / "a.png").stat().st_size > 0


def test_layers_without_second_derivatives_are_told_in_python_too() -> None:
    bag = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 2))
    states = [{k: p + 0.1 * t for k, p in bag.state_dict().items()} for t in range(3)]
    tasks = [(torch.randint(5, (8, 3)), torch.arange(8) % 2) for _ in range(2)]
    for asked in (lambda s: measure(s, "theorem1"), lambda s: examine_trace(s, 0.1)):
        with pytest.raises(GlocalError, match="differentiated twice"):
            asked(trace_checkpoints(bag, "cross-entropy", tasks, states))


def test_an_empty_panel_leaves_its_neighbour_alone() -> None:
    for name in ("forgetting", "theorem2", "perturbation"):
        how, figure = INSTRUMENTS[name], Figure()
        rows: list[Row] = [{how.x: x, how.y[0]: 0.5 * x, how.y[1]: math.nan, "task": 0} for x in (1, 2, 3)]
        draw_measurement(Measurement(name, how, rows), figure)
        full, empty = figure.axes[:2]
        assert len(full.get_yticks()) > 1 and not full.texts and len(empty.texts) == 1


def test_a_figure_of_no_numbers_says_so(tmp_path: Path) -> None:
    for name, how in INSTRUMENTS.items():
        row: Row = {how.x: 1, **dict.fromkeys(how.y, math.nan), **({how.group: 0} if how.group else {})}
        figure = Figure()
        draw_measurement(Measurement(name, how, [row]), figure)
        assert all([t.get_text() for t in axes.texts] == ["no numbers to draw"] for axes in figure.axes)
        assert Measurement(name, how, [row]).plot(tmp_path / "f.png").stat().st_size > 0


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_break_no_word(width: int, looks: dict[str, Measurement]) -> None:
    for found in looks.values():
        text = io.StringIO()
        Console(width=width, file=text).print(measurement_table(found))
        words = set(text.getvalue().split())
        assert {word for name in found.rows[0] for word in name.split("_")} <= words
        cells = {f"{x:.3g}" if isinstance(x, float) else str(x) for row in found.rows for x in row.values()}
        assert {word for cell in cells for word in cell.split()} <= words


def test_counts_are_whole_numbers_on_their_axis() -> None:
    figure = Figure()
    row: Row = {"learned": 2, "min_epsilon": 0.5, "task": 1}
    draw_measurement(Measurement("assumption", INSTRUMENTS["assumption"], [row]), figure)
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_no_such_instrument(small: TrainingTrace) -> None:
    with pytest.raises(GlocalError, match=r"instrument 'flatnes'\. Did you mean 'flatness'"):
        measure(small, "flatnes")
