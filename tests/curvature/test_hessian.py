"""The dense Hessian against plain autograd, and Eq. Hessian-decomp with its two parts computed apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CLASSES, ON_ALL, dense_gauss_newton, dense_hessian, joined, make
from torch import Tensor
from torch.func import vmap

from glocal.curvature.hessian import functional_hessian, ggn, hessian, to_dense
from glocal.curvature.operators import ggn_operator
from glocal.tree import Params, from_vector, select, stack, to_vector


@ON_ALL
def test_hessian_is_autograds(network: str, loss: str) -> None:
    case = make(network, loss)
    expected = dense_hessian(case)
    torch.testing.assert_close(hessian(case), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(hessian(replace(case, chunk_size=3), block_size=50), expected, rtol=1e-9, atol=1e-12)


@ON_ALL
def test_the_two_parts_sum_to_the_hessian(network: str, loss: str) -> None:
    case = make(network, loss)
    expected = dense_gauss_newton(case)
    for chunk in (500, 3):
        outer, functional = ggn(case), functional_hessian(replace(case, chunk_size=chunk))
        torch.testing.assert_close(outer, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(outer + functional, dense_hessian(case), rtol=1e-9, atol=1e-12)
    if network != "linear":
        assert functional.abs().max() > 1e-3


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_outer_product_hessian_is_positive_and_of_rank_at_most_its_outputs(loss: str) -> None:
    case = make("tanh", loss, n=4)
    outer, functional = ggn(case), functional_hessian(case)
    eigenvalues = torch.linalg.eigvalsh(outer)
    assert eigenvalues.min() > -1e-12
    directions = CLASSES - 1 if loss == "cross-entropy" else CLASSES  # softmax does not see a common shift
    assert (eigenvalues > 1e-9).sum() == 4 * directions
    assert torch.linalg.eigvalsh(functional).min() < -1e-6


def test_functional_hessian_vanishes_where_the_network_fits() -> None:
    case = make("tanh", "squared-error")
    fitted = replace(case, y=case.outputs())
    outer, functional = ggn(fitted), functional_hessian(fitted)
    assert functional.abs().max() < 1e-14
    torch.testing.assert_close(hessian(fitted), outer, rtol=1e-9, atol=1e-12)


def test_mapped_over_runs_it_is_the_loop() -> None:
    runs = [make("conv with BatchNorm", seed=seed) for seed in range(3)]

    def one(params: Params, buffers: Params) -> tuple[Tensor, Tensor, Tensor]:
        risk = replace(runs[0], params=params, buffers=buffers, chunk_size=4)
        return hessian(risk), ggn(risk), functional_hessian(risk)

    together = vmap(one)(stack([c.params for c in runs]), stack([c.buffers for c in runs]))
    for run, case in enumerate(runs):
        for mapped, alone in zip(together, (hessian(case), ggn(case), functional_hessian(case)), strict=True):
            torch.testing.assert_close(mapped[run], alone, rtol=1e-9, atol=1e-13)


def test_dense_matrix_of_any_product() -> None:
    case = make("tied weights")
    torch.testing.assert_close(to_dense(ggn_operator(case)), dense_gauss_newton(case), rtol=1e-9, atol=1e-12)


def test_flatten_and_unflatten_are_inverse_alone_and_mapped() -> None:
    runs = [make("tied weights", seed=seed).params for seed in range(3)]
    assert torch.equal(to_vector(runs[0]), joined(runs[0]))
    back = from_vector(to_vector(runs[0]), runs[0])
    assert list(back) == list(runs[0])
    assert all(torch.equal(back[k], p) for k, p in runs[0].items())
    together = vmap(to_vector)(stack(runs))
    assert torch.equal(together, torch.stack([joined(p) for p in runs]))
    apart = vmap(lambda vector: from_vector(vector, runs[0]))(together)
    assert all(torch.equal(select(apart, 2)[k], p) for k, p in runs[2].items())


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    params = make("tanh").params
    with pytest.raises(RuntimeError, match="split"):
        from_vector(to_vector(params)[:-1], params)
