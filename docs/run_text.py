"""What all pages of the reproduction say about runs: their algorithm, their cost and their dates."""

from __future__ import annotations

from typing import Any

from glocal.store.run import Run, Runs


def chosen(run: Run) -> tuple[str, dict[str, Any]]:
    """The algorithm's name and options."""
    algorithm = run.config["algorithm"]
    return algorithm["name"], algorithm.get("options", {})


def cost(runs: Runs) -> str:
    """How many runs there are, and how long they took, where and when."""
    seconds = sum(run.info["cost"]["seconds"] for run in runs)
    where = sorted({str(run.info["versions"]["device"]) for run in runs})
    return f"{len(runs)} runs took {seconds:.0f} s together on {', '.join(where)}{when(runs)}."


def when(runs: Runs) -> str:
    """The days on which they were finished."""
    days = sorted({run.finished[:10] for run in runs})
    return f", finished on {days[0]}" if len(days) == 1 else f", finished from {days[0]} to {days[-1]}"
