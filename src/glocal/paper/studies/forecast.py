"""Does the lens predict the winner? Measurements of a run of plain SGD against the outcomes of other algorithms.

docs/experiments/forecast.md registers the settings, the predictors, the targets and the decision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from glocal import challenges
from glocal.challenges.challenge import Challenge
from glocal.curvature.lanczos import lanczos
from glocal.lens.examination import Examination, examine_trace
from glocal.lens.record import RecordedRun
from glocal.lens.training_trace import Checkpoint, TrainingTrace, distance, dot
from glocal.networks import mlp
from glocal.paper import table1
from glocal.paper.studies import common
from glocal.paper.studies.common import MeanInterval, column
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, legend
from glocal.report.summary import DEFAULT_VIEW, run_statistics
from glocal.tree import to_vector

LOCAL, REPLAY = ("ewc", "laplace", "ogd-gtl"), "er"
IMPLICIT = "laplace-implicit"
"""`laplace` with implicit steps, which replaces `laplace` in a second reading of the results."""
LARGE_REPLAY = "er-large"
"""`er` with as many examples as take the memory of `laplace` with implicit steps."""
FULL: WorkItem = {"challenge": "rotated-mnist", "tasks": 10, "batch_size": 128, "examples": 2_000}
FULL |= {"lrs": [0.003, 0.01, 0.03, 0.1], "seeds": list(table1.SEEDS[:3])}
DEMO: WorkItem = FULL | {"challenge": "rotated-digits", "tasks": 3, "batch_size": 128, "examples": 200}
DEMO |= {"lrs": [0.03, 0.3], "seeds": [11]}
GRID = {False: ((1, 5), (30, 90, 180), (100, 400)), True: ((1,), (30, 180), (16,))}
"""Epochs, ranges of angles in degrees, and widths, by whether it is the demo."""
SETTING = ["lr", "epochs", "angles", "width"]
LENS = ["error", "break_time", "radius_over_travel", "quadratic", "sharpness_travel", "advice"]
RIVALS = ["distance", "lr", "kl", "lr_sqrt_loss"]
SHARES = (0.05, 0.1, 0.2)
"""Parts of the second task after which its early predictors are measured."""
PLAIN = ("advice", "break_time", *(f"early_rise_{share:g}" for share in SHARES))
"""Predictors that enter as they are, not as logarithms: those that may be 0 or negative."""
LABELS = {"lr": "learning rate", "distance": r"distance $\Vert\theta_t - \theta_{t-1}\Vert_2$"}
LABELS |= {"error": r"error $\xi$ of the expansion", "radius_over_travel": "radius of the ε-region over the distance"}
EARLY = ["error", "quadratic", "sharpness_travel", "distance", "kl", "rise"]
TARGETS = {"R²: best local − er": "gain", "R²: forgetting of sgd": "sgd_forgetting"}
MIN_WINS = 5
"""Settings that each outcome needs for the AUC to decide."""
RESAMPLES = 2_000
Statistic: TypeAlias = Callable[[np.ndarray], float]  # of the settings with these numbers


class Forecast:
    """A row for every run: its setting and outcome and, for `sgd`, all predictors."""

    name = "forecast"
    columns = " ".join(
        ["algorithm locality lr seed epochs angles width acc forgetting", *LENS, "distance kl lr_sqrt_loss"]
        + [f"early_{name}_{share:g}" for share in SHARES for name in EARLY]
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        sizes = itertools.product(*GRID[demo])
        parts = [{"epochs": epochs, "angles": angles, "width": width} for epochs, angles, width in sizes]
        size, algorithms = DEMO if demo else FULL, ("sgd", REPLAY, *LOCAL, IMPLICIT, LARGE_REPLAY)
        return [{"algorithm": name, **size, **part} for part in parts for name in algorithms]

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        name: str = item["algorithm"]
        make = partial(mlp, hidden=(item["width"],) * 2)
        challenge = _challenge(item, context)
        algorithm, overrides = name, dict[str, Any]()
        if name == IMPLICIT:
            algorithm, overrides = "laplace", {"implicit": True}
        elif name == LARGE_REPLAY:
            algorithm, overrides = REPLAY, {"slots": equal_memory(item["width"])}
        options = {**table1.COLUMNS["rotated-mnist"].row(algorithm).options, **overrides}
        runs = common.sweep_item(item, context, challenge, [(algorithm, options)], network=make)
        rows = {}
        for run, statistics in zip(runs, run_statistics(runs, DEFAULT_VIEW), strict=True):
            values: Row = {k: x for k, x in statistics.items() if k != "distance"}  # which is a predictor here
            steps = item["epochs"] * math.ceil(len(challenge.task(0, run.seed).train.y) / item["batch_size"])
            per_epoch = steps / item["epochs"] * np.sqrt(np.maximum(run.arrays["epoch_loss"], 0))
            values["lr_sqrt_loss"] = float(run.lr * per_epoch.sum()) if name == "sgd" else None
            rows[run.seed, run.lr] = common.run_row(self.columns, item, run, values)
        if name == "sgd":
            for member, recording in common.record_item(item, context, challenge, make):
                finite = all(bool(p.isfinite().all()) for p in recording.trace.checkpoints[-1].params.values())
                if finite:
                    rows[member.seed, member.lr] |= predictors(recording.trace)
                    rows[member.seed, member.lr] |= early_predictors(recording, challenge, item, member.seed, member.lr)
        return list(rows.values())

    def draw(self, rows: pl.DataFrame, figure: Figure) -> None:
        """The winner against three predictors, and forgetting of sgd against the best one."""
        figure.set_size_inches(13.2, 3.5)
        table = settings_table(rows)
        *panels, forgetting_axes = figure.subplots(1, 4)
        implicit_table = settings_table(rows, implicit=True).with_columns(pl.col("lr") * 1.25)
        _scatter(panels[0], implicit_table, "lr", "gain", filled=False)
        for axes, name in zip(panels, ("lr", "distance", "error"), strict=True):
            axes.axhline(0, color=FAINT, linewidth=0.9)
            _scatter(axes, table, name, "gain")
            axes.set_title("best local − er, final accuracy (points)")
        _scatter(forgetting_axes, table, "radius_over_travel", "sgd_forgetting")
        panels[0].set_xlabel(f"{LABELS['lr']} (hollow: implicit steps of laplace)")
        forgetting_axes.set_title("forgetting of sgd (points)")
        legend(figure, [f"angles within {angles:g}°" for angles in common.distinct(table, "angles")])

    def summarize(self, rows: pl.DataFrame) -> Summary:
        table = settings_table(rows)
        wins, total = int((table["gain"] > 0).sum()), len(table)
        by_auc = MIN_WINS <= wins <= total - MIN_WINS
        names, all_settings = [*LENS, *RIVALS], np.arange(total)
        summary_rows: list[Row] = []
        for name in [*names, "rise"]:
            row: Row = {"predictor": name.replace("_", " "), **dict.fromkeys(("AUC", *TARGETS), "")}
            if name in names:
                row["AUC"] = str(interval(auc(table, name), total))
                row |= {k: str(interval(r_squared(table, name, target), total)) for k, target in TARGETS.items()}
            for share in SHARES:
                early = r_squared(table, f"early_{name}_{share:g}", "sgd_forgetting") if name in EARLY else None
                row[f"after {100 * share:g} %"] = "–" if early is None else str(interval(early, total))
            summary_rows.append(row)
        statistics = {name: auc(table, name) if by_auc else r_squared(table, name, "gain") for name in names}
        best = max(names, key=lambda name: statistics[name](all_settings))
        difference = interval(lambda i: statistics["advice"](i) - statistics["distance"](i), total)
        comparison = "worse" if difference.high < 0 else "not clearly better"
        conclusion = (
            "The recommendation is kept."
            if difference.low > 0
            else f"The recommendation is {comparison} than the distance and is replaced. The best predictor is {best}."
        )
        verdict = (
            f"A local algorithm wins in {wins} of {total} settings, so {'the AUC' if by_auc else 'R²'} decides. "
            f"Recommendation of the lens minus distance: {difference}. {conclusion}"
        )
        return Summary(summary_rows, verdict + _with_implicit_steps(rows) + _at_equal_memory(rows))


def _with_implicit_steps(rows: pl.DataFrame) -> str:
    """Say who wins and what predicts it if the steps of `laplace` are implicit."""
    table = settings_table(rows, implicit=True)
    wins, total = int((table["gain"] > 0).sum()), len(table)
    text = f" With implicit steps of laplace, a local algorithm wins in {wins} of {total} settings"
    if not MIN_WINS <= wins <= total - MIN_WINS:
        return f"{text}, which leaves too little to predict."
    areas = {name: auc(table, name) for name in (*LENS, *RIVALS)}
    best = max(areas, key=lambda name: areas[name](np.arange(total)))
    return f"{text}; the highest AUC is that of {best}, {interval(areas[best], total)}."


def _at_equal_memory(rows: pl.DataFrame) -> str:
    """Say how often `laplace` with implicit steps beats replay with as much memory; "" without such runs."""
    lead = column(leads(rows, LARGE_REPLAY), "lead")
    wins = f"{(lead > 0).sum()} of {len(lead)} settings, with a mean lead of {MeanInterval.of(lead)} points."
    return f" At equal memory, laplace with implicit steps beats replay in {wins}" if len(lead) else ""


def equal_memory(width: int) -> int:
    """Return how many images, of 784 bytes and 16 for the label, take the memory of `laplace` with implicit steps."""
    layers = [(785, width), (width + 1, width), (width + 1, 10)]
    return 4 * sum(2 * a * b + 2 * (a**2 + b**2) for a, b in layers) // 800


def leads(rows: pl.DataFrame, replay: str = REPLAY) -> pl.DataFrame:
    """Return by how many points `laplace` with implicit steps ends above replay in every setting, means over seeds.

    Infinite if a run of replay diverged, which counts as a win; NaN if one of `laplace` did.
    """
    means = rows.group_by(*SETTING, "algorithm").agg(pl.col("acc").mean())
    wide = [means.filter(algorithm=name).rename({"acc": name}).drop("algorithm") for name in (IMPLICIT, replay)]
    lead = pl.col(IMPLICIT) - pl.col(replay).fill_nan(-math.inf)
    return wide[0].join(wide[1], SETTING).with_columns(lead=lead).sort(SETTING)


def _scatter(axes: Axes, table: pl.DataFrame, name: str, target: str, filled: bool = True) -> None:
    """Draw a target against a predictor, a colour for each range of angles, which have labels if they are filled."""
    for number, angles in enumerate(common.distinct(table, "angles")):
        points, color = table.filter(angles=angles), f"C{number}"
        axes.scatter(
            np.exp(_predictor(points, name)),
            points[target],
            s=18,
            edgecolors=color,
            facecolors=color if filled else "none",
            label=f"angles within {angles:g}°" if filled else None,
        )
    axes.set(xlabel=LABELS[name], xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _challenge(item: WorkItem, context: Context) -> Challenge:
    """Return the challenge with angles drawn for every seed from the item's range."""
    angles: dict[int, list[float]] = {}
    for seed in item["seeds"]:
        angles[seed] = (item["angles"] * np.random.default_rng(seed).random(item["tasks"])).tolist()
    return challenges.make(item["challenge"], item["tasks"], context.data, angles=angles)


