"""What the page shows: an overview of each store, the data of the charts, and the differences between two stores."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

from glocal import metrics, tree
from glocal.cluster.status import Status, retry_advice
from glocal.report import per_run
from glocal.report.lens_figures import examination_table
from glocal.report.plots import best_group
from glocal.report.style import lighten, line_styles
from glocal.report.summary import DEFAULT_VIEW, INTERVAL, Group, format_range, group_runs, split_groups
from glocal.report.table import ABSENT, Cell, Column, Section, Table, finite, format_lr, signed
from glocal.store.conditions import as_text, is_number
from glocal.store.run import SETTINGS, Run, Runs
from glocal.sweeps.options import format_time

if TYPE_CHECKING:
    from glocal.lens.examination import Examination

SHOWN = ("metric", "forgetting", "distance")
NOT_SWEPT = ("challenge", "algorithm", "label", "locality", "setting", "seed")
MAX_TASKS = 25
"""Of more tasks, the matrices show so many, evenly spaced, with the first and the last one."""
MAX_POINTS = 200
"""Points of a learning curve."""
_number = partial(finite, digits=5)


@dataclass(frozen=True)
class StoreContent:
    """A store as it was given, its runs that are shown, and its status."""

    name: str
    runs: Runs
    status: Status

    @cached_property
    def groups(self) -> list[Group]:
        return group_runs(self.runs)


def family(run: Run) -> str:
    """Return the name of a run's algorithm without options: what has one colour."""
    return f"{run.settings['algorithm']} ({run.locality})"


def run_name(run: Run) -> str:
    """Return the name of a run in its store."""
    return run.path.name if run.path else f"{run.algorithm}, lr {format_lr(run.lr)}, seed {run.seed}"


def overview(store: StoreContent) -> list[tuple[str, str]]:
    """Return what was run, as names and texts."""
    runs, status = store.runs, store.status
    counts = {name: getattr(status, name) for name in ("running", "waiting", "failed")}
    parts = [f"{len(runs)} finished", f"{sum(run.diverged is not None for run in runs)} diverged"]
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    seconds, memory = ([run.info["cost"][name] for run in runs] for name in ("seconds", "memory_bytes"))
    versions = Counter(", ".join(f"{k} {v}" for k, v in run.info["versions"].items()) for run in runs)
    ends = sorted(str(run.info.get("finished", ""))[:16].replace("T", " ") for run in runs)
    setting_names = {"challenges": "challenge", "networks": "network", "algorithms": "label", "optimisers": "optimizer"}
    setting_names |= {
        "learning rates": "lr",
        "seeds": "seed",
        "tasks": "tasks",
        "epochs": "epochs",
        "batch sizes": "batch_size",
    }
    setting_names |= {"precision": "precision"}
    rows = [("runs", ", ".join(parts))]
    rows += [(title, _values(run.settings[name] for run in runs)) for title, name in setting_names.items()]
    peak_memory = decimal(max(memory, default=0))
    rows += [("cost", f"{format_time(sum(seconds))} of training; algorithms held at most {peak_memory}")]
    rows += [("versions", "; ".join(text for text in versions if text) or "unknown")]
    rows += [("finished", f"{ends[0]} to {ends[-1]} UTC")] if ends and ends[0] else []
    return rows


def _values(values: Iterable[Any]) -> str:
    distinct = set(values)
    if all(map(is_number, distinct)):
        return ", ".join(str(value) if isinstance(value, int) else f"{value:g}" for value in sorted(distinct))
    return ", ".join(sorted(map(as_text, distinct)))


def problems(store: StoreContent) -> list[tuple[str, str]]:
    """Return the runs that diverged, the cohorts that failed and the notes of runs, with what is known of them."""
    entries = [
        (
            run_name(run),
            f"{run.algorithm} on {run.challenge}, lr {format_lr(run.lr)}, seed {run.seed}, diverged {run.diverged}.",
        )
        for run in store.runs
        if run.diverged is not None
    ]
    for cohort in store.status.failures:
        name = f"{format_range([len(cohort.hashes)], 'run')} failed"
        entries.append((name, f"{cohort.failed} {retry_advice(store.name)}"))
    notes = Counter(str(note) for run in store.runs for note in run.info["notes"])
    return entries + [(f"{count} runs" if count > 1 else "1 run", note) for note, count in notes.items()]


