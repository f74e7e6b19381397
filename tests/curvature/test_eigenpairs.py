"""Eigenpairs in one call, beside the dense Hessian's: with features that are zero in every sample, which are left out,
and where they may not be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy

from glocal import losses
from glocal.curvature.eigenpairs import eigenpairs
from glocal.curvature.lanczos import Largest
from glocal.curvature.products import living
from glocal.curvature.vector import flatten, unflatten
from glocal.networks.mlp import mlp
from glocal.tree import Params

WIDTH = 5
LOSS = losses.get("cross-entropy")


def problem(dead: int, samples: int = 30) -> tuple[nn.Module, Params, Tensor, Tensor]:
    """A chain of 12 features, some of them always zero, in double precision."""
    stream = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = mlp((12,), 3, (WIDTH, 4)).double().eval()
    x = torch.randn(samples, 12, generator=stream, dtype=torch.float64)
    x[:, torch.randperm(12, generator=stream)[:dead]] = 0
    y = torch.randint(3, (samples,), generator=stream)
    return module, {k: p.detach() for k, p in module.named_parameters()}, x, y


def dense(module: nn.Module, params: Params, x: Tensor, y: Tensor) -> Tensor:
    def value(theta: Tensor) -> Tensor:
        return cross_entropy(functional_call(module, unflatten(theta, params), (x,)), y)

    return jacrev(jacrev(value))(flatten(params))


@pytest.mark.parametrize("largest", ["magnitude", "algebraic"])
@pytest.mark.parametrize("k", [1, WIDTH, WIDTH + 1, 30])
@pytest.mark.parametrize("dead", [0, 1, 7])
def test_beside_the_dense_matrix(dead: int, k: int, largest: Largest) -> None:
    module, params, x, y = problem(dead)
    matrix = dense(module, params, x, y)
    assert (living(module, params, x) is not None) is (dead > 1)
    found = eigenpairs(module, params, {}, x, y, LOSS, k, steps=len(matrix), largest=largest)
    values = torch.linalg.eigvalsh(matrix)
    order = (values.abs() if largest == "magnitude" else values).argsort(descending=True)[:k]
    torch.testing.assert_close(found.values, values[order], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.vectors @ matrix, found.values[:, None] * found.vectors, rtol=0, atol=1e-8)


def test_more_pairs_than_the_search_has_are_found_in_the_whole() -> None:
    """Of 104 weights, 69 meet features that are alive: 90 eigenpairs are of all of them."""
    module, params, x, y = problem(dead=8)
    some, matrix = living(module, params, x), dense(module, params, x, y)
    assert some is not None and flatten(some.narrowed(params)).numel() < 90 < len(matrix)
    found = eigenpairs(module, params, {}, x, y, LOSS, 90, steps=len(matrix))
    values = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(found.values, values[values.abs().argsort(descending=True)[:90]], rtol=1e-8, atol=1e-9)


def test_a_matrix_of_one_sample_has_zeros_among_its_first() -> None:
    """Two directions have curvature of the outputs' part alone: more are asked for than the search has eigenvalues."""
    module, params, x, y = problem(dead=7, samples=1)
    matrix = dense(module, params, x, y)
    found = eigenpairs(module, params, {}, x, y, LOSS, WIDTH, steps=len(matrix), largest="algebraic")
    values = torch.linalg.eigvalsh(matrix).flip(0)[:WIDTH]
    torch.testing.assert_close(found.values, values, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.vectors.norm(dim=1), torch.ones(WIDTH, dtype=torch.float64))


def test_a_start_is_the_callers() -> None:
    """An eigenvector alone spans what Lanczos's method sees; what it has where nothing is alive does not count."""
    module, params, x, y = problem(dead=7)
    values, vectors = torch.linalg.eigh(dense(module, params, x, y))
    empty = (x == 0).all(0)
    start = unflatten(vectors[:, -3], params)
    start["layers.0.weight"][:, empty] += 1
    found = eigenpairs(module, params, {}, x, y, LOSS, 2, steps=2, largest="algebraic", start=flatten(start))
    assert float(found.values[0]) == pytest.approx(float(values[-3]), rel=1e-8)
    assert abs(float(found.vectors[0] @ vectors[:, -3])) == pytest.approx(1, abs=1e-6)


def test_single_precision_and_the_same_start_every_time() -> None:
    module, params, x, y = problem(dead=7)
    exact = eigenpairs(module, params, {}, x, y, LOSS, 3)
    single = {k: p.float() for k, p in params.items()}
    first, again = (eigenpairs(module.float(), single, {}, x.float(), y, LOSS, 3, tolerance=1e-4) for _ in range(2))
    torch.testing.assert_close(first.values.double(), exact.values, rtol=1e-4, atol=0)
    assert torch.equal(first.vectors, again.vectors) and first.vectors.dtype == torch.float32
