"""Hutch++ where it is exact, without bias elsewhere, and as far off as it says."""

from __future__ import annotations

import pytest
import torch
from cases import dense_hessian, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glocal.curvature.operators import hessian_operator
from glocal.curvature.spectrum import Estimate, random_signs, trace


def signs(count: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return random_signs(count, size, torch.Generator().manual_seed(seed), dtype)


def of(matrix: Tensor, count: int, seed: int = 0, block: int = 1) -> Estimate:
    return trace(matrix, signs(count, len(matrix), seed, matrix.dtype), block)


def random_matrix(size: int, rank: int, seed: int) -> Tensor:
    """Symmetric, of this rank, with eigenvalues of both signs."""
    draw = torch.Generator().manual_seed(seed)
    u = torch.randn(size, rank, dtype=torch.float64, generator=draw)
    return u * torch.randn(rank, dtype=torch.float64, generator=draw) @ u.T


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 30), rank=st.integers(0, 6), seed=st.integers(0, 1000), scale=st.sampled_from([1e-60, 1, 1e60])
)
def test_exact_up_to_as_many_ranks_as_there_are_vectors(size: int, rank: int, seed: int, scale: float) -> None:
    matrix = random_matrix(size, min(rank, size), seed) * scale
    found = of(matrix, 12, seed)
    largest = float(matrix.abs().sum())
    assert abs(found.value - matrix.trace()) <= 1e-12 * largest
    assert found.error <= 1e-12 * largest


def test_exact_where_there_are_no_more_rows_than_products() -> None:
    for size, exact in ((18, True), (19, False)):
        matrix = random_matrix(size, size, 3)
        found = of(matrix, 12)
        assert bool(abs(found.value - matrix.trace()) < 1e-12) is exact
        assert bool(found.error == 0) is exact


def test_signs_are_signs_and_as_often_one_as_the_other() -> None:
    drawn = signs(20, 500)
    assert drawn.abs().eq(1).all()
    assert abs(drawn.mean()) < 4 / 10_000**0.5
    assert torch.equal(drawn, signs(20, 500))
    assert not torch.equal(drawn, signs(20, 500, seed=1))


def test_beyond_that_without_bias_and_as_far_off_as_it_says() -> None:
    matrix = random_matrix(60, 60, 0)
    found = [of(matrix, 20, seed) for seed in range(400)]
    off = torch.stack([f.value for f in found]) - matrix.trace()
    errors = torch.stack([f.error for f in found])
    assert off.abs().median() > 1e-3 * matrix.trace().abs()
    assert abs(off.mean()) < 4 * off.std() / 20
    # ten terms tell a standard deviation to about a quarter; the mean over many repetitions far better
    assert 0.85 < errors.square().mean().sqrt() / off.std() < 1.15


def test_few_large_eigenvalues_cost_no_precision() -> None:
    """Where plain estimates with as many products are ten times as far off."""
    spectrum = 1 / torch.arange(1, 201, dtype=torch.float64) ** 2
    turn, _ = torch.linalg.qr(torch.randn(200, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    matrix = turn * spectrum @ turn.T
    off = torch.stack([of(matrix, 20, seed).value - spectrum.sum() for seed in range(30)])
    plain = []
    for seed in range(30):
        z = signs(30, 200, seed)
        plain.append((z * (z @ matrix)).sum(1).mean() - spectrum.sum())
    assert off.square().mean().sqrt() < 0.1 * torch.stack(plain).square().mean().sqrt()


@pytest.mark.parametrize("network", ["relu", "conv with BatchNorm"])
def test_of_a_networks_hessian_one_by_one_and_batched(network: str) -> None:
    case = make(network)
    probes = signs(16, case.num_params)
    alone, mapped = (trace(hessian_operator(case), probes, block) for block in (1, 5))
    true = dense_hessian(case).trace()
    assert abs(alone.value - true) < 4 * alone.error + 1e-12
    torch.testing.assert_close(mapped.value, alone.value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mapped.error, alone.error, rtol=1e-6, atol=1e-12)


def test_in_single_precision() -> None:
    matrix = random_matrix(200, 5, 0).float()
    found = of(matrix, 10)
    torch.testing.assert_close(found.value, matrix.double().trace(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_has_no_trace(value: float) -> None:
    matrix = torch.eye(5)
    matrix[1, 2] = matrix[2, 1] = value
    found = of(matrix, 4)
    assert found.value.isnan()
    assert found.error.isnan()


@pytest.mark.parametrize("count", [0, 2, 5])
def test_bad_requests_say_what_is_allowed(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} random vectors .* even and at least 4"):
        of(torch.eye(3), count)
