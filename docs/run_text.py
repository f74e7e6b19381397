"""What all pages of the reproduction say about runs: their algorithm, their cost and their dates."""

from __future__ import annotations

from collections import Counter
from typing import Any

from glocal.store.run import Run, Runs


def algorithm_of(run: Run) -> tuple[str, dict[str, Any]]:
    """The algorithm's name and options."""
    algorithm = run.config["algorithm"]
    return algorithm["name"], algorithm.get("options", {})


def cost(runs: Runs) -> str:
    """How many runs there are, and how long they took, where and when."""
    seconds = sum(run.info["cost"]["seconds"] for run in runs)
    devices = sorted({str(run.info["versions"]["device"]) for run in runs})
    return f"{len(runs)} runs took {seconds:.0f} s together on {', '.join(devices)}{dates(runs)}."


def dates(runs: Runs) -> str:
    """The days on which they were finished."""
    days = sorted({run.finished[:10] for run in runs})
    return f", finished on {days[0]}" if len(days) == 1 else f", finished from {days[0]} to {days[-1]}"


def seeds(runs: Runs) -> str:
    """How many seeds the algorithms have, and which have other numbers of them than most."""
    seeds_by_name: dict[str, set[int]] = {}
    for run in runs:
        seeds_by_name.setdefault(algorithm_of(run)[0], set()).add(run.seed)
    counts = {name: len(seed_values) for name, seed_values in seeds_by_name.items()}
    ((usual, _),) = Counter(counts.values()).most_common(1)
    other_counts = ", ".join(f"{count} of `{name}`" for name, count in counts.items() if count != usual)
    return f"{usual} seeds{f' ({other_counts})' if other_counts else ''}"
