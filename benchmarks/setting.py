"""The setting that all contenders of `benchmarks.step` share: network, data, algorithms and the number of rounds.

This module is also imported in Avalanche's environment, so it imports glocal only where the data is written.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

THREADS = 2
WIDTHS = (784, 100, 100, 10)
BATCH_SIZE = 128
CHALLENGE = "rotated-digits"
NUM_TASKS = 2
"""The first task is learned to fill the memory; steps of the second are timed."""
LR = 0.05
LRS = (0.01, 0.02, 0.05, 0.1, 0.2)
SEEDS = (0, 1, 2, 3, 4)
NUM_RUNS = len(SEEDS) * len(LRS)

ALGORITHMS = ("sgd", "er", "ewc", "agem")
ER_SLOTS = 500
"""Examples that er stores."""
AGEM_SLOTS_PER_TASK = 256
"""Examples that agem stores of each task: two replay batches, so that every contender replays BATCH_SIZE examples."""
EWC_PENALTY = 0.7

MIN_SECONDS = 1.0
"""A measurement consists of whole epochs and takes at least this long: the first steps after a pause are slower."""
NUM_ROUNDS = 10

TaskData = tuple[Tensor, Tensor]


def make_mlp() -> nn.Sequential:
    """Return the network in plain PyTorch."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def write_tasks(path: Path) -> int:
    """Write the tasks as flat float32 images in [0, 1] to an .npz file; return the number of examples per task."""
    from glocal import challenges

    challenge = challenges.make(CHALLENGE, tasks=NUM_TASKS)
    arrays: dict[str, Any] = {}
    for t in range(NUM_TASKS):
        data = challenge.task(t, SEEDS[0]).train
        arrays[f"x{t}"] = data.x.flatten(1).float().div(255).numpy()
        arrays[f"y{t}"] = data.y.numpy()
    np.savez(path, **arrays)
    return len(arrays["y0"])


def read_tasks(path: Path) -> list[TaskData]:
    with np.load(path) as arrays:
        return [(torch.from_numpy(arrays[f"x{t}"]), torch.from_numpy(arrays[f"y{t}"])) for t in range(NUM_TASKS)]


def steps_per_epoch(examples: int) -> int:
    return -(-examples // BATCH_SIZE)


def flops(algorithm: str, examples: int) -> float:
    """Return the floating-point operations of the matrix products in an average step.

    Per example: the forward pass, the gradients of all weights, and the gradients of the inputs of all layers except
    the first. er and agem also process a replay batch.
    """
    layers = [inputs * outputs for inputs, outputs in pairwise(WIDTHS)]
    flops_per_example = 2 * (2 * sum(layers) + sum(layers[1:]))
    replay = BATCH_SIZE if algorithm in ("er", "agem") else 0
    return (examples / steps_per_epoch(examples) + replay) * flops_per_example
