"""Lanczos's method in single precision: what it tells of its error holds, and rounding neither grows nor goes on."""

from __future__ import annotations

import pytest
import torch
from cases import FunctionOperator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glocal.curvature.lanczos import lanczos


def start(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def with_spectrum(spectrum: Tensor, seed: int) -> Tensor:
    """A symmetric matrix in single precision, with these eigenvalues but for rounding."""
    draw = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64, generator=draw))
    made = (turn * spectrum.double() @ turn.T).float()
    return (made + made.T) / 2


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 300),
    decay=st.sampled_from([0.3, 0.9, 0.99]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    steps=st.sampled_from([5, 20, 60]),
    seed=st.integers(0, 100),
)
def test_true_residuals_are_no_larger_than_reported(
    size: int, decay: float, scale: float, steps: int, seed: int
) -> None:
    signs = torch.arange(size) % 3 - 1.0
    matrix = with_spectrum(scale * signs * decay ** torch.arange(size), seed)
    found = lanczos(matrix, start(size, seed), min(4, size), steps)
    vectors, values = found.vectors.double(), found.values.double()
    true = (vectors @ matrix.double() - values.unsqueeze(1) * vectors).norm(dim=1)
    assert (true <= found.residuals.double() * (1 + 1e-5)).all()


def test_millions_of_parameters_lose_no_digits() -> None:
    size = 1_000_000
    diagonal = 1e-3 * torch.rand(size, generator=torch.Generator().manual_seed(0))
    diagonal[:3] = torch.tensor([7.0, -5.0, 3.0])
    found = lanczos(FunctionOperator(lambda v: diagonal * v), start(size), 3, 12)
    # The order of a BLAS library's sums moves the last two digits; sums one after the other would lose √size · 6e-8.
    torch.testing.assert_close(found.values, torch.tensor([7.0, -5.0, 3.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.vectors.double().square().sum(1), torch.ones(3).double(), rtol=0, atol=1e-6)
    values, vectors = found.values.double().unsqueeze(1), found.vectors.double()
    assert ((diagonal * vectors - values * vectors).norm(dim=1) <= found.residuals).all()


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
def test_a_tolerance_ends_it_even_below_what_rounding_leaves(tolerance: float) -> None:
    """No step would mend rounding: what is asked of is the part that steps do."""
    matrix = with_spectrum(torch.cat([10 * 0.7 ** torch.arange(20.0), torch.linspace(-0.001, 0.001, 280)]), seed=0)
    products = []

    def times(v: Tensor) -> Tensor:
        products.append(1)
        return matrix @ v

    found = lanczos(FunctionOperator(times), start(300), 5, 200, tolerance=tolerance)
    assert len(products) < 60
    assert 0 < found.residuals.max() < 2 * tolerance * found.values[0] + 1e-4
