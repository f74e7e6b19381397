"""The charts of the page as Vega-Lite specifications without data.

page.js fills in the data sets 'runs' (one row per run) and 'means' (one row per group of seeds). Both have the fields
`colour`, `opacity` and `shape`, which depend on the theme and on what is selected. Texts that begin with @ depend on
what is shown; page.js replaces them. All field names are fixed, so that nothing in a store is read as an expression.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import altair as alt

INTERVAL = "small points: seeds · lines: means · bars: 95 % t-intervals, cut at the frame"
BAND = "lines: means over seeds · bands: 95 % t-intervals, cut at the frame"
HEIGHT = 260
SCALES = ("log", "linear", "point")


@cache
def specifications() -> dict[str, Any]:
    """Return all specifications by name."""
    over = {
        f"over-{name}-{kind}": _over(name, kind) for name in ("forgetting", "metric", "distance") for kind in SCALES
    }
    charts = {
        **over,
        "tasks": _over_tasks(),
        **{f"loss-{kind}": _loss(kind) for kind in SCALES[:2]},
        "tradeoff": _tradeoff(),
        "matrix": _matrix(),
    }
    charts |= {"change": _change(), "region": _region(), "predicted": _predicted(), "spectrum": _spectrum()}
    return {name: chart.to_dict() for name, chart in charts.items()}


def _data(name: str) -> Any:
    return alt.Chart(alt.NamedData(name=name))


def _colour(**more: Any) -> dict[str, Any]:
    """Return the encodings of colour and opacity; rows hold them as they are."""
    return {"color": alt.Color("colour:N", scale=None), "opacity": alt.Opacity("opacity:Q", scale=None), **more}


def _shape() -> Any:
    return alt.Shape("shape:N", scale=None)


def _dash() -> Any:
    scale = alt.Scale(domain=["global", "local"], range=[[1, 0], [5, 3]])
    return alt.StrokeDash("locality:N", scale=scale, legend=None)


def _tooltip(**fields: str) -> list[Any]:
    return [alt.Tooltip(field, title=title.replace("_", " ")) for title, field in fields.items()]


def _finish(*layers: Any, title: str, subtitle: str, description: str, height: int = HEIGHT) -> Any:
    shown = alt.TitleParams(title, subtitle=subtitle)
    return alt.layer(*layers).properties(width="container", height=height, title=shown, description=description)


def _y(field: str, title: str, kind: Any = "linear") -> Any:
    more: dict[str, Any] = {"zero": False} if kind == "linear" else {}
    return alt.Y(f"{field}:Q", title=title, scale=alt.Scale(type=kind, **more))


OF_RUN = {"run": "name:N", "algorithm": "algorithm:N", "learning_rate": "lr:N", "seed": "seed:N"}
OF_GROUP = {"algorithm": "algorithm:N", "learning_rate": "lr:N", "seeds": "seeds:Q"}
BOUNDS = {"mean": "mean:Q", "from": "low:Q", "to": "high:Q"}


def _over(name: str, kind: Any) -> Any:
    """A statistic against an option that was swept."""
    axis = alt.Axis(labelOverlap="greedy", labelAngle=0, grid=kind != "point")
    if kind == "point":
        x = alt.X("x:O", title="@option", scale=alt.Scale(type="point", padding=0.5), axis=axis)
    else:
        more: dict[str, Any] = {"zero": False} if kind == "linear" else {}
        x = alt.X("at:Q", title="@option", scale=alt.Scale(type=kind, nice=False, padding=14, **more), axis=axis)
    means, title = _data("means"), f"@{name}"
    bars = means.mark_rule(strokeWidth=1.5).encode(x=x, y=_y("low", title), y2="high:Q", **_colour())
    lines = means.mark_line(strokeWidth=2).encode(
        x=x, y=_y("mean", title), detail="series:N", strokeDash=_dash(), **_colour()
    )
    tooltip = _tooltip(algorithm="algorithm:N", value="x:N", seeds="seeds:Q", **BOUNDS)
    centres = means.mark_point(size=55, filled=True).encode(
        x=x, y=_y("mean", title), shape=_shape(), tooltip=tooltip, **_colour()
    )
    dots = (
        _data("runs")
        .mark_point(size=16, filled=True)
        .encode(x=x, y=_y("value", title), shape=_shape(), tooltip=_tooltip(**OF_RUN, value="value:Q"), **_colour())
    )
    about = f"{name} against the chosen option, with a line per algorithm. The table of results has the same numbers."
    return _finish(bars, lines, centres, dots, title=title, subtitle=INTERVAL, description=about)


def _band(x: Any, y: str, kind: Any = "linear") -> list[Any]:
    """Lines of means with bands."""
    means, tooltip = _data("means"), _tooltip(**OF_GROUP, **BOUNDS)
    band = means.mark_area().encode(
        x=x,
        y=_y("low", y, kind),
        y2="high:Q",
        detail="series:N",
        color=alt.Color("colour:N", scale=None),
        opacity=alt.Opacity("band:Q", scale=None),
    )
    line = means.mark_line(strokeWidth=2).encode(
        x=x, y=_y("mean", y, kind), detail="series:N", strokeDash=_dash(), **_colour()
    )
    dots = means.mark_point(size=30, filled=True).encode(
        x=x, y=_y("mean", y, kind), shape=_shape(), tooltip=tooltip, **_colour()
    )
    return [band, line, dots]


def _over_tasks() -> Any:
    x = alt.X("x:Q", title="after task t", axis=alt.Axis(format="d"), scale=alt.Scale(zero=False))
    about = "The average over the tasks learnt so far, after every task."
    layers = _band(x, "@metric of tasks 1 to t")
    return _finish(*layers, title="@metric over tasks", subtitle=BAND, description=about)


def _loss(kind: Any) -> Any:
    x = alt.X("x:Q", title="task, epoch by epoch", axis=alt.Axis(format="d"))
    about = "The training objective, averaged over each epoch."
    layers = _band(x, "objective", kind)
    return _finish(*layers, title="Learning curves", subtitle=BAND, description=about)


def _tradeoff() -> Any:
    def x(field: str) -> Any:
        return alt.X(f"{field}:Q", title="@forgetting", scale=alt.Scale(zero=False, padding=8))

    means = _data("means")
    lines = means.mark_line(strokeWidth=1.2).encode(
        x=x("x"), y=_y("mean", "@metric"), detail="series:N", order="order:Q", strokeDash=_dash(), **_colour()
    )
    centres = means.mark_point(size=90, filled=True).encode(
        x=x("x"),
        y=_y("mean", "@metric"),
        shape=_shape(),
        **_colour(),
        tooltip=_tooltip(**OF_GROUP, accuracy_or_loss="mean:Q", forgetting="x:Q"),
    )
    dots = (
        _data("runs")
        .mark_point(size=16, filled=True)
        .encode(
            x=x("forgetting"),
            y=_y("metric", "@metric"),
            shape=_shape(),
            **_colour(),
            tooltip=_tooltip(**OF_RUN, accuracy_or_loss="metric:Q", forgetting="forgetting:Q"),
        )
    )
    subtitle = "small points: seeds · large points: means, joined in the order of the learning rate"
    about = "Accuracy against forgetting: the best runs have high accuracy and little forgetting."
    return _finish(lines, centres, dots, title="@metric against forgetting", subtitle=subtitle, description=about)


def _matrix() -> Any:
    x = alt.X("o:O", title="task o", axis=alt.Axis(labelAngle=0, labelOverlap="greedy", ticks=False, domain=False))
    y = alt.Y("t:O", title="after task t", axis=alt.Axis(labelOverlap="greedy", ticks=False, domain=False))
    colour = alt.Color(
        "value:Q", title="@metric", scale=alt.Scale(scheme="cividis", domainMin=0, domainMax={"expr": "largest"})
    )
    cells, tooltip = _data("cells"), _tooltip(after_task="t:N", task="o:N", value="value:Q")
    boxes = cells.mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
    shade = alt.condition("datum.value < 0.55 * largest", alt.value("white"), alt.value("black"))
    numbers = cells.mark_text(fontSize=11).encode(x=x, y=y, text=alt.Text("text:N"), color=shade, tooltip=tooltip)
    about = "R[t, o] of the chosen run: the result on task o after task t. Row 0 is the initialisation."
    chart = _finish(
        boxes, numbers, title="@run", subtitle="R[t, o]: task o after task t", description=about, height=300
    )
    return chart.add_params(alt.param(name="largest", value=100))


def _change() -> Any:
    """The differences between two stores."""
    x, y = alt.X("low:Q", title="@difference"), alt.Y("group:N", title=None, sort=None, axis=alt.Axis(labelLimit=280))
    rows = _data("means")
    bars = rows.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q", y=y, **_colour())
    tooltip = _tooltip(group="group:N", seeds="seeds:Q", **BOUNDS)
    dots = rows.mark_point(size=60, filled=True).encode(x="mean:Q", y=y, shape=_shape(), tooltip=tooltip, **_colour())
    zero = alt.Chart(alt.InlineData([{"at": 0}])).mark_rule(strokeDash=[3, 3], color="#888").encode(x="at:Q")
    about = "Mean paired differences, with intervals. The table below has the same numbers."
    subtitle = "points: mean differences of equal seeds · bars: 95 % t-intervals"
    return _finish(zero, bars, dots, title="@difference", subtitle=subtitle, description=about)


def _region() -> Any:
    """Distances of later solutions, and how far ε-regions reach towards them."""
    x = alt.X("pair:O", title="task o → later task t", axis=alt.Axis(labelAngle=0, labelOverlap="greedy"), sort=None)
    y = alt.Scale(type="log")
    rows, tooltip = _data("pairs"), _tooltip(pair="pair:N", distance="distance:Q", radius="radius:Q", inside="inside:N")
    ticks = rows.mark_tick(thickness=3, bandSize=22, color="#888").encode(
        x=x, y=alt.Y("radius:Q", title="distance from θ_o", scale=y), tooltip=tooltip
    )
    dots = rows.mark_point(size=80, filled=True).encode(
        x=x, y=alt.Y("distance:Q", scale=y), shape=_shape(), color=alt.Color("colour:N", scale=None), tooltip=tooltip
    )
    return _finish(
        ticks,
        dots,
        title="Distances and ε-regions",
        subtitle="ticks: radius of the ε-region of task o towards θ_t · circles: θ_t inside it · crosses: outside",
        description="Distances of later solutions and radii of ε-regions.",
    )


def _predicted() -> Any:
    rows, tooltip = (
        _data("pairs"),
        _tooltip(pair="pair:N", predicted="predicted:Q", measured="measured:Q", inside="inside:N"),
    )
    x, y = alt.X("predicted:Q", title="predicted to the second order"), alt.Y("measured:Q", title="measured")
    line = rows.mark_line(strokeDash=[3, 3], color="#888").encode(x=x, y=alt.Y("predicted:Q", title="measured"))
    dots = rows.mark_point(size=80, filled=True).encode(
        x=x, y=y, shape=_shape(), color=alt.Color("colour:N", scale=None), tooltip=tooltip
    )
    about = "Forgetting of every pair of tasks: predicted by a quadratic, and measured."
    return _finish(line, dots, title="Forgetting, by loss", subtitle="line: the prediction is exact", description=about)


def _spectrum() -> Any:
    x = alt.X("task:O", title="task", axis=alt.Axis(labelAngle=0))
    y = alt.Y("size:Q", title="|λ| of the Hessian", scale=alt.Scale(type="log"))
    rows, tooltip = _data("eigenvalues"), _tooltip(task="task:N", eigenvalue="value:Q")
    dots = rows.mark_point(size=36, filled=True).encode(
        x=x, y=y, shape=_shape(), color=alt.Color("colour:N", scale=None), tooltip=tooltip
    )
    about = "The largest eigenvalues of every task's Hessian, at its solution."
    return _finish(dots, title="Spectra", subtitle="largest eigenvalues · triangles: negative", description=about)
