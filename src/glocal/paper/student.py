r"""Student's t: the interval of a mean, from the closed form of the distribution for whole degrees of freedom.

With φ = arctan(t/√ν),

    P(|T| ≤ t) = (2/π)(φ + sin φ (cos φ + (2/3) cos³φ + … + (2·4⋯(ν−3))/(3·5⋯(ν−2)) cos^{ν−2}φ))    ν odd,
    P(|T| ≤ t) = sin φ (1 + (1/2) cos²φ + … + (1·3⋯(ν−3))/(2·4⋯(ν−2)) cos^{ν−2}φ)                  ν even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def within(t: float, freedom: int) -> float:
    """P(|T| ≤ t)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 if odd else 1, freedom - 2, 2):
        term *= k / (k + 1) * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(level: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = level, by bisection."""
    low, high = 0.0, 1.0
    while within(high, freedom) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """x̄ ∓ t s/√n with s of ddof = 1; of fewer than two values there is none (NaN)."""
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2:
        return math.nan, math.nan
    half = quantile(level, x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return float(x.mean()) - half, float(x.mean()) + half