@dataclass(frozen=True)
class Examined:
    """A run, and what `glocal lens` found of it."""

    run: Run
    result: Examination

    @property
    def table(self) -> Table:
        return examination_table(self.result)

    def data(self) -> dict[str, Any]:
        """Return what the charts show: every pair of an old and a later task, and the largest eigenvalues."""
        result, n = self.result, len(self.result.losses)
        columns = {"distance": result.distance, "radius": result.radius}
        columns |= {"predicted": result.forgetting.predicted, "measured": result.forgetting.measured}
        pairs = [
            {"pair": f"{o + 1} → {t + 1}", "inside": bool(result.inside[t, o])}
            | {name: _number(float(matrix[t, o])) for name, matrix in columns.items()}
            for o in range(n)
            for t in range(o + 1, n)
        ]
        spectrum = [
            {"task": o + 1, "value": _number(x)} for o, values in enumerate(result.eigenvalues.tolist()) for x in values
        ]
        return {"pairs": pairs, "eigenvalues": spectrum}


def lead(groups: Sequence[Group]) -> str:
    """Return one line with the numbers of runs, algorithms, seeds, challenges and learning rates."""
    runs = [run for group in groups for run in group.runs]
    counts = {
        "run": len(runs),
        "algorithm": len({family(run) for run in runs}),
        "seed": len({run.seed for run in runs}),
    }
    counts |= {"challenge": len({run.challenge for run in runs}), "learning rate": len({run.lr for run in runs})}
    return " · ".join(format_range([count], noun) for noun, count in counts.items())


def joined_groups(stores: Sequence[StoreContent]) -> list[Group]:
    """Return the groups of all stores; of several, each challenge's label ends with its store."""
    if len(stores) == 1:
        return stores[0].groups
    return [
        replace(group, challenge=f"{group.challenge} · {store.name}")
        for store, groups in zip(stores, aligned_groups(stores), strict=True)
        for group in groups
    ]


def aligned_groups(stores: Sequence[StoreContent]) -> list[list[Group]]:
    """Return the groups of each store, with the same label for the same settings or options in all stores.

    Labels name settings that differ within a store, so those of one store may be longer: the longest are used.
    """
    own = ("algorithm", "optimizer", "lr", "seed", "parent")

    def settings(group: Group) -> str:
        config = group.runs[0].config
        return json.dumps([group.runs[0].after, {k: v for k, v in config.items() if k not in own}], sort_keys=True)

    def options(group: Group) -> str:
        parts = [group.runs[0].config.get(part) for part in ("algorithm", "optimizer")]
        return json.dumps([group.challenge, group.locality, *parts], sort_keys=True)

    def with_label(group: Group, name: str, label: Any) -> Group:
        return replace(group, **{name: label})

    groups = [list(store.groups) for store in stores]
    for name, key_of in (("challenge", settings), ("algorithm", options)):
        labels: dict[str, str] = {}
        for group in itertools.chain(*groups):
            labels[key_of(group)] = max(labels.get(key_of(group), ""), getattr(group, name), key=len)
        groups = [[with_label(group, name, labels[key_of(group)]) for group in members] for members in groups]
    return groups


def chart_data(stores: Sequence[StoreContent]) -> dict[str, Any]:
    """Return what the charts show, for JSON: NaN and infinity are None."""
    groups = joined_groups(stores)
    runs = [run for group in groups for run in group.runs]
    best = {id(best_group(members, DEFAULT_VIEW)) for members in split_groups(groups, "challenge", "title")}
    return {
        "families": _families(runs),
        "challenges": [_challenge(members) for members in split_groups(groups, "challenge")],
        "groups": [_group(group, id(group) in best) for group in groups],
        "runs": [_run(run, number, group) for number, group in enumerate(groups) for run in group.runs],
        "options": [_option(name, stores, groups) for name in swept(runs)],
    }


def _statistics(group: Group) -> dict[int, dict[str, float]]:
    """Return the statistics of each seed that did not diverge, with the accuracy or loss as 'metric'."""
    return {seed: {**values, "metric": values[group.metric]} for seed, values in group.by_seed(DEFAULT_VIEW).items()}


