"""Hessian and Gauss–Newton products against dense matrices by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import ON_ALL, dense_gauss_newton, dense_hessian, joined, make, some_vector, unflatten
from torch import Tensor
from torch.func import vmap

from glocal.curvature.operators import functional_operator, ggn_operator, hessian_operator
from glocal.risk import Risk
from glocal.tree import Params, select, stack

OPERATORS = {"hessian": hessian_operator, "gauss-newton": ggn_operator, "functional": functional_operator}
DENSE: dict[str, Callable[[Risk], Tensor]] = {
    "hessian": dense_hessian,
    "gauss-newton": dense_gauss_newton,
    "functional": lambda case: dense_hessian(case) - dense_gauss_newton(case),
}


@pytest.mark.parametrize("kind", DENSE)
@ON_ALL
def test_product_is_that_of_the_dense_matrix(network: str, loss: str, kind: str) -> None:
    case = make(network, loss)
    v = some_vector(case.params)
    expected = unflatten(DENSE[kind](case) @ joined(v), case.params)
    for chunk in (2000, 3):  # 7 samples at once, or 3 + 3 + 1
        operator = OPERATORS[kind](replace(case, chunk_size=chunk))
        torch.testing.assert_close(operator @ v, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(operator @ v, expected, rtol=1e-9, atol=1e-12)  # what is kept is not used up
        torch.testing.assert_close(operator @ joined(v), joined(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("chunk", [2000, 3])
def test_mapped_over_a_block_of_vectors_and_over_runs_it_is_the_loop(kind: str, chunk: int) -> None:
    runs = [make("conv with BatchNorm", seed=seed) for seed in range(3)]
    blocks = [stack([some_vector(case.params, seed) for seed in range(4)]) for case in runs]
    case = runs[0]

    def block_of_one(params: Params, buffers: Params, block: Params) -> Params:
        operator = OPERATORS[kind](replace(case, params=params, buffers=buffers, chunk_size=chunk))
        return vmap(lambda v: operator @ v)(block)

    together = vmap(block_of_one)(stack([c.params for c in runs]), stack([c.buffers for c in runs]), stack(blocks))
    for run, own in enumerate(runs):
        operator = OPERATORS[kind](replace(own, chunk_size=chunk))
        for j in range(4):
            alone = operator @ select(blocks[run], j)
            torch.testing.assert_close(select(select(together, run), j), alone, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("chunk", [2000, 3])
def test_no_graph_reaches_out_of_a_product(kind: str, chunk: int) -> None:
    case = make("tanh")
    leaves = {k: p.clone().requires_grad_() for k, p in case.params.items()}
    result = OPERATORS[kind](replace(case, params=leaves, chunk_size=chunk)) @ some_vector(case.params)
    assert not any(t.requires_grad for t in result.values())
    assert any(t.abs().max() > 1e-3 for t in result.values())


def test_the_gauss_newton_matrix_of_a_linear_network_is_its_hessian() -> None:
    case = make("linear")
    v = some_vector(case.params)
    torch.testing.assert_close(ggn_operator(case) @ v, hessian_operator(case) @ v)
    functional = functional_operator(case) @ v
    assert all(t.abs().max() < 1e-14 for t in functional.values())
