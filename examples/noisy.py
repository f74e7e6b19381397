"""Bring your own challenge: the embedded digits with more noise in every task.

Train on it with experience replay (a few seconds on a CPU):

    glocal run examples/noisy.py:make_challenge er --lr 0.1

Replace the tensors by your own data: `glocal.from_tasks` takes arrays, tensors or torch Datasets.
"""

from __future__ import annotations

import torch
from torch import Tensor

import glocal
from glocal.challenges import Challenge, make

NOISE_LEVELS = (0.0, 0.3, 0.6)


def make_challenge() -> Challenge:
    digits = make("rotated-digits", tasks=1, angles=[0.0]).task(0, seed=0)
    generator = torch.Generator().manual_seed(0)

    def add_noise(data: tuple[Tensor, Tensor], level: float) -> tuple[Tensor, Tensor]:
        x, y = data
        return x / 255 + level * torch.randn(x.shape, generator=generator), y

    tasks = [(add_noise(digits.train, level), add_noise(digits.test, level)) for level in NOISE_LEVELS]
    return glocal.from_tasks("noisy-digits", tasks, setting="domain")