def predictors(trace: TrainingTrace) -> Row:
    """Return what the lens and its rivals tell about a training."""
    result = examine_trace(trace)
    pairs, last = result.later, result.distance[-1, :-1]
    kl = [_kl(trace, t, trace.checkpoints[t], trace.checkpoints[t + 1]) for t in range(1, trace.num_learned)]
    return {
        "error": float(result.error[pairs].mean()),
        "break_time": _break_time(result),
        "radius_over_travel": float((result.radius / result.distance)[pairs].clamp(max=100).median()),
        "quadratic": float(result.forgetting.quadratic[-1, :-1].mean()),
        "sharpness_travel": float((0.5 * result.largest[:-1] * last.square()).mean()),
        "advice": float(torch.equal(result.inside, result.later)),  # the rule of the lens when this was registered
        "distance": float(result.updates[1:].mean()),
        "kl": float(np.mean(kl)),
    }


def _break_time(result: Examination) -> float:
    """Return the share of tasks that were learnt before the first one that left the ε-region of an older one."""
    outside = (result.later & ~result.inside).any(1)
    return float(outside.int().argmax()) / len(outside) if bool(outside.any()) else 1.0


def _kl(trace: TrainingTrace, task: int, before: Checkpoint, after: Checkpoint) -> float:
    """Return KL(p_before ‖ p_after), averaged over the task's inputs."""
    with torch.no_grad():
        p, q = (trace.outputs(c, trace.tasks[task].x).double().log_softmax(-1) for c in (before, after))
    return float((p.exp() * (p - q)).sum(-1).mean())


