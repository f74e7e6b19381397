r"""What is said of a run, derived from its matrices and never stored: ACC(t), E_o, E(t), transfer.

R has the shape (T + 1, T). R[t, o] is a measure (accuracy as a fraction, or loss) on task o = 1…T with θ_t, the
parameters after t tasks; t = 0 is the initialisation. Task o is column o − 1 of the array. NaN, where a run had
diverged, makes every number that depends on it NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from glocal.errors import GlocalError, unknown

if TYPE_CHECKING:
    from glocal.store.run import Run

Over: TypeAlias = Literal["t", "t-1"]
Measure: TypeAlias = Literal["accuracy", "loss"]
Scope: TypeAlias = Literal["task", "class"]

OVER: tuple[Over, ...] = ("t", "t-1")
MEASURES: tuple[Measure, ...] = ("accuracy", "loss")
SCOPES: tuple[Scope, ...] = ("task", "class")


def average_accuracy(R: np.ndarray, t: int | None = None) -> float:
    """ACC(t) = (1/t) Σ_{o≤t} R[t, o]; t = T unless given."""
    R, t = _matrix(R, t)
    return float(R[t, :t].mean())


def task_forgetting(R: np.ndarray, o: int, t: int | None = None, by: Measure = "accuracy") -> float:
    """E_o(θ_t) = R[o, o] − R[t, o] by accuracy, R[t, o] − R[o, o] by loss: the higher, the more is forgotten."""
    R, t = _matrix(R, t)
    if not 1 <= o <= t:
        raise GlocalError(f"task o = {o} was asked for after t = {t} tasks; allowed: 1 to {t}.")
    return float(_lost(R, t, by)[o - 1])


def average_forgetting(R: np.ndarray, t: int | None = None, over: Over = "t-1", by: Measure = "accuracy") -> float:
    """E(t): over 't', (1/t) Σ_{o≤t} E_o(θ_t); over 't-1', (1/(t−1)) Σ_{o<t} E_o(θ_t), undefined (NaN) at t = 1.

    The sums are equal, for E_t(θ_t) = 0. Over T, ACC(T) + E(T) is the mean accuracy right after learning and cannot
    pass 1; published tables pass it, and average over T − 1.
    """
    R, t = _matrix(R, t)
    if over not in OVER:
        raise unknown("average of forgetting over", over, OVER)
    count = t if over == "t" else t - 1
    return float(_lost(R, t, by)[:count].mean()) if count else float("nan")


def backward_transfer(R: np.ndarray) -> float:
    """BWT = (1/(T−1)) Σ_{o<T} (R[T, o] − R[o, o]): forgetting over T − 1, with the opposite sign; NaN at T = 1."""
    return -average_forgetting(R, over="t-1", by="accuracy")


def forward_transfer(R: np.ndarray) -> float:
    """FWT = (1/(T−1)) Σ_{o=2…T} (R[o−1, o] − R[0, o]): what is known of a task before it is met; NaN at T = 1."""
    R, T = _matrix(R, None)
    before, initially = np.diagonal(R)[1:], R[0, 1:]
    return float((before - initially).mean()) if T > 1 else float("nan")


def learning_accuracy(R: np.ndarray) -> float:
    """LA = (1/T) Σ_o R[o, o]: the accuracy on every task right after learning it."""
    R, _ = _matrix(R, None)
    return float(np.diagonal(R, offset=-1).mean())


def scope_of(run: Run, scope: Scope | None = None) -> Scope:
    """Which accuracy is the run's: among the task's own classes in the 'task' setting, among all classes otherwise."""
    if scope is None:
        return "task" if run.setting == "task" else "class"
    if scope not in SCOPES:
        raise unknown("scope", scope, SCOPES)
    return scope


def accuracy_of(run: Run, scope: Scope | None = None) -> np.ndarray:
    """The run's own R of test accuracies, by its setting or as `scope` says."""
    return run.arrays[f"test_{scope_of(run, scope)}_accuracy"]


def summary(
    run: Run, scope: Scope | None = None, measure: Measure = "accuracy", over: Over = "t-1"
) -> dict[str, float]:
    """One run's test numbers after its last task, accuracies as fractions.

    'acc', 'forgetting', 'backward_transfer', 'forward_transfer', 'learning_accuracy', and 'distance' = ‖θ_T − θ_0‖₂.
    `measure` is what forgetting is measured by; all else is accuracy. `scope` overrides the run's own setting.
    """
    if measure not in MEASURES:
        raise unknown("measure", measure, MEASURES)
    chosen = scope_of(run, scope)
    R = accuracy_of(run, scope)
    return {
        "acc": average_accuracy(R),
        "forgetting": average_forgetting(run.arrays[f"test_{chosen}_{measure}"], over=over, by=measure),
        "backward_transfer": backward_transfer(R),
        "forward_transfer": forward_transfer(R),
        "learning_accuracy": learning_accuracy(R),
        "distance": float(run.arrays["distance_from_init"][-1]),
    }


def over_seeds(summaries: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of every number over the runs of several seeds.

    The deviation is √((1/n) Σ (x − x̄)²), ddof = 0; of one seed it is 0. No seeds give {}.
    """
    names = summaries[0] if summaries else ()
    columns = {name: np.array([s[name] for s in summaries]) for name in names}
    with np.errstate(invalid="ignore"):  # an infinite loss has no deviation
        return {name: (float(x.mean()), float(x.std())) for name, x in columns.items()}


def _matrix(R: np.ndarray, t: int | None) -> tuple[np.ndarray, int]:
    """R in double precision and t, both checked."""
    R = np.asarray(R, dtype=np.float64)
    if R.ndim != 2 or R.shape[0] != R.shape[1] + 1 or R.shape[1] < 1:
        raise GlocalError(f"R has the shape {R.shape}; allowed: (T + 1, T), from the initialisation to θ_T.")
    T = R.shape[1]
    if t is not None and not 1 <= t <= T:
        raise GlocalError(f"t = {t} was asked for; allowed: 1 to {T}.")
    return R, T if t is None else t


def _lost(R: np.ndarray, t: int, by: Measure) -> np.ndarray:
    """E_o(θ_t) for o = 1…t."""
    if by not in MEASURES:
        raise unknown("measure of forgetting", by, MEASURES)
    learnt, now = np.diagonal(R, offset=-1)[:t], R[t, :t]
    with np.errstate(invalid="ignore"):  # from one infinite loss to another there is no difference
        return learnt - now if by == "accuracy" else now - learnt
