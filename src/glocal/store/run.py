"""Finished runs, as a store returns them."""

from __future__ import annotations

import math
from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glocal.engine.config import RunConfig
from glocal.errors import GlocalError, require
from glocal.files import read_tensors, report_damage

if TYPE_CHECKING:
    import polars
    from matplotlib.figure import Figure

    from glocal.tree import Params

EXPLOSION = 10.0
"""An objective, or an update of the parameters, that is more than this many times too large is an explosion."""

SETTINGS = (
    *("challenge", "algorithm", "label", "locality", "setting", "network", "optimizer"),
    *("lr", "seed", "tasks", "epochs", "batch_size", "precision"),
)
"""Names of what every run has in `Run.settings` first. 'algorithm' is its registered name, 'label' what tables show."""


def short_name(name: str) -> str:
    """Return the name of one of `Run.other_settings` without its prefix, but for hashes of code."""
    return name if name.endswith("_source") else name.partition("_")[2]


@dataclass(frozen=True, repr=False)
class Run:
    """A run's configuration, measurements and information about its training.

    Attributes:
        arrays: the eight matrices R[t, o] of shape (T + 1, T), named as in `engine.config.MEASURES` (t = 0 is the
            initialisation; NaN where the run had diverged, or where the run that it goes on from did not have task o
            yet), four more with validation data (`VALIDATION_MEASURES`), 'distance_from_init' and 'update_norm' (T,),
            'epoch_loss' (T, epochs), 'memory_bytes' (T,).
        info: 'label' (the algorithm and, unless it is plain SGD, the optimiser, with the options that are not
            defaults), 'locality', 'setting', 'diverged' (the step by which a value was not finite, or None), 'steps',
            'cost', 'versions', 'notes', 'finished' (when).
    """

    config: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    info: Mapping[str, Any]
    path: Path | None = None

    def __repr__(self) -> str:
        description = f"{self.algorithm} on {self.challenge}, lr {self.lr:g}, seed {self.seed}"
        return f"<Run: {description}{', diverged' if self.diverged else ''}>"

    @property
    def hash(self) -> str:
        """The name in a store: by the configuration."""
        return self.path.name if self.path else RunConfig(**self.config).hash

    @property
    def challenge(self) -> str:
        return str(self.config["challenge"]["name"])

    @property
    def algorithm(self) -> str:
        return str(self.info["label"])

    @property
    def locality(self) -> str:
        return str(self.info["locality"])

    @property
    def setting(self) -> str:
        return str(self.info["setting"])

    @property
    def lr(self) -> float:
        return float(self.config["lr"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def tasks(self) -> int:
        return int(self.config["challenge"]["tasks"])

    @property
    def after(self) -> int:
        """The number of tasks of the run that this one goes on from, 0 if it started from the initialisation."""
        return int(self.config.get("parent", {"after": 0})["after"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What was chosen for the run, by names: `SETTINGS`, `options` and `other_settings`.

        The last lose their prefix, as 'patience', where the run has nothing else of this name.
        """
        config = self.config
        named = {name: config[name]["name"] for name in ("challenge", "algorithm", "network")}
        named |= {name: getattr(self, name) for name in ("locality", "setting", "lr", "seed", "tasks")}
        named |= {"label": self.algorithm, "optimizer": config.get("optimizer", {"name": "sgd"})["name"]}
        named |= {"precision": config.get("precision", "fp32")}
        named |= {name: config[name] for name in ("epochs", "batch_size")}
        settings = {name: named[name] for name in SETTINGS}
        settings |= {k: v for k, v in self.options.items() if k not in SETTINGS}
        for name, value in self.other_settings.items():
            settings[name if (short := short_name(name)) in settings else short] = value
        return settings

    @property
    def other_settings(self) -> dict[str, Any]:
        """All else that the run's name depends on: 'challenge_validation', 'network_source', 'training_patience'."""
        config = self.config
        challenge = config["challenge"].get("options", {}) | {
            k: v for k, v in config["challenge"].items() if k not in (*SETTINGS, "name", "options")
        }
        training = {k: v for k, v in config.items() if k not in (*SETTINGS, "parent")}
        training |= {"after": self.after} if self.after else {}
        optimizer = {k: v for k, v in config.get("optimizer", {}).items() if k == "source"}
        parts = {"challenge": challenge, "network": config["network"], "optimizer": optimizer, "training": training}
        return {f"{part}_{k}": v for part, values in parts.items() for k, v in values.items() if k != "name"}

    @property
    def options(self) -> dict[str, Any]:
        """The options of its algorithm and optimiser, and 'source', the hash of the file of a user's algorithm."""
        options = {**self.config.get("optimizer", {}).get("options", {}), **self.config["algorithm"]["options"]}
        source = self.config["algorithm"].get("source")
        return options | ({} if source is None else {"source": source})

    @cached_property
    def diverged(self) -> str | None:
        """When and how the run diverged, or None. Diverged runs are left out of means."""
        if self.info["diverged"] is not None:
            return f"by step {self.info['diverged']}: its objective, parameters or losses were not finite"
        task = exploded_task(self)
        return None if task is None else f"in task {task}: its parameters exploded, though they stayed finite"

    @property
    def finished(self) -> str:
        """Time at which the run finished, in UTC (ISO 8601)."""
        return str(self.info["finished"])

    def state(self, task: int) -> Params:
        """Return the network's state dict after `task` tasks; 0 is the initialisation. Needs `keep_parameters`."""
        path = None if self.path is None else self.path / "parameters.safetensors"
        if path is None or not path.exists():
            raise GlocalError("this run has not kept its parameters: repeat its command with keep_parameters.")
        require(0 <= task <= self.tasks, f"task = {task} was given; it must be 0 (initialisation) to {self.tasks}.")
        with report_damage(path, "Delete it and repeat the run's command with keep_parameters."):
            tensors, _ = read_tensors(path, ("frozen/", f"{task}/"))
            if not any(name.startswith(f"{task}/") for name in tensors):
                raise ValueError(f"it has no parameters after {task} tasks")
        return {name.partition("/")[2]: tensor for name, tensor in tensors.items()}


def exploded_task(run: Run) -> int | None:
    """Return the first task, counted from 1, in which training exploded while all numbers stayed finite.

    That is a task in which the objective, averaged over an epoch, exceeded ten times the loss of the untrained network,
    and of which nothing was learnt: its training loss is still more than half of what it was for the untrained network.
    Neither is enough alone, since algorithms scale their objectives and predictions as they like (iCaRL's are
    distances). The first comparison is with the largest loss of all tasks, and for classes at least with that of
    guessing, because a pretrained network starts near 0.

    Archived results have no losses: there, a task exploded if it moved the parameters more than ten times as far as
    every task before it.
    """
    arrays, challenge = run.arrays, run.config["challenge"]
    if "epoch_loss" in arrays:
        guessing = math.log(challenge.get("outputs", 1)) if challenge.get("loss") == "cross-entropy" else 0.0
        untrained = arrays["train_class_loss"][0]
        large = np.abs(arrays["epoch_loss"]) > EXPLOSION * max(untrained.max(), guessing)
        if not large.any():
            return None
        exploded = large.any(axis=1) & (np.diagonal(arrays["train_class_loss"], offset=-1) > untrained / 2)
    else:
        updates = arrays["update_norm"]
        longest = np.maximum.accumulate(updates)[:-1]
        exploded = np.concatenate([[False], (longest > 0) & (updates[1:] > EXPLOSION * longest)])
    return int(exploded.argmax()) + 1 if exploded.any() else None


CONFIG = {
    "challenge": {"name": str, "tasks": int, "outputs": int, "loss": str | dict, "options": dict},
    "network": {"name": str},
    "algorithm": {"name": str, "options": dict},
    "lr": int | float,
    "seed": int,
    "epochs": int,
    "batch_size": int,
}
INFO = {
    "label": str,
    "locality": str,
    "setting": str,
    "diverged": int | None,
    "cost": {"seconds": int | float, "memory_bytes": int},
    "versions": dict,
    "notes": list,
    "steps": int,
}


def check_run(run: Run) -> None:
    """Raise ValueError unless a run that was read from a file has the types and shapes that tables and figures need."""
    wrong = next(chain(_misfits(run.config, CONFIG, "config"), _misfits(run.info, INFO, "info")), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is missing or of another type")
    if not run.lr > 0 or run.config["challenge"]["outputs"] < 1:
        raise ValueError(f"its learning rate is {run.lr}, and its outputs are {run.config['challenge']['outputs']}")
    if run.locality not in ("local", "global") or run.setting not in ("task", "class", "domain"):
        raise ValueError(f"its locality is {run.locality!r}, and its setting {run.setting!r}")
    loss = run.config["challenge"]["loss"]
    if isinstance(loss, dict) and "classes" not in loss:
        raise ValueError("config.challenge.loss.classes is missing")
    tasks, epochs = run.tasks, run.config["epochs"]
    if not 0 <= run.after < tasks:
        raise ValueError(f"it goes on after {run.after} of {tasks} tasks")
    vectors = {"distance_from_init": (tasks,), "update_norm": (tasks,), "memory_bytes": (tasks,)}
    shapes = {**vectors, "epoch_loss": (tasks, epochs)}
    for name, array in run.arrays.items():
        if array.shape != shapes.get(name, (tasks + 1, tasks)) or array.dtype.kind not in "if":
            raise ValueError(f"{name} has shape {array.shape} and type {array.dtype}")


def _misfits(value: Any, schema: Any, name: str) -> Iterator[str]:
    """Yield the names of entries that are not as a schema of types and dicts of schemas says."""
    if isinstance(schema, dict):
        for key, part in schema.items():
            yield from _misfits(value.get(key) if isinstance(value, dict) else None, part, f"{name}.{key}")
    elif not isinstance(value, schema) or not _fits(value):
        yield name


def _fits(value: object) -> bool:
    """Return whether tables can hold a value: a whole number in 64 bits, any other if it is finite."""
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 2**63


class Runs(UserList[Run]):
    """Finished runs, in the order of their requests; `table` and `plot` show them."""

    def __repr__(self) -> str:
        names = sorted({run.algorithm for run in self})
        return f"<{len(self)} runs: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}>"

    def where(self, *conditions: str | Callable[[Run], bool]) -> Runs:
        """Return the runs that meet all conditions: functions of a run, or texts on `Run.settings`.

        For example `runs.where("algorithm=er,ewc", "lr>=0.01", "seed!=11", lambda run: run.diverged is None)`.
        """
        from glocal.store.conditions import parse_condition

        if not self:
            return Runs()
        keep = [parse_condition(text, self) if isinstance(text, str) else text for text in conditions]
        return Runs([run for run in self if all(condition(run) for condition in keep)])

    def table(self, **options: Any) -> polars.DataFrame:
        """Return `glocal.report.summary.rows`: accuracy and forgetting by algorithm and learning rate.

        The options are those of `glocal.report.summary.View`.
        """
        from glocal.report.summary import View, frame

        return frame(self, View(**options))

    def frame(self, **options: Any) -> polars.DataFrame:
        """Return `glocal.report.per_run.frame`: settings, statistics and cost, one row per run.

        The options are those of `glocal.report.summary.View`. `.to_pandas()` needs pandas and pyarrow; without pyarrow,
        use `pandas.DataFrame({column.name: column.to_numpy() for column in runs.frame()})`.
        """
        from glocal.report.per_run import frame
        from glocal.report.summary import View

        return frame(self, View(**options))

    def choose(self, *protocols: str, **options: Any) -> polars.DataFrame:
        """Return `glocal.report.choices.rows`: the configuration of each algorithm that each protocol chooses.

        For example `runs.choose("first-k=3", "oracle-test")`. The options are those of `glocal.report.summary.View`.
        """
        import polars as pl

        from glocal.report.choices import DEFAULT_PROTOCOLS, rows
        from glocal.report.summary import View

        return pl.DataFrame(rows(self, protocols or DEFAULT_PROTOCOLS, View(**options)), infer_schema_length=None)

    def plot(self, kind: str, path: str | Path, over: str = "lr", **look: Any) -> Path:
        """Save a figure as PNG, PDF, SVG or PGF and return its path; `glocal plot --help` lists the kinds.

        `over` is the option by which the runs of an algorithm are compared. The other options, `dpi`, `width` and
        `style`, are those of `glocal.report.figure.make_figure`.
        """
        from glocal.report.figure import save_figure
        from glocal.report.plots import drawing

        return save_figure(drawing(self, kind, over=over), path, **look)

    def figure(self, kind: str, over: str = "lr", **look: Any) -> Figure:
        """Return the figure that `plot` saves; notebooks show it."""
        from glocal.report.figure import make_figure
        from glocal.report.plots import drawing

        return make_figure(drawing(self, kind, over=over), **look)

    def track(self, to: str) -> None:
        """Log the runs to a tracker, such as "tensorboard:logs"; what it has already is not repeated."""
        from glocal.track.tracking import track_runs

        track_runs(self, to)
