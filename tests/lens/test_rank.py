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

from glocal.curvature.spectrum import Estimate, exact_density
from glocal.errors import GlocalError
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.rank import MAX_DENSE_PARAMS, Ranks, effective_rank, participation_ratio, rank, ranks, spectra


def averages(known: Quadratics) -> list[np.ndarray]:
    r"""\bar H_{<t} = (1/t) Σ_{o<t} H_o with the paper's count: t = 2, 3, … have 1, 2, … tasks before them."""
    tasks = len(known.data)
    return [np.sum([known.hessian(o) for o in range(t - 1)], axis=0) / t for t in range(2, tasks + 2)]


def estimates(found: Ranks) -> list[Estimate]:
    return [*found.absolute.values(), *found.relative.values(), found.effective, found.participation]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), tasks=st.integers(1, 4), spans=st.integers(1, 2))
def test_on_quadratics_it_is_numpys_rank_and_grows_with_the_tasks(seed: int, tasks: int, spans: int) -> None:
    known = anywhere(seed, tasks, spans)
    found = rank(known.trace, absolute=(1e-2, 0.3), relative=(1e-9, 0.2))
    for row, matrix in enumerate(averages(known)):
        values = abs(np.linalg.eigvalsh(matrix))
        np.testing.assert_allclose(found.top[row], values.max(), rtol=1e-10)
        assert found.relative[1e-9].value[row] == np.linalg.matrix_rank(matrix, tol=1e-9 * values.max(), hermitian=True)
        assert found.relative[1e-9].value[row] == 2 * min(4, spans * (row + 1))
        assert found.relative[0.2].value[row] == (values > 0.2 * values.max()).sum()
        for threshold, estimate in found.absolute.items():
            assert estimate.value[row] == (values > threshold).sum()
        p = values / values.sum()
        np.testing.assert_allclose(
            found.effective.value[row], np.exp(-(p[p > 1e-15] * np.log(p[p > 1e-15])).sum()), rtol=1e-9
        )
        np.testing.assert_allclose(found.participation.value[row], np.trace(matrix) ** 2 / (matrix**2).sum(), rtol=1e-9)
    for estimate in estimates(found):
        assert estimate.error.abs().max() == 0


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
    assert all(estimate.value.item() == count for estimate in ranks([found]).relative.values())


def test_zero_has_rank_zero() -> None:
    found = exact_density(torch.zeros(5))
    assert effective_rank(found) == participation_ratio(found) == 0
    assert all(estimate.value.item() == 0 for estimate in estimates(ranks([found])))


def test_a_networks_dense_hessians() -> None:
    trace = network(tasks=3)
    found = spectra(trace)
    total = torch.zeros_like(dense_hessian(trace, 0))
    for o, one in enumerate(found):
        total = total + dense_hessian(trace, o)
        torch.testing.assert_close(one.nodes[0], torch.linalg.eigvalsh(total / (o + 2)), rtol=1e-9, atol=1e-12)


def test_the_average_as_a_product_kept_or_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = network(tasks=3)
    v = torch.randn(trace.num_params, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (dense_hessian(trace, 0) + dense_hessian(trace, 1)) @ v / 3
    torch.testing.assert_close(trace.average_hessian(2) @ v, expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(sys.modules["glocal.lens.training_trace"], "MAX_BATCHED_HVP_PARAMS", 10)
    torch.testing.assert_close(trace.average_hessian(2) @ v, expected, rtol=1e-9, atol=1e-12)
    assert trace.hvp_batch_size == 1


def test_the_density_counts_what_the_eigenvalues_are() -> None:
    trace = network(tasks=2)
    exact = rank(trace, absolute=(1e-2,), relative=(1e-2,))
    found = rank(trace, absolute=(1e-2,), relative=(1e-2,), max_dense=0, probes=40)
    torch.testing.assert_close(found.top, exact.top, rtol=1e-9, atol=0)
    for (value, error), true, precision in zip(estimates(found), estimates(exact), (0.1, 0.1, 0.05, 0.05), strict=True):
        assert ((value - true.value).abs() < 4 * error).all()
        assert (error > 0).all()
        assert (error < precision * true.value).all()


def test_the_density_is_the_same_with_vectors_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = network(tasks=2)
    found = []
    for largest in (10, 1000):
        monkeypatch.setattr(sys.modules["glocal.lens.training_trace"], "MAX_BATCHED_HVP_PARAMS", largest)
        found.append(rank(trace, absolute=(1e-2,), max_dense=0, probes=3))
    for name in ("top", "absolute", "effective", "participation"):
        torch.testing.assert_close(*(getattr(one, name) for one in found), rtol=1e-6, atol=1e-9)


class Many(nn.Module):
    """A network of too many parameters for a dense matrix, most of which do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2, bias=False)
        self.idle = nn.Parameter(torch.zeros(MAX_DENSE_PARAMS))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + 0 * self.idle.sum()


def test_large_networks_get_a_density() -> None:
    module = Many()
    x, y = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(9, 2)
    trace = trace_checkpoints(module, "squared-error", [(x, y)], [module.state_dict()] * 2)
    found = rank(trace, relative=(1e-3,), steps=8, probes=60)
    ((value, error),) = found.relative.values()
    assert abs(value[0] - 6) < 4 * error[0]
    np.testing.assert_allclose(found.top[0], np.linalg.eigvalsh(x.T @ x / 9)[-1] / 2, rtol=1e-5)


@pytest.mark.parametrize("max_dense", [MAX_DENSE_PARAMS, 0])
def test_a_run_that_diverged_has_no_rank_from_there_on(max_dense: int) -> None:
    found = rank(diverged(network(), 2), max_dense=max_dense)
    for values in (found.top, *(estimate.value for estimate in estimates(found))):
        assert values[0].isfinite()
        assert values[1:].isnan().all()


def test_mistakes_are_told() -> None:
    with pytest.raises(GlocalError, match="probes = 0 was given; it must be at least 1"):
        rank(network(), probes=0)
