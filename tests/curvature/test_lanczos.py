"""Top eigenpairs against dense decompositions and ARPACK: any spectrum, repeated and zero eigenvalues, several runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy
import pytest
import torch
from cases import FunctionOperator, dense_hessian, make
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor
from torch.func import vmap

from glocal.curvature.lanczos import Eigenpairs, Largest, lanczos, tridiagonalize
from glocal.curvature.operators import hessian_operator
from glocal.errors import GlocalError
from glocal.tree import stack

LARGEST: tuple[Largest, ...] = ("magnitude", "algebraic")


def start(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, in a random basis."""
    draw = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64, generator=draw))
    return turn * eigenvalues @ turn.T


def in_order(eigenvalues: Tensor, largest: Largest) -> Tensor:
    key = eigenvalues.abs() if largest == "magnitude" else eigenvalues
    return eigenvalues[key.argsort(descending=True)]


def check_pairs(found: Eigenpairs, matrix: Tensor, tolerance: float = 1e-10) -> None:
    """Orthonormal eigenvectors whose residuals are as reported."""
    k = len(found.values)
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-10)
    true = (found.vectors @ matrix - found.values.unsqueeze(-1) * found.vectors).norm(dim=1)
    torch.testing.assert_close(found.residuals, true, rtol=1e-6, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    eigenvalues=st.lists(
        st.sampled_from([-3.0, -1.0, -1e-3, 0.0, 1e-6, 0.5, 2.0, 2.0, 100.0]), min_size=1, max_size=25
    ),
    k=st.integers(1, 5),
    largest=st.sampled_from(LARGEST),
    seed=st.integers(0, 100),
)
def test_all_steps_find_every_eigenvalue_as_often_as_it_occurs(
    eigenvalues: list[float], k: int, largest: Largest, seed: int
) -> None:
    spectrum = torch.tensor(eigenvalues, dtype=torch.float64)
    matrix, k = with_spectrum(spectrum, seed), min(k, len(eigenvalues))
    found = lanczos(matrix, start(len(eigenvalues), seed), k, largest=largest)
    top = spectrum.abs().max().item()
    key = in_order(spectrum, largest)[:k]
    values = (found.values.abs(), key.abs()) if largest == "magnitude" else (found.values, key)  # 2 and −2 tie
    torch.testing.assert_close(*values, rtol=0, atol=1e-11 * max(top, 1e-3))
    check_pairs(found, matrix, 1e-11 * max(top, 1.0))


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 20), seed=st.integers(0, 1000), scale=st.sampled_from([1e-100, 1e-8, 1.0, 1e8, 1e100]))
def test_any_matrix_at_any_scale(size: int, seed: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, dtype=torch.float64, generator=draw)
    matrix = (matrix + matrix.T) * scale
    found = lanczos(matrix, start(size, seed), size, largest="algebraic")
    expected = torch.linalg.eigvalsh(matrix).flip(0)
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("largest", LARGEST)
def test_few_steps_on_a_large_matrix_agree_with_arpack(largest: Largest) -> None:
    draw = torch.Generator().manual_seed(1)
    bulk = 0.1 * torch.randn(400, dtype=torch.float64, generator=draw)
    bulk[:6] = torch.tensor([9.0, -7.0, 5.0, -4.0, 3.0, 2.0])
    matrix = with_spectrum(bulk)
    found = lanczos(matrix, start(400), 4, largest=largest)
    which = {"magnitude": "LM", "algebraic": "LA"}[largest]
    values, _ = eigsh(matrix.numpy(), 4, which=which)
    expected = in_order(torch.from_numpy(numpy.ascontiguousarray(values)), largest)
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-12)
    check_pairs(found, matrix)
    assert found.residuals.max() < 1e-10


def test_residuals_tell_how_far_the_pairs_are_before_they_have_converged() -> None:
    matrix = with_spectrum(torch.linspace(-1, 2, 200, dtype=torch.float64))
    found = lanczos(matrix, start(200), 3, steps=12)
    assert found.residuals.min() > 1e-3
    check_pairs(found, matrix)