def early_predictors(run: RecordedRun, challenge: Challenge, item: WorkItem, seed: int, lr: float) -> Row:
    """Return predictors after parts of the second task, trained from θ_1 with plain SGD."""
    trace, model = run.trace, run.model
    data, device = challenge.task(1, seed).train, trace.device
    x, y = (part.to(device) for part in data)
    size, start = item["batch_size"], trace.checkpoints[1]
    steps = item["epochs"] * math.ceil(len(y) / size)
    params, generator = {k: p.clone() for k, p in start.params.items()}, torch.Generator().manual_seed(seed)
    gradient, hessian = trace.gradient(0), trace.hessian(0)
    top = float(lanczos(hessian, trace.random_start(0), 1).values[0])
    row: Row = {}
    step = 0
    for share in SHARES:
        for _ in range(max(1, round(share * steps)) - step):
            rows = torch.randint(len(y), (size,), generator=generator).to(device)
            grads = model.grad(params, model.transform.normalize(x[rows]), y[rows])
            params = {k: p - lr * grads[k] for k, p in params.items()}
        step = max(1, round(share * steps))
        checkpoint = Checkpoint(params, start.buffers)
        delta = to_vector(params) - to_vector(start.params)
        with torch.no_grad():
            rise = float(trace.value(0, checkpoint) - trace.value(0, start))
        quadratic = float(dot(delta, hessian @ delta)) / 2
        values = {
            "error": abs(rise - float(dot(gradient, delta)) - quadratic),
            "quadratic": quadratic,
            "sharpness_travel": top * float(dot(delta, delta)) / 2,
            "distance": float(distance(checkpoint, start)),
            "kl": _kl(trace, 1, start, checkpoint),
            "rise": rise,
        }
        row |= {f"early_{name}_{share:g}": value for name, value in values.items()}
    return row


