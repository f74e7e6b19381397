"""The study of Theorem 5.1: its rows against outputs' differentials, its figure and sentences from made-up rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import functional_call

from glocal.lens.training_trace import TrainingTrace
from glocal.paper import get_study
from glocal.paper.studies.common import record_item
from glocal.paper.studies.theorems import DEMO, PANELS
from glocal.paper.study import Context, Row

STUDY = get_study("theorem2")
SMALL = DEMO | {"hidden": [6, 6], "epochs": 1, "batch_size": 400, "examples": 40, "lrs": (0.3,), "seeds": (13, 33)}


def test_rows_are_quadratics_along_the_updates(tmp_path: Path) -> None:
    context = Context(torch.device("cpu"), None, tmp_path)
    item = {"algorithm": "ogd", "options": {"slots": 60}, **SMALL}
    rows = STUDY.measure(item, context)
    assert [(row["seed"], row["t"]) for row in rows] == [(13, 2), (13, 3), (33, 2), (33, 3)]
    assert all(row.keys() == rows[0].keys() for row in rows)
    for (_, run), row in zip(record_item(item, context), rows[::2], strict=True):
        trace = run.trace
        _, before, after = (s.params for s in trace.checkpoints[:3])
        x, _ = trace.tasks[0]
        update = {k: after[k] - p for k, p in before.items()}

        def network(*values: torch.Tensor, trace: TrainingTrace = trace, x: torch.Tensor = x) -> torch.Tensor:
            named = dict(zip(trace.checkpoints[0].params, values, strict=True))
            return functional_call(trace.module, named, (x,))

        outputs, moved = torch.autograd.functional.jvp(network, tuple(before.values()), tuple(update.values()))
        p = outputs.softmax(-1)
        curvature = (p * moved.square()).sum(-1) - (p * moved).sum(-1).square()  # vᵀ (diag(p) − p pᵀ) v
        assert row["outer"] == pytest.approx(float(curvature.mean()), rel=1e-3)
        length = sum(float(u.square().sum()) for u in update.values()) ** 0.5
        assert row["length"] == pytest.approx(length, rel=1e-4)
    for row in rows:
        outer, functional, whole = (float(row[name] or 0) for name in ("outer", "functional", "hessian"))
        assert whole == pytest.approx(outer + functional, rel=1e-9)
        assert row["rayleigh"] == pytest.approx(whole / float(row["length"] or 0) ** 2, rel=1e-6)
    first = rows[0]
    share = abs(float(first["functional"] or 0)) / (float(first["outer"] or 0) + abs(float(first["functional"] or 0)))
    assert first["functional_share"] == pytest.approx(100 * share)


def made_up(left: float, diverged: bool = False) -> pl.DataFrame:
    """OGD's quadratic is a tenth of plain SGD's, and its forgetting has a part `left` of it."""
    rows: list[Row] = []
    for algorithm, locality, part, forgotten in (("sgd", "global", 1.0, 1.0), ("ogd", "local", 0.1, left)):
        for lr in (0.01, 0.1):
            for seed in (1, 2):
                for t in (2, 3):
                    gone = diverged and (algorithm, lr, seed) == ("ogd", 0.1, 2)
                    numbers = dict.fromkeys((*PANELS, "functional", "rayleigh"), np.nan if gone else 1.0)
                    if not gone:
                        numbers |= {"hessian": 100 * lr * part, "outer": 90 * lr * part, "functional_share": 10.0}
                        numbers |= {"forgetting": 10 * lr * forgotten}
                    who: Row = {"algorithm": algorithm, "locality": locality, "lr": lr, "seed": seed, "t": t}
                    rows.append(who | dict(numbers))
    return pl.DataFrame(rows)


def test_the_summary_follows_the_rows() -> None:
    summary = STUDY.summarize(made_up(0.5))
    table = {(row["algorithm"], row["lr"]): row for row in summary.table}
    assert table["ogd", 0.1]["Δᵀ H Δ"] == pytest.approx(1.0) and table["sgd", 0.01]["Δᵀ G Δ"] == pytest.approx(0.9)
    assert table["sgd", 0.01]["functional part (%)"] == 10.0
    assert "leaves 0.1 of SGD's Δᵀ G Δ on all inputs and 0.5 of its forgetting" in summary.verdict
    assert "1 of 8 runs diverged" in STUDY.summarize(made_up(0.5, diverged=True)).verdict
    alone = made_up(0.5).filter(algorithm="ogd", lr=0.1)
    assert "are needed" in STUDY.summarize(alone).verdict


@pytest.mark.parametrize("diverged", [False, True])
def test_figure_has_a_line_for_each_algorithm_in_every_panel(diverged: bool) -> None:
    figure = Figure()
    STUDY.draw(made_up(0.5, diverged), figure)
    assert [axes.get_title() for axes in figure.axes] == list(PANELS.values())
    first = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines}
    assert first == {"sgd (global)": pytest.approx([1, 10]), "ogd (local)": pytest.approx([0.1, 1])}
    assert all(len(axes.lines) == 2 for axes in figure.axes)
    assert figure.axes[0].get_yscale() == "log"
