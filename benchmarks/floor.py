"""The floor: the arithmetic of a model-step, and how fast this machine multiplies matrices of the network's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.setting import BATCH, RUNS, WIDTHS
from benchmarks.tensors import steps_per_epoch

SECONDS = 0.03


def flops_per_row() -> int:
    """Forward, the weights' gradients, and the inputs' gradients of all layers but the first, for one example."""
    layers = [a * b for a, b in pairwise(WIDTHS)]
    return 2 * (2 * sum(layers) + sum(layers[1:]))


def rows(algorithm: str, examples: int) -> float:
    """Examples that go forward and backward in a mean step: the stream's, and what er and agem replay."""
    return examples / steps_per_epoch(examples) + (BATCH if algorithm in ("er", "agem") else 0)


def flops(algorithm: str, examples: int) -> float:
    return rows(algorithm, examples) * flops_per_row()


def gemm_gflops() -> float:
    """The best rate over the two products of the widest layer, forward and weights' gradient, alone and batched."""
    rates = []
    for runs in (1, RUNS):
        inputs, outputs = WIDTHS[:2]
        x, w = torch.randn(runs, BATCH, inputs), torch.randn(runs, outputs, inputs)
        g = torch.randn(runs, outputs, BATCH)  # the outputs' gradient, transposed
        if runs == 1:
            x, w, g = x[0], w[0], g[0]
        work = 2 * runs * BATCH * inputs * outputs
        rates += [work / _seconds(_product(x, w.mT)), work / _seconds(_product(g, x))]
    return max(rates) / 1e9


def _product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    out = a @ b
    return lambda: torch.matmul(a, b, out=out)


def _seconds(call: Callable[[], Tensor]) -> float:
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < SECONDS:
        call()
        calls += 1
    return elapsed / calls
