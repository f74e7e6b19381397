"""The two tasks as every contender but glocal gets them: float32 images in [0, 1], flat, in an .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.setting import BATCH, CHALLENGE, SEEDS, TASKS

Task = tuple[Tensor, Tensor]


def write(path: Path) -> int:
    """Write the tasks of the first seed; returns how many examples each has."""
    from glocal import challenges

    challenge = challenges.make(CHALLENGE, tasks=TASKS)
    arrays: dict[str, Any] = {}
    for t in range(TASKS):
        data = challenge.task(t, SEEDS[0]).train
        arrays[f"x{t}"] = data.x.flatten(1).float().div(255).numpy()
        arrays[f"y{t}"] = data.y.numpy()
    np.savez(path, **arrays)
    return len(arrays["y0"])


def read(path: Path) -> list[Task]:
    with np.load(path) as held:
        return [(torch.from_numpy(held[f"x{t}"]), torch.from_numpy(held[f"y{t}"])) for t in range(TASKS)]


def steps_per_epoch(examples: int) -> int:
    return -(-examples // BATCH)
