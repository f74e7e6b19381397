"""The nearest Kronecker product, against the singular value decomposition of the whole rearranged matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from glocal.curvature.kronecker import nearest_kronecker

Factors = tuple[Tensor, Tensor]


def positive(size: int, seed: int, rank: int | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    half = torch.randn(size, rank or size, dtype=torch.float64, generator=draw)
    return half @ half.T


def factors(seed: int) -> Factors:
    return positive(4, seed), positive(3, seed + 100)


def whole(*pairs: Factors) -> Tensor:
    return sum((torch.kron(g, a) for a, g in pairs), torch.zeros(()))


def by_rearrangement(first: Factors, second: Factors) -> Tensor:
    """The dense sum, its blocks laid out as rows, and its best approximation of rank one put back."""
    (p, q), matrix = (first[0].shape[0], first[1].shape[0]), whole(first, second)
    rows = matrix.view(q, p, q, p).permute(0, 2, 1, 3).reshape(q * q, p * p)
    u, s, v = torch.linalg.svd(rows)
    best = s[0] * torch.outer(u[:, 0], v[0])
    return best.view(q, q, p, p).permute(0, 2, 1, 3).reshape(q * p, q * p)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_of_all_kronecker_products(seed: int) -> None:
    first, second = factors(seed), factors(seed + 10)
    torch.testing.assert_close(whole(nearest_kronecker(first, second)), by_rearrangement(first, second))


@pytest.mark.parametrize("seed", range(5))
def test_its_factors_are_positive_semi_definite(seed: int) -> None:
    for factor in nearest_kronecker(factors(seed), factors(seed + 10)):
        assert float(torch.linalg.eigvalsh(factor).min()) > -1e-9


def test_a_sum_that_is_a_product_is_found_exactly() -> None:
    (a, g), (b, _) = factors(1), factors(2)
    torch.testing.assert_close(whole(nearest_kronecker((a, g), (b, 3 * g))), torch.kron(g, a + 3 * b))
    torch.testing.assert_close(whole(nearest_kronecker((a, g), (2 * a, g))), torch.kron(g, 3 * a))


def test_nothing_and_something_is_something() -> None:
    (a, g), nothing = factors(3), (torch.zeros(4, 4).double(), torch.zeros(3, 3).double())
    for pair in (((a, g), nothing), (nothing, (a, g))):
        torch.testing.assert_close(whole(nearest_kronecker(*pair)), torch.kron(g, a))
    assert all(float(f.abs().max()) == 0 for f in nearest_kronecker(nothing, nothing))


def test_mapped_over_runs_it_is_each_ones_own() -> None:
    runs = [(factors(s), factors(s + 7)) for s in range(3)]
    first, second = (
        (torch.stack([run[i][0] for run in runs]), torch.stack([run[i][1] for run in runs])) for i in (0, 1)
    )
    found = vmap(nearest_kronecker)(first, second)
    for i, run in enumerate(runs):
        torch.testing.assert_close(whole((found[0][i], found[1][i])), whole(nearest_kronecker(*run)))
