"""A challenge of one's own: the embedded digits under more and more noise.

Run it:  glocal run examples/noisy.py:make_challenge er --lr 0.1
"""

from __future__ import annotations

import torch

import glocal
from glocal.challenges import Challenge, make


def make_challenge() -> Challenge:
    digits = make("rotated-digits", tasks=1, angles=[0.0]).task(0, seed=0)
    noise = torch.Generator().manual_seed(0)

    def noisy(data: tuple[torch.Tensor, torch.Tensor], strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = data[0] / 255
        return x + strength * torch.randn(x.shape, generator=noise), data[1]

    tasks = [(noisy(digits.train, s), noisy(digits.test, s)) for s in (0.0, 0.3, 0.6)]
    return glocal.from_tasks("noisy-digits", tasks, setting="domain")