def settings_table(rows: pl.DataFrame, implicit: bool = False) -> pl.DataFrame:
    """Return a row for every setting: predictors as they enter the regressions, and both targets, means over seeds.

    `implicit` counts `laplace` with implicit steps instead of explicit ones.
    """
    candidates = [IMPLICIT if implicit and name == "laplace" else name for name in LOCAL]
    table = []
    for setting_rows in rows.partition_by(SETTING, maintain_order=True):
        sgd = setting_rows.filter(algorithm="sgd")
        means = {name: common.mean(setting_rows.filter(algorithm=name), "acc") for name in (REPLAY, *candidates)}
        local = [means[name] for name in candidates if np.isfinite(means[name])]
        row: Row = setting_rows.select(SETTING).row(0, named=True)
        row |= {"gain": max(local, default=np.nan) - means[REPLAY], "sgd_forgetting": common.mean(sgd, "forgetting")}
        for name in (*LENS, "distance", "kl", "lr_sqrt_loss", *(c for c in rows.columns if c.startswith("early_"))):
            values = column(sgd, name)
            inputs = values if name in PLAIN else np.log(np.maximum(values, 1e-12))
            row[name] = float(inputs[np.isfinite(inputs)].mean()) if np.isfinite(inputs).any() else np.nan
        table.append(row)
    frame = pl.DataFrame(table)
    conditions = [pl.col(name).is_finite() for name in ("gain", "sgd_forgetting", *LENS, "distance", "kl")]
    return frame.filter(pl.all_horizontal(conditions))


def leave_one_out(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return, for every point, the prediction of a linear regression on all others."""
    X = np.column_stack([x, np.ones(len(x))])
    hat = X @ np.linalg.pinv(X)
    leverage = np.clip(np.diag(hat), 0, 1 - 1e-9)
    return np.asarray((hat @ y - leverage * y) / (1 - leverage))


def r_squared(table: pl.DataFrame, name: str, target: str) -> Statistic:
    """Return 1 − Σ (y − ŷ)² / Σ (y − ȳ)² as a function of settings, where ŷ and ȳ leave the predicted one out."""
    x, y = _predictor(table, name), column(table, target)
    errors, spread = ((y - leave_one_out(predictor, y)) ** 2 for predictor in (x, np.zeros(len(y))))
    return lambda i: float(1 - errors[i].sum() / spread[i].sum()) if spread[i].sum() > 0 else np.nan


def auc(table: pl.DataFrame, name: str) -> Statistic:
    """Return the area under the ROC curve for "a local algorithm wins", as a function of settings.

    It is the probability that the predictor ranks a setting in which one wins above one in which none does. Whether
    large values speak for or against is learnt from the other settings.
    """
    x, y = _predictor(table, name), column(table, "gain")
    masks = [np.arange(len(y)) != i for i in range(len(y))]
    score = x * np.sign([((x[i] - x[i].mean()) * y[i]).sum() for i in masks])

    def area(i: np.ndarray) -> float:
        wins = y[i] > 0
        differences = score[i][wins][:, None] - score[i][~wins]
        return float(((differences > 0) + 0.5 * (differences == 0)).mean()) if differences.size else np.nan

    return area


def _predictor(table: pl.DataFrame, name: str) -> np.ndarray:
    return np.log(column(table, name)) if name == "lr" else column(table, name)


def interval(statistic: Statistic, settings: int) -> MeanInterval:
    """Return a statistic of all settings, and its 95 % bootstrap interval."""
    draw = np.random.default_rng(0).integers(settings, size=(RESAMPLES, settings))
    values = np.array([statistic(i) for i in draw])
    finite_values = values[np.isfinite(values)]
    low, high = np.quantile(finite_values, [0.025, 0.975]) if finite_values.size else (np.nan, np.nan)
    return MeanInterval(statistic(np.arange(settings)), float(low), float(high))


STUDIES = (Forecast(),)
