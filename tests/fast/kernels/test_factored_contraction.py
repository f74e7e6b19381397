"""Contractions with factored Jacobians against einsum: plain on a CPU, by kernels on a GPU or in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from glocal.curvature.jacobian import contract, scale_deltas
from glocal.fast import factored_contraction

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
SIZES = pytest.mark.parametrize(("each", "inputs"), [(1, 500), (10, 50), (3, 7), (1, 1)])
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
WIDTHS, MARGIN = (100, 33, 10), 40


class Stored:
    """δ and responses of three runs; those of the first layer are a slice of a wider tensor."""

    def __init__(self, each: int, inputs: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(each + inputs)

        def randn(*shape: int) -> Tensor:
            return torch.randn(3, *shape, generator=generator, device=device)

        self.deltas = randn(sum(WIDTHS), each, inputs)
        self.wide = randn(WIDTHS[0], MARGIN + inputs)
        self.z = [randn(width, inputs) for width in WIDTHS[1:]]
        self.b = [randn(width) for width in WIDTHS[1:]]
        self.c = randn(inputs, each)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.deltas, self.wide, *self.z, *self.b

    def expected(self) -> Tensor:
        shifted = [z + b.unsqueeze(-1) for z, b in zip(self.z, self.b, strict=True)]
        return torch.einsum("rdcn,rdn->rnc", self.deltas, torch.cat([self.wide[..., MARGIN:], *shifted], 1))


def contract_all(deltas: Tensor, wide: Tensor, z2: Tensor, z3: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
    return contract(deltas, [(wide[:, MARGIN:], None), (z2, b2), (z3, b3)])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@SIZES
@DEVICES
def test_contract(each: int, inputs: int, device: str) -> None:
    stored = Stored(each, inputs, device)
    close(vmap(contract_all)(*stored.arguments), stored.expected())
    close(contract_all(*(t[1] for t in stored.arguments)), stored.expected()[1])


@SIZES
@DEVICES
def test_scale_deltas(each: int, inputs: int, device: str) -> None:
    stored = Stored(each, inputs, device)
    expected = torch.einsum("rdcn,rnc->rdn", stored.deltas, stored.c)

    def both(deltas: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        products, sums = scale_deltas(deltas, c)
        return products, products.sum(1) if sums is None else sums

    products, sums = vmap(both)(stored.deltas, stored.c)
    close(products, expected)
    close(sums, expected.sum(2))
    close(both(stored.deltas[2], stored.c[2])[1], expected[2].sum(1))


@SIZES
@DEVICES
def test_gradients(each: int, inputs: int, device: str) -> None:
    stored = Stored(each, inputs, device)

    def gradients(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        gradient = grad(lambda *args: f(*args).square().sum(), argnums=tuple(range(1, 6)))
        found: tuple[Tensor, ...] = vmap(gradient)(*stored.arguments)
        return found

    def reference(deltas: Tensor, wide: Tensor, z2: Tensor, z3: Tensor, b2: Tensor, b3: Tensor) -> Tensor:
        z = torch.cat([wide[:, MARGIN:], z2 + b2.unsqueeze(1), z3 + b3.unsqueeze(1)])
        return (deltas * z.unsqueeze(1)).sum(0).mT

    for found, expected in zip(gradients(contract_all), gradients(reference), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


@DEVICES
def test_each_is_the_transpose_of_the_other(device: str) -> None:
    stored = Stored(3, 7, device)
    deltas, c = stored.deltas[0], stored.c[0]
    gradient = grad(lambda c: scale_deltas(deltas, c)[0].square().sum() / 2)(c)
    close(gradient, contract(deltas, [(scale_deltas(deltas, c)[0], None)]))


@DEVICES
def test_runs_may_share_arguments(device: str) -> None:
    stored = Stored(1, 7, device)
    shared = [t if i in (0, 2) else t[0] for i, t in enumerate(stored.arguments)]  # δ and one layer's z are their own
    found = vmap(contract_all, in_dims=(0, None, 0, None, None, None))(*shared)
    alone = [contract_all(*(t[run] if i in (0, 2) else t for i, t in enumerate(shared))) for run in range(3)]
    close(found, torch.stack(alone))


def test_tensors_beyond_32_bit_indices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored_contraction, "supports", lambda deltas: True)
    number = torch.zeros(1)
    assert factored_contraction._supported(number.expand(2**10, 1, 2**20))
    assert not factored_contraction._supported(number.expand(2**11, 1, 2**20))
    assert not factored_contraction._supported(number.double())


@DEVICES
def test_deltas_are_constants(device: str) -> None:
    stored = Stored(3, 7, device)
    z, c = stored.wide[0][:, MARGIN:], stored.c[0]
    deltas = stored.deltas[0][: WIDTHS[0]]
    assert not grad(lambda d: contract(d, [(z, None)]).sum())(deltas).any()
    assert not grad(lambda d: scale_deltas(d, c)[0].sum())(deltas).any()


@DEVICES
def test_arguments_need_not_be_contiguous(device: str) -> None:
    stored = Stored(3, 7, device)
    deltas, z = stored.deltas[0][: WIDTHS[0]], stored.wide[0][:, MARGIN:]
    expected = contract(deltas, [(z, None)])
    transposed = [t.mT.contiguous().mT for t in (deltas, z)]
    assert not any(t.is_contiguous() for t in transposed)
    close(contract(transposed[0], [(transposed[1], None)]), expected)
    close(scale_deltas(transposed[0], stored.c[0])[0], scale_deltas(deltas, stored.c[0])[0])
    one = z[:, :1]
    close(contract(deltas, [(one.expand_as(z), None)]), contract(deltas, [(one.repeat(1, z.shape[1]), None)]))
