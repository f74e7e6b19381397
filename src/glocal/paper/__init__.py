"""The experiments of the paper: which runs, which published numbers, and what is concluded from both.

`data/experiments.toml` lists them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING

from glocal.errors import require_known

if TYPE_CHECKING:
    from glocal.paper.study import Study


@dataclass(frozen=True)
class Experiment:
    """An experiment with a command."""

    name: str
    reference: str
    """Where the paper has it, by printed number."""
    title: str
    """What it shows."""
    cost: str
    """Amount of work in a few words: runs, steps, products."""
    module: str | None = None
    """File of `glocal.paper.studies` that has the study; None if it is made of Table 1's runs."""

    @property
    def command(self) -> str:
        return f"glocal paper {self.name}"


_LISTED = tomllib.loads((files("glocal.paper") / "data" / "experiments.toml").read_text(encoding="utf-8"))
EXPERIMENTS: dict[str, Experiment] = {name: Experiment(name, **fields) for name, fields in _LISTED.items()}
STUDIES: dict[str, Experiment] = {name: e for name, e in EXPERIMENTS.items() if e.module is not None}


def get_study(name: str) -> Study:
    """Return a study by name, importing its file."""
    require_known("study", name, STUDIES)
    module = import_module(f"glocal.paper.studies.{STUDIES[name].module}")
    return next(study for study in module.STUDIES if study.name == name)
