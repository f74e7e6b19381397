"""Eigenpairs of a risk's Hessian against those of the dense matrix, also where weights have no curvature at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import dense_hessian

from glocal import losses
from glocal.curvature.lanczos import Largest, eigenpairs
from glocal.networks.mlp import mlp
from glocal.risk import Risk

WIDTH = 5


def make(zero_features: int, samples: int = 30) -> Risk:
    """An MLP on 12 features, some of them always zero, in double precision."""
    stream = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = mlp((12,), 3, (WIDTH, 4)).double().eval()
    x = torch.randn(samples, 12, generator=stream, dtype=torch.float64)
    x[:, torch.randperm(12, generator=stream)[:zero_features]] = 0
    y = torch.randint(3, (samples,), generator=stream)
    return Risk(module, {k: p.detach() for k, p in module.named_parameters()}, {}, x, y, losses.get("cross-entropy"))


@pytest.mark.parametrize("largest", ["magnitude", "algebraic"])
@pytest.mark.parametrize("k", [1, WIDTH + 1, 30, 90])
@pytest.mark.parametrize("zero_features", [0, 7])
def test_eigenpairs_are_those_of_the_dense_matrix(zero_features: int, k: int, largest: Largest) -> None:
    risk = make(zero_features)
    matrix = dense_hessian(risk)
    top = eigenpairs(risk, k, steps=len(matrix), largest=largest)
    values = torch.linalg.eigvalsh(matrix)
    order = (values.abs() if largest == "magnitude" else values).argsort(descending=True)[:k]
    torch.testing.assert_close(top.values, values[order], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(top.vectors @ top.vectors.mT, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(top.vectors @ matrix, top.values[:, None] * top.vectors, rtol=0, atol=1e-8)


def test_start_vector_is_used() -> None:
    """Started at an eigenvector, Lanczos's method finds it first."""
    risk = make(7)
    values, vectors = torch.linalg.eigh(dense_hessian(risk))
    top = eigenpairs(risk, 2, steps=2, largest="algebraic", start=vectors[:, -3].contiguous())
    assert float(values[-3]) in top.values.tolist() or float((top.values - values[-3]).abs().min()) < 1e-8
    assert float((top.vectors @ vectors[:, -3]).abs().max()) == pytest.approx(1, abs=1e-6)


def test_single_precision_and_default_start_are_deterministic() -> None:
    risk = make(7)
    exact = eigenpairs(risk, 3)
    params = {k: p.float() for k, p in risk.params.items()}
    single = replace(risk, module=risk.module.float(), params=params, x=risk.x.float())
    first, again = (eigenpairs(single, 3, tolerance=1e-4) for _ in range(2))
    torch.testing.assert_close(first.values.double(), exact.values, rtol=1e-4, atol=0)
    assert torch.equal(first.vectors, again.vectors) and first.vectors.dtype == torch.float32
