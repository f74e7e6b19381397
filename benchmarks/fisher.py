"""Cost of EWC's consolidation: the diagonal Fisher of the paper's MLP on 60,000 images.

    python -m benchmarks.fisher [--device cpu|cuda]        writes results/fisher-DEVICE.json

Each variant is compared with a loop that computes the same, one backward pass per sample (one per sample and class for
the exact Fisher). The loop is timed on 300 samples and scaled up, since every pass costs the same.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common import RESULTS, Quartiles, choose_device, save, timed
from glocal import losses
from glocal.algorithms.algorithm import Batch
from glocal.algorithms.ewc import Fisher, task_fisher
from glocal.networks.mlp import mlp
from glocal.networks.model import Model

NUM_IMAGES, NUM_LOOP_IMAGES, NUM_ROUNDS, NUM_CLASSES = 60_000, 300, 3, 10
GOAL = 50


def loop_fisher(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Sum the squared gradients of log p(y|x), one backward pass per sample."""
    params = list(module.parameters())
    fisher = [torch.zeros_like(p) for p in params]
    for i in range(len(y)):
        gradients = torch.autograd.grad(cross_entropy(module(x[i : i + 1]), y[i : i + 1]), params)
        for f, g in zip(fisher, gradients, strict=True):
            f += g.square()
    return fisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = choose_device(parser.parse_args().device)
    torch.manual_seed(0)
    module = mlp((1, 28, 28), NUM_CLASSES).to(device)
    model = Model(module, losses.get("cross-entropy"))
    params = {k: p.detach() for k, p in module.named_parameters()}
    x = torch.randint(0, 256, (NUM_IMAGES, 1, 28, 28), dtype=torch.uint8, device=device)
    y = torch.randint(0, NUM_CLASSES, (NUM_IMAGES,), device=device)
    zero = torch.tensor(0, device=device)
    data = Batch(x, y, zero, zero)
    loop = partial(loop_fisher, module, model.prepare(x[:NUM_LOOP_IMAGES]), y[:NUM_LOOP_IMAGES])
    times: dict[str, list[float]] = {"loop": [], **{variant: [] for variant in get_args(Fisher)}}
    for number in range(NUM_ROUNDS + 1):
        seconds = {"loop": timed(loop, device)[0] * NUM_IMAGES / NUM_LOOP_IMAGES}
        seconds |= {v: timed(partial(task_fisher, model, params, data, v), device)[0] for v in get_args(Fisher)}
        if number:  # the first round warms up
            for name, value in seconds.items():
                times[name].append(value)
    title = f"Diagonal Fisher of {NUM_IMAGES:,} images on {device}; loop: one backward pass per sample"
    table = Table("", "seconds", "speed-up", title=title)
    speedups = {}
    for name, seconds_per_round in times.items():
        passes = NUM_CLASSES if name == "exact" else 1
        speedups[name] = passes * Quartiles.of_ratios(times["loop"], seconds_per_round).median
        goal = "" if name == "loop" else f" (≥ {GOAL})"
        table.add_row(name, f"{median(seconds_per_round):.2f}", f"{speedups[name]:.0f} ×{goal}")
    Console().print(table)
    content = {"images": NUM_IMAGES, "seconds": times, "speedup": speedups}
    save(RESULTS / f"fisher-{device.type}.json", content, device)


if __name__ == "__main__":
    main()
