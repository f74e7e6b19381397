r"""Statistics of runs: ACC(t), E_o, E(t) and transfer of one run, means over seeds, and the paper's test.

R has the shape (T + 1, T). R[t, o] is the accuracy (a fraction) or loss on task o = 1…T with θ_t, the parameters after
t tasks; t = 0 is the initialisation. Task o is column o − 1 of the array. NaN entries of a diverged run propagate.
A statistic of one R is a float; of R stacked for several runs, (runs, T + 1, T), it is an array with one entry per run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from glocal.errors import require, require_known

if TYPE_CHECKING:
    from glocal.store.run import Run

Over: TypeAlias = Literal["t", "t-1"]
Measure: TypeAlias = Literal["accuracy", "loss"]
Scope: TypeAlias = Literal["task", "class"]
Split: TypeAlias = Literal["test", "validation"]
Statistic: TypeAlias = Any  # float, or an array with one entry per run

OVER: tuple[Over, ...] = ("t", "t-1")
MEASURES: tuple[Measure, ...] = ("accuracy", "loss")
SCOPES: tuple[Scope, ...] = ("task", "class")

CONFIDENCE = 0.95
END_LRS = 2
"""Number of learning rates at each end of the range that the paper's test compares."""


def average_accuracy(R: np.ndarray, t: int | None = None) -> Statistic:
    """Compute ACC(t) = (1/t) Σ_{o≤t} R[t, o], by default at t = T."""
    R, t = _matrix(R, t)
    return _mean(R[..., t, :t])


def average_forgetting(R: np.ndarray, t: int | None = None, over: Over = "t-1", by: Measure = "accuracy") -> Statistic:
    """Compute E(t): for over='t-1', (1/(t−1)) Σ_{o<t} E_o(θ_t) (NaN at t = 1); for over='t', (1/t) Σ_{o≤t} E_o(θ_t).

    Both sums are equal because E_t(θ_t) = 0. With over='t', ACC(T) + E(T) is the mean accuracy right after learning and
    cannot exceed 1. Published tables exceed it, so they average over T − 1.
    """
    R, t = _matrix(R, t)
    require_known("average of forgetting over", over, OVER)
    require_known("measure of forgetting", by, MEASURES)
    count = t if over == "t" else t - 1
    after_training, now = _diagonal(R, -1)[..., :count], R[..., t, :count]
    with np.errstate(invalid="ignore"):  # infinite losses
        forgetting = after_training - now if by == "accuracy" else now - after_training
    return _mean(forgetting)


def backward_transfer(R: np.ndarray) -> Statistic:
    """Compute BWT = (1/(T−1)) Σ_{o<T} (R[T, o] − R[o, o]), the negative of forgetting over T − 1; NaN at T = 1."""
    return -average_forgetting(R, over="t-1", by="accuracy")


def forward_transfer(R: np.ndarray) -> Statistic:
    """Compute FWT = (1/(T−1)) Σ_{o=2…T} (R[o−1, o] − R[0, o]), accuracy gained before training on a task."""
    R, _ = _matrix(R, None)
    return _mean(_diagonal(R)[..., 1:] - R[..., 0, 1:])


def learning_accuracy(R: np.ndarray) -> Statistic:
    """Compute LA = (1/T) Σ_o R[o, o], the mean accuracy on each task right after training on it."""
    R, _ = _matrix(R, None)
    return _mean(_diagonal(R, -1))


def scope_of(run: Run, scope: Scope | None = None) -> Scope:
    """Return the scope of a run's accuracy: 'task' (the task's own classes) in the task setting, else 'class' (all)."""
    if scope is None:
        return "task" if run.setting == "task" else "class"
    require_known("scope", scope, SCOPES)
    return scope


def measure_of(run: Run, measure: Measure = "accuracy") -> Measure:
    """Return what a run is measured by: 'loss' if it has no classes, otherwise `measure`."""
    require_known("measure", measure, MEASURES)
    loss = run.config["challenge"].get("loss", "cross-entropy")
    has_classes = loss["classes"] if isinstance(loss, Mapping) else loss == "cross-entropy"
    return measure if has_classes else "loss"


def choice_split(run: Run) -> Split:
    """Return the data on which a choice between this run and others is made: validation data if it has any."""
    return "validation" if "validation_class_loss" in run.arrays else "test"


