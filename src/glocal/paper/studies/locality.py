r"""Which algorithms are local and which global (Definition 3.1, §5)?

For every algorithm, test whether \hat L_o depends on the solution θ_o, and compare the result with the locality that
the algorithm declares, which is the paper's for those that the paper classifies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from glocal.algorithms import ALGORITHMS
from glocal.lens.local_or_global import Verdict, locality
from glocal.paper.studies.common import column, join, names, where
from glocal.paper.study import Context, Row, Summary, WorkItem
from glocal.report.style import FAINT, INK, TITLE_COLOURS
from glocal.sweeps import resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FULL: dict[str, Any] = {"solutions": 64, "draws": 5, "probes": 16, "examples": 2_000, "epochs": 3, "lr": 0.1, "seed": 0}
DEMO: dict[str, Any] = {"solutions": 10, "draws": 3, "probes": 4, "examples": 160, "epochs": 2, "lr": 0.1, "seed": 0}
SETTINGS = {"rotated": "domain", "split": "task"}


class Locality:
    r"""Each algorithm's verdict, with one row for each θ at which \hat L_o was evaluated."""

    name = "locality"
    columns = (
        "challenge algorithm family declared found p_value explained involved information over_theta solutions draws "
        "lost distance probe place probe_explained probe_involved probe_information probe_p_value"
    )

    def work_items(self, demo: bool) -> list[WorkItem]:
        """The demo has each algorithm once: on rotated digits, or on split ones if it needs new classes."""
        if demo:
            on = {name: "rotated" if "domain" in a.settings else "split" for name, a in ALGORITHMS.items()}
            return [{"challenge": f"{kind}-digits", "algorithm": name, **DEMO} for name, kind in on.items()]
        return [
            {"challenge": f"{kind}-mnist", "algorithm": name, **FULL}
            for kind, setting in SETTINGS.items()
            for name, a in ALGORITHMS.items()
            if setting in a.settings
        ]

    def cost(self, demo: bool) -> str:
        size = DEMO if demo else FULL
        return f"{len(self.work_items(demo))} tests of {size['solutions']} solutions, {size['draws']} memories each"

    def measure(self, item: WorkItem, context: Context) -> list[Row]:
        options = dict(item)
        name = options.pop("challenge")
        challenge = resolve.challenge(name, data=context.data, setting=SETTINGS[name.partition("-")[0]]).value
        verdict = locality(options.pop("algorithm"), challenge, **options, device=context.device)
        return verdict_rows(verdict, name, ALGORITHMS[item["algorithm"]].family)

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        r"""The share of \hat L_o's variance that θ_o explains: ticks at each θ, points for the mean."""
        panels = [where(rows, challenge=name) for name in names(rows, "challenge")]
        sizes = [len(names(panel)) for panel in panels]
        one_row = 2 * min(sizes) > max(sizes)  # panels of very different heights go below each other
        columns = len(sizes) if one_row else 1
        heights = [0.21 * max(sizes) + 0.9] if one_row else [0.21 * size + 0.9 for size in sizes]
        figure.set_size_inches(4.9 * columns + 0.4, sum(heights) + 0.4)
        cells = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat
        for axes, panel in zip(cells, panels, strict=True):
            _draw_panel(axes, panel)
        handles = _legend_handles()
        columns = min(len(handles), 2 * columns)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, handletextpad=0.4)

    def summarize(self, rows: Sequence[Row]) -> Summary:
        columns = ("challenge", "algorithm", "declared", "found", "explained", "information", "p_value")
        table = [{name: row[name] for name in columns} for row in rows if row["probe"] == 0]
        differ = list(dict.fromkeys(str(row["algorithm"]) for row in table if row["declared"] != row["found"]))
        total = len(names(table))
        exceptions = f"; it differs for {join(differ)}" if differ else ""
        agreement = f"{total - len(differ)} of {total} algorithms"
        return Summary(table, f"The test agrees with the declared locality for {agreement}{exceptions}.")


STUDIES = (Locality(),)


