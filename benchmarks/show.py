"""The tables of a finished benchmark."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks import setting
from benchmarks.results import BARE, MANY, ONE, PEER, Results, Spread

GOALS: dict[tuple[str, str], dict[str, float]] = {
    (BARE, ONE): dict.fromkeys(setting.ALGORITHMS, 1.0),
    (BARE, MANY): dict.fromkeys(setting.ALGORITHMS, 2.0),
    (PEER, MANY): {"sgd": 6.0, "er": 10.0, "ewc": 10.0},
}
"""How many times faster glocal wants to be."""


def show(results: Results, console: Console) -> None:
    console.print(times(results))
    console.print(ratios(results))
    for contender, reason in results.skipped.items():
        console.print(f"skipped {contender}: {reason}")
    gemm = results.gemm()
    console.print(
        f"Floor: the products of a step at {gemm.middle:.0f} GFLOP/s ({gemm.low:.0f}–{gemm.high:.0f}), this machine's "
        f"rate on the widest layer, measured in every round. Medians over {len(results.rounds)} rounds; dim: quartiles."
    )


def times(results: Results) -> Table:
    title = f"ms per model-step, batch {setting.BATCH}, {setting.THREADS} threads"
    table = Table(title=title, show_lines=True)
    table.add_column("", no_wrap=True)
    for column in ("floor", BARE, PEER, ONE, MANY):
        table.add_column(column, justify="right", no_wrap=True)
    for a in setting.ALGORITHMS:
        cells = [milliseconds(results.floor(a))]
        for contender in (BARE, PEER, ONE, MANY):
            if contender in results.skipped:
                cells.append("skipped")
                continue
            cells.append(f"{milliseconds(results.time(a, contender))}\n{distance(results.above_floor(a, contender))}")
        table.add_row(a, *cells)
    return table


def ratios(results: Results) -> Table:
    table = Table("", title="times faster, per model-step (and the goal)", show_lines=True)
    for slower, faster in GOALS:
        table.add_column(f"{slower}\n/ {faster}", justify="right", no_wrap=True)
    for a in setting.ALGORITHMS:
        cells = []
        for (slower, faster), goals in GOALS.items():
            skipped = slower in results.skipped
            cells.append("skipped" if skipped else against(results.ratio(a, slower, faster), goals.get(a)))
        table.add_row(a, *cells)
    return table


def milliseconds(spread: Spread) -> str:
    return f"{spread.middle:.3f}\n[dim]{spread.low:.3f}–{spread.high:.3f}[/]"


def distance(spread: Spread) -> str:
    return f"[dim]{spread.middle:.1f} × floor[/]"


def against(spread: Spread, goal: float | None) -> str:
    """A ratio beside its goal, green where it is reached."""
    number, quartiles = f"{spread.middle:.2f} ×", f"[dim]{spread.low:.2f}–{spread.high:.2f}[/]"
    if goal is None:
        return f"{number}\n{quartiles}"
    colour = "green" if spread.middle >= goal else "red"
    return f"[{colour}]{number} (≥ {goal:g})[/]\n{quartiles}"