def accuracy_of(run: Run, scope: Scope | None = None, split: Split = "test") -> np.ndarray:
    """Return the run's matrix R of accuracies on test or validation data in its own scope, or in `scope`."""
    return run.arrays[f"{split}_{scope_of(run, scope)}_accuracy"]


def shown_matrix(run: Run, scope: Scope | None = None, split: Split = "test") -> np.ndarray:
    """Return the run's matrix R of accuracies in percent, or of losses if it has no classes."""
    return run.arrays[f"{split}_class_loss"] if measure_of(run) == "loss" else 100 * accuracy_of(run, scope, split)


def summary(
    run: Run,
    scope: Scope | None = None,
    measure: Measure = "accuracy",
    over: Over = "t-1",
    split: Split = "test",
) -> dict[str, float]:
    """Compute a run's test statistics after its last task, accuracies as fractions.

    Args:
        run: the run.
        scope: accuracy among the task's classes ('task') or all classes ('class'); by default that of the setting.
        measure: measure forgetting by 'accuracy' or by 'loss'; everything else is accuracy.
        over: average forgetting over 't' or 't-1' tasks.
        split: 'test', or 'validation' where the run has validation data.

    Returns:
        'acc', 'forgetting', 'backward_transfer', 'forward_transfer', 'learning_accuracy', 'distance' = ‖θ_T − θ_0‖₂;
        of a run without classes 'loss', the average test loss, forgetting by loss, and NaN for accuracies; all NaN if
        the run diverged.
    """
    return summaries([run], scope, measure, over, split)[0]


def summaries(
    runs: Sequence[Run],
    scope: Scope | None = None,
    measure: Measure = "accuracy",
    over: Over = "t-1",
    split: Split = "test",
) -> list[dict[str, float]]:
    """Compute the `summary` of each of several runs of the same challenge."""
    if not runs:
        return []
    run_scope, by = scope_of(runs[0], scope), measure_of(runs[0], measure)

    def stacked(name: str) -> np.ndarray:
        return np.stack([run.arrays[f"{split}_{name}"] for run in runs])

    R = stacked(f"{run_scope}_accuracy")
    columns: dict[str, Statistic] = {
        **({"loss": average_accuracy(stacked("class_loss"))} if measure_of(runs[0]) == "loss" else {}),
        "acc": average_accuracy(R),
        "forgetting": average_forgetting(stacked(f"{run_scope}_{by}"), over=over, by=by),
        "backward_transfer": backward_transfer(R),
        "forward_transfer": forward_transfer(R),
        "learning_accuracy": learning_accuracy(R),
        "distance": np.array([run.arrays["distance_from_init"][-1] for run in runs]),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in np.stack(list(columns.values()), axis=1).tolist()]
    return [x if run.diverged is None else dict.fromkeys(x, math.nan) for x, run in zip(rows, runs, strict=True)]