@pytest.mark.parametrize(
    ("spectrum", "expected"),
    [
        ([0.0] * 50, [0.0] * 4),
        ([1.0] * 50, [1.0] * 4),
        ([-3.0] + [0.0] * 49, [-3.0, 0.0, 0.0, 0.0]),
        ([5.0] * 3 + [1.0] * 7 + [0.0] * 40, [5.0, 5.0, 5.0, 1.0]),
    ],
    ids=["zero", "identity", "rank one", "rank ten"],
)
def test_repeated_eigenvalues_in_fewer_steps_than_the_size(spectrum: list[float], expected: list[float]) -> None:
    matrix = with_spectrum(torch.tensor(spectrum, dtype=torch.float64))
    found = lanczos(matrix, start(50), 4, steps=25)
    torch.testing.assert_close(found.values, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    check_pairs(found, matrix)


@pytest.mark.parametrize("given", ["an eigenvector", "zero", "an invariant subspace"])
def test_a_start_that_sees_little_still_finds_all(given: str) -> None:
    spectrum = torch.arange(12, dtype=torch.float64) - 3
    begin = torch.zeros(12, dtype=torch.float64)
    begin[: {"an eigenvector": 1, "zero": 0, "an invariant subspace": 4}[given]] = 1
    found = lanczos(spectrum.diag(), begin, 12, largest="algebraic")
    torch.testing.assert_close(found.values, spectrum.flip(0), rtol=0, atol=1e-12)
    check_pairs(found, spectrum.diag())


def test_in_single_precision_too() -> None:
    spectrum = torch.tensor([4.0] * 3 + [-2.0] + [0.0] * 96)
    matrix = with_spectrum(spectrum.double()).float()
    found = lanczos(matrix, start(100).float(), 5)
    assert found.values.dtype == found.vectors.dtype == found.residuals.dtype == torch.float32
    torch.testing.assert_close(found.values, torch.tensor([4.0, 4.0, 4.0, -2.0, 0.0]), rtol=0, atol=2e-5)
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False], ids=["one start for all", "a start each"])
def test_mapped_over_runs_each_is_as_alone_even_where_one_breaks_down(shared: bool) -> None:
    spectra = [torch.linspace(-2, 3, 30), torch.tensor([2.0] * 2 + [0.0] * 28), torch.zeros(30)]
    matrices = torch.stack([with_spectrum(s.double(), seed) for seed, s in enumerate(spectra)])
    starts = torch.stack([start(30, 0 if shared else seed) for seed in range(3)])

    def one(matrix: Tensor, begin: Tensor) -> Eigenpairs:
        return lanczos(matrix, begin, 3, steps=15)

    together = vmap(one, in_dims=(0, None if shared else 0))(matrices, starts[0] if shared else starts)
    for run in range(3):
        alone = one(matrices[run], starts[run])
        torch.testing.assert_close(together.values[run], alone.values, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(together.residuals[run], alone.residuals, rtol=1e-6, atol=1e-12)
        check_pairs(Eigenpairs(*(part[run] for part in together)), matrices[run])


def test_a_run_that_diverged_is_nan_and_leaves_the_others_alone() -> None:
    good = with_spectrum(torch.linspace(-2, 3, 10, dtype=torch.float64))
    matrices = torch.stack([good, torch.full_like(good, torch.nan), good * torch.inf])
    begin = start(10)
    found = vmap(lambda matrix: lanczos(matrix, begin, 2))(matrices)
    torch.testing.assert_close(found.values[0], torch.linalg.eigvalsh(good).flip(0)[:2], rtol=1e-10, atol=1e-12)
    assert all(part[1:].isnan().all() for part in found)


@pytest.mark.parametrize("network", ["relu", "conv with BatchNorm"])
def test_top_of_a_networks_hessian_alone_and_mapped(network: str) -> None:
    runs = [make(network, seed=seed) for seed in range(3)]
    begin = start(runs[0].num_params)

    def one(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Eigenpairs:
        return lanczos(hessian_operator(replace(runs[0], params=params, buffers=buffers)), begin, 5)

    together = vmap(one)(stack([c.params for c in runs]), stack([c.buffers for c in runs]))
    for run, case in enumerate(runs):
        matrix = dense_hessian(case)
        expected = in_order(torch.linalg.eigvalsh(matrix), "magnitude")[:5]
        torch.testing.assert_close(one(case.params, case.buffers).values, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(together.values[run], expected, rtol=1e-9, atol=1e-11)
        check_pairs(Eigenpairs(*(part[run] for part in together)), matrix)


def test_bad_requests_say_what_is_allowed() -> None:
    with pytest.raises(GlocalError, match=r"k = 6 was given; .* 1 to 5"):
        lanczos(torch.eye(5), torch.ones(5), 6)
    with pytest.raises(GlocalError, match=r"k = 4 was given; .* 1 to 3"):
        lanczos(torch.eye(5), torch.ones(5), 4, steps=3)
    with pytest.raises(GlocalError, match="algebraic, magnitude"):
        lanczos(torch.eye(5), torch.ones(5), 1, largest="biggest")  # type: ignore[arg-type]


def test_a_tolerance_ends_it_when_all_pairs_are_as_exact() -> None:
    values = torch.cat([10.0 * 0.8 ** torch.arange(20.0), torch.linspace(-0.05, 0.05, 280)]).double()
    matrix, begin, products = with_spectrum(values), start(300, seed=1), []

    def count(v: Tensor) -> Tensor:
        products.append(1)
        return matrix @ v

    made: dict[float, int] = {}
    for tolerance in (0.0, 1e-12, 1e-6, 1e-2):
        products.clear()
        found = lanczos(FunctionOperator(count), begin, 6, 200, tolerance=tolerance)
        made[tolerance] = len(products)
        true = (matrix @ found.vectors.mT - found.vectors.mT * found.values).norm(dim=0)
        assert (true <= max(tolerance, 1e-13) * 10).all() and len(found.values) == 6
        assert found.values.numpy() == pytest.approx(values[:6].numpy(), abs=max(10 * tolerance**2, 1e-11))
    assert made[0.0] == 200 > made[1e-12] > made[1e-6] > made[1e-2] >= 12


def test_a_tolerance_does_not_miss_repeated_eigenvalues() -> None:
    """The first subspace holds one vector of each eigenvalue; it is exact, and not all there is."""
    values = torch.tensor([5.0] * 4 + [3.0] * 4 + [1.0] * 4 + [0.0] * 28, dtype=torch.float64)
    found = lanczos(values.diag(), start(40), 8, 40, tolerance=0.1)
    assert found.values.tolist() == pytest.approx([5.0] * 4 + [3.0] * 4)


def test_zero_is_told_from_little_by_the_largest_product() -> None:
    """A start that is an eigenvector, of 1e6: what is left of its product is rounding, though longer than 1e-12."""
    diagonal = torch.cat([torch.tensor([1e6, 1.0]), torch.linspace(0.1, 0.5, 30)]).double()
    turn, _ = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    matrix = turn * diagonal @ turn.mT
    _, _, betas = tridiagonalize(matrix, turn[:, 0], 3)
    assert (matrix @ turn[:, 0] - 1e6 * turn[:, 0]).norm() > 1e-12 and betas[0] == 0 < betas[1]
