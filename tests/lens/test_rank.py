"""Ranks of the average Hessian against numpy's, dense and by density."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratics import Quadratics, anywhere, dense_hessian, diverged, network
from torch import Tensor, nn

from glocal.curvature.spectrum import exact_density
from glocal.errors import GlocalError
from glocal.lens.rank import MAX_DENSE_PARAMS, Method, effective_rank, participation_ratio, rank, ranks, spectra
from glocal.lens.trace import trace_checkpoints


def averages(known: Quadratics) -> list[np.ndarray]:
    r"""\bar H_{<t} = (1/t) Σ_{o<t} H_o with the paper's count: t = 2, 3, … have 1, 2, … tasks before them."""
    tasks = len(known.data)
    return [np.sum([known.hessian(o) for o in range(t - 1)], axis=0) / t for t in range(2, tasks + 2)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), tasks=st.integers(1, 4), spans=st.integers(1, 2))
def test_on_quadratics_it_is_numpys_rank_and_grows_with_the_tasks(seed: int, tasks: int, spans: int) -> None:
    known = anywhere(seed, tasks, spans)
    found = rank(known.trace, absolute=(1e-2, 0.3), relative=(1e-9, 0.2))
    assert found.size == 8
    for row, matrix in enumerate(averages(known)):
        values = abs(np.linalg.eigvalsh(matrix))
        np.testing.assert_allclose(found.top[row], values.max(), rtol=1e-10)
        assert found.relative[row, 0] == np.linalg.matrix_rank(matrix, tol=1e-9 * values.max(), hermitian=True)
        assert found.relative[row, 0] == 2 * min(4, spans * (row + 1))
        assert found.relative[row, 1] == (values > 0.2 * values.max()).sum()
        assert found.absolute[row].tolist() == [(values > 1e-2).sum(), (values > 0.3).sum()]
        p = values / values.sum()
        np.testing.assert_allclose(
            found.effective[row], np.exp(-(p[p > 1e-15] * np.log(p[p > 1e-15])).sum()), rtol=1e-9
        )
        np.testing.assert_allclose(found.participation[row], np.trace(matrix) ** 2 / (matrix**2).sum(), rtol=1e-9)
    assert found.absolute_errors.abs().max() == 0
    assert found.relative_errors.abs().max() == 0
    assert found.effective_errors.abs().max() == found.participation_errors.abs().max() == 0


@given(
    count=st.integers(1, 20),
    zeros=st.integers(0, 20),
    scale=st.sampled_from([1e-200, 1e-3, 1.0, 1e200]),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_equal_eigenvalues_and_zeros_have_their_number_as_rank(
    count: int, zeros: int, scale: float, sign: float
) -> None:
    found = exact_density(torch.tensor([sign * scale] * count + [0.0] * zeros, dtype=torch.float64))
    torch.testing.assert_close(float(effective_rank(found)), float(count))
    torch.testing.assert_close(float(participation_ratio(found)), float(count))
    assert ranks([found], count + zeros).relative[0].tolist() == [count] * 4


def test_zero_has_rank_zero() -> None:
    found = exact_density(torch.zeros(5))
    assert effective_rank(found) == participation_ratio(found) == 0
    assert ranks([found], 5).absolute.sum() == ranks([found], 5).relative.sum() == 0


def test_a_networks_dense_hessians() -> None:
    trace = network(tasks=3)
    found = spectra(trace, "dense")
    total = torch.zeros_like(dense_hessian(trace, 0))
    for o, one in enumerate(found):
        total = total + dense_hessian(trace, o)
        torch.testing.assert_close(one.nodes[0], torch.linalg.eigvalsh(total / (o + 2)), rtol=1e-9, atol=1e-12)


def test_the_average_as_a_product_kept_or_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = network(tasks=3)
    v = torch.randn(trace.num_params, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (dense_hessian(trace, 0) + dense_hessian(trace, 1)) @ v / 3
    torch.testing.assert_close(trace.average_hessian(2) @ v, expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(sys.modules["glocal.lens.trace"], "MAX_BATCHED_HVP_PARAMS", 10)
    torch.testing.assert_close(trace.average_hessian(2) @ v, expected, rtol=1e-9, atol=1e-12)
    assert trace.hvp_batch_size == 1


def test_the_density_counts_what_the_eigenvalues_are() -> None:
    trace = network(tasks=2)
    exact = rank(trace, absolute=(1e-2,), relative=(1e-2,), method="dense")
    found = rank(trace, absolute=(1e-2,), relative=(1e-2,), method="density", probes=40)
    torch.testing.assert_close(found.top, exact.top, rtol=1e-9, atol=0)
    for count, error, true in (
        (found.absolute, found.absolute_errors, exact.absolute),
        (found.relative, found.relative_errors, exact.relative),
    ):
        assert ((count - true).abs() < 4 * error).all()
        assert (error > 0).all()
        assert (error < 0.1 * true).all()
    for value, error, true in (
        (found.effective, found.effective_errors, exact.effective),
        (found.participation, found.participation_errors, exact.participation),
    ):
        assert ((value - true).abs() < 4 * error).all()
        assert (error < 0.05 * true).all()


def test_the_density_is_the_same_with_vectors_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = network(tasks=2)
    found = []
    for largest in (10, 1000):
        monkeypatch.setattr(sys.modules["glocal.lens.trace"], "MAX_BATCHED_HVP_PARAMS", largest)
        found.append(rank(trace, absolute=(1e-2,), method="density", probes=3))
    for name in ("top", "absolute", "absolute_errors", "effective", "participation"):
        torch.testing.assert_close(*(getattr(one, name) for one in found), rtol=1e-6, atol=1e-9)


class Many(nn.Module):
    """A network of too many parameters for a dense matrix, most of which do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2, bias=False)
        self.idle = nn.Parameter(torch.zeros(MAX_DENSE_PARAMS))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + 0 * self.idle.sum()


def test_large_networks_get_a_density_and_are_refused_a_dense_matrix() -> None:
    module = Many()
    x, y = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(9, 2)
    trace = trace_checkpoints(module, "squared-error", [(x, y)], [module.state_dict()] * 2)
    with pytest.raises(GlocalError, match=r"allows up to 20,000 parameters; the network has 20,006"):
        rank(trace, method="dense")
    found = rank(trace, relative=(1e-3,), steps=8, probes=60)
    assert abs(found.relative[0, 0] - 6) < 4 * found.relative_errors[0, 0]
    np.testing.assert_allclose(found.top[0], np.linalg.eigvalsh(x.T @ x / 9)[-1] / 2, rtol=1e-5)


@pytest.mark.parametrize("method", ["dense", "density"])
def test_a_run_that_diverged_has_no_rank_from_there_on(method: Method) -> None:
    found = rank(diverged(network(), 2), method=method)
    for part in (
        found.top,
        found.absolute,
        found.relative,
        found.absolute_errors,
        found.effective,
        found.participation,
    ):
        assert part[0].isfinite().all()
        assert part[1:].isnan().all()


def test_mistakes_are_told() -> None:
    with pytest.raises(
        GlocalError, match=r"unknown method 'densest'. Did you mean 'dense'\? Allowed: auto, dense, density"
    ):
        rank(network(), method="densest")  # type: ignore[arg-type]
    with pytest.raises(GlocalError, match="probes = 0 was given; it must be at least 1"):
        rank(network(), probes=0)