def over_seeds(summaries: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Compute (mean, standard deviation) of each statistic over seeds; {} without seeds.

    The standard deviation is √((1/n) Σ (x − x̄)²) with ddof = 0, hence 0 for one seed.
    """
    names = summaries[0] if summaries else ()
    columns = {name: np.array([s[name] for s in summaries]) for name in names}
    with np.errstate(invalid="ignore"):  # infinite losses
        return {name: (float(x.mean()), float(x.std())) for name, x in columns.items()}


def confidence_interval(values: Sequence[float], level: float = CONFIDENCE) -> tuple[float, float]:
    """Compute the t-interval x̄ ∓ t s/√n of the mean, with ddof = 1; (NaN, NaN) for fewer than two values."""
    from scipy.special import stdtrit  # as scipy.stats.t.ppf, which takes a second to import

    x = np.asarray(values, dtype=np.float64)
    if x.size < 2:
        return float("nan"), float("nan")
    half_width = float(stdtrit(x.size - 1, (1 + level) / 2) * x.std(ddof=1) / np.sqrt(x.size))
    return float(x.mean()) - half_width, float(x.mean()) + half_width


@dataclass(frozen=True)
class LearningRateTest:
    """Result of the paper's test (§6.1): forgetting at low learning rates minus forgetting at high ones, in points.

    The paper predicts a negative difference for local algorithms and no particular sign for global ones. `difference`
    is the mean over `seeds` paired differences, [`lower`, `upper`] its 95 % t-interval (NaN for fewer than two seeds).
    """

    locality: str
    seeds: int
    difference: float
    lower: float
    upper: float
    flat: bool = False
    """Whether the paper predicts no difference, as for iCaRL with random exemplars."""

    @property
    def sign(self) -> Literal["negative", "positive", "not settled"]:
        """Sign of the difference if the interval excludes 0."""
        return "negative" if self.upper < 0 else "positive" if self.lower > 0 else "not settled"

    @property
    def verdict(self) -> str:
        if self.seeds == 0:
            return "not tested: no seed finished at all four learning rates"
        if self.seeds == 1:
            return "not settled: one seed"
        if self.sign == "not settled":
            return "not settled"
        if self.locality == "global":
            return f"forgets {'more' if self.sign == 'negative' else 'less'} at high lr"
        return "supports the paper" if self.sign == "negative" and not self.flat else "contradicts the paper"


def learning_rate_test(forgetting: Mapping[float, Mapping[int, float]], locality: str) -> LearningRateTest | None:
    """Run the paper's test on one algorithm, paired by seed.

    Args:
        forgetting: `forgetting[lr][seed]` in points; diverged runs are left out, so an lr may have no seeds.
        locality: 'local' or 'global'.

    Returns:
        The trend over the seeds that finished at all four compared learning rates, or None for fewer than four
        learning rates and where forgetting is undefined (one task).
    """
    if len(forgetting) < 2 * END_LRS:
        return None
    differences = list(low_minus_high_by_seed(forgetting).values())
    if not np.isfinite(differences).all():
        return None
    mean = float(np.mean(differences)) if differences else float("nan")
    return LearningRateTest(locality, len(differences), mean, *confidence_interval(differences))


def low_minus_high_by_seed(values: Mapping[float, Mapping[int, float]]) -> dict[int, float]:
    """Compute `low_minus_high` of values[lr][seed] for each seed that has all four compared learning rates."""
    lrs = sorted(values)
    compared = lrs[:END_LRS] + lrs[-END_LRS:]
    seeds = sorted(set.intersection(*(set(values[lr]) for lr in compared)))
    return {seed: low_minus_high({lr: values[lr][seed] for lr in compared}) for seed in seeds}


def low_minus_high(values: Mapping[float, float]) -> float:
    """Compute the mean of values[lr] at the two lowest learning rates minus that at the two highest."""
    lrs = sorted(values)
    low, high = ([values[lr] for lr in end] for end in (lrs[:END_LRS], lrs[-END_LRS:]))
    return float(np.mean(low) - np.mean(high))


def _matrix(R: np.ndarray, t: int | None) -> tuple[np.ndarray, int]:
    """Validate R and t; return R in double precision and t (T by default)."""
    R = np.asarray(R, dtype=np.float64)
    fits = R.ndim >= 2 and R.shape[-2] == R.shape[-1] + 1 > 1
    require(fits, f"R has shape {R.shape}; expected (T + 1, T), one row for the initialisation and one per task.")
    T = R.shape[-1]
    require(t is None or 1 <= t <= T, f"t = {t} is out of range; allowed: 1 to {T}.")
    return R, T if t is None else t


def _diagonal(R: np.ndarray, offset: int = 0) -> np.ndarray:
    return np.diagonal(R, offset, axis1=-2, axis2=-1)


def _mean(values: np.ndarray) -> Statistic:
    """Return the mean over tasks, NaN if there are none."""
    mean = values.mean(axis=-1) if values.shape[-1] else np.full(values.shape[:-1], np.nan)
    return mean if mean.ndim else float(mean)


def learning_curves(runs: Sequence[Run]) -> np.ndarray:
    """Return obj_t after every epoch, (runs, T, epochs).

    A run that stopped a task early keeps its last value for as long as another goes on; then follows NaN.
    """
    curves = np.stack([run.arrays["epoch_loss"] for run in runs])
    ended = np.isnan(curves).all(0)
    for epoch in range(1, curves.shape[2]):
        curves[..., epoch] = np.where(np.isnan(curves[..., epoch]), curves[..., epoch - 1], curves[..., epoch])
    return np.where(ended, np.nan, curves)
