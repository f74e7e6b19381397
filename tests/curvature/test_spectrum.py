"""Stochastic Lanczos quadrature against all eigenvalues, exact where it has as many steps as the matrix has rows."""

from __future__ import annotations

import numpy
import pytest
import torch
from cases import dense_hessian, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glocal.curvature.lanczos import Eigenpairs
from glocal.curvature.operators import hessian_operator
from glocal.curvature.spectrum import Density, density, exact_density, quadrature, random_signs


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    size, draw = len(eigenvalues), torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=draw))
    matrix = turn * eigenvalues @ turn.T
    return (matrix + matrix.T) / 2


def signs(count: int, size: int, seed: int = 0) -> Tensor:
    return random_signs(count, size, torch.Generator().manual_seed(seed), torch.float64)


def of(matrix: Tensor, probes: Tensor, steps: int = 100, block: int = 1) -> Density:
    return density(matrix, probes.to(matrix.dtype), steps, block)


SPECTRA = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.0, 0.25, 2.0, 2.0, 50.0]), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(eigenvalues=SPECTRA, seed=st.integers(0, 100))
def test_with_all_steps_every_function_is_exact(eigenvalues: list[float], seed: int) -> None:
    """zᵀ f(A) z of one vector, by functions that no polynomial of low degree resembles."""
    spectrum = torch.tensor(eigenvalues, dtype=torch.float64)
    matrix, (z,) = with_spectrum(spectrum, seed), signs(1, len(spectrum), seed)
    values, vectors = torch.linalg.eigh(matrix)
    nodes, weights = quadrature(matrix, z, len(spectrum))
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    along = (vectors.T @ z).square() / len(z)
    for f in (lambda v: v, lambda v: v.abs() > 0.1, lambda v: (v / 10).exp(), lambda v: v.abs().sqrt()):
        torch.testing.assert_close((weights * f(nodes)).sum(), (along * f(values)).sum(), rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(eigenvalues=SPECTRA, seed=st.integers(0, 100))
def test_over_a_whole_basis_counts_are_exact(eigenvalues: list[float], seed: int) -> None:
    spectrum = torch.tensor(eigenvalues, dtype=torch.float64)
    size = len(spectrum)
    basis = (
        with_spectrum(torch.ones(size, dtype=torch.float64)) @ torch.linalg.qr(signs(size, size) + torch.eye(size))[0]
    )
    found = of(with_spectrum(spectrum, seed), basis)
    for threshold in (0.1, 0.5, 1.5, 10.0):
        torch.testing.assert_close(float(found.count_above(threshold).value), float((spectrum.abs() > threshold).sum()))
    torch.testing.assert_close(found.sum(torch.square).value, spectrum.square().sum(), rtol=1e-9, atol=1e-9)


def test_few_steps_are_exact_on_polynomials_of_twice_their_degree() -> None:
    matrix, (z,) = with_spectrum(torch.linspace(-1, 1, 40, dtype=torch.float64)), signs(1, 40)
    nodes, weights = quadrature(matrix, z, 5)
    power = z.clone()
    for degree in range(1, 12):
        power = matrix @ power
        true, found = z @ power / 40, (weights * nodes**degree).sum()
        assert (abs(found - true) < 1e-14) == (degree <= 9), degree


def test_sums_are_as_far_off_as_they_say() -> None:
    matrix = with_spectrum(torch.cat([torch.linspace(1, 5, 40), torch.zeros(160)]).double())
    found = [of(matrix, signs(8, 200, seed), 45, 8).sum(lambda v: v.abs().sqrt()) for seed in range(60)]
    off = torch.stack([f.value for f in found]) - torch.linspace(1, 5, 40).double().sqrt().sum()
    assert off.abs().median() > 0.1
    assert abs(off.mean()) < 4 * off.std() / 60**0.5
    assert 0.75 < torch.stack([f.error for f in found]).square().mean().sqrt() / off.std() < 1.25


def test_where_no_node_is_below_a_threshold_the_next_ones_may_stand_for_zeros() -> None:
    """Three in four eigenvalues are 0, and their node is a little above: to the quadrature the rank might be P."""
    spectrum = torch.cat([torch.zeros(300), torch.logspace(-5, 0, 70), -torch.logspace(-5, -1, 30)]).double()
    found = of(with_spectrum(spectrum), signs(30, 400), 20)
    threshold = float(found.nodes.abs().min()) / 2
    assert threshold > 1e-8
    count, error = found.count_above(threshold)
    assert float(count) == pytest.approx(400) and 300 <= float(error) <= 400


@pytest.mark.parametrize("shape", ["positive", "both signs"])
def test_counts_are_within_three_of_their_errors_at_any_threshold(shape: str) -> None:
    """Also where the threshold is among eigenvalues that so few steps cannot tell apart."""
    spectrum = torch.logspace(-8, 0, 400, dtype=torch.float64)
    if shape == "both signs":
        spectrum[::2] *= -1
    found = of(with_spectrum(spectrum), signs(30, 400), 40)
    off, errors = [], []
    for threshold in torch.logspace(-7, -0.5, 60).tolist():
        count, error = found.count_above(threshold)
        off.append(abs(float(count) - int((spectrum.abs() > threshold).sum())))
        errors.append(float(error))
    assert max(off) > 20
    assert all(a <= 3 * b for a, b in zip(off, errors, strict=True))
    assert max(errors[-5:]) < 15


def test_known_eigenpairs_leave_chance_to_the_rest() -> None:
    spectrum = torch.cat([torch.tensor([50.0, -40.0, 30.0]), torch.linspace(-1, 1, 97)]).double()
    matrix = with_spectrum(spectrum)
    values, vectors = torch.linalg.eigh(matrix)
    order = values.abs().argsort(descending=True)[:3]
    pairs = Eigenpairs(values[order], vectors.T[order], torch.zeros(3, dtype=torch.float64))
    without, found = (density(matrix, signs(8, 100), 30, known=known) for known in (None, pairs))
    assert (found.nodes.diff(dim=1) >= 0).all()
    torch.testing.assert_close(found.weights.sum(1), torch.full((8,), 100.0, dtype=torch.float64))
    torch.testing.assert_close(found.count_above(10).value, torch.tensor(3.0, dtype=torch.float64))
    assert without.sum(torch.square).error > 100
    assert found.sum(torch.square).error < 3
    assert abs(found.sum(torch.square).value - spectrum.square().sum()) < 4 * found.sum(torch.square).error


def test_known_eigenvalues_count_themselves() -> None:
    draw = numpy.random.default_rng(0)
    values = draw.normal(size=300)
    found = exact_density(torch.from_numpy(values))
    assert found.count_above(0.7).value == (abs(values) > 0.7).sum()
    assert found.count_above(0.7).error == 0
    assert found.radius == abs(values).max()
    numpy.testing.assert_allclose(found.sum(torch.abs).value, abs(values).sum())


def test_of_a_networks_hessian_one_by_one_and_batched() -> None:
    case = make("tanh")
    eigenvalues = torch.linalg.eigvalsh(dense_hessian(case))
    probes = signs(6, case.num_params)
    alone, mapped = (density(hessian_operator(case), probes, 40, block) for block in (1, 4))
    torch.testing.assert_close(alone.radius, eigenvalues.abs().max(), rtol=1e-9, atol=0)
    count, error = alone.count_above(1e-3)
    assert abs(count - (eigenvalues.abs() > 1e-3).sum()) < 4 * error
    for threshold in (1e-3, 1e-1):
        torch.testing.assert_close(
            mapped.count_above(threshold).value, alone.count_above(threshold).value, rtol=1e-6, atol=1e-6
        )


def test_one_vector_knows_no_error() -> None:
    found = of(torch.eye(4, dtype=torch.float64), signs(1, 4)).count_above(0.5)
    torch.testing.assert_close(found.value, torch.tensor(4.0, dtype=torch.float64))
    assert found.error.isnan()


def test_a_matrix_that_is_not_finite_has_no_rank() -> None:
    matrix = torch.full((5, 5), torch.nan, dtype=torch.float64)
    for found in (of(matrix, signs(3, 5)), exact_density(matrix[0])):
        assert found.count_above(0.1).value.isnan()
        assert found.count_above(0.1).error.isnan()
        assert found.radius.isnan()


def test_bad_requests_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="2 random vectors and 0 steps were given; at least 1"):
        of(torch.eye(3), signs(2, 3), steps=0)
