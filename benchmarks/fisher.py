"""EWC's consolidation: the diagonal Fisher of the paper's MLP on 60,000 images, beside one backward pass a sample.

python -m benchmarks.fisher [--device cpu|cuda]

Each variant goes beside the loop that computes the same: one sample, one backward pass (the exact Fisher: one for each
class), its squared gradient added. Loops are timed on a few hundred passes, which cost the same each, and scaled up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.device import chosen
from glocal import losses
from glocal.algorithms.algorithm import Batch
from glocal.algorithms.ewc import FISHERS, task_fisher
from glocal.networks.mlp import mlp
from glocal.networks.model import Model

IMAGES, LOOPED, ROUNDS = 60_000, 300, 3
GOAL = 50


def looped(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Squared gradients of log p(y|x), one backward pass after the other."""
    params = list(module.parameters())
    fisher = [torch.zeros_like(p) for p in params]
    for i in range(len(y)):
        gradients = torch.autograd.grad(cross_entropy(module(x[i : i + 1]), y[i : i + 1]), params)
        for f, g in zip(fisher, gradients, strict=True):
            f += g.square()
    return fisher


def seconds(work: object, device: torch.device) -> float:
    assert callable(work)
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = chosen(parser.parse_args().device)
    torch.manual_seed(0)
    module = mlp((1, 28, 28), 10).to(device)
    model = Model(module, losses.get("cross-entropy"))
    params = {k: p.detach() for k, p in module.named_parameters()}
    x = torch.randint(0, 256, (IMAGES, 1, 28, 28), dtype=torch.uint8, device=device)
    y = torch.randint(0, 10, (IMAGES,), device=device)
    data = Batch(x, y, torch.rand(IMAGES, device=device), torch.tensor(0, device=device))
    some = model.prepare(x[:LOOPED])
    passes = {variant: 10 if variant == "exact" else 1 for variant in FISHERS}
    times: dict[str, list[float]] = {"loop": [], **{v: [] for v in FISHERS}}
    for round_ in range(ROUNDS + 1):
        times["loop"].append(seconds(lambda: looped(module, some, y[:LOOPED]), device) * IMAGES / LOOPED)
        for variant in FISHERS:
            times[variant].append(seconds(lambda v=variant: task_fisher(model, params, data, v), device))
        if round_ == 0:
            times = {k: [] for k in times}  # the first round warms up
    table = Table(
        "", "seconds", "times faster", title=f"Diagonal Fisher of 60,000 images, {device}; loop: one pass a sample"
    )
    ratios = {}
    for variant, spent in times.items():
        scale = passes.get(variant, 1)
        ratios[variant] = sorted(scale * a / b for a, b in zip(times["loop"], spent, strict=True))[ROUNDS // 2]
        goal = "" if variant == "loop" else f" (≥ {GOAL})"
        table.add_row(variant, f"{sorted(spent)[ROUNDS // 2]:.2f}", f"{ratios[variant]:.0f} ×{goal}")
    Console().print(table)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    result = {"device": name, "torch": torch.__version__, "images": IMAGES, "seconds": times, "times_faster": ratios}
    file = Path(__file__).parent / "results" / f"fisher-{device.type}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
