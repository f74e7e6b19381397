"""`glocal locality`: test whether algorithms are local or global."""

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
DEFAULT_CHALLENGES = ("rotated-digits", "split-digits")
"""The first one whose setting an algorithm supports is used."""


@dataclass(frozen=True)
class Locality:
    """Test whether algorithms are local or global (Definition 3.1).

    Many solutions θ_o of a task are trained from different initialisations and in different orders; everything else is
    the same. If the algorithm's approximation of the task's loss differs between solutions, it is local, otherwise
    global. All algorithms together take one to two minutes on two cores.
    For example: glocal locality; glocal locality er ewc path.py:Mine
    """

    algorithms: Algorithms = ()
    """Names from `glocal list algorithms`, or path.py:Name for your own (default: all built-in algorithms)."""
    challenge: Name = None
    """Challenge whose first task is trained: a name or path.py:function (default: rotated-digits, or split-digits for
    algorithms that need new classes)."""
    setting: Name = None
    """Setting of a split challenge: task or class (default: the challenge's)."""
    network: str = "mlp"
    """A name from `glocal list networks`, or path.py:function for your own."""
    lr: float = 0.1
    """Learning rate."""
    epochs: int = 3
    """Epochs. If more than one, each solution shuffles its first epoch differently."""
    solutions: int = 24
    """Number of solutions to compare."""
    examples: int = 500
    """Maximum number of training examples."""
    seed: int = 0
    """Base seed. Solution i uses seed + 1 + i for its initialisation and first epoch."""
    data: PathName = None
    """Folder to search first for data sets."""
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
        kwargs = {name: getattr(self, name) for name in ("network", "lr", "epochs", "solutions", "examples", "seed")}
        verdicts: dict[str, list[Verdict]] = {}
        failures: list[str] = []
        with progress_bar("locality") as on_progress:
            for number, (algorithm, challenge) in enumerate(pairs):
                if number or sys.stderr.isatty():
                    on_progress(number, len(pairs), resolve.name_of(algorithm))
                try:
                    verdict = locality(algorithm, challenge, **kwargs, device=device)
                    verdicts.setdefault(challenge.name, []).append(verdict)
                except GlocalError as error:
                    failures.append(f"{resolve.name_of(algorithm)}: {error}")
        if verdicts:
            without = [resolve.name_of(algorithm) for algorithm, _ in pairs if _has_no_approximation(algorithm)]
            Console().print(verdict_table([v for group in verdicts.values() for v in group]))
            Console().print("\n".join(summary(verdicts, without)), highlight=False)
        if failures:
            single = len(failures) == len(pairs) == 1
            count = f"{len(failures)} of {len(pairs)} failed."
            raise GlocalError(failures[0] if single else f"{count} {' '.join(failures)}")

    def _pairs(self) -> list[tuple[Algorithm, Challenge]]:
        """Return every algorithm with its challenge; raise before training if one is invalid."""
        from glocal.algorithms import ALGORITHMS
        from glocal.sweeps import resolve

        challenges: dict[str, Challenge] = {}

        def load(name: str, setting: str | None = None) -> Challenge:
            if name not in challenges:
                challenges[name] = resolve.challenge(name, data=self.data, setting=setting).value
            return challenges[name]

        if self.challenge is None and self.setting is not None:
            raise GlocalError("--setting requires --challenge with a split challenge, e.g. --challenge split-digits.")
        pairs = []
        for name in self.algorithms or ALGORITHMS:
            algorithm = resolve.algorithm(name).value
            if self.challenge is None:
                defaults = [load(default) for default in DEFAULT_CHALLENGES]
                challenge = next((c for c in defaults if c.setting in algorithm.settings), defaults[0])
            else:
                challenge = load(self.challenge, self.setting)
            if self.algorithms:
                resolve.check_setting(algorithm, challenge)
            elif challenge.setting not in algorithm.settings:
                continue
            pairs.append((algorithm, challenge))
        return pairs


def _has_no_approximation(algorithm: Algorithm) -> bool:
    r"""Return whether a user's algorithm does not override `approximation`; built-in ones mean \hat L_o = 0."""
    from glocal.algorithms import ALGORITHMS
    from glocal.algorithms import Algorithm as Base

    return type(algorithm).approximation is Base.approximation and type(algorithm) not in ALGORITHMS.values()


def verdict_table(verdicts: Sequence[Verdict]) -> Any:
    """Return a rich table with one row per algorithm."""
    from rich.table import Table

    table = Table(title=r"Does \hat L_o depend on θ_o?", title_justify="left")
    for column in ("algorithm", "declared", "found"):
        table.add_column(column, no_wrap=True)
    for column in ("explained", "involved", "nats", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    for v in verdicts:
        found = f"[green]{v.found}[/]" if v.agrees else f"[bold red]{v.found} ≠[/]"
        shares = [f"{100 * share:.1f} %" for share in (v.first_order_index, v.total_index)]
        table.add_row(v.algorithm, v.declared, found, *shares, f"{v.information:.2f}", f"{v.p_value:.3f}")
    return table


def summary(verdicts: Mapping[str, Sequence[Verdict]], without_approximation: Sequence[str]) -> list[str]:
    """Return lines that explain the table.

    Args:
        verdicts: the verdicts by challenge.
        without_approximation: names of algorithms that do not override `approximation`.
    """
    flat = [v for group in verdicts.values() for v in group]
    sizes, num_diverged = sorted({len(v.values) for v in flat}), sum(v.num_diverged for v in flat)
    size_range = " to ".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    first, *others = verdicts
    exceptions = "".join(f" ({', '.join(v.algorithm for v in verdicts[name])} on {name})" for name in others)
    lines = [
        f"The test agrees with the declared locality for {sum(v.agrees for v in flat)} of {len(flat)} algorithms; "
        f"{size_range} solutions each of the first task of {first}{exceptions}.",
        "explained: share of Var[\\hat L_o(θ)] due to θ_o alone (first-order Sobol index); involved: including its "
        "interaction with the memory's random draws (total index).",
        "nats: I(\\hat L_o(θ); θ_o), estimated by nearest neighbours. p: permutation-test p-value; local if p ≤ 0.01.",
    ]
    if num_diverged:
        lines.append(f"{num_diverged} runs diverged and were left out.")
    if without_approximation:
        plural = "do" if len(without_approximation) > 1 else "does"
        lines.append(
            f"{', '.join(without_approximation)} {plural} not override `approximation`, so \\hat L_o = 0 was tested."
        )
    return lines
