r"""Plain SGD: \hat L_o(θ) = 0 for every finished task o (§2 and the appendix on stable SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from glocal.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class SGD(Algorithm):
    r"""Follows L_t alone. Its approximation of the past, 0, does not depend on θ_o: global."""

    name: ClassVar[str] = "sgd"
