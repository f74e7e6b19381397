"""`glocal locality`: is an algorithm local or global?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glocal.cli.common import Name, PathName
from glocal.errors import GlocalError

if TYPE_CHECKING:
    from glocal.algorithms import Algorithm
    from glocal.challenges import Challenge
    from glocal.lens.local_or_global import Verdict

Algorithms = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="[ALGORITHM ...]", help_behavior_hint=""), tyro.conf.Positional
]
UNLESS_GIVEN = ("rotated-digits", "split-digits")
"""The first of them that an algorithm is suited for."""


@dataclass(frozen=True)
class Locality:
    """Test by experiment whether algorithms are local or global, as the paper's Definition 1 has it.

    Many solutions θ_o of a task are trained from different initialisations and in different orders, all else held
    fixed. An approximation of the task's loss that then differs with the solution is local; one that does not is
    global. All algorithms take one to two minutes on two cores.
    For example: glocal locality; glocal locality er ewc path.py:Mine
    """

    algorithms: Algorithms = ()
    """Names from `glocal list algorithms`, or path.py:Name for your own (all that have a name unless given)."""
    challenge: Name = None
    """Whose first task is learnt: a name or path.py:function (rotated-digits unless given, and split-digits for
    algorithms that need new classes with every task)."""
    setting: Name = None
    """task or class: how a split challenge is met; the challenge's own unless given."""
    network: str = "mlp"
    """A name from `glocal list networks`, or path.py:function for your own."""
    lr: float = 0.1
    """Learning rate."""
    epochs: int = 3
    """Passes over the task; the first of several in an order of its own for each solution."""
    solutions: int = 24
    """How many solutions are compared."""
    examples: int = 500
    """At most so many training examples of the task."""
    seed: int = 0
    """Seed of all that is held fixed; initialisations and orders have the following ones."""
    data: PathName = None
    """A folder with data sets, looked at first."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __call__(self) -> None:
        from rich.console import Console

        from glocal.cli.common import progress_bar
        from glocal.lens.local_or_global import locality
        from glocal.sweeps import resolve
        from glocal.sweeps.resolve import choose_device

        device, pairs = choose_device(self.device), self._pairs()
        for _, challenge in pairs:
            resolve.network(self.network, challenge)
        how = {name: getattr(self, name) for name in ("network", "lr", "epochs", "solutions", "examples", "seed")}
        verdicts: dict[str, list[Verdict]] = {}
        failures: list[str] = []
        with progress_bar("locality") as on_progress:
            for number, (algorithm, challenge) in enumerate(pairs):
                if number or sys.stderr.isatty():
                    on_progress(number, len(pairs), resolve.name_of(algorithm))
                try:
                    found = locality(algorithm, challenge, **how, device=device)
                    verdicts.setdefault(challenge.name, []).append(found)
                except GlocalError as error:
                    failures.append(f"{resolve.name_of(algorithm)}: {error}")
        if verdicts:
            silent = [resolve.name_of(algorithm) for algorithm, _ in pairs if _states_nothing(algorithm)]
            Console().print(table([v for own in verdicts.values() for v in own]))
            Console().print("\n".join(summary(verdicts, silent)), highlight=False)
        if failures:
            one = len(failures) == len(pairs) == 1
            raise GlocalError(failures[0] if one else f"{len(failures)} of {len(pairs)} failed. {' '.join(failures)}")

    def _pairs(self) -> list[tuple[Algorithm, Challenge]]:
        """Whom to test and on what, all of them known before the first is trained."""
        from glocal.algorithms import ALGORITHMS
        from glocal.sweeps import resolve

        made: dict[str, Challenge] = {}

        def challenge(name: str, setting: str | None = None) -> Challenge:
            if name not in made:
                made[name] = resolve.challenge(name, data=self.data, setting=setting).value
            return made[name]

        if self.challenge is None and self.setting is not None:
            raise GlocalError("a setting goes with a challenge that has one: give --challenge split-digits, say.")
        pairs = []
        for name in self.algorithms or ALGORITHMS:
            algorithm = resolve.algorithm(name).value
            if self.challenge is None:
                settings = [challenge(each) for each in UNLESS_GIVEN]
                met = next((c for c in settings if c.setting in algorithm.settings), settings[0])
            else:
                met = challenge(self.challenge, self.setting)
            if self.algorithms:
                resolve.check_setting(algorithm, met)
            elif met.setting not in algorithm.settings:
                continue
            pairs.append((algorithm, met))
        return pairs


def _states_nothing(algorithm: Algorithm) -> bool:
    r"""Whether it does something about old tasks without saying what it takes their losses for; sgd's \hat L_o is 0."""
    from glocal.algorithms import ALGORITHMS
    from glocal.algorithms import Algorithm as Base

    return type(algorithm).approximation is Base.approximation and type(algorithm) not in ALGORITHMS.values()


def table(verdicts: Sequence[Verdict]) -> Any:
    """What each declares, what was found, and by what numbers."""
    from rich.table import Table

    made = Table(title=r"Does \hat L_o depend on θ_o?", title_justify="left")
    for column in ("algorithm", "declared", "found"):
        made.add_column(column, no_wrap=True)
    for column in ("explained", "involved", "nats", "p"):
        made.add_column(column, justify="right", no_wrap=True)
    for v in verdicts:
        found = f"[green]{v.found}[/]" if v.agrees else f"[bold red]{v.found} ≠[/]"
        shares = [f"{100 * share:.1f} %" for share in (v.variance_explained, v.variance_involved)]
        made.add_row(v.algorithm, v.declared, found, *shares, f"{v.information:.2f}", f"{v.p_value:.3f}")
    return made


def summary(verdicts: Mapping[str, Sequence[Verdict]], silent: Sequence[str]) -> list[str]:
    """How to read the table; verdicts are by challenge, `silent` are those that state no approximation."""
    every = [v for own in verdicts.values() for v in own]
    sizes, lost = sorted({len(v.values) for v in every}), sum(v.lost for v in every)
    names = [f"{', '.join(v.algorithm for v in own)} on {name}" for name, own in verdicts.items()][1:]
    first = next(iter(verdicts))
    told = [
        f"{sum(v.agrees for v in every)} of {len(every)} found as declared; "
        f"{' to '.join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))} solutions each, of the first task "
        f"of {first}{''.join(f' ({name})' for name in names)}.",
        "explained: θ_o's share of the variance of \\hat L_o(θ); involved: with what it makes of a memory's draws.",
        "nats: I(\\hat L_o; θ_o), by nearest neighbours. p: how often chance does as much; local if p ≤ 0.01.",
    ]
    if lost:
        told.append(f"{lost} solutions diverged and were left out.")
    if silent:
        told.append(
            f"{', '.join(silent)}: no \\hat L_o is stated, and 0 was tested in its place. Override `approximation`."
        )
    return told
