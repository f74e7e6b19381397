"""The paper's experiments beside Table 1, by name: what each shows, and its file, read when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from glocal.errors import unknown

if TYPE_CHECKING:
    from glocal.paper.study import Study

TITLES: dict[str, tuple[str, str]] = {
    "approximation-error": ("approximation_error", "how well old losses are approximated as later tasks are learnt"),
    "epsilon-region": ("epsilon_region", "how far from a solution its expansion holds, and when learning leaves there"),
    "recursion": ("recursion", "forgetting as the quadratic approximation predicts it, and as it is measured"),
    "locality": ("locality", "which algorithms are local and which global, found by Definition 1 and as declared"),
}
"""name -> (file, what the figure shows)"""


def get(name: str) -> Study:
    """A study by name. Its file lists its studies under `STUDIES`."""
    if name not in TITLES:
        raise unknown("study", name, TITLES)
    file, _ = TITLES[name]
    (study,) = (s for s in import_module(f"glocal.paper.studies.{file}").STUDIES if s.name == name)
    return study