def _families(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return every algorithm with its style; colours are lighter on dark backgrounds."""
    from matplotlib.colors import to_hex

    members = sorted({(run.locality, str(run.settings["algorithm"])) for run in runs})
    styles = line_styles((name, locality) for locality, name in members)
    return [
        {
            "name": f"{name} ({locality})",
            "locality": locality,
            "colour": style.colour,
            "dark": to_hex(lighten(style.colour, 0.35)),
            "shape": _svg_path(style.marker),
        }
        for locality, name in members
        for style in [styles[name, locality]]
    ]


def _svg_path(marker: str) -> str:
    """Return a marker of matplotlib as an SVG path of about the size of a circle with radius 1."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.path import Path as MarkerPath
    from matplotlib.transforms import Affine2D

    style = MarkerStyle(marker)
    path = style.get_path().transformed(style.get_transform() + Affine2D().scale(2, -2))
    commands = {MarkerPath.MOVETO: "M", MarkerPath.LINETO: "L", MarkerPath.CURVE3: "Q", MarkerPath.CURVE4: "C"}
    segments = path.iter_segments(simplify=False)
    return "".join(
        commands[c] + ",".join(f"{round(x, 3):g}" for x in xy) if c in commands else "Z" for xy, c in segments
    )


def _challenge(groups: Sequence[Group]) -> dict[str, Any]:
    run, metric = groups[0].runs[0], groups[0].metric
    unit = "points" if metrics.measure_of(run) == "accuracy" else "test loss"
    return {
        "name": groups[0].challenge,
        "metric": "accuracy (%)" if metric == "acc" else "test loss",
        "forgetting": f"forgetting ({unit})",
        "largest": 100 if metric == "acc" else None,
    }


def _group(group: Group, best: bool) -> dict[str, Any]:
    """Return a group: its labels, its accuracy after every task and its learning curve."""
    finished, T = group.finished, group.tasks
    R = np.stack([metrics.shown_matrix(run) for run in finished]) if finished else np.empty((0, T + 1, T))
    curves = metrics.learning_curves(finished).reshape(len(finished), -1) if finished else np.empty((0, 0))
    epochs = curves.shape[1] // T if finished else 1
    return {
        "challenge": group.challenge,
        "algorithm": group.algorithm,
        "family": family(group.runs[0]),
        "lr": group.lr,
        "best": best,
        "tasks": [[t, *_interval(metrics.average_accuracy(R, t))] for t in range(1, T + 1) if finished],
        "loss": [
            [_number((i + 1) / epochs), *_interval(curves[np.isfinite(curves[:, i]), i])]  # NaN: all had ended the task
            for i in _spread(curves.shape[1], MAX_POINTS)
        ],
        **_intervals(group),
        "seeds": len(finished),
    }


def _run(run: Run, number: int, group: Group) -> dict[str, Any]:
    """Return a run: its name, the number of its group, its statistics and its matrix."""
    statistics = _statistics(group).get(run.seed, {}) if run.diverged is None else {}
    rows, columns = [*_spread(run.tasks + 1, MAX_TASKS + 1)], [*_spread(run.tasks, MAX_TASKS)]
    return {
        "name": run_name(run),
        "group": number,
        "seed": run.seed,
        **{name: _number(statistics.get(name)) for name in SHOWN},
        "rows": rows,
        "columns": [o + 1 for o in columns],
        "matrix": [[_number(x) for x in row] for row in metrics.shown_matrix(run)[np.ix_(rows, columns)]],
    }


def swept(runs: Sequence[Run]) -> list[str]:
    """Return the names of options that have several values; the learning rate in any case."""
    frame = per_run.frame(runs)
    names = [*SETTINGS, *per_run.differing([run.options for run in runs], runs)]
    return [
        "lr",
        *(n for n in dict.fromkeys(names) if n not in (*NOT_SWEPT, "lr") and frame[n].drop_nulls().n_unique() > 1),
    ]


def _option(name: str, stores: Sequence[StoreContent], groups: Sequence[Group]) -> dict[str, Any]:
    """Return statistics against an option.

    The runs of a series differ only in the option and the seed. The series is shown with all their challenges, whose
    labels may contain the option.
    """
    labels = {id(run): group.challenge for group in groups for run in group.runs}
    series: list[dict[str, Any]] = []
    place: dict[int, tuple[int, Any]] = {}
    for store in stores:
        store_runs = [run for run in store.runs if name in SETTINGS or run.options.get(name) is not None]
        for series_groups in split_groups(group_runs(store_runs, name), "challenge", "title"):
            members = [(run, group.x) for group in series_groups for run in group.runs]
            place |= {id(run): (len(series), x) for run, x in members}
            challenges = sorted({labels[id(run)] for run, _ in members if id(run) in labels})
            rows = [{"x": group.x, "seeds": len(group.finished), **_intervals(group)} for group in series_groups]
            names = {"family": family(members[0][0]), "algorithm": series_groups[0].algorithm}
            series.append({**names, "challenges": challenges, "rows": rows})
    values = [row["x"] for entry in series for row in entry["rows"]]
    numeric = all(map(is_number, values))
    wide = numeric and min(values) > 0 and max(values) >= 10 * min(values)
    places = [place.get(id(run), (None, None)) for group in groups for run in group.runs]
    return {
        "name": "learning rate" if name == "lr" else name.replace("_", " "),
        "kind": "log" if wide else "linear" if numeric else "point",
        "series": series,
        "of": [number for number, _ in places],
        "x": [x for _, x in places],
    }


def _intervals(group: Group) -> dict[str, list[float | None]]:
    return {name: _interval([values[name] for values in _statistics(group).values()]) for name in SHOWN}


def changes(first: StoreContent, second: StoreContent) -> tuple[list[str], list[dict[str, Any]]]:
    """Compare the groups that both stores have.

    Returns:
        Sentences on what differs, and a row for every group and statistic: the mean difference, second − first, over
        the seeds that finished in both, with its paired t-interval.
    """
    groups = [
        {(g.challenge, g.locality, g.algorithm, g.lr): g for g in members}
        for members in aligned_groups([first, second])
    ]
    shared_keys = [key for key in groups[0] if key in groups[1]]
    lone_keys = [groups[0].keys() - groups[1].keys(), groups[1].keys() - groups[0].keys()]
    notes = [
        f"{len(keys)} of {len(store.groups)} groups are in {store.name} alone."
        for store, keys in zip((first, second), lone_keys, strict=True)
        if keys
    ]
    several = len({challenge for challenge, *_ in shared_keys}) > 1
    counts: Counter[str] = Counter()
    rows = []
    for key in shared_keys:
        old, new = groups[0][key], groups[1][key]
        counts.update(_differences(old.runs[0], new.runs[0]))
        statistics = _statistics(old), _statistics(new)
        seeds = sorted(statistics[0].keys() & statistics[1].keys())
        for name in SHOWN:
            is_comparable = name == "distance" or old.metric == new.metric  # an accuracy and a loss have no difference
            differences = [statistics[1][s][name] - statistics[0][s][name] for s in seeds if is_comparable]
            mean, low, high = _interval(differences)
            label = f"{old.challenge}: {old.title}" if several else old.title
            rows.append(
                {
                    "group": f"{label}, lr {format_lr(old.lr)}",
                    "label": label,
                    "family": family(old.runs[0]),
                    "statistic": name,
                    "seeds": len(seeds),
                }
            )
            rows[-1] |= {"mean": mean, "low": low, "high": high, "algorithm": old.algorithm, "lr": old.lr}
    notes += [f"{text} ({count} of {len(shared_keys)} groups)." for text, count in counts.items()]
    return notes + (["The settings of all groups in both are equal."] if shared_keys and not counts else []), rows


def _differences(old: Run, new: Run) -> list[str]:
    """Return the settings and versions in which two runs of different stores differ."""
    settings = [tree.flatten({**r.config, "seed": 0, "parent": {}, "versions": r.info["versions"]}) for r in (old, new)]
    names = dict.fromkeys([*settings[0], *settings[1]])
    texts = {name: [as_text(values[name]) if name in values else "absent" for values in settings] for name in names}
    return [f"{name}: {a} → {b}" for name, (a, b) in texts.items() if a != b]


def change_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the rows of `changes`: one line per group, a difference and an interval for each statistic."""
    sections = []
    for start in range(0, len(rows), len(SHOWN)):
        group_rows = rows[start : start + len(SHOWN)]
        cells = [Cell(format_lr(group_rows[0]["lr"])), Cell(str(group_rows[0]["seeds"]))]
        for row in group_rows:
            bounds = ABSENT if row["low"] is None else f"[{signed(row['low'])}, {signed(row['high'])}]"
            excludes_zero = row["low"] is not None and not row["low"] <= 0 <= row["high"]
            cells += [Cell(signed(row["mean"]), marked=excludes_zero), Cell(bounds)]
        sections.append(Section(str(group_rows[0]["label"]), "", (tuple(cells),)))
    titles = {"metric": "accuracy or loss", "forgetting": "forgetting", "distance": "distance"}
    columns = [Column("lr"), Column("seeds")]
    columns += [Column(name, titles[statistic]) for statistic in SHOWN for name in ("difference", INTERVAL)]
    note = "Differences are paired by seed. Bold: the interval excludes 0; it is not corrected for many comparisons."
    return Table(tuple(columns), tuple(sections), "", "group", (note,))


def _interval(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Return the mean and its t-interval over seeds."""
    values = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = float(values.mean()) if values.size else math.nan
        return [_number(mean), *map(_number, metrics.confidence_interval(values.tolist()))]


def _spread(count: int, limit: int) -> Iterable[int]:
    """Return at most `limit` of `count` indices, evenly spaced, with the first and the last."""
    return (
        range(count) if count <= limit else dict.fromkeys(np.linspace(0, count - 1, limit).round().astype(int).tolist())
    )
