"""The charts of the page as Vega-Lite specifications without data.

page.js fills in the data sets 'runs' (one row per run), 'means' (one row per group of seeds), and others. Rows hold
`colour`, `opacity` and `shape` as they are drawn, since these depend on the theme and on what is selected. Texts that
begin with @ depend on what is shown; page.js replaces them. All field names are fixed, so that nothing in a store is
read as an expression.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import altair as alt

INTERVAL = "small points: seeds · lines: means · bars: 95 % t-intervals, cut at the frame"
BAND = "lines: means over seeds · bands: 95 % t-intervals, cut at the frame"
OF_RUN = {"run": "name:N", "algorithm": "algorithm:N", "learning rate": "lr:N", "seed": "seed:N"}
OF_GROUP = {"algorithm": "algorithm:N", "learning rate": "lr:N", "seeds": "seeds:Q"}
BOUNDS = {"mean": "mean:Q", "from": "low:Q", "to": "high:Q"}
FLAT: dict[str, Any] = {"labelAngle": 0, "labelOverlap": "greedy"}


@cache
def specifications() -> dict[str, Any]:
    """Return all specifications by name."""
    charts = {f"over-{kind}": _over(kind) for kind in ("log", "linear", "point")}
    charts |= {f"loss-{kind}": _loss(kind) for kind in ("log", "linear")}
    charts |= {"tasks": _over_tasks(), "tradeoff": _tradeoff(), "matrix": _matrix(), "change": _change()}
    charts |= {"region": _region(), "predicted": _predicted(), "spectrum": _spectrum()}
    return {name: chart.to_dict() for name, chart in charts.items()}


def _chart(title: str, subtitle: str, description: str, *layers: Any, height: int = 260) -> Any:
    title_params = alt.TitleParams(title, subtitle=subtitle)
    return alt.layer(*layers).properties(width="container", height=height, title=title_params, description=description)


def _data(name: str) -> Any:
    return alt.Chart(alt.NamedData(name=name))


def _axis(channel: Any, field: str, title: str | None, kind: Any = "linear", **options: Any) -> Any:
    scale: dict[str, Any] = {"type": kind} | ({"zero": False} if kind == "linear" else {}) | options.pop("scale", {})
    return channel(f"{field}:Q", title=title, scale=alt.Scale(**scale), **options)


def _colours(opacity: str = "opacity") -> dict[str, Any]:
    """Return encodings by what rows hold."""
    return {"color": alt.Color("colour:N", scale=None), "opacity": alt.Opacity(f"{opacity}:Q", scale=None)}


def _points(data: Any, x: Any, y: Any, size: int, tooltip: dict[str, str]) -> Any:
    texts = [alt.Tooltip(field, title=title) for title, field in tooltip.items()]
    shape = alt.Shape("shape:N", scale=None)
    return data.mark_point(size=size, filled=True).encode(x=x, y=y, shape=shape, tooltip=texts, **_colours())


def _lines(data: Any, x: Any, y: Any, **encodings: Any) -> Any:
    """Lines of series, dashed if local."""
    dashes = alt.Scale(domain=["global", "local"], range=[[1, 0], [5, 3]])
    dash = alt.StrokeDash("locality:N", scale=dashes, legend=None)
    return data.mark_line(strokeWidth=2).encode(x=x, y=y, detail="series:N", strokeDash=dash, **encodings, **_colours())


def _over(kind: str) -> Any:
    """A statistic against an option that was swept."""
    x: Any
    if kind == "point":
        scale = alt.Scale(type="point", padding=0.5)
        x = alt.X("x:O", title="@option", scale=scale, axis=alt.Axis(grid=False, **FLAT))
    else:
        scale_options = {"nice": False, "padding": 14}
        x = _axis(alt.X, "at", "@option", kind, scale=scale_options, axis=alt.Axis(format="~g", **FLAT))
    means, title = _data("means"), "@statistic"
    y = _axis(alt.Y, "mean", title)
    bars = means.mark_rule(strokeWidth=1.5).encode(x=x, y=_axis(alt.Y, "low", title), y2="high:Q", **_colours())
    centres = _points(means, x, y, 55, {"algorithm": "algorithm:N", "value": "x:N", "seeds": "seeds:Q", **BOUNDS})
    dots = _points(_data("runs"), x, _axis(alt.Y, "value", title), 16, {**OF_RUN, "value": "value:Q"})
    description = (
        "@statistic against the chosen option, a line per algorithm. The table of results has the same numbers."
    )
    return _chart(title, INTERVAL, description, bars, _lines(means, x, y), centres, dots)


def _band(x: Any, title: str, kind: str = "linear") -> list[Any]:
    """Lines of means with bands."""
    means, y = _data("means"), _axis(alt.Y, "mean", title, kind)
    low = _axis(alt.Y, "low", title, kind)
    band = means.mark_area().encode(x=x, y=low, y2="high:Q", detail="series:N", **_colours("band"))
    return [band, _lines(means, x, y), _points(means, x, y, 30, OF_GROUP | BOUNDS)]


def _over_tasks() -> Any:
    x = _axis(alt.X, "x", "after task t", axis=alt.Axis(format="d"))
    description = "The average over the tasks learnt so far, after every task."
    return _chart("@metric over tasks", BAND, description, *_band(x, "@metric of tasks 1 to t"))


def _loss(kind: str) -> Any:
    x = _axis(alt.X, "x", "task, epoch by epoch", axis=alt.Axis(format="d"), scale={"zero": True})
    description = "The training objective, averaged over each epoch."
    return _chart("Learning curves", BAND, description, *_band(x, "objective", kind))


def _tradeoff() -> Any:
    means, y = _data("means"), _axis(alt.Y, "mean", "@metric")
    x, of_run = (_axis(alt.X, field, "@forgetting", scale={"padding": 8}) for field in ("x", "forgetting"))
    lines = _lines(means, x, y, order="order:Q")
    centres = _points(means, x, y, 90, OF_GROUP | {"accuracy or loss": "mean:Q", "forgetting": "x:Q"})
    numbers = {"accuracy or loss": "metric:Q", "forgetting": "forgetting:Q"}
    dots = _points(_data("runs"), of_run, _axis(alt.Y, "metric", "@metric"), 16, OF_RUN | numbers)
    subtitle = "small points: seeds · large points: means, joined in the order of the learning rate"
    description = "Accuracy against forgetting: the best runs have high accuracy and little forgetting."
    return _chart("@metric against forgetting", subtitle, description, lines, centres, dots)


def _matrix() -> Any:
    axis = alt.Axis(ticks=False, domain=False, **FLAT)
    x, y = alt.X("o:O", title="task o", axis=axis), alt.Y("t:O", title="after task t", axis=axis)
    scale = alt.Scale(scheme="cividis", domainMin=0, domainMax={"expr": "largest"})
    texts = [alt.Tooltip("t:N", title="after task"), alt.Tooltip("o:N", title="task"), alt.Tooltip("value:Q")]
    cells = _data("cells").encode(x=x, y=y, tooltip=texts)
    boxes = cells.mark_rect().encode(color=alt.Color("value:Q", title="@metric", scale=scale))
    shade = alt.condition("datum.value < 0.55 * largest", alt.value("white"), alt.value("black"))
    numbers = cells.mark_text(fontSize=11).encode(text="text:N", color=shade)
    description = "R[t, o] of the chosen run: the result on task o after task t. Row 0 is the initialisation."
    chart = _chart("@run", "R[t, o]: task o after task t", description, boxes, numbers, height=300)
    return chart.add_params(alt.param(name="largest", value=100))


def _change() -> Any:
    """The differences between two stores."""
    rows, y = _data("means"), alt.Y("group:N", title=None, sort=None, axis=alt.Axis(labelLimit=280))
    bars = rows.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title="@difference"), x2="high:Q", y=y, **_colours())
    dots = _points(rows, alt.X("mean:Q"), y, 60, {"group": "group:N", "seeds": "seeds:Q", **BOUNDS})
    zero = alt.Chart(alt.InlineData([{"at": 0}])).mark_rule(strokeDash=[3, 3], color="#888").encode(x="at:Q")
    description = "Mean paired differences, with intervals. The table below has the same numbers."
    subtitle = "points: mean differences of equal seeds · bars: 95 % t-intervals"
    return _chart("@difference", subtitle, description, zero, bars, dots)


def _region() -> Any:
    """Distances of later solutions, and how far ε-regions reach towards them."""
    rows, x = _data("pairs"), alt.X("pair:O", title="task o → later task t", sort=None, axis=alt.Axis(**FLAT))
    radius, distance = (_axis(alt.Y, field, "distance from θ_o", "log") for field in ("radius", "distance"))
    ticks = rows.mark_tick(thickness=3, bandSize=22, color="#888").encode(x=x, y=radius)
    tooltip = {"pair": "pair:N", "distance": "distance:Q", "radius": "radius:Q", "inside": "inside:N"}
    subtitle = "ticks: radius of the ε-region of task o towards θ_t · circles: θ_t inside it · crosses: outside"
    description = "Distances of later solutions and radii of ε-regions."
    return _chart("Distances and ε-regions", subtitle, description, ticks, _points(rows, x, distance, 80, tooltip))


def _predicted() -> Any:
    rows, x = _data("pairs"), alt.X("predicted:Q", title="predicted to the second order")
    line = rows.mark_line(strokeDash=[3, 3], color="#888").encode(x=x, y=alt.Y("predicted:Q", title="measured"))
    tooltip = {"pair": "pair:N", "predicted": "predicted:Q", "measured": "measured:Q", "inside": "inside:N"}
    dots = _points(rows, x, alt.Y("measured:Q", title="measured"), 80, tooltip)
    description = "Forgetting of every pair of tasks: predicted by a quadratic, and measured."
    return _chart("Forgetting, by loss", "line: the prediction is exact", description, line, dots)


def _spectrum() -> Any:
    x, y = alt.X("task:O", title="task", axis=alt.Axis(**FLAT)), _axis(alt.Y, "size", "|λ| of the Hessian", "log")
    dots = _points(_data("eigenvalues"), x, y, 36, {"task": "task:N", "eigenvalue": "value:Q"})
    description = "The largest eigenvalues of every task's Hessian, at its solution."
    return _chart("Spectra", "largest eigenvalues · triangles: negative", description, dots)