def verdict_rows(verdict: Verdict, challenge: str, family: str) -> list[Row]:
    """Return a verdict as rows of the table."""
    common: Row = {
        "challenge": challenge,
        "algorithm": verdict.algorithm,
        "family": family,
        "declared": verdict.declared,
        "found": verdict.found,
        "p_value": verdict.p_value,
        "explained": verdict.first_order_index,
        "involved": verdict.total_index,
        "information": verdict.information,
        "over_theta": share_over_theta(verdict.values),
        "solutions": len(verdict.values),
        "draws": verdict.values.shape[1],
        "lost": verdict.num_diverged,
        "distance": verdict.distance,
    }
    statistics = ("probe_explained", "probe_involved", "probe_information", "probe_p_value")
    values = zip(*(part.tolist() for part in verdict.by_probe[:4]), strict=True)
    return [
        common | {"probe": i, "place": place} | dict(zip(statistics, probe, strict=True))
        for i, (place, probe) in enumerate(zip(verdict.probe_locations, values, strict=True))
    ]


def share_over_theta(values: Tensor) -> float:
    r"""Return the share of the variance of \hat L_o(θ) that is over θ, at one solution and draw; 0 for a constant.

    Args:
        values: \hat L_o(θ) as (solutions, draws, repetitions, probes).
    """
    values = values.double()
    total = values.var(correction=0)
    return float(values.var(-1, correction=0).mean() / total) if total > 0 else 0.0


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    verdicts = [where(rows, algorithm=a) for a in names(rows)]
    verdicts.sort(key=lambda v: (v[0]["declared"] == "local", _known(v[0]["explained"]), str(v[0]["algorithm"])))
    heights = list(range(len(verdicts)))[::-1]
    for y, probes in zip(heights, verdicts, strict=True):
        first = probes[0]
        colour, explained = TITLE_COLOURS[str(first["declared"])], 100 * column([first], "explained")[0]
        axes.plot([0, explained], [y, y], color=colour, linewidth=1.2, alpha=0.5)
        ticks = 100 * column(probes, "probe_explained")
        axes.plot(ticks, [y] * len(ticks), "|", color=colour, markersize=7, alpha=0.6)
        face = colour if first["declared"] == first["found"] else "white"
        axes.plot(explained, y, "o", color=colour, markerfacecolor=face, markeredgewidth=1.4, zorder=3)
        p = column([first], "p_value")[0]
        texts = f"{first['information']:.2f}", f"{p:.3f}" if p < 0.0995 else f"{p:.2g}"
        for x, text in zip((1.05, 1.24), texts, strict=True):
            axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=8, color=INK)
    for x, text in ((1.05, "nats"), (1.24, "p")):
        axes.text(x, 1, text, transform=axes.transAxes, va="bottom", fontsize=8, color=FAINT)
    axes.set_yticks(heights, [str(v[0]["algorithm"]) for v in verdicts])
    for tick, probes in zip(axes.get_yticklabels(), verdicts, strict=True):
        tick.set_color(TITLE_COLOURS[str(probes[0]["declared"])])
    axes.set(xlim=(-4, 104), ylim=(-0.7, len(verdicts) - 0.3))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(r"share of $\hat L_o$'s variance that $\theta_o$ explains (%)")
    axes.set_title(str(rows[0]["challenge"]), loc="left", fontweight="bold", pad=10)


def _known(value: Any) -> float:
    return value if math.isfinite(value) else -1.0


def _legend_handles() -> list[Any]:
    from matplotlib.lines import Line2D

    def mark(text: str, colour: str, **style: Any) -> Line2D:
        return Line2D([], [], color=colour, linestyle="none", label=text, **{"marker": "o", **style})

    return [
        *(mark(f"declared {kind}", colour) for kind, colour in TITLE_COLOURS.items()),
        mark("test disagrees", FAINT, markerfacecolor="white", markeredgewidth=1.4),
        mark("at a single θ", FAINT, marker="|", markersize=7),
    ]
